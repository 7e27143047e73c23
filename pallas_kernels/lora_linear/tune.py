"""Measures block sizes of the one-launch kernel and writes the table that `config.pick_config` reads.

    python -m pallas_kernels.lora_linear.tune --shape llama-3-8b llama-3.2-1b --out pallas_kernels/lora_linear/h200.json
    python -m pallas_kernels.lora_linear.tune --rank 64 --out pallas_kernels/lora_linear/h200.json

From the present choice, all problems side by side: first the sizes of the main programs together ("main"), then those
of the shrink programs ("shrink"), then single fields; last, for steps without adapters, the main programs' sizes once
more, with the same splits ("plain"). One timed call runs the op for several layers, so that weights come from memory;
the score is the mean time over batches without adapters, with one adapter a token, and with three. Every candidate's
output is checked against the float32 reference before it may win. Problems that are not tuned stay in the table as they
are. With more rank rows than 1024 (--slots times --rank), or 2048 for 16 tokens, what is tuned is how the adapters are
read, and the table holds that beside the choice for fewer. Never run in production: what serves is what was committed.
"""

import argparse
import dataclasses
import itertools
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.lora_linear import new_arrivals, pallas_triton, reference
from pallas_kernels.lora_linear.config import MIN_DOT_SIZE, KernelConfig, Problem, pick_config
from pallas_kernels.maf_mvm import swiglu
from pallas_kernels.maf_mvm.shapes import GROUPS, named_shapes
from pallas_kernels.maf_mvm.slots import ProjectionSlots
from pallas_kernels.segments import Segments, build_segments

