"""How the Pallas kernel of decode_attention is cut up, from the shapes alone."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

# Programs that fill an H200 (132 multiprocessors) about twice over. Other GPUs get the same split: it decides how
# sums are grouped, so results do not change with the number of multiprocessors.
_TARGET_PROGRAMS = 256
_MAX_SPLITS = 32

# Cached tokens that a split is worth: the merge costs about as much as reading so many in one program.
_MIN_SPLIT_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Block sizes and launch parameters.

    Attributes:
      chunk_tokens: cached tokens per loop step, a power of two, at least 16 (the smallest matrix product).
      num_splits: ranges that the longest context is cut into, one program each. A sequence uses as many of them as
        its own length is worth, and no merge if that is one.
      min_split_chunks: chunks that a range has at least, but for a sequence's last.
      num_warps: warps per program.
      num_stages: loop steps in flight.
      launch_dependents: let the kernel after this one start early, see `pallas_launch.launch_dependents`.
    """

    chunk_tokens: int
    num_splits: int
    min_split_chunks: int
    num_warps: int
    num_stages: int
    launch_dependents: bool = False

    def __post_init__(self) -> None:
        if self.chunk_tokens < 16 or self.chunk_tokens & (self.chunk_tokens - 1):
            raise ValueError(f"chunk_tokens must be a power of two and at least 16, got {self.chunk_tokens}")
        if not 1 <= self.num_splits <= _MAX_SPLITS:
            raise ValueError(f"num_splits must be between 1 and {_MAX_SPLITS}, got {self.num_splits}")
        if self.num_warps not in (1, 2, 4, 8) or self.num_stages < 1 or self.min_split_chunks < 1:
            raise ValueError(
                "num_warps must be 1, 2, 4 or 8, num_stages and min_split_chunks at least 1, got "
                f"{self.num_warps}, {self.num_stages} and {self.min_split_chunks}"
            )


def kernel_config(
    *, num_seqs: int, num_kv_heads: int, head_dim: int, max_context: int, dtype: DTypeLike
) -> KernelConfig:
    """Picks the kernel's configuration from static shapes.

    Args:
      num_seqs: sequences of the batch, unused ones included.
      num_kv_heads: KV heads, one program each.
      head_dim: width of a head.
      max_context: tokens that one row of the block table can hold.
      dtype: of the cache.
    """
    is_float32 = jnp.dtype(dtype) == jnp.float32
    # 16 KiB of bfloat16 keys a chunk. Products of float32 run unrolled and without tensor cores: parity, not speed.
    chunk_tokens = 32 if is_float32 else 128 if head_dim <= 64 else 64 if head_dim <= 128 else 32
    min_split_chunks = max(_MIN_SPLIT_TOKENS // chunk_tokens, 1)
    return KernelConfig(
        chunk_tokens=chunk_tokens,
        num_splits=_num_splits(num_seqs * num_kv_heads, max_context),
        min_split_chunks=min_split_chunks,
        num_warps=4,
        # Measured on an H200 (8B heads, 32 x 256 tokens): 18 us with 2, 20 with 3, 24 with 4.
        num_stages=2,
    )


def _num_splits(num_programs: int, max_context: int) -> int:
    """The power of two that brings the programs to the target while the longest context is worth so many splits."""
    num_splits = 1
    while (
        num_splits < _MAX_SPLITS
        and num_programs * num_splits < _TARGET_PROGRAMS
        and 2 * num_splits * _MIN_SPLIT_TOKENS <= max_context
    ):
        num_splits *= 2
    return num_splits
