"""Times maf_mvm beside what others do in its place, over batch sizes and ranks, and beside the byte floor.

    python -m pallas_kernels.maf_mvm.bench --shape llama-3-8b --batch 1 32 --rank 8 64 --out maf_mvm.json

A line of the report is one decoder layer: the sum over its groups of projections, in microseconds. Columns:

    floor              A, B of the active adapters and x in once, the base in and out once, at a copy's bandwidth
    maf_...            implementations of maf_mvm, on the engine's slot array (cells of --slot-rank rank rows)
    copy_sgmv, sgmv    merge each mix of the batch into one composite in memory, then SGMV over the composites; and
                       that SGMV alone, on composites copied beforehand
    naive, bmm         a loop over the adapters of the batch; all tokens through all adapters of the batch
    dense              all tokens through all adapters of the arrays, used or not
    site_...           with --site: the base projection too; XLA's matmul alone, the same and then the LoRA product, or
                       both in one launch (lora_linear), and that launch for a step without adapters
    added              with --site: what the adapters add to that one launch, which is what the engine runs: the
                       difference of the two medians. Ratios are to it, else to the first implementation of maf_mvm.

A timed call runs an op many times, each output being the next one's base, layer after layer of arrays so large that the
active adapters come from memory, not from the L2 cache. Nothing else is subtracted; what an empty call takes is said
beside.
The first op of the very program that is timed is checked against the float32 reference.
"""

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.bench_report import run_facts
from pallas_kernels.lora_linear import lora_linear, lora_swiglu, new_arrivals
from pallas_kernels.maf_mvm import baselines, reference
from pallas_kernels.maf_mvm.api import Implementation, ProjectionSlots, maf_mvm
from pallas_kernels.maf_mvm.bench_cases import (
    UNROLL,
    Batch,
    Mixes,
    Problem,
    Site,
    Storage,
    make_batch,
    make_site,
)
from pallas_kernels.maf_mvm.shapes import GROUPS, Group, named_shapes
from pallas_kernels.pytree import pytree_dataclass
from pallas_kernels.segments import Segments


@dataclasses.dataclass(frozen=True)
class Op:
    """What one op of a timed chain sees.

    Attributes:
      slots: the adapters, in the column's storage.
      segments: segments over `slots`.
      projection: base projection; None for a column that computes "lora" only.
      dense_layer: the adapters of this layer; None unless the column's storage is "layers".
      place: number of the op in its iteration of the timed loop, below UNROLL.
      scratch: what the column's `scratch` made, as the op before left it.
    """

    x: Float[Array, "batch in_features"]
    base: Float[Array, "batch out_features"]
    slots: ProjectionSlots
    segments: Segments
    layer: Int[Array, ""]
    adapter_ids: Int[Array, " num_active"]
    composites: baselines.Composites
    projection: Float[Array, "in_features out_features"] | None
    dense_layer: baselines.DenseLayer | None
    place: int
    scratch: Any


@pytree_dataclass
class Inputs:
    """Arguments of a timed chain: those of its ops, tuples being walked in turn."""

    x: Float[Array, "batch in_features"]
    base: Float[Array, "batch out_features"]
    slots: tuple[ProjectionSlots, ...]
    segments: Segments
    adapter_ids: Int[Array, " num_active"]
    composites: baselines.Composites
    projections: tuple[Float[Array, "in_features out_features"], ...]
    dense_layers: tuple[baselines.DenseLayer, ...]

    @property
    def num_layers(self) -> int:
        """Layers that one walk passes in each of `slots`; the dense layers are one each."""
        return 1 if self.dense_layers else self.slots[0].num_layers


@dataclasses.dataclass(frozen=True)
class Column:
    """One competitor.

    Attributes:
      run: gives the op's output, [batch, out_features]; and its scratch, if the column has any.
      storage: how it wants the adapters.
      unroll: ops of one iteration of the timed loop.
      computes: "lora" (onto the base given), "projection" (the base alone) or "site" (both).
      scratch: makes arrays that one iteration's ops hand on, such as the counters of a fused op.
      ends_in_swiglu: of gate and up it gives silu(gate) * up, twice side by side, as no other column does.
    """

    run: Callable[[Op], Any]
    storage: Storage = "slots"
    unroll: int = UNROLL
    computes: Literal["lora", "projection", "site"] = "lora"
    scratch: Callable[[], Any] | None = None
    ends_in_swiglu: bool = False