MAIN_FIELDS = ("columns", "depth", "splits", "num_stages")
MAIN_SIZES = tuple(itertools.product((64, 128), (64, 128), (1, 2, 4, 8), (3, 4, 5)))
SHRINK_FIELDS = ("shrink_rows", "shrink_splits", "shrink_programs", "shrink_unroll")
SHRINK_SIZES = tuple(itertools.product((32, 64), (1, 2, 4, 8), (66, 132, 264), (1, 2, 4)))
LARGE_SHRINK_SIZES = tuple(itertools.product((64, 128), (2, 4, 8), (132, 264), (1, 2)))
CANDIDATES: dict[str, tuple[int, ...]] = {
    "tail_rows": (32, 64, 128),
    "shrink_columns": (64, 128),
    "num_warps": (4, 8),
    "num_stages": (3, 4, 5),
}
ROUNDS = ("main", "shrink", *CANDIDATES, "plain")
MANY_ROWS_ROUNDS = ("shrink", "tail_rows", "num_stages", "shrink_columns")
MANY_ROWS_FIELDS = (*SHRINK_FIELDS, "tail_rows", "num_stages", "shrink_columns")
_MAX_SHARED_BYTES = 200e3
_NUM_PROGRAMS = (60, 280)  # fewer leave multiprocessors idle, more come in a second wave
_PASSES = 3  # over the layers in one call, so that the device has work for longer than the host needs to launch it
_LARGEST_ERROR = 2e-2  # of outputs of order 1 in bfloat16, relative to their norm


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem's arrays.

    Attributes:
      problem: what the configuration is for.
      args: x, w of each layer, slots.
      mixes: segments by name of the batch.
      expected: output of layer 0 with the last mixes, in float32.
    """

    problem: Problem
    args: tuple[Array, list[Array], ProjectionSlots]
    mixes: dict[str, Segments]
    expected: Array


def make_case(shape: str, group: Any, num_tokens: int, *, num_slots: int, slot_rank: int, num_layers: int) -> Case:
    """Random arrays of order 1 for one group of one model."""
    in_features, widths = named_shapes()[shape].group(group)
    is_swiglu = group == "gate_up"
    keys = iter(jax.random.split(jax.random.key(0), 3 + num_layers))

    def normal(size: tuple[int, ...], scale: float) -> Array:
        return jax.random.normal(next(keys), size, jnp.bfloat16) * jnp.asarray(scale, jnp.bfloat16)

    slots = ProjectionSlots(
        a=normal((num_layers, num_slots, len(widths) * slot_rank, in_features), in_features**-0.5),
        b=normal((num_layers, num_slots, slot_rank, sum(widths)), slot_rank**-0.5),
        scale=jnp.ones((num_layers, num_slots, len(widths))),
        widths=widths,
    )
    x = normal((num_tokens, in_features), 1.0)
    ws = [normal((in_features, sum(widths)), in_features**-0.5) for _ in range(num_layers)]
    tile = max(num_tokens, MIN_DOT_SIZE)
    mixes = {name: _segments(num_tokens, num_slots, k, tile) for name, k in (("base", 0), ("one", 1), ("three", 3))}

    expected = reference.lora_linear(x, ws[0], slots, mixes["three"], jnp.int32(0)).astype(jnp.float32)
    problem = Problem(tile, num_slots * slot_rank, in_features, widths, is_swiglu)
    return Case(problem, (x, ws, slots), mixes, swiglu(expected) if is_swiglu else expected)


def _segments(num_tokens: int, num_slots: int, mix_size: int, tile: int) -> Segments:
    weights = np.zeros((num_tokens, 1, num_slots), np.float32)
    for t in range(num_tokens):
        for i in range(mix_size):
            weights[t, 0, (t * mix_size + i) % num_slots] = 0.3
    return build_segments(jnp.asarray(weights), tile_size=tile)


def all_layers(config: KernelConfig, *, is_swiglu: bool) -> Callable[..., list[Array]]:
    """The op for every layer in turn."""
    op = pallas_triton.lora_swiglu if is_swiglu else pallas_triton.lora_linear

    def run(x: Array, ws: list[Array], slots: ProjectionSlots, segments: Segments | None) -> list[Array]:
        arrivals, outputs = new_arrivals(_PASSES * len(ws)), []
        for i in range(_PASSES * len(ws)):
            layer = i % len(ws)
            y, arrivals = op(x, ws[layer], slots, segments, arrivals, jnp.int32(layer), jnp.int32(i), config=config)
            outputs.append(y)
        return outputs

    return run


def is_valid(config: KernelConfig, problem: Problem) -> bool:
    """Whether the kernel can run this configuration at all."""
    c, p = config, problem
    if p.is_swiglu and c.splits != 1:
        return False
    chunk = c.shrink_splits * c.shrink_columns * c.shrink_unroll
    return (
        all(width % c.columns == 0 for width in p.widths)
        and p.in_features % (c.splits * c.depth) == 0
        and p.in_features % chunk == 0
    )


def shared_bytes(config: KernelConfig, problem: Problem) -> int:
    """Of the main programs' loop, in which every stage holds a block of x and of W."""
    columns = config.columns * (2 if problem.is_swiglu else 1)
    return 2 * config.num_stages * config.depth * (problem.num_tokens + columns)


def num_programs(config: KernelConfig, problem: Problem) -> int:
    """Main programs of one launch."""
    out_features = problem.widths[0] if problem.is_swiglu else sum(problem.widths)
    return out_features // config.columns * config.splits


def compile_case(case: Case, config: KernelConfig, *, has_adapters: bool = True) -> Any:
    """The compiled chain, or the reason why there is none."""
    try:
        run = jax.jit(all_layers(config, is_swiglu=case.problem.is_swiglu))
        return run.lower(*case.args, case.mixes["base"] if has_adapters else None).compile()
    except Exception as error:
        return error


def measure(case: Case, compiled: Any, repeats: int) -> dict[str, float] | None:
    """Microseconds a layer for each mix; None for a program that failed or is wrong."""
    if isinstance(compiled, Exception) or _error(compiled, case, case.mixes["three"], case.expected) > _LARGEST_ERROR:
        return None
    return {name: _microseconds(compiled, case, segments, repeats) for name, segments in case.mixes.items()}


def measure_plain(case: Case, compiled: Any, base_bits: Array, repeats: int) -> float:
    """Microseconds a layer without adapters; infinity for a program that failed or gives other bits than `base_bits`.

    Those are layer 0's output of the configuration with adapters for a batch that has none.
    """
    if isinstance(compiled, Exception) or not bool((compiled(*case.args, None)[0] == base_bits).all()):
        return float("inf")
    return _microseconds(compiled, case, None, repeats)


