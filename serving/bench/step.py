"""Time of a step's program alone, and of each of its kernels: the quick loop of kernel work.

    python -m serving.bench.step --shape 8b --batches 1,32,64 --profile
    python -m serving.bench.step --shape 8b --batches none --prefill 4x2048 1x482+30 --profile

Weights and adapters are random and every decode row has the same context. Steps follow each other without the host
reading anything, as in the engine, so that a time is the device's as long as the host is faster. `serving.bench.decode`
is the engine's own loop.
"""

import argparse
import dataclasses
import functools
import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dymerge_jax.config import LlamaConfig, named_config
from dymerge_jax.kv_cache import empty_cache
from dymerge_jax.lora import SlotArray
from dymerge_jax.model import Implementations, random_model
from dymerge_jax.step import StepTables, forward_step, split_weights
from dymerge_jax.step_batch import packed_batch, packed_rows
from pallas_kernels.bench_report import run_facts
from pallas_kernels.maf_mvm import ProjectionSlots
from serving.bench.decode import SHAPES, Workload, prefill_workloads, workloads
from serving.bench.profile import kernel_times

BLOCK_SIZE = 16
STEPS = 20  # in a row, between two reads of the clock
TRACED_STEPS = 8


def random_slots(config: LlamaConfig, *, num_slots: int, slot_rank: int, dtype: Any) -> SlotArray:
    """Every slot filled, made on the device."""
    keys = iter(jax.random.split(jax.random.key(1), 2 * len(config.groups)))

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(key: Array, shape: tuple[int, ...], scale: float) -> Array:
        return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)

    lead = (config.num_layers, num_slots)
    return SlotArray(
        groups={
            name: ProjectionSlots(
                a=normal(next(keys), (*lead, len(g.widths) * slot_rank, g.in_features), g.in_features**-0.5),
                b=normal(next(keys), (*lead, slot_rank, g.out_features), 0.05),
                scale=jnp.ones((*lead, len(g.widths)), jnp.float32),
                widths=g.widths,
            )
            for name, g in config.groups.items()
        }
    )


def packed_mixes(workload: Workload, num_slots: int) -> np.ndarray:
    """The rows of a workload's mixes; adapter i is in slot i."""
    rows = packed_rows(workload.batch, num_slots)
    for row in range(workload.batch):
        for name, weight in workload.mix(row).entries:
            rows.weights[row, int(name.removeprefix("lora-"))] = weight
    return rows.array


@dataclasses.dataclass(frozen=True)
class StepSize:
    """What a step has to do.

    Attributes:
      num_prompts: whole prompts.
      prompt_len: tokens of each.
      decode_rows: rows with one new token each, before the prompts.
    """

    num_prompts: int
    prompt_len: int
    decode_rows: int

    @classmethod
    def of(cls, text: str) -> "StepSize":
        """What `--prefill` names.

        Raises:
          argparse.ArgumentTypeError: If it names none.
        """
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:\+(\d+))?", text)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is no size; expected such as 4x2048, or 1x482+30")
        return cls(*(int(number or 0) for number in match.groups()))

    def __str__(self) -> str:
        names = [f"{self.num_prompts} x {self.prompt_len}"] if self.num_prompts else []
        return " + ".join(names + [f"{self.decode_rows} x 1"] * (self.decode_rows > 0))

    @property
    def num_seqs(self) -> int:
        """Rows."""
        return self.decode_rows + self.num_prompts

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return self.decode_rows + self.num_prompts * self.prompt_len

    def batch(self, context: int) -> np.ndarray:
        """The packed batch; decode rows have `context` tokens once theirs is in."""
        lens = np.repeat([1, self.prompt_len], [self.decode_rows, self.num_prompts])
        is_decode = np.arange(self.num_seqs) < self.decode_rows
        batch = packed_batch(self.num_tokens, self.num_seqs)
        seqs = [np.arange(self.num_seqs), lens.cumsum() - lens, lens, np.where(is_decode, context - 1, 0), is_decode]
        batch.seqs[:] = np.stack([*seqs, np.ones_like(lens), np.zeros_like(lens)])
        batch.tokens[:] = np.arange(self.num_tokens) % 1000
        return batch.array


