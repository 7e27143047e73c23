"""How the op is cut up: tokens per query tile, and the Pallas kernel's block sizes, from the shapes alone."""

import dataclasses
import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels.gpu import HOPPER_SHARED_BYTES

# Programs that fill an H200 (132 multiprocessors) about twice over. Other GPUs get the same split: it decides how
# sums are grouped, so results do not change with the number of multiprocessors.
_TARGET_PROGRAMS = 256
_MAX_SPLITS = 32
MIN_DOT_SIZE = 16  # Triton's matrix product takes no smaller side: rows and lanes are padded to it
_LONG_PROMPT_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Block sizes and launch parameters of the Pallas kernel.

    Attributes:
      chunk_tokens: cached tokens per loop step, a power of two, at least 16 (the smallest matrix product).
      num_splits: ranges that the context is cut into, one program each; 1 needs no second kernel.
      num_warps: warps per program.
      num_stages: loop steps in flight.
    """

    chunk_tokens: int
    num_splits: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.chunk_tokens < 16 or self.chunk_tokens & (self.chunk_tokens - 1):
            raise ValueError(f"chunk_tokens must be a power of two and at least 16, got {self.chunk_tokens}")
        if not 1 <= self.num_splits <= _MAX_SPLITS:
            raise ValueError(f"num_splits must be between 1 and {_MAX_SPLITS}, got {self.num_splits}")
        if self.num_warps not in (1, 2, 4, 8) or self.num_stages < 1:
            raise ValueError(
                f"num_warps must be 1, 2, 4 or 8 and num_stages at least 1, got {self.num_warps} and {self.num_stages}"
            )


MOSAIC_TILE_SIZE = 64  # rows of one warpgroup's wgmma


@dataclasses.dataclass(frozen=True)
class MosaicConfig:
    """Block sizes of the Mosaic kernel.

    Attributes:
      chunk_tokens: cached tokens per loop step, 64 or 128 (the registers of a warpgroup hold no more scores).
      num_buffers: chunks of keys, and as many of values, in flight or in use.
    """

    chunk_tokens: int = 128
    num_buffers: int = 2

    def __post_init__(self) -> None:
        if self.chunk_tokens not in (64, 128) or self.num_buffers < 2:
            raise ValueError(
                f"chunk_tokens must be 64 or 128 and num_buffers at least 2, got {self.chunk_tokens} and "
                f"{self.num_buffers}"
            )

    def shared_bytes(self, head_dim: int) -> int:
        """Shared memory of a CTA: rings of keys and values, queries and results of two heads, sums, barriers."""
        rings = 2 * self.num_buffers * self.chunk_tokens * head_dim * 2
        return rings + 2 * 2 * MOSAIC_TILE_SIZE * head_dim * 2 + 2048 + 1024

    def check_fits(self, head_dim: int) -> None:
        """Raises NotImplementedError if a CTA has less shared memory than this needs."""
        if self.shared_bytes(head_dim) > HOPPER_SHARED_BYTES:
            raise NotImplementedError(
                f"{self} needs {self.shared_bytes(head_dim)} bytes of shared memory; a CTA has {HOPPER_SHARED_BYTES}"
            )


def query_tile_size(num_tokens: int, num_seqs: int) -> int:
    """Tokens per query tile for a batch of these sizes: 1 when each sequence has one token, else 16, 32 or 64.

    Larger tiles read the cache less often; smaller ones waste less on the last tile of each sequence.
    """
    if num_tokens < 1 or num_seqs < 1:
        raise ValueError(f"num_tokens and num_seqs must be at least 1, got {num_tokens} and {num_seqs}")
    if num_tokens <= num_seqs:
        return 1
    tokens_per_seq = num_tokens // num_seqs
    return 16 if tokens_per_seq <= 16 else 32 if tokens_per_seq <= 32 else 64


def kernel_config(
    *,
    num_tiles: int,
    tile_size: int,
    num_kv_heads: int,
    q_per_kv: int,
    head_dim: int,
    max_context: int,
    dtype: DTypeLike,
    shared_bytes: int = HOPPER_SHARED_BYTES,
    has_wgmma: bool = True,
) -> KernelConfig:
    """Picks the Pallas kernel's configuration from static shapes.

    Args:
      num_tiles: query tiles of the batch, unused ones included.
      tile_size: tokens per tile.
      num_kv_heads: KV heads, one program each.
      q_per_kv: query heads per KV head.
      head_dim: width of a head.
      max_context: tokens that one row of the block table can hold.
      dtype: of q and of the cache.
      shared_bytes: that a block of this GPU may have.
      has_wgmma: it is Hopper, whose products read the weights from registers.

    Raises:
      NotImplementedError: If not even the smallest sizes fit into it.
    """
    num_rows = tile_size * q_per_kv
    is_float32 = jnp.dtype(dtype) == jnp.float32
    chunk_tokens = 64 if head_dim <= 128 else 32
    if is_float32:
        # Products run unrolled and without tensor cores: parity, not speed, and large ones compile for 20 s.
        chunk_tokens = 32 if num_rows <= 64 else 16
    # Measured on an H200 (8B heads, 4 x 512 tokens): 4 warps are best at 64 and 128 rows, 8 at 256.
    num_warps = 8 if num_rows > 128 else 4
    num_stages = 2 if is_float32 else 3
    sizes = [(chunk_tokens, num_stages), *((n, 2) for n in (64, 32, 16) if n <= chunk_tokens)]
    needed = functools.partial(_shared_bytes, num_rows, head_dim, is_float32=is_float32, has_wgmma=has_wgmma)
    fitting = [size for size in sizes if needed(*size) <= shared_bytes]
    if not fitting:
        raise NotImplementedError(
            f"{num_rows} query rows of {head_dim} need more than the {shared_bytes} bytes of shared memory that a "
            "block of this GPU has; use 'portable'"
        )
    chunk_tokens, num_stages = fitting[0]
    return KernelConfig(
        chunk_tokens=chunk_tokens,
        num_splits=_num_splits(num_tiles * num_kv_heads, -(-max_context // chunk_tokens)),
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _shared_bytes(
    num_rows: int, head_dim: int, chunk_tokens: int, num_stages: int, *, is_float32: bool, has_wgmma: bool
) -> int:
    """What XLA asks for: queries, chunks of keys and values in flight, and weights unless products have registers."""
    rows, lanes = (max(pl.next_power_of_2(n), MIN_DOT_SIZE) for n in (num_rows, head_dim))
    chunk = 2 * chunk_tokens * lanes  # keys and values
    if is_float32:
        return 4 * (rows * (lanes + chunk_tokens + 1) + (num_stages - 1) * chunk)
    if has_wgmma:
        return 2 * (rows * lanes + num_stages * chunk)
    return 2 * (rows * (lanes + chunk_tokens) + (num_stages - 1) * chunk)


def prefers_mosaic(*, num_tokens: int, tile_size: int, head_dim: int, max_context: int, dtype: DTypeLike) -> bool:
    """Whether to take the Mosaic kernel on Hopper, where long prompts are read.

    On an H200, 8B heads: 4 x 2048 tokens 351 us against 431, 2048 behind 2048 others 215 against 327, but 16 x 512 188
    against 163. How long the prompts are is not known when a program is compiled, only how long they may be. Heads of
    64 and fewer tokens, which take Triton's, and decode rows among them, which do not, were not measured.
    """
    is_measured = tile_size == MOSAIC_TILE_SIZE and head_dim == 128 and jnp.dtype(dtype) == jnp.bfloat16
    return is_measured and num_tokens >= _LONG_PROMPT_TOKENS and max_context >= _LONG_PROMPT_TOKENS


def _num_splits(num_programs: int, num_chunks: int) -> int:
    """The power of two that brings the programs to the target while each split keeps two chunks or more."""
    num_splits = 1
    while num_splits < _MAX_SPLITS and num_programs * num_splits < _TARGET_PROGRAMS and num_splits * 4 <= num_chunks:
        num_splits *= 2
    return num_splits