def kernel_columns(implementations: Sequence[Implementation], sgmv: Implementation) -> dict[str, Column]:
    """The op alone, by name of the column."""

    def copy_sgmv(op: Op) -> Array:
        return baselines.copy_sgmv(op.x, op.slots, op.composites, op.base, op.layer, implementation=sgmv)

    def sgmv_alone(op: Op) -> Array:
        return baselines.sgmv(op.x, op.slots, op.composites, op.base, op.layer, implementation=sgmv)

    def naive(op: Op) -> Array:
        return baselines.naive(op.x, op.slots, op.segments, op.base, op.adapter_ids, op.layer)

    def bmm(op: Op) -> Array:
        return baselines.bmm(op.x, op.slots, op.segments, op.base, op.adapter_ids, op.layer)

    def dense(op: Op) -> Array:
        assert op.dense_layer is not None
        return baselines.dense(op.x, op.dense_layer, op.segments, op.base)

    return {
        **{f"maf_{name}": Column(_lora(name)) for name in implementations},
        "copy_sgmv": Column(copy_sgmv, "adapters"),
        "sgmv": Column(sgmv_alone, "composites"),
        "naive": Column(naive, "adapters", unroll=1),  # it has a loop of its own
        "bmm": Column(bmm, "adapters"),
        "dense": Column(dense, "layers"),
    }


def site_columns(implementations: Sequence[Implementation]) -> dict[str, Column]:
    """The op and its base projection, by name of the column."""
    return {
        "site_base": Column(_project, computes="projection"),
        **{f"site_{name}": Column(_site(name), computes="site") for name in implementations},
        "site_fused": _one_launch_column(has_adapters=True),
        "site_plain": _one_launch_column(has_adapters=False),
    }


def _one_launch_column(*, has_adapters: bool) -> Column:
    return Column(
        functools.partial(_one_launch, has_adapters=has_adapters),
        computes="site" if has_adapters else "projection",
        scratch=lambda: new_arrivals(UNROLL),
        ends_in_swiglu=True,
    )


def _lora(implementation: Implementation) -> Callable[[Op], Array]:
    return lambda op: maf_mvm(op.x, op.slots, op.segments, op.base, layer=op.layer, implementation=implementation)


def _project(op: Op) -> Array:
    assert op.projection is not None
    precision = lax.Precision.HIGHEST if op.x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.dot(op.x, op.projection, precision=precision)


def _site(implementation: Implementation) -> Callable[[Op], Array]:
    return lambda op: _lora(implementation)(dataclasses.replace(op, base=_project(op)))


def _is_gate_up(widths: Sequence[int]) -> bool:
    return len(widths) == 2


def _one_launch(op: Op, *, has_adapters: bool) -> tuple[Array, Array]:
    """The engine's own launch: gate and up end in SwiGLU there, with block sizes of their own."""
    assert op.projection is not None
    args = op.x, op.projection, op.slots, op.segments if has_adapters else None, op.scratch
    if _is_gate_up(op.slots.widths):
        z, arrivals = lora_swiglu(*args, layer=op.layer, site=op.place, implementation="pallas_triton")
        return jnp.concatenate([z, z], 1), arrivals
    partials, arrivals = lora_linear(*args, layer=op.layer, site=op.place, implementation="pallas_triton")
    # In a model the next kernel adds the partial sums up as it reads them; here it is a small kernel more.
    return partials.astype(jnp.float32).sum(0).astype(op.x.dtype), arrivals


@dataclasses.dataclass(frozen=True)
class Timing:
    """One column for one batch at one site; times in microseconds per op.

    Attributes:
      num_ops: ops of one timed call.
      floor_us: bytes that must move, at the bandwidth that a copy reaches on this device.
      max_error: largest |difference| from the reference in float32, over the size of outputs that are above 1.
    """

    mixes: str
    rank: int
    group: str
    batch: int
    column: str
    active_adapters: int
    num_ops: int
    median_us: float
    p10_us: float
    p90_us: float
    floor_us: float
    max_error: float


