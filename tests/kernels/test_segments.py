"""Sorting of token–LoRA pairs into segments, against a loop over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.segments import Segments, build_segments
from tests.support.maf_cases import ALL_MIXES, Mixes, mix_matrix


def slots_of_tiles(segments: Segments) -> list[list[int]]:
    counts = np.asarray(segments.num_segments)
    return [ids[:count].tolist() for ids, count in zip(np.asarray(segments.slot_ids), counts, strict=True)]


def expected_slots(weights: np.ndarray, tile_size: int) -> list[list[int]]:
    used = (weights != 0).any(1)
    starts = range(0, len(weights), tile_size)
    return [sorted({int(s) for row in used[i : i + tile_size] for s in np.flatnonzero(row)}) for i in starts]


@pytest.mark.parametrize("mixes", ALL_MIXES)
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 133])
def test_each_tile_lists_its_slots_in_ascending_order(rng: np.random.Generator, mixes: Mixes, num_tokens: int) -> None:
    weights = mix_matrix(rng, mixes, num_tokens, 9)
    segments = build_segments(jnp.asarray(weights), tile_size=16)
    assert slots_of_tiles(segments) == expected_slots(weights, 16)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sets(st.integers(0, 3)), min_size=8, max_size=8))
def test_any_pattern_of_pairs_is_sorted(slots_of_tokens: list[set[int]]) -> None:
    weights = np.zeros((8, 2, 4), np.float32)
    for token, slots in enumerate(slots_of_tokens):
        weights[token, token % 2, list(slots)] = -1.5
    segments = build_segments(jnp.asarray(weights), tile_size=4)
    assert slots_of_tiles(segments) == expected_slots(weights, 4)


def test_entries_past_the_last_segment_are_the_unused_slots(rng: np.random.Generator) -> None:
    segments = build_segments(jnp.asarray(mix_matrix(rng, "distinct", 3, 6)), tile_size=16)
    assert sorted(np.asarray(segments.slot_ids)[0].tolist()) == list(range(6))
    assert int(segments.num_segments[0]) == 3


def test_shapes_do_not_depend_on_the_mixes(rng: np.random.Generator) -> None:
    shapes = {
        jax.tree.structure(segments): jax.tree.map(jnp.shape, jax.tree.leaves(segments))
        for mixes in ALL_MIXES
        for segments in [build_segments(jnp.asarray(mix_matrix(rng, mixes, 20, 6)), tile_size=16)]
    }
    assert len(shapes) == 1


def test_pairs_announced_by_is_used_get_a_segment_before_they_have_a_weight() -> None:
    is_used = jnp.zeros((4, 5), bool).at[0, 3].set(True).at[2, 1].set(True)
    segments = build_segments(jnp.zeros((4, 1, 5)), tile_size=4, is_used=is_used)
    assert slots_of_tiles(segments) == [[1, 3]]
    gated = segments.with_weights(segments.weights.at[0, 0, 3].set(0.25))
    assert slots_of_tiles(gated) == [[1, 3]]


def test_a_tile_without_pairs_has_no_segment() -> None:
    segments = build_segments(jnp.zeros((40, 1, 3)).at[39, 0, 2].set(1), tile_size=16)
    assert slots_of_tiles(segments) == [[], [], [2]]


def test_compacting_leaves_out_slots_that_add_nothing_to_a_tile(rng: np.random.Generator) -> None:
    used = np.ones((40, 5), bool)
    segments = build_segments(jnp.zeros((40, 1, 5)), tile_size=16, is_used=jnp.asarray(used))
    assert slots_of_tiles(segments) == [[0, 1, 2, 3, 4]] * 3
    weights = np.zeros((40, 2, 5), np.float32)
    weights[3, 0, 4] = weights[15, 1, 1] = weights[20, 0, 2] = weights[21, 1, 3] = -0.5
    weights[39, 1, 0] = 1e-30
    scale = np.ones((5, 2), np.float32)
    scale[3, 1] = 0  # the adapter in slot 3 leaves the second projection alone
    compacted = segments.with_weights(jnp.asarray(weights)).compacted(jnp.asarray(scale))
    assert slots_of_tiles(compacted) == [[1, 4], [2], [0]]
    np.testing.assert_array_equal(np.asarray(compacted.weights), weights)