class StepLoop:
    """One size of a step: its cache and what every call of its programs takes; `context` is that of decode rows."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: Any,
        slots: SlotArray,
        size: StepSize,
        *,
        context: int,
        dtype: Any,
    ) -> None:
        longest = max(context if size.decode_rows else 0, size.prompt_len)
        blocks_per_seq = -(-longest // BLOCK_SIZE)
        num_blocks = size.num_seqs * blocks_per_seq
        self._cache = empty_cache(config, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=dtype)
        self._block_tables = jnp.arange(num_blocks, dtype=jnp.int32).reshape(size.num_seqs, blocks_per_seq)
        self._last_tokens = jnp.arange(size.num_seqs, dtype=jnp.int32)
        self._batch = jax.device_put(size.batch(context))
        self._weights, self._slots, self._num_seqs = weights, slots, size.num_seqs

    def tables(self, rows: np.ndarray) -> StepTables:
        return StepTables(self._slots, None, jax.device_put(rows), self._block_tables)

    def compile(
        self, structure: Any, tables: StepTables, *, max_slots: int | None, implementations: Implementations
    ) -> Any:
        return forward_step.lower(
            structure,
            self._weights,
            self._cache,
            self._last_tokens,
            tables,
            self._batch,
            num_seqs=self._num_seqs,
            max_slots=max_slots,
            implementations=implementations,
        ).compile()

    def run(self, program: Any, tables: StepTables, steps: int) -> tuple[float, float]:
        """Milliseconds a step, and those of them in which the host dispatched."""
        start_s = time.perf_counter()
        for _ in range(steps):
            result = program(self._weights, self._cache, self._last_tokens, tables, self._batch)
            self._cache, self._last_tokens = result.cache, result.last_tokens
        host_s = time.perf_counter() - start_s
        jax.block_until_ready(self._last_tokens)
        return (time.perf_counter() - start_s) / steps * 1e3, host_s / steps * 1e3


def print_profile(loop: StepLoop, program: Any, tables: StepTables) -> list[dict[str, Any]]:
    """Each kernel's share of a step, from a profiler trace."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            loop.run(program, tables, TRACED_STEPS)
        times = kernel_times(Path(folder), "/device:GPU")
    rows = [
        {"kernel": name, "us_per_step": us / TRACED_STEPS, "calls_per_step": count / TRACED_STEPS}
        for name, (count, us) in times.items()
    ]
    for row in rows[:12]:
        print(f"    {row['us_per_step']:9.1f} us  {row['calls_per_step']:6.1f} calls  {row['kernel']}")
    return rows


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    shape: str = options.shape
    config = named_config(SHAPES.get(shape, shape))
    model = random_model(config, options.dtype)
    structure, weights = split_weights(model.graph, model.state)
    slots = random_slots(config, num_slots=options.slots, slot_rank=options.rank, dtype=options.dtype)
    implementations = Implementations(lora_linear=options.implementation)
    decode_sizes = [] if options.batches == "none" else [StepSize(0, 0, int(b)) for b in options.batches.split(",")]
    for size in (*decode_sizes, *options.prefill):
        limits = (0, None) if size.num_prompts else (0, options.max_slots, None)
        loop = StepLoop(config, weights, slots, size, context=options.context, dtype=options.dtype)
        programs = {}
        for workload in prefill_workloads(size.num_seqs) if size.num_prompts else workloads([size.num_seqs]):
            tables = loop.tables(packed_mixes(workload, options.slots))
            for max_slots in limits:
                if max_slots is not None and workload.num_adapters > max_slots:
                    continue
                if max_slots not in programs:
                    programs[max_slots] = loop.compile(
                        structure, tables, max_slots=max_slots, implementations=implementations
                    )
                program = programs[max_slots]
                loop.run(program, tables, 2)
                samples = [loop.run(program, tables, STEPS) for _ in range(options.repeats)]
                ms = [sample[0] for sample in samples]
                row = {
                    "workload": workload.name,
                    **dataclasses.asdict(size),
                    "active_adapters": workload.num_adapters,
                    "max_slots": max_slots,
                    "step_ms_median": statistics.median(ms),
                    "step_ms_min": min(ms),
                    "step_ms_max": max(ms),
                    "tokens_per_s": size.num_tokens / statistics.median(ms) * 1e3,
                    "host_ms_median": statistics.median(sample[1] for sample in samples),
                }
                print(
                    f"{row['workload']:22} {size!s:>15}, program for {max_slots!s:>4} slots: "
                    f"{row['step_ms_median']:8.3f} ms a step ({row['step_ms_min']:.3f} to {row['step_ms_max']:.3f}), "
                    f"{row['tokens_per_s']:.0f} tokens/s, host {row['host_ms_median']:.3f} ms",
                    flush=True,
                )
                if options.profile:
                    row["kernels"] = print_profile(loop, program, tables)
                yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", help="8b, 1b or a named model size (default: %(default)s)")
    parser.add_argument("--batches", default="1,32,64", help="batch sizes, or none (default: %(default)s)")
    parser.add_argument(
        "--prefill",
        type=StepSize.of,
        nargs="+",
        default=[],
        metavar="PxT",
        help="prompts x tokens, 4x2048, or with decode rows beside them, 1x482+30 (default: none)",
    )
    parser.add_argument("--slots", type=int, default=128, help="adapter slots (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="rank rows of a slot (default: %(default)s)")
    parser.add_argument("--context", type=int, default=256, help="tokens of each row (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    parser.add_argument(
        "--max-slots",
        type=int,
        default=8,
        help="beside decode programs for any mixes, time those for none and for so many slots (default: %(default)s)",
    )
    parser.add_argument("--implementation", help="of lora_linear (default: what the op picks)")
    parser.add_argument("--repeats", type=int, default=5, help=f"of {STEPS} steps (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="show the time of each kernel (GPU only)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    device = jax.devices()[0].device_kind
    print(f"{device}, {options.shape}, {options.dtype}, {options.slots} slots of rank {options.rank}")
    result = {
        **run_facts("serving.bench.step"),
        "settings": vars(options),
        "rows": list(measure(options)),
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1, default=str))


if __name__ == "__main__":
    main()
