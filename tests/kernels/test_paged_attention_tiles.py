"""Query tiles of a flat batch, and the sizes chosen from shapes alone."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import QueryTiles, build_query_tiles, query_tile_size
from pallas_kernels.paged_attention.config import KernelConfig, kernel_config

type Ints = Sequence[int] | np.ndarray


def build(seq_starts: Ints, seq_lens: Ints, context_lens: Ints, *, num_tokens: int, tile_size: int) -> QueryTiles:
    arrays = (jnp.asarray(x, jnp.int32) for x in (seq_starts, seq_lens, context_lens))
    jitted = jax.jit(build_query_tiles, static_argnames=("num_tokens", "tile_size"))
    return jitted(*arrays, num_tokens=num_tokens, tile_size=tile_size)


def as_rows(tiles: QueryTiles) -> list[tuple[int, int, int, int]]:
    """(seq_id, start, length, position) of the used tiles."""
    columns = (np.asarray(x).tolist() for x in (tiles.seq_ids, tiles.starts, tiles.lengths, tiles.positions))
    return [row for row in zip(*columns, strict=True) if row[2] > 0]


def test_tiles_never_cross_a_sequence():
    tiles = build([0, 9, 9, 10], [9, 0, 1, 4], [5, 8, 2, 0], num_tokens=16, tile_size=4)
    assert tiles.lengths.shape == (16 // 4 + 4,)
    assert as_rows(tiles) == [(0, 0, 4, 5), (0, 4, 4, 9), (0, 8, 1, 13), (2, 9, 1, 2), (3, 10, 4, 0)]


def test_sequences_may_lie_anywhere_in_the_batch():
    tiles = build([12, 0], [3, 5], [0, 7], num_tokens=24, tile_size=4)
    assert as_rows(tiles) == [(0, 12, 3, 0), (1, 0, 4, 7), (1, 4, 1, 11)]


def test_a_decode_batch_has_one_tile_a_sequence():
    tiles = build(range(4), [1, 0, 1, 1], [5, 6, 0, 9], num_tokens=4, tile_size=1)
    assert tiles.lengths.shape == (4,)
    assert as_rows(tiles) == [(0, 0, 1, 5), (2, 2, 1, 0), (3, 3, 1, 9)]


def test_tiles_of_one_token_hold_for_a_mixed_batch_as_long_as_its_table():
    tiles = build([0, 3, 3, 4], [3, 0, 1, 0], [2, 5, 7, 0], num_tokens=4, tile_size=1)
    assert as_rows(tiles) == [(0, 0, 1, 2), (0, 1, 1, 3), (0, 2, 1, 4), (2, 3, 1, 7)]


def test_as_many_tiles_as_a_batch_can_need_always_fit(rng: np.random.Generator):
    for _ in range(20):
        lens = rng.multinomial(23, rng.dirichlet(np.full(5, 0.5)))
        tiles = build(np.cumsum(lens) - lens, lens, lens, num_tokens=23, tile_size=4)
        assert sum(row[2] for row in as_rows(tiles)) == 23


def test_tile_sizes_follow_the_tokens_per_sequence():
    assert [query_tile_size(*sizes) for sizes in ((1, 1), (32, 32), (8, 32))] == [1, 1, 1]
    assert [query_tile_size(*sizes) for sizes in ((33, 32), (512, 32), (1024, 32), (512, 1))] == [16, 16, 32, 64]


def test_few_tiles_over_a_long_context_are_split_and_many_are_not():
    heads = {"num_kv_heads": 8, "q_per_kv": 4, "head_dim": 128, "dtype": jnp.bfloat16}
    assert kernel_config(num_tiles=1, tile_size=1, max_context=8192, **heads).num_splits == 32
    assert kernel_config(num_tiles=1, tile_size=1, max_context=64, **heads).num_splits == 1
    assert kernel_config(num_tiles=256, tile_size=1, max_context=8192, **heads).num_splits == 1


def test_a_gpu_with_less_shared_memory_gets_smaller_chunks_until_nothing_fits():
    sizes = {"num_tiles": 64, "num_kv_heads": 8, "head_dim": 128, "max_context": 2048, "dtype": jnp.bfloat16}

    def picked(q_per_kv: int, shared_kib: int, **changes: Any) -> tuple[int, int]:
        memory = {"shared_bytes": shared_kib * 1024, "has_wgmma": shared_kib == 227}
        config = kernel_config(tile_size=64, q_per_kv=q_per_kv, **(sizes | memory | changes))
        return config.chunk_tokens, config.num_stages

    assert (picked(4, 227), picked(4, 163), picked(4, 99)) == ((64, 3), (64, 3), (32, 2))
    assert picked(4, 99, head_dim=80) == picked(4, 99)  # the kernel's lanes are a power of two
    assert picked(8, 227) == (64, 3)
    for q_per_kv, shared_kib, changes in ((8, 99, {}), (16, 227, {}), (4, 99, {"dtype": jnp.float32})):
        rows = 64 * q_per_kv
        with pytest.raises(
            NotImplementedError, match=f"{rows} query rows of 128 need more than the {shared_kib << 10}"
        ):
            picked(q_per_kv, shared_kib, **changes)


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="tile_size and num_tokens must be at least 1, got 0 and 4"):
        build([0], [4], [0], num_tokens=4, tile_size=0)
    with pytest.raises(ValueError, match="num_tokens and num_seqs must be at least 1, got 4 and 0"):
        query_tile_size(4, 0)
    with pytest.raises(ValueError, match="chunk_tokens must be a power of two and at least 16, got 24"):
        KernelConfig(chunk_tokens=24, num_splits=1, num_warps=4, num_stages=2)