@dataclasses.dataclass(frozen=True)
class LayerTiming:
    """Sums over the groups of a layer, in microseconds.

    Attributes:
      floor_us, median_us: by column; a column that refused a group is absent.
      spread: widest p10 to p90 of a column and group, relative to its median.
      max_error: of all columns and groups.
    """

    mixes: str
    rank: int
    batch: int
    active_adapters: int
    floor_us: dict[str, float]
    median_us: dict[str, float]
    spread: float
    max_error: float


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse_args(argv)
    device = jax.devices()[0]
    bandwidth = _copy_bandwidth()
    empty_us = statistics.median(_time(jax.jit(lambda x: x + 1), 20, jnp.zeros(()))) * 1e6
    print(f"{device.device_kind}, jax {jax.__version__}, {args.dtype}; a copy moves {bandwidth / 1e9:.0f} GB/s")
    print(
        f"{args.shape}: {', '.join(args.group)}; {args.adapters} adapters in slots of {args.slot_rank} rank rows; ",
        end="",
    )
    print(f"median us per layer of {args.repeats} calls after 2, of about {args.call_us:.0f} us; ", end="")
    print(f"an empty call takes {empty_us:.0f} us")
    print(_header(args), flush=True)

    timings: list[Timing] = []
    layers: list[LayerTiming] = []
    refusals: dict[str, str] = {}
    header = {
        **run_facts("pallas_kernels.maf_mvm.bench", argv),
        "copy_gb_per_s": bandwidth / 1e9,
        "empty_call_us": empty_us,
        "arguments": {key: value for key, value in vars(args).items() if key != "out"},
    }
    for mixes, rank in itertools.product(args.mixes, args.rank):
        found = []
        for group in args.group:
            start_s = time.perf_counter()
            found += _bench_group(args, mixes, rank, group, bandwidth, refusals)
            print(f"{mixes}, rank {rank}, {group}: {time.perf_counter() - start_s:.0f} s", file=sys.stderr, flush=True)
        for batch in args.batch:
            layers.append(_sum_groups([t for t in found if t.batch == batch], len(args.group)))
            print(_line(args, layers[-1]), flush=True)
        timings += found
        if args.out:  # after every rank: what was measured is kept, whatever ends the run
            report = header | {
                "refusals": refusals,
                "layers": [dataclasses.asdict(layer) for layer in layers],
                "groups": [dataclasses.asdict(timing) for timing in timings],
            }
            Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    for column, reason in refusals.items():
        print(f"{column}: {reason}")
    check_errors(timings, args.dtype)


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    # On a CPU the kernels run in interpret mode, which says nothing about their speed.
    is_cpu = jax.default_backend() == "cpu"
    ours = "loop" if is_cpu else "pallas_triton"
    has_jax_triton = not is_cpu and importlib.util.find_spec("jax_triton") is not None
    implementations = [ours, *(["jax_triton"] if has_jax_triton else [])]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=list(named_shapes()), default="tiny" if is_cpu else "llama-3-8b")
    add("--group", nargs="+", choices=GROUPS, default=list(GROUPS))
    add("--mixes", nargs="+", choices=get_args(Mixes), default=["distinct"])
    add("--batch", nargs="+", type=int, default=[1, 8] if is_cpu else [1, 2, 4, 8, 16, 32, 64])
    add("--rank", nargs="+", type=int, default=[8] if is_cpu else [4, 8, 16, 32, 64])
    add("--implementation", nargs="+", default=implementations, help="of maf_mvm; ratios are to the first")
    add("--sgmv", default=ours, help="implementation of maf_mvm that is the SGMV")
    add("--column", nargs="+", default=None, help="time these columns only")
    add("--site", action="store_true", help="also time the op together with its base projection")
    add("--mix-size", type=int, default=3, help="adapters of each token in distinct and zipf mixes")
    add("--adapters", type=int, default=16 if is_cpu else 128, help="adapters in the arrays")
    add("--slot-rank", type=int, default=8, help="rank rows of a slot")
    add("--dtype", choices=["bfloat16", "float32"], default="float32" if is_cpu else "bfloat16")
    add("--repeats", type=int, default=10)
    add("--call-us", type=float, default=200 if is_cpu else 4000, help="length of a timed call, about")
    add("--cold-bytes", type=int, default=2**16 if is_cpu else 2**27, help="bytes of adapters that no cache holds")
    # More at once disturb each other: for a GPU, XLA times kernels for matrix products on the device as it compiles.
    add("--jobs", type=int, default=os.cpu_count() if is_cpu else 4, help="programs that are compiled at a time")
    add("--out", default=None, help="write the results to this JSON file")
    args = parser.parse_args(argv)
    if args.mix_size > args.adapters:
        parser.error(f"--mix-size {args.mix_size} needs as many adapters, but --adapters is {args.adapters}")
    unknown = set(args.column or ()) - set(_columns(args, only=None))
    if unknown:
        parser.error(f"--column {' '.join(sorted(unknown))}: expected {', '.join(_columns(args, only=None))}")
    return args


