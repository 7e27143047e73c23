"""Block sizes of the one-launch kernel: measured choices from a table, and the rule for shapes that are not in it."""

import dataclasses
import functools
import json
from importlib import resources
from typing import Any

from jax.experimental import pallas as pl

from pallas_kernels.gpu import HOPPER_SHARED_BYTES

MIN_DOT_SIZE = 16  # the tensor cores' smallest tile side
_FEW_ROWS = 64  # then blocks are small: most have a row or two, and less shared memory lets more programs run
MANY_ROWS = 1024
"""Rank rows of all slots; with more, A and B may be most of what a launch reads, and there may be another choice for
them. It is a worse one for few adapters (on an H200, up to 20 us a layer of the 8B shape), so who knows that there are
few says so by `Segments.max_segments`."""
_MANY_ROWS_OF_FEW_TOKENS = 2048  # which have few adapters
MAX_TOKENS = 64  # more tokens want the library's GEMM: weights are then no longer what takes the time


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Block sizes of the Triton kernel; all are powers of two but the splits.

    Attributes:
      columns: output features of one main program (of each half, with SwiGLU); divides every projection's width.
      depth: input features of one step of the main loop.
      splits: main programs that share the input features of one block of columns: partial sums of the output.
      tail_rows: rank rows of one step of a main program's LoRA tail.
      shrink_rows: rank rows of one shrink program.
      shrink_columns: input features of one load of a shrink program.
      shrink_splits: shrink programs that share the input features of one block of rank rows.
      shrink_programs: at most that many; each does several blocks in turn where there are more. Programs that find
        nothing to do are not free.
      shrink_unroll: independent accumulators of a shrink program; its loop is bound by the latency of the dots.
      num_stages: software pipelining depth.
      num_warps: warps of a program.
    """

    columns: int
    depth: int
    splits: int
    tail_rows: int
    shrink_rows: int
    shrink_columns: int
    shrink_splits: int
    shrink_programs: int
    shrink_unroll: int
    num_stages: int
    num_warps: int

    def padded_rows(self, num_rows: int) -> int:
        """Rank rows of one projection, rounded up so that no block of rows reaches into the next projection."""
        block = max(self.shrink_rows, self.tail_rows)
        return -(-num_rows // block) * block


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a configuration is picked by.

    Attributes:
      num_tokens: tokens of the step, a power of two from 16 to MAX_TOKENS after padding.
      num_rows: rank rows of one projection over all slots.
      in_features: of the group.
      widths: out_features of its projections.
      is_swiglu: gate and up in one program.
    """

    num_tokens: int
    num_rows: int
    in_features: int
    widths: tuple[int, ...]
    is_swiglu: bool

    @property
    def has_many_rows(self) -> bool:
        """Whether large adapters may take most of the time, for which there may be other choices."""
        return self.num_rows > (MANY_ROWS if self.num_tokens > MIN_DOT_SIZE else _MANY_ROWS_OF_FEW_TOKENS)

    @property
    def key(self) -> str:
        """Of the table of measured choices; of the number of slots only `has_many_rows` matters to them."""
        kind = "swiglu" if self.is_swiglu else "linear"
        return f"{kind} {self.in_features}->{'+'.join(map(str, self.widths))} tokens {self.num_tokens}"


