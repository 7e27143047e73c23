"""Adapters into slots and back out by the maths."""

import jax.numpy as jnp
import numpy as np
import pytest

from dymerge_jax.lora import (
    AdapterWeights,
    ProjectionWeights,
    content_bytes,
    empty_slots,
    read_slot,
    slot_bytes,
    slot_contents,
    write_slot,
)
from tests.support.tiny_models import random_adapter, tiny_model

CONFIG = tiny_model().config


@pytest.mark.parametrize(("rank", "slot_rank", "num_slots"), [(1, 4, 1), (4, 4, 1), (5, 4, 2), (13, 4, 4), (8, 16, 1)])
def test_an_adapter_fills_as_many_slots_as_its_rank_needs(rank, slot_rank, num_slots) -> None:
    adapter = random_adapter(CONFIG, rank=rank, seed=1)
    contents = slot_contents(CONFIG, adapter, slot_rank=slot_rank, dtype=np.float32)
    assert len(contents) == num_slots == adapter.num_slots(slot_rank)


def test_the_slots_of_an_adapter_add_up_to_its_delta(rng) -> None:
    adapter = random_adapter(CONFIG, rank=7, seed=2, projections=("k_proj", "up_proj", "o_proj"), layers=[1])
    contents = slot_contents(CONFIG, adapter, slot_rank=4, dtype=np.float32)
    slots = empty_slots(CONFIG, num_slots=len(contents), slot_rank=4, dtype=np.float32)
    for slot_id, content in enumerate(contents):
        slots = write_slot(slots, slot_id, content)
    for name, group in CONFIG.groups.items():
        x = rng.normal(size=(3, group.in_features)).astype(np.float32)
        ends = np.cumsum(group.widths)
        a, b, scale = (
            np.asarray(array) for array in (slots.groups[name].a, slots.groups[name].b, slots.groups[name].scale)
        )
        for layer in range(CONFIG.num_layers):
            for p, projection in enumerate(group.projections):
                columns = slice(ends[p] - group.widths[p], ends[p])
                got = sum(
                    scale[layer, slot_id, p]
                    * (x @ a[layer, slot_id, 4 * p : 4 * p + 4].T)
                    @ b[layer, slot_id][:, columns]
                    for slot_id in range(len(contents))
                )
                weights = adapter.projections.get((layer, projection))
                want = 0.0 if weights is None else weights.scale * (x @ weights.a.T) @ weights.b.T
                np.testing.assert_allclose(got, want, atol=1e-5)


def test_writing_a_slot_replaces_every_row_and_nothing_else() -> None:
    """Case F1: a small adapter after a big one in the same slot leaves nothing of the big one."""
    big = slot_contents(CONFIG, random_adapter(CONFIG, rank=4, seed=3), slot_rank=4, dtype=np.float32)[0]
    small_adapter = random_adapter(CONFIG, rank=2, seed=4, projections=("q_proj", "v_proj"))
    small = slot_contents(CONFIG, small_adapter, slot_rank=4, dtype=np.float32)[0]
    slots = empty_slots(CONFIG, num_slots=3, slot_rank=4, dtype=np.float32)
    for slot_id, content in [(0, big), (1, big), (2, big), (1, small)]:
        slots = write_slot(slots, slot_id, content)
    for slot_id, content in [(0, big), (1, small), (2, big)]:
        np.testing.assert_array_equal(read_slot(slots, slot_id).values, content.values)
        np.testing.assert_array_equal(read_slot(slots, slot_id).scales, content.scales)


@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_weights_of_any_dtype_are_rounded_to_the_slots_as_by_a_cast(source: str, target: str, rng) -> None:
    """On their bits: a tie, the largest values, subnormal ones."""
    values = [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 3.38e38, 1e-40, 0.0, -0.0, 65504.0]
    with np.errstate(over="ignore"):
        values = np.asarray(values, np.float32).astype(jnp.dtype(source))
    values[~np.isfinite(values.astype(np.float32))] = 0
    a = np.concatenate([values, rng.normal(size=CONFIG.hidden - len(values)).astype(values.dtype)])[None]
    b = np.resize(values, (CONFIG.hidden, 1))
    adapter = AdapterWeights({(1, "o_proj"): ProjectionWeights(a, b, 1.0)}, "")
    (content,) = slot_contents(CONFIG, adapter, slot_rank=1, dtype=target)
    found = np.asarray(content.values)
    assert found.dtype == jnp.dtype(target)
    for expected in (a, b):
        expected = expected.reshape(-1).astype(np.float32).astype(found.dtype)
        windows = np.lib.stride_tricks.sliding_window_view(found.view(f"u{found.itemsize}"), expected.size)
        assert (windows == expected.view(f"u{found.itemsize}")).all(1).any()


def test_writing_a_slot_is_in_place() -> None:
    """Case I3: switching adapters does not grow device memory."""
    content = slot_contents(CONFIG, random_adapter(CONFIG, rank=4, seed=3), slot_rank=4, dtype=np.float32)[0]
    slots = empty_slots(CONFIG, num_slots=2, slot_rank=4, dtype=np.float32)
    before = {name: g.a.unsafe_buffer_pointer() for name, g in slots.groups.items()}
    old = slots
    for slot_id in (0, 1, 0):
        slots = write_slot(slots, slot_id, content)
    assert {name: g.a.unsafe_buffer_pointer() for name, g in slots.groups.items()} == before
    assert old.groups["qkv"].a.is_deleted()


def test_a_slot_that_does_not_exist_is_refused() -> None:
    content = slot_contents(CONFIG, random_adapter(CONFIG, rank=4, seed=3), slot_rank=4, dtype=np.float32)[0]
    slots = empty_slots(CONFIG, num_slots=2, slot_rank=4, dtype=np.float32)
    with pytest.raises(ValueError, match="slot 2 does not exist; the slot array has 2"):
        write_slot(slots, 2, content)


def test_slot_bytes_is_the_size_of_one_slot() -> None:
    slots = empty_slots(CONFIG, num_slots=5, slot_rank=4, dtype=np.float32)
    total = sum(g.a.nbytes + g.b.nbytes for g in slots.groups.values())
    assert total == 5 * slot_bytes(CONFIG, 4, np.float32)
    scales = sum(g.scale.nbytes for g in slots.groups.values())
    assert total + scales == 5 * content_bytes(CONFIG, 4, np.float32) == 5 * read_slot(slots, 0).num_bytes