def _columns(args: argparse.Namespace, only: Sequence[str] | None) -> dict[str, Column]:
    columns = kernel_columns(args.implementation, args.sgmv)
    if args.site:
        columns |= site_columns(args.implementation)
    return {name: column for name, column in columns.items() if only is None or name in only}


def _bench_group(
    args: argparse.Namespace, mixes: Mixes, rank: int, group: Group, bandwidth: float, refusals: dict[str, str]
) -> list[Timing]:
    """Compiles all columns for all batches side by side, then times them one after another."""
    in_features, widths = named_shapes()[args.shape].group(group)
    site = make_site(
        Problem(
            in_features=in_features,
            widths=widths,
            num_adapters=args.adapters,
            rank=rank,
            slot_rank=args.slot_rank,
            mixes=mixes,
            mix_size=args.mix_size,
            dtype=args.dtype,
            cold_bytes=args.cold_bytes,
            has_projection=args.site,
        )
    )
    columns = _columns(args, args.column)
    timings = []
    with ThreadPoolExecutor(args.jobs) as pool:
        batches = list(pool.map(lambda size: make_batch(site, size), args.batch))
        expected = [pool.submit(_expected, site, batch) for batch in batches]
        programs = [
            {name: pool.submit(Program.compile, column, site, batch, args.call_us) for name, column in columns.items()}
            for batch in batches
        ]
        for futures in programs:
            _wait(futures, refusals)
    for batch, futures, wanted in zip(batches, programs, expected, strict=True):
        for name, future in futures.items():
            if future.exception() is None:
                floor_us = _bytes_moved(columns[name], site, batch) / bandwidth * 1e6
                timings.append(
                    Timing(
                        mixes=mixes,
                        rank=rank,
                        group=group,
                        batch=batch.size,
                        column=name,
                        active_adapters=batch.adapter_ids.size,
                        floor_us=floor_us,
                        **future.result().time(args.repeats, _wanted(columns[name], widths, wanted.result())),
                    )
                )
    return timings


def _wanted(column: Column, widths: Sequence[int], expected: Mapping[str, Array]) -> Array:
    """What a column's first op is to give."""
    y = expected[column.computes]
    if column.ends_in_swiglu and _is_gate_up(widths):
        gate, up = jnp.split(y, 2, axis=1)
        y = jnp.tile(jax.nn.silu(gate) * up, 2)
    return y


