"""Settings of the engine. Every default lives here once; the command line reads its defaults from `EngineConfig`."""

import dataclasses
import math
import re
from typing import Literal, get_args

SchedulerName = Literal["lag", "fifo", "random", "least-first"]
DTypeName = Literal["bfloat16", "float32"]

_BYTE_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and policy of one engine; checked on construction, errors name the command-line flag.

    Attributes:
      adapter_slots: slots of the device's adapter array; 0 serves the base model only.
      slot_rank: rank rows of A and of B in one slot; an adapter of rank r holds ceil(r / slot_rank) slots.
      adapter_host_bytes: host memory for adapters; None takes a quarter of the machine's.
      max_num_seqs: requests that run at once, rows of the block table.
      max_model_len: most tokens of one request, prompt and output together; None takes the model's own limit.
      block_size: tokens in one KV block, a power of two.
      num_blocks: KV blocks; None takes what the device's memory allows.
      enable_prefix_cache: let a request share the KV blocks that hold what it begins with, computed before for the
        same mix.
      max_num_batched_tokens: token budget of one step; at least `max_num_seqs`, so that a step always has room for
        one token of every running request.
      decode_steps: decode steps of one dispatch while nothing waits and all rows are greedy; None picks by model.
      scheduler: admission policy: "lag", "fifo", "random" or "least-first".
      theta_s: LAG's bound in seconds: a request that has waited this long goes first. 0 is FIFO.
      scheduler_seed: seed of the "random" policy.
      dtype: "bfloat16" or "float32" for weights, KV cache and activations; None takes the checkpoint's own.
    """

    adapter_slots: int = 64
    slot_rank: int = 8
    adapter_host_bytes: int | None = None
    max_num_seqs: int = 32
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    enable_prefix_cache: bool = True
    max_num_batched_tokens: int = 512
    decode_steps: int | None = None
    scheduler: SchedulerName = "lag"
    theta_s: float = 0.5
    scheduler_seed: int = 0
    dtype: DTypeName | None = None

    def __post_init__(self) -> None:
        _check_at_least(0, "--adapter-slots", self.adapter_slots)
        for flag, value in [
            ("--slot-rank", self.slot_rank),
            ("--max-num-seqs", self.max_num_seqs),
            ("--block-size", self.block_size),
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
        ]:
            _check_at_least(1, flag, value)
        if self.max_model_len is not None:
            _check_at_least(2, "--max-model-len", self.max_model_len)
        if self.adapter_host_bytes is not None:
            _check_at_least(0, "--adapter-host-bytes", self.adapter_host_bytes)
        if self.num_blocks is not None:
            _check_at_least(1, "--num-blocks", self.num_blocks)
        if self.decode_steps is not None:
            _check_at_least(1, "--decode-steps", self.decode_steps)
        _check_at_least(0, "--scheduler-seed", self.scheduler_seed)
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"--block-size is {self.block_size}, expected a power of two, e.g. 16")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, less than the {self.max_num_seqs} rows of "
                "--max-num-seqs, each of which needs a token in every step; raise the first or lower the second"
            )
        _check_is_one_of("--scheduler", self.scheduler, get_args(SchedulerName))
        if self.dtype is not None:
            _check_is_one_of("--dtype", self.dtype, get_args(DTypeName))
        if isinstance(self.theta_s, bool) or not isinstance(self.theta_s, int | float):
            raise TypeError(f"--theta is {self.theta_s!r}, expected a number of seconds")
        if math.isnan(self.theta_s) or self.theta_s < 0:
            raise ValueError(f"--theta is {self.theta_s}, expected seconds >= 0 (0 is FIFO, inf never overrides LAG)")


def parse_bytes(text: str) -> int:
    """A number of bytes as people write it: 8GiB, 500MB, 1.5 GiB or 123456.

    Raises:
      ValueError: If it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _BYTE_UNITS:
        raise ValueError(f"{text!r} is no size; expected bytes, or a number with a unit such as 8GiB or 500MB")
    return int(float(match[1]) * _BYTE_UNITS[match[2]])


def _check_at_least(least: int, flag: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{flag} is {value!r}, expected an integer >= {least}")
    if value < least:
        raise ValueError(f"{flag} is {value}, expected an integer >= {least}")


def _check_is_one_of(flag: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{flag} is {value!r}, expected one of {', '.join(choices)}")