def pick_config(
    problem: Problem, *, has_adapters: bool = True, shared_bytes: int = HOPPER_SHARED_BYTES
) -> KernelConfig:
    """The measured choice for one problem, or a rule's, with as many stages as `shared_bytes` of a block can hold.

    Without adapters there may be a better one, and for many rank rows, with the same splits: they alone decide in which
    order a base product is summed, and a row on the base model must get the same bits whatever others have.

    Raises:
      NotImplementedError: If the kernel does not support the shapes.
    """
    check_supported(problem)
    measured = _measured()
    config = KernelConfig(**measured["configs"][problem.key]) if problem.key in measured["configs"] else None
    config = config or _by_rule(problem)
    if not has_adapters:
        config = dataclasses.replace(config, **measured["plain"].get(problem.key, {}))
    elif problem.has_many_rows:
        config = dataclasses.replace(config, **measured["many_rows"].get(problem.key, {}))
    if problem.num_rows <= _FEW_ROWS:
        config = dataclasses.replace(config, tail_rows=_FEW_ROWS // 2, shrink_rows=_FEW_ROWS // 2)
    num_rows = max(problem.num_rows, MIN_DOT_SIZE)
    config = dataclasses.replace(
        config,
        tail_rows=min(config.tail_rows, pl.next_power_of_2(num_rows)),
        shrink_rows=min(config.shrink_rows, pl.next_power_of_2(num_rows)),
    )
    # A pipeline of n stages holds the loads of n - 1 steps.
    step_bytes = _step_bytes(config, problem, has_adapters=has_adapters)
    num_stages = min(config.num_stages, 1 + shared_bytes // step_bytes)
    return dataclasses.replace(config, num_stages=num_stages)


def _step_bytes(config: KernelConfig, problem: Problem, *, has_adapters: bool) -> int:
    """Bytes that one step loads, of the loop with the largest steps."""
    c, tokens, columns = config, problem.num_tokens, config.columns * (2 if problem.is_swiglu else 1)
    main, tail = (tokens + columns) * c.depth, (tokens + columns) * c.tail_rows
    shrink = (tokens + c.shrink_rows) * c.shrink_columns * c.shrink_unroll
    return 2 * (max(main, tail, shrink) if has_adapters else main)


def check_supported(problem: Problem) -> None:
    """Raises NotImplementedError for what the kernel does not support."""
    p = problem
    if p.num_tokens < MIN_DOT_SIZE or p.num_tokens & (p.num_tokens - 1):
        raise NotImplementedError(
            f"tile_size {p.num_tokens} of the segments is not supported; use 16, 32 or 64, as token_tile_size gives it"
        )
    if p.num_tokens > MAX_TOKENS:
        raise NotImplementedError(f"{p.num_tokens} tokens are not supported; at most {MAX_TOKENS} fit one launch")
    for name, width in [("in_features", p.in_features), *(("width", width) for width in p.widths)]:
        if _power_of_two_factor(width) < MIN_DOT_SIZE:
            raise NotImplementedError(f"{name} {width} is not supported; it must be a multiple of {MIN_DOT_SIZE}")


@functools.cache
def _measured() -> dict[str, Any]:
    """Made on an H200 by `python -m pallas_kernels.lora_linear.tune`.

    "configs" holds whole configurations by `Problem.key`, "plain" the fields in which those without adapters differ,
    "many_rows" those that were chosen anew for many rank rows.
    """
    return json.loads(resources.files(__package__).joinpath("h200.json").read_text())


def _by_rule(problem: Problem) -> KernelConfig:
    p = problem
    out_features = p.widths[0] if p.is_swiglu else sum(p.widths)
    widest = min(_power_of_two_factor(width) for width in p.widths)
    # Rows of W of 256 B; with SwiGLU a program streams two blocks of columns, and half as wide ones do.
    columns = min(widest, 64 if p.is_swiglu else 128)
    depth = min(_power_of_two_factor(p.in_features), 64)
    # Two programs for each of an H200's 132 SMs, unless the loops of one become short.
    splits = 1
    while (
        not p.is_swiglu
        and out_features // columns * splits * 2 <= 264
        and p.in_features % (splits * 2 * depth) == 0
        and p.in_features // (splits * 2) >= 512
    ):
        splits *= 2
    # What the measured shapes have in common.
    num_loads = p.in_features // depth
    shrink_splits = _largest_divisor(num_loads, at_most=min(8, max(1, p.in_features // 256)))
    return KernelConfig(
        columns=columns,
        depth=depth,
        splits=splits,
        tail_rows=64 if p.num_tokens <= 32 else 128,
        shrink_rows=32 if p.num_tokens <= 16 else 64,
        shrink_columns=depth,
        shrink_splits=shrink_splits,
        shrink_programs=132,
        shrink_unroll=_largest_divisor(num_loads // shrink_splits, at_most=2 if p.num_tokens <= 32 else 1),
        num_stages=4 if p.num_tokens <= 32 else 3,
        num_warps=4,
    )


def _power_of_two_factor(n: int) -> int:
    return n & -n


def _largest_divisor(n: int, *, at_most: int) -> int:
    return next(d for d in range(at_most, 0, -1) if n % d == 0)
