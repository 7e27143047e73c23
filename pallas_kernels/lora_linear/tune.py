"""Measures block sizes of the one-launch kernel and writes the table that `config.pick_config` reads.

    python -m pallas_kernels.lora_linear.tune --shape llama-3-8b llama-3.2-1b --out pallas_kernels/lora_linear/h200.json

From the present choice, all problems side by side: first the sizes of the main programs together ("main"), then those
of the shrink programs ("shrink"), then single fields. Last, with the same splits, for steps without adapters the main
programs' sizes once more ("plain"), and for programs made for few adapters all that matters there ("few"). One timed
call runs the op for several layers, so that weights come from memory; the score is the mean time over batches without
adapters, with one adapter a token, and with three ("few": one and three adapters that all tokens share). Every
candidate's output is checked before it may win: against the float32 reference, and rows on the base model to the bit.
Problems that are in the table and not tuned stay in it. Never run in production: what serves is what was committed.
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
from pallas_kernels.lora_linear.config import FEW_ROWS, MIN_DOT_SIZE, KernelConfig, Problem, pick_config
from pallas_kernels.maf_mvm import swiglu
from pallas_kernels.maf_mvm.shapes import GROUPS, named_shapes
from pallas_kernels.maf_mvm.slots import ProjectionSlots
from pallas_kernels.segments import Segments, build_segments

MAIN_FIELDS = ("columns", "depth", "splits", "num_stages")
MAIN_SIZES = tuple(itertools.product((64, 128), (64, 128), (1, 2, 4, 8), (3, 4, 5)))
SHRINK_FIELDS = ("shrink_rows", "shrink_splits", "shrink_programs", "shrink_unroll")
SHRINK_SIZES = tuple(itertools.product((32, 64), (1, 2, 4, 8), (66, 132, 264), (1, 2, 4)))
FEW_FIELDS = (*MAIN_FIELDS, "tail_rows", "shrink_rows", "shrink_splits", "shrink_unroll")
FEW_SIZES = tuple(itertools.product(((16, 16), (32, 32)), (4, 8), (2,)))
CANDIDATES: dict[str, tuple[int, ...]] = {
    "tail_rows": (32, 64, 128),
    "shrink_columns": (64, 128),
    "num_warps": (4, 8),
}
ROUNDS = ("main", "shrink", *CANDIDATES, "plain", "few")
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
      few: the same for a program for few slots: none, and one and three adapters that all tokens share.
      expected, few_expected: output of layer 0 with the last mixes of each, in float32.
    """

    problem: Problem
    args: tuple[Array, list[Array], ProjectionSlots]
    mixes: dict[str, Segments]
    few: dict[str, Segments]
    expected: Array
    few_expected: Array

    @property
    def few_problem(self) -> Problem:
        """What a configuration for few slots is picked by."""
        return dataclasses.replace(self.problem, num_rows=FEW_ROWS)


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
    few_slots = FEW_ROWS // slot_rank
    mixes = {k: _segments(num_tokens, num_slots, size, tile) for k, size in (("base", 0), ("one", 1), ("three", 3))}
    few = {
        k: _segments(num_tokens, num_slots, size, tile, max_segments=few_slots, is_shared=True)
        for k, size in (("base", 0), ("one", 1), ("three", 3))
    }

    def expected(segments: Segments) -> Array:
        y = reference.lora_linear(x, ws[0], slots, segments, jnp.int32(0)).astype(jnp.float32)
        return swiglu(y) if is_swiglu else y

    problem = Problem(tile, num_slots * slot_rank, in_features, widths, is_swiglu)
    return Case(problem, (x, ws, slots), mixes, few, expected(mixes["three"]), expected(few["three"]))


def _segments(
    num_tokens: int,
    num_slots: int,
    mix_size: int,
    tile: int,
    *,
    max_segments: int | None = None,
    is_shared: bool = False,
) -> Segments:
    weights = np.zeros((num_tokens, 1, num_slots), np.float32)
    for t in range(num_tokens):
        for i in range(mix_size):
            weights[t, 0, (i if is_shared else t * mix_size + i) % num_slots] = 0.3
    return build_segments(jnp.asarray(weights), tile_size=tile, max_segments=max_segments)


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


