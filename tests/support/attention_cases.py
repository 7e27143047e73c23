"""Inputs of the op paged_attention: one set of shapes for every implementation, and its float32 reference."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.paged_attention import build_query_tiles, paged_attention
from pallas_kernels.paged_attention.shapes import AttentionInputs, AttentionShape, random_inputs
from tests.support.tolerances import assert_close

_BLOCK = 8

jitted_tiles = jax.jit(build_query_tiles, static_argnames=("num_tokens", "tile_size"))


def _small(
    seq_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    tile_size: int | None = None,
    padded_len: int | None = None,
) -> AttentionShape:
    return AttentionShape(
        seq_lens,
        context_lens,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        block_size=_BLOCK,
        tile_size=tile_size,
        padded_len=padded_len,
    )


def _groups(q_per_kv: int, head_dim: int) -> AttentionShape:
    return AttentionShape(
        (11, 1, 0, 1), (3, 20, 9, 0), num_q_heads=2 * q_per_kv, num_kv_heads=2, head_dim=head_dim, tile_size=4
    )


# Context ends (context + new tokens) stand at the borders of a block: 1, size - 1, size, size + 1.
ATTENTION_CASES: dict[str, AttentionShape] = {
    "decode_one": _small((1,), (0,)),
    "decode_at_block_borders": _small((1,) * 6, (0, _BLOCK - 2, _BLOCK - 1, _BLOCK, 2 * _BLOCK - 1, 2 * _BLOCK)),
    "decode_with_unused_rows": _small((1, 0, 1, 0, 1), (5, 7, 0, 0, 40), tile_size=1, padded_len=1),
    "decode_with_very_different_contexts": _small((1,) * 11, (300, *range(10))),
    "prefill_one_token": _small((1,), (0,), tile_size=4),
    "prefill_at_block_borders": _small((_BLOCK - 1, _BLOCK, _BLOCK + 1), (0, 0, 0), tile_size=4),
    "prefill_chunks_after_context": _small((7, 9, 16), (_BLOCK - 1, _BLOCK, _BLOCK + 1), tile_size=8),
    "prefill_longer_than_a_chunk": _small((150,), (131,)),
    "mixed": _small((20, 1, 0, 1, 33), (0, 3, 0, 17, 30), tile_size=8),
    "mixed_token_by_token": _small((5, 1, 0, 3), (2, 9, 4, 0), tile_size=1),
    "padded": _small((3, 0, 12, 7), (0, 5, 9, 0), tile_size=4, padded_len=12),
    "nobody": _small((0, 0), (5, 0), tile_size=4),
    "group_1": _groups(1, 16),
    "group_2_head_dim_64": _groups(2, 64),
    "group_3_head_dim_64": _groups(3, 64),
    "group_4_head_dim_128": _groups(4, 128),
    "group_8": _groups(8, 16),
    "head_dim_not_a_power_of_two": _groups(3, 24),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of one shape and what they must give.

    Attributes:
      shape: sequences and heads.
      inputs: arguments of the op.
      expected: [num_tokens, num_q_heads, head_dim] float32 result of the reference on the same values.
    """

    shape: AttentionShape
    inputs: AttentionInputs
    expected: Array

    def check(self, out: Array) -> None:
        """Compares the rows of all tokens that belong to a sequence; the others must be finite."""
        assert out.shape == self.inputs.q.shape
        assert out.dtype == self.inputs.q.dtype
        is_owned = owned_tokens(self.shape)
        assert_close(np.asarray(out)[is_owned], np.asarray(self.expected)[is_owned])
        assert np.isfinite(np.asarray(out, np.float32)).all(), "a row outside the tiles is not finite"


def make_case(shape: AttentionShape, dtype: DTypeLike, rng: np.random.Generator) -> Case:
    inputs = random_inputs(shape, dtype, rng)
    return Case(shape, inputs, reference_output(inputs))


def check_each_sequence_alone(case: Case, attend: Callable[[AttentionInputs], Array]) -> None:
    """The same program gives a sequence the same bits with all of them and with each of them alone in its row."""
    shape = case.shape
    together = np.asarray(attend(case.inputs))
    for seq, (start, length) in enumerate(zip(shape.seq_starts, shape.seq_lens, strict=True)):
        lens = tuple(n if i == seq else 0 for i, n in enumerate(shape.seq_lens))
        tiles = jitted_tiles(
            *(jnp.asarray(x, jnp.int32) for x in (shape.seq_starts, lens, shape.context_lens)),
            num_tokens=shape.num_tokens,
            tile_size=case.inputs.tiles.tile_size,
        )
        alone = np.asarray(attend(dataclasses.replace(case.inputs, tiles=tiles)))
        np.testing.assert_array_equal(alone[start : start + length], together[start : start + length])


def moved_to_the_end(inputs: AttentionInputs, *, num_elements: int) -> AttentionInputs:
    """The same in a larger cache: the blocks that were there lie behind `num_elements` elements of NaN or fewer."""
    kv = inputs.kv
    num_blocks = num_elements // (kv.size // kv.shape[0]) + 64
    first = num_blocks - kv.shape[0]
    large = jnp.full((num_blocks, *kv.shape[1:]), jnp.nan, kv.dtype).at[first:].set(kv)
    return dataclasses.replace(inputs, kv=large, block_tables=inputs.block_tables + first)


@functools.cache
def named_case(name: str, dtype: str = "float32") -> Case:
    """One of `ATTENTION_CASES`, made once for all implementations; its numbers depend on its name only."""
    return make_case(ATTENTION_CASES[name], dtype, np.random.default_rng(list(name.encode())))


@jax.jit
def reference_output(inputs: AttentionInputs) -> Array:
    """Float32 reference result of inputs of any dtype."""
    q, kv = inputs.q.astype(jnp.float32), inputs.kv.astype(jnp.float32)
    return paged_attention(q, kv, inputs.block_tables, inputs.tiles, implementation="reference")


def owned_tokens(shape: AttentionShape) -> np.ndarray:
    """[num_tokens] bool: tokens that belong to a sequence; the rows of the others are unspecified."""
    is_owned = np.zeros(shape.num_tokens, np.bool_)
    for start, length in zip(shape.seq_starts, shape.seq_lens, strict=True):
        is_owned[start : start + length] = True
    return is_owned