def _error(compiled: Any, case: Case, segments: Segments | None, expected: Array) -> float:
    """Norm of the difference over the expected norm; infinity for NaN."""
    y = compiled(*case.args, segments)[0].astype(jnp.float32)
    y = y.sum(0) if y.ndim == 3 else y
    error = float(jnp.linalg.norm(y - expected) / jnp.linalg.norm(expected))
    return error if error == error else float("inf")


def _microseconds(compiled: Any, case: Case, segments: Segments | None, repeats: int) -> float:
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([compiled(*case.args, segments) for _ in range(8)][-1])
        samples.append((time.perf_counter() - start) / 8 / (_PASSES * len(case.args[1])) * 1e6)
    return statistics.median(samples)


def score(times: dict[str, float] | None) -> float:
    return float("inf") if times is None else statistics.fmean(times.values())


@dataclasses.dataclass
class Choice:
    """The best so far for one case.

    Attributes:
      config: with adapters.
      times: microseconds a layer by mix; None before the first measurement.
      plain: the fields of `config` that are different without adapters.
      plain_us: microseconds a layer without adapters.
      base_bits: what rows on the base model get, which must not depend on the program.
    """

    config: KernelConfig
    times: dict[str, float] | None = None
    plain: dict[str, int] = dataclasses.field(default_factory=dict)
    plain_us: float = float("inf")
    base_bits: Array | None = None


def tune(cases: list[Case], rounds: Iterable[str], repeats: int) -> Iterator[list[Choice]]:
    """After every round, the best choices so far; the first round measures what `pick_config` says."""
    best = [Choice(pick_config(case.problem)) for case in cases]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 2)) as pool:
        for name in ("start", *rounds):
            start_s, is_plain = time.perf_counter(), name == "plain"
            jobs = [
                (i, option) for i, case in enumerate(cases) for option in options_of(best[i].config, name, case.problem)
            ]
            # All compiled before any is timed: the compiler's threads would disturb the host's part of a call.
            futures = [pool.submit(compile_case, cases[i], option, has_adapters=not is_plain) for i, option in jobs]
            compiled = [future.result() for future in _shown(futures, f"{name}: compiled")]
            update = _update_plain if is_plain else _update
            for (i, option), program in _shown(list(zip(jobs, compiled, strict=True)), f"{name}: timed"):
                update(best[i], option, cases[i], program, repeats)
            print(f"{name}: {len(jobs)} candidates, {time.perf_counter() - start_s:.0f} s", flush=True)
            yield best


def _shown[T](items: list[T], done: str) -> Iterator[T]:
    """The items, and a line about how many are done every ten seconds."""
    shown_s = time.perf_counter()
    for i, item in enumerate(items):
        yield item
        if time.perf_counter() - shown_s > 10:
            shown_s = time.perf_counter()
            print(f"{done} {i + 1} of {len(items)}", file=sys.stderr, flush=True)


def _update(choice: Choice, option: KernelConfig, case: Case, program: Any, repeats: int) -> None:
    times = measure(case, program, repeats)
    if score(times) < score(choice.times) * 0.99:
        choice.config, choice.times = option, times


def _update_plain(choice: Choice, option: KernelConfig, case: Case, program: Any, repeats: int) -> None:
    base_bits = choice.base_bits
    if base_bits is None:
        base_bits = choice.base_bits = compile_case(case, choice.config)(*case.args, case.mixes["base"])[0]
    us = measure_plain(case, program, base_bits, repeats)
    if us < choice.plain_us * 0.99:
        choice.plain_us = us
        fields = {name: getattr(option, name) for name in MAIN_FIELDS}
        choice.plain = {k: v for k, v in fields.items() if v != getattr(choice.config, k)}