def _wait(futures: Mapping[str, "Future[Program]"], refusals: dict[str, str]) -> None:
    for name, future in futures.items():
        reason = future.exception()
        if isinstance(reason, NotImplementedError):
            refusals[name] = str(reason)
        elif reason is not None:
            raise reason


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled chain of ops of one column.

    Attributes:
      run: gives the output of the first op and that of the last.
      inputs: its argument.
      num_ops: ops of the chain.
    """

    run: Callable[[Inputs], tuple[Array, Array]]
    inputs: Inputs
    num_ops: int

    @classmethod
    def compile(cls, column: Column, site: Site, batch: Batch, call_us: float) -> "Program":
        inputs = inputs_of(column, site, batch)
        ops_per_walk = inputs.num_layers * column.unroll
        num_rounds = max(round(call_us / _guess_us(column, site, batch) / ops_per_walk), 1)
        run = jax.jit(functools.partial(chain, column, num_rounds)).lower(inputs).compile()
        return cls(run, inputs, 1 + num_rounds * ops_per_walk)

    def time(self, repeats: int, expected: Array) -> dict[str, Any]:
        """Times of an op in microseconds, and the error of the first."""
        first, _ = self.run(self.inputs)
        per_op = sorted(seconds / self.num_ops * 1e6 for seconds in _time(self.run, repeats, self.inputs))
        tenth = (len(per_op) - 1) // 10
        error = jnp.abs(first.astype(jnp.float32) - expected) / jnp.maximum(1, jnp.abs(expected))
        return {
            "num_ops": self.num_ops,
            "median_us": statistics.median(per_op),
            "p10_us": per_op[tenth],
            "p90_us": per_op[-1 - tenth],
            "max_error": float(error.max()),
        }


def inputs_of(column: Column, site: Site, batch: Batch) -> Inputs:
    """What a chain of `column` reads."""
    match column.storage:
        case "slots":
            slots, segments = site.slots, batch.slot_segments
        case "adapters" | "layers":
            slots, segments = site.adapters, batch.adapter_segments
        case "composites":
            slots, segments = batch.copied, batch.composites.segments
    return Inputs(
        x=batch.x,
        base=batch.base,
        slots=slots,
        segments=segments,
        adapter_ids=batch.adapter_ids,
        composites=batch.composites,
        projections=site.projections if column.computes != "lora" else (),
        dense_layers=site.layers if column.storage == "layers" else (),
    )


def chain(column: Column, num_rounds: int, inputs: Inputs) -> tuple[Array, Array]:
    """Outputs of the first op and of the last; each op waits for the one before, whose output is its base."""

    def op(place: int, layer: Array, base: Array, scratch: Any) -> tuple[Array, Any]:
        # XLA would move what does not depend on the base out of the loop, or merge it for several ops.
        x, base, layer = lax.optimization_barrier((inputs.x, base, layer))
        if column.computes != "lora":
            x = x + base[:, :1] * jnp.zeros(
                (), base.dtype
            )  # nothing reads the base: a small kernel makes x wait for it
        result = column.run(
            Op(
                x=x,
                base=base,
                slots=inputs.slots[place],
                segments=inputs.segments,
                layer=layer,
                adapter_ids=inputs.adapter_ids,
                composites=inputs.composites,
                projection=inputs.projections[place % len(inputs.projections)] if inputs.projections else None,
                dense_layer=inputs.dense_layers[place] if inputs.dense_layers else None,
                place=place,
                scratch=scratch,
            )
        )
        return result if column.scratch else (result, None)

    def new_scratch() -> Any:
        return column.scratch() if column.scratch else None

    def ops(layer: Array, y: Array) -> Array:
        scratch = new_scratch()
        for place in range(column.unroll):
            y, scratch = op(place, layer, y, scratch)
        return y

    def walk(_: Array, y: Array) -> Array:
        return lax.fori_loop(jnp.int32(0), jnp.int32(inputs.num_layers), ops, y)

    first, _ = op(0, jnp.int32(0), inputs.base, new_scratch())
    return first, lax.fori_loop(0, num_rounds, walk, first)


def _guess_us(column: Column, site: Site, batch: Batch) -> float:
    """About what an op takes; right within a few times, which is enough to choose the length of a call."""
    num_read = site.problem.num_adapters if column.storage == "layers" else batch.adapter_ids.size
    lora_us = max(8.0, num_read * site.problem.adapter_bytes / 2e6)  # 2 TB/s
    if column.unroll == 1:
        lora_us = max(lora_us, 20.0 * num_read)
    return lora_us if column.computes == "lora" else lora_us + site.projections[0].nbytes / 3e6


@jax.jit
def _expected_lora(x: Array, adapters: ProjectionSlots, segments: Segments, base: Array) -> Array:
    return reference.maf_mvm(x.astype(jnp.float32), adapters, segments, base, jnp.int32(0))


def _expected(site: Site, batch: Batch) -> dict[str, Array]:
    """Output of the first op in float32, by what a column computes."""
    expected = {"lora": _expected_lora(batch.x, site.adapters[0], batch.adapter_segments, batch.base)}
    if site.projections:
        dot = jax.jit(lambda x, w: jnp.dot(x, w, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32))
        expected["projection"] = dot(batch.x, site.projections[0])
        expected["site"] = _expected_lora(batch.x, site.adapters[0], batch.adapter_segments, expected["projection"])
    return expected


def _bytes_moved(column: Column, site: Site, batch: Batch) -> int:
    """A and B of the active adapters, x and the base projection in once, the output once, the base given in once."""
    lora = batch.adapter_ids.size * site.problem.adapter_bytes
    given = batch.x.nbytes + batch.base.nbytes
    match column.computes:
        case "lora":
            return given + lora + batch.base.nbytes
        case "projection":
            return given + site.projections[0].nbytes
        case "site":
            return given + site.projections[0].nbytes + lora


def _copy_bandwidth() -> float:
    """Bytes per second that a large copy reads and writes."""
    size = 2**27 if jax.default_backend() == "cpu" else 2**30
    array = jnp.zeros(size // 4, jnp.float32)
    return 2 * size / statistics.median(_time(jax.jit(lambda array: array + 1), 5, array))


def _time(fn: Callable[..., Any], repeats: int, *args: Any) -> list[float]:
    """Seconds of each of `repeats` calls, after two warm-up calls."""
    seconds = []
    for i in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        if i >= 2:
            seconds.append(time.perf_counter() - start)
    return seconds


def _sum_groups(timings: Sequence[Timing], num_groups: int) -> LayerTiming:
    by_column: dict[str, list[Timing]] = {}
    for timing in timings:
        by_column.setdefault(timing.column, []).append(timing)
    complete = {name: of_column for name, of_column in by_column.items() if len(of_column) == num_groups}
    return LayerTiming(
        mixes=timings[0].mixes,
        rank=timings[0].rank,
        batch=timings[0].batch,
        active_adapters=timings[0].active_adapters,
        floor_us={name: sum(t.floor_us for t in of_column) for name, of_column in complete.items()},
        median_us={name: sum(t.median_us for t in of_column) for name, of_column in complete.items()},
        spread=max((t.p90_us - t.p10_us) / t.median_us for t in timings),
        max_error=max(t.max_error for t in timings),
    )


def _ours(args: argparse.Namespace) -> str:
    return f"maf_{args.implementation[0]}"


def _ratios(args: argparse.Namespace) -> list[str]:
    """Columns that are divided by ours."""
    columns = _columns(args, args.column)
    if _ours(args) not in columns and not _has_added(args):
        return []
    return [name for name in ("copy_sgmv", "naive", "bmm", "dense") if name in columns]


def _has_added(args: argparse.Namespace) -> bool:
    return {"site_fused", "site_plain"} <= _columns(args, args.column).keys()


def _added_us(args: argparse.Namespace, layer: LayerTiming) -> float | None:
    """What adapters add to the launch that computes a site; None where it was not timed or refused."""
    if not _has_added(args) or not {"site_fused", "site_plain"} <= layer.median_us.keys():
        return None
    return layer.median_us["site_fused"] - layer.median_us["site_plain"]


def _header(args: argparse.Namespace) -> str:
    names = ("floor", *_columns(args, args.column), *(["added"] if _has_added(args) else []))
    columns = [f"{name:>{max(len(name), 8)}}" for name in names]
    ratios = [f"{name + '/ours':>14}" for name in _ratios(args)]
    return " ".join(["mixes    batch rank active", *columns, *ratios, " spread   error"])


def _line(args: argparse.Namespace, layer: LayerTiming) -> str:
    columns = _columns(args, args.column)
    floor_us = next((us for name, us in layer.floor_us.items() if columns[name].computes == "lora"), None)
    times = {"floor": floor_us} | {name: layer.median_us.get(name) for name in columns}
    added_us = _added_us(args, layer)
    if _has_added(args):
        times["added"] = added_us
    cells = [f"{'-' if us is None else f'{us:.1f}':>{max(len(name), 8)}}" for name, us in times.items()]
    ours = added_us if _has_added(args) else layer.median_us.get(_ours(args))
    for name in _ratios(args):
        them = layer.median_us.get(name)
        cells.append(f"{'-' if ours is None or them is None else f'{them / ours:.2f}':>14}")
    head = f"{layer.mixes:8} {layer.batch:5} {layer.rank:4} {layer.active_adapters:6}"
    return " ".join([head, *cells, f"{layer.spread:7.1%} {layer.max_error:7.1e}"])


def check_errors(timings: Sequence[Timing], dtype: str) -> None:
    """Ends the run with an error if a timed program was wrong."""
    bound = 1e-3 if dtype == "float32" else 0.1
    wrong = [t for t in timings if not t.max_error <= bound]
    if wrong:
        worst = ", ".join(f"{t.column} at {t.group}, batch {t.batch}, rank {t.rank}: {t.max_error:.1e}" for t in wrong)
        raise SystemExit(f"outputs differ from the float32 reference by more than {bound:.0e}: {worst}")


if __name__ == "__main__":
    main()