def compile_case(case: Case, config: KernelConfig, segments: Segments | None) -> Any:
    """The compiled chain for segments of that kind, or the reason why there is none."""
    try:
        return jax.jit(all_layers(config, is_swiglu=case.problem.is_swiglu)).lower(*case.args, segments).compile()
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


def measure_few(case: Case, compiled: Any, base_bits: Array, repeats: int) -> float:
    """Mean microseconds a layer with one and with three adapters that all share; infinity as for `measure_plain`."""
    if isinstance(compiled, Exception) or not bool((compiled(*case.args, case.few["base"])[0] == base_bits).all()):
        return float("inf")
    if _error(compiled, case, case.few["three"], case.few_expected) > _LARGEST_ERROR:
        return float("inf")
    return statistics.fmean(_microseconds(compiled, case, case.few[name], repeats) for name in ("one", "three"))


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
      plain, few: the fields of `config` that are different without adapters, and with few.
      plain_us, few_us: microseconds a layer of these; infinity before the first measurement.
      base_bits: what rows on the base model get, which must not depend on the program.
    """

    config: KernelConfig
    times: dict[str, float] | None = None
    plain: dict[str, int] = dataclasses.field(default_factory=dict)
    few: dict[str, int] = dataclasses.field(default_factory=dict)
    plain_us: float = float("inf")
    few_us: float = float("inf")
    base_bits: Array | None = None


def tune(cases: list[Case], rounds: Iterable[str], repeats: int) -> Iterator[list[Choice]]:
    """After every round, the best choices so far; the first round measures what `pick_config` says."""
    best = [Choice(pick_config(case.problem)) for case in cases]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 2)) as pool:
        for name in ("start", *rounds):
            start_s = time.perf_counter()
            update = {"plain": _update_plain, "few": _update_few}.get(name, _update)
            jobs = [(i, option) for i, case in enumerate(cases) for option in options_of(best[i].config, name, case)]
            # All compiled before any is timed: the compiler's threads would disturb the host's part of a call.
            futures = [pool.submit(compile_case, cases[i], option, _kind(cases[i], name)) for i, option in jobs]
            compiled = [future.result() for future in _shown(futures, f"{name}: compiled")]
            for (i, option), program in _shown(list(zip(jobs, compiled, strict=True)), f"{name}: timed"):
                update(best[i], option, cases[i], program, repeats)
            print(f"{name}: {len(jobs)} candidates, {time.perf_counter() - start_s:.0f} s", flush=True)
            yield best


def _kind(case: Case, round_name: str) -> Segments | None:
    """Segments as the programs of a round take them."""
    return {"plain": None, "few": case.few["base"]}.get(round_name, case.mixes["base"])


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
    us = measure_plain(case, program, _base_bits(choice, case), repeats)
    if us < choice.plain_us * 0.99:
        choice.plain_us = us
        choice.plain = _differences(option, choice.config, MAIN_FIELDS)


def _update_few(choice: Choice, option: KernelConfig, case: Case, program: Any, repeats: int) -> None:
    us = measure_few(case, program, _base_bits(choice, case), repeats)
    if us < choice.few_us * 0.99:
        choice.few_us = us
        choice.few = _differences(option, choice.config, FEW_FIELDS)


def _base_bits(choice: Choice, case: Case) -> Array:
    if choice.base_bits is None:
        program = compile_case(case, choice.config, case.mixes["base"])
        choice.base_bits = program(*case.args, case.mixes["base"])[0]
    return choice.base_bits


def _differences(option: KernelConfig, config: KernelConfig, fields: Iterable[str]) -> dict[str, int]:
    values = {name: getattr(option, name) for name in fields}
    return {name: value for name, value in values.items() if value != getattr(config, name)}


def options_of(config: KernelConfig, round_name: str, case: Case) -> list[KernelConfig]:
    """The valid candidates of one round; for "plain" and "few" those with the splits of `config`, present one first."""
    problem = case.problem
    match round_name:
        case "start":
            candidates = [config]
        case "main":
            candidates = _main_options(config, problem)
        case "shrink":
            candidates = [_with(config, SHRINK_FIELDS, sizes) for sizes in SHRINK_SIZES]
        case "plain":
            candidates = [config, *(c for c in _main_options(config, problem) if c.splits == config.splits)]
        case "few":
            problem = case.few_problem
            candidates = [pick_config(problem)] if pick_config(problem).splits == config.splits else []
            candidates += [
                _with(c, ("tail_rows", "shrink_rows", "shrink_splits", "shrink_unroll"), (*rows, splits, unroll))
                for c in _main_options(config, problem)
                if c.splits == config.splits
                for rows, splits, unroll in FEW_SIZES
            ]
        case field:
            candidates = [dataclasses.replace(config, **{field: v}) for v in CANDIDATES[field]]
    return [c for c in dict.fromkeys(candidates) if is_valid(c, problem)]


def _main_options(config: KernelConfig, problem: Problem) -> list[KernelConfig]:
    fewest, most = _NUM_PROGRAMS
    return [
        c
        for c in (_with(config, MAIN_FIELDS, sizes) for sizes in MAIN_SIZES)
        if shared_bytes(c, problem) <= _MAX_SHARED_BYTES and fewest <= num_programs(c, problem) <= most
    ]


def _with(config: KernelConfig, fields: Iterable[str], values: Iterable[int]) -> KernelConfig:
    return dataclasses.replace(config, **dict(zip(fields, values, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(named_shapes()), default=["llama-3-8b"])
    parser.add_argument("--group", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 32, 64], help="tokens of a step")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--rank", type=int, default=8, help="rank rows of a slot")
    parser.add_argument("--layers", type=int, default=8, help="layers a call: more bytes than the L2 cache holds")
    parser.add_argument("--rounds", nargs="+", choices=ROUNDS, default=list(ROUNDS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the table to this JSON file")
    options = parser.parse_args()
    cases = [
        make_case(s, g, t, num_slots=options.slots, slot_rank=options.rank, num_layers=options.layers)
        for s in options.shape
        for g in options.group
        for t in options.tokens
    ]
    print(f"device {jax.devices()[0].device_kind}, jax {jax.__version__}, {len(cases)} problems", flush=True)
    for best in tune(cases, options.rounds, options.repeats):
        for case, choice in zip(cases, best, strict=True):
            times = {k: round(v, 1) for k, v in (choice.times or {}).items()}
            print(
                f"  {case.problem.key}: us a layer {times}, without adapters {choice.plain_us:.1f}, "
                f"few {choice.few_us:.1f}",
                flush=True,
            )
        if options.out:
            options.out.write_text(json.dumps(_table(cases, best), indent=1) + "\n")


def _table(cases: list[Case], best: list[Choice]) -> dict[str, Any]:
    """The committed table with what was measured in its place."""
    table = json.loads(resources.files(__package__).joinpath("h200.json").read_text())
    command = shlex.join(["python", "-m", "pallas_kernels.lora_linear.tune", *sys.argv[1:]])
    for case, choice in zip(cases, best, strict=True):
        key = case.problem.key
        others = {"plain": choice.plain_us, "few": choice.few_us}
        table["us_per_layer"][key] = (choice.times or {}) | {k: us for k, us in others.items() if us < float("inf")}
        table["configs"][key] = dataclasses.asdict(choice.config)
        table["made_by"][key] = f"{command} ({jax.devices()[0].device_kind}, jax {jax.__version__})"
        for name, fields in (("plain", choice.plain), ("few", choice.few)):
            table[name].pop(key, None)
            if fields:
                table[name][key] = fields
    return table


if __name__ == "__main__":
    main()