def options_of(config: KernelConfig, round_name: str, problem: Problem) -> list[KernelConfig]:
    """The valid candidates of one round; for "plain" those with the splits of `config`, itself first."""
    match round_name:
        case "start":
            candidates = [config]
        case "main" | "plain":
            candidates = [
                dataclasses.replace(config, **dict(zip(MAIN_FIELDS, sizes, strict=True))) for sizes in MAIN_SIZES
            ]
            fewest, most = _NUM_PROGRAMS
            candidates = [
                c
                for c in candidates
                if shared_bytes(c, problem) <= _MAX_SHARED_BYTES and fewest <= num_programs(c, problem) <= most
            ]
            if round_name == "plain":
                candidates = [config, *(c for c in candidates if c.splits == config.splits)]
        case "shrink":
            all_sizes = LARGE_SHRINK_SIZES if problem.has_many_rows else SHRINK_SIZES
            candidates = [
                dataclasses.replace(config, **dict(zip(SHRINK_FIELDS, sizes, strict=True))) for sizes in all_sizes
            ]
        case field:
            candidates = [dataclasses.replace(config, **{field: v}) for v in CANDIDATES[field]]
    return [c for c in dict.fromkeys(candidates) if is_valid(c, problem)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(named_shapes()), default=["llama-3-8b"])
    parser.add_argument("--group", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 32, 64], help="tokens of a step")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--rank", type=int, default=8, help="rank rows of a slot")
    parser.add_argument("--layers", type=int, default=8, help="layers a call: more bytes than the L2 cache holds")
    parser.add_argument(
        "--rounds",
        nargs="+",
        choices=ROUNDS,
        help=f"(default: all; with many rank rows {' '.join(MANY_ROWS_ROUNDS)}, and no others)",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the table to this JSON file")
    options = parser.parse_args()
    cases = [
        make_case(s, g, t, num_slots=options.slots, slot_rank=options.rank, num_layers=options.layers)
        for s in options.shape
        for g in options.group
        for t in options.tokens
    ]
    if len({case.problem.has_many_rows for case in cases}) > 1:
        parser.error("--slots times --rank is many rank rows for some of --tokens alone; tune these apart")
    possible = MANY_ROWS_ROUNDS if cases[0].problem.has_many_rows else ROUNDS
    rounds = options.rounds or possible
    if unknown := set(rounds) - set(possible):
        parser.error(f"--rounds {' '.join(sorted(unknown))} is for fewer rank rows; expected of {' '.join(possible)}")
    print(f"device {jax.devices()[0].device_kind}, jax {jax.__version__}, {len(cases)} problems", flush=True)
    for best in tune(cases, rounds, options.repeats):
        for case, choice in zip(cases, best, strict=True):
            times = {k: round(v, 1) for k, v in (choice.times or {}).items()}
            print(f"  {case.problem.key}: us a layer {times}, without adapters {choice.plain_us:.1f}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(_table(cases, best), indent=1) + "\n")


def _table(cases: list[Case], best: list[Choice]) -> dict[str, Any]:
    """The committed table with what was measured in its place."""
    table = json.loads(resources.files(__package__).joinpath("h200.json").read_text())
    command = shlex.join(["python", "-m", "pallas_kernels.lora_linear.tune", *sys.argv[1:]])
    for case, choice in zip(cases, best, strict=True):
        key = case.problem.key
        made_by = f"{command} ({jax.devices()[0].device_kind}, jax {jax.__version__})"
        if case.problem.has_many_rows:
            table["many_rows"][key] = {name: getattr(choice.config, name) for name in MANY_ROWS_FIELDS}
            table["made_by"][f"{key} many rows"] = made_by
            table["us_per_layer"][f"{key} many rows"] = dict(choice.times or {})
            continue
        table["made_by"][key] = made_by
        table["us_per_layer"][key] = dict(choice.times or {})
        table["configs"][key] = dataclasses.asdict(choice.config)
        if choice.plain_us < float("inf"):
            table["us_per_layer"][key]["plain"] = choice.plain_us
            table["plain"][key] = choice.plain
        elif choice.config.splits != pick_config(case.problem).splits:
            table["plain"].pop(key, None)  # chosen for other splits
    table["plain"] = {key: fields for key, fields in table["plain"].items() if fields}
    return table


if __name__ == "__main__":
    main()
