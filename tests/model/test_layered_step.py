"""The step as one program a stage, beside the step as one program."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from dymerge_jax.kv_cache import KVCache, empty_cache
from dymerge_jax.layered_step import LayeredStep
from dymerge_jax.library import Model
from dymerge_jax.model import Implementations
from dymerge_jax.step import StepTables, forward_step, forward_steps, split_weights
from dymerge_jax.step_batch import AdapterMix, PackedBatch, packed_batch, packed_rows
from tests.support.tiny_models import random_adapter, random_gated_set, tiny_model

BLOCK_TABLES = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)


@pytest.fixture(scope="module")
def case() -> tuple[Model, AdapterMix]:
    split = tiny_model()
    model = Model(split, None, adapter_slots=6, slot_rank=4)
    for seed, name in enumerate("ab"):
        model.add_adapter(name, random_adapter(split.config, rank=5, seed=seed))
    layer = random_gated_set(split.config, "l", "ab", granularity="layer", top_k=1, renormalize=False, seed=5)
    projection = random_gated_set(
        split.config, "p", "ba", granularity="projection", top_k=None, renormalize=True, seed=6
    )
    model.add_gated_sets([layer, projection])
    return model, model.mix(["l", "p", {"a": -0.5, "b": 2.0}])


def step_batches() -> list[PackedBatch]:
    """A prefill of two sequences, a step that decodes one and goes on with the other, a decode step of both."""
    prefill = packed_batch(8, 2)
    prefill.tokens[:] = [5, 9, 2, 40, 7, 33, 100, 0]
    prefill.seqs.T[:] = [[2, 0, 4, 0, 0, 1, 0], [0, 4, 3, 0, 0, 0, 0]]
    mixed = packed_batch(8, 3)
    mixed.tokens[2:6] = [71, 8, 64, 29]
    mixed.seqs.T[:] = [[2, 1, 1, 4, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0], [0, 2, 4, 3, 0, 1, 0]]
    decode = packed_batch(2, 2)
    decode.seqs.T[:] = [[2, 0, 1, 5, 1, 1, 2], [0, 1, 1, 7, 1, 1, 1]]
    return [prefill, mixed, decode]


def test_a_layered_step_equals_the_step_as_one_program(case: tuple[Model, AdapterMix]) -> None:
    model, mix = case
    split = model.split
    structure, weights = split_weights(split.graph, split.state)
    rows = packed_rows(3, 6)
    rows.weights[:], rows.gated_set_ids[:] = mix.weights, mix.gated_set_ids
    tables = StepTables(model.slots, model.gates, jnp.asarray(rows.array), BLOCK_TABLES)
    caches = [empty_cache(split.config, num_blocks=12, block_size=4, dtype=split.dtype) for _ in range(2)]
    last_tokens = [jnp.asarray([17, 3, 0], jnp.int32) for _ in range(2)]
    want = np.asarray([17, 3, 0])
    for batch in step_batches():
        sizes = {"num_seqs": batch.seqs.shape[1]}
        layered = LayeredStep(
            split, caches[1], last_tokens[1], tables, batch.array, **sizes, implementations=Implementations()
        )
        expected = forward_step(structure, weights, caches[0], last_tokens[0], tables, batch.array, **sizes)
        before = caches[1]
        actual = layered(weights, caches[1], last_tokens[1], tables, batch.array)
        used = np.flatnonzero(batch.seqs[2])
        np.testing.assert_allclose(actual.logits[used], expected.logits[used], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(actual.tokens, np.asarray(actual.logits).argmax(1))
        np.testing.assert_array_equal(actual.tokens[used], expected.tokens[used])
        sampled = np.flatnonzero(batch.seqs[5])
        want[batch.seqs[0, sampled]] = np.asarray(expected.tokens)[sampled]
        for ours, theirs in zip(actual.cache.layers, expected.cache.layers, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
        assert all(array.is_deleted() for array in before.layers), "the cache is copied, not updated in place"
        caches = [expected.cache, actual.cache]
        last_tokens = [expected.last_tokens, actual.last_tokens]
        for tokens in last_tokens:
            np.testing.assert_array_equal(np.asarray(tokens)[batch.seqs[0, sampled]], want[batch.seqs[0, sampled]])
            assert int(tokens[1]) == 3, "a row without a sequence has lost its token"


def test_many_steps_at_once_give_what_one_after_another_gives(case: tuple[Model, AdapterMix]) -> None:
    """A row that ends first is left out of the later steps."""
    model, mix = case
    structure, weights = split_weights(model.split.graph, model.split.state)
    rows = packed_rows(3, 6)
    rows.weights[:], rows.gated_set_ids[:] = mix.weights, mix.gated_set_ids
    tables = StepTables(model.slots, model.gates, jnp.asarray(rows.array), BLOCK_TABLES)
    batches = [packed_batch(2, 2) for _ in range(3)]
    for i, batch in enumerate(batches):
        batch.seqs.T[0] = [2, 0, 1, 2 + i, 1, 1, 1 + i]
        batch.seqs.T[1] = [0, 1, 1, 3 + i, 1, 1, i] if i < 2 else [0, 1, 0, 0, 0, 0, 0]
    prompts = packed_batch(8, 2)
    prompts.tokens[:5] = [5, 9, 2, 40, 7]
    prompts.seqs.T[:] = [[2, 0, 2, 0, 0, 1, 0], [0, 2, 3, 0, 0, 1, 0]]

    def begin() -> tuple[KVCache, Array]:
        cache = empty_cache(model.split.config, num_blocks=12, block_size=4, dtype=model.split.dtype)
        result = forward_step(structure, weights, cache, jnp.zeros(3, jnp.int32), tables, prompts.array, num_seqs=2)
        return result.cache, result.last_tokens

    cache, last_tokens = begin()
    expected = []
    for batch in batches:
        result = forward_step(structure, weights, cache, last_tokens, tables, batch.array, num_seqs=2)
        cache, last_tokens = result.cache, result.last_tokens
        expected.append(np.asarray(result.tokens))
    many = forward_steps(
        structure, weights, *begin(), tables, np.stack([batch.array for batch in batches]), num_seqs=2
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(many.tokens)[:, 0], np.stack(expected)[:, 0])
    np.testing.assert_array_equal(np.asarray(many.tokens)[:2, 1], np.stack(expected)[:2, 1])
    np.testing.assert_array_equal(many.last_tokens, last_tokens)
    for ours, theirs in zip(many.cache.layers, cache.layers, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "implementation", [*(pytest.param(i, marks=pytest.mark.slow) for i in ("reference", "pallas_triton")), "separate"]
)
@pytest.mark.parametrize("new_tokens", [1, 3])
def test_programs_for_few_slots_and_for_none_give_the_bits_of_the_one_for_any(implementation, new_tokens) -> None:
    split = tiny_model(dtype=jnp.bfloat16)
    model = Model(split, None, adapter_slots=3, slot_rank=4)
    model.add_adapter("a", random_adapter(split.config, rank=3, seed=0))
    structure, weights = split_weights(split.graph, split.state)
    rows = packed_rows(3, 3)
    rows.weights[0, 0] = 1.0
    tables = StepTables(model.slots, None, jnp.asarray(rows.array), BLOCK_TABLES)
    batch = packed_batch(2 * new_tokens, 2)
    batch.tokens[:] = np.arange(7, 7 + 2 * new_tokens)
    batch.seqs.T[:] = [[0, 0, new_tokens, 0, 0, 1, 0], [2, new_tokens, new_tokens, 0, 0, 1, 0]]

    def logits(max_slots: int | None) -> np.ndarray:
        cache = empty_cache(split.config, num_blocks=12, block_size=4, dtype=split.dtype)
        last_tokens = jnp.zeros(3, jnp.int32)
        implementations = Implementations(lora_linear=implementation)
        sizes = {"num_seqs": 2, "max_slots": max_slots, "implementations": implementations}
        return np.asarray(forward_step(structure, weights, cache, last_tokens, tables, batch.array, **sizes).logits)

    with_many, with_few, without = logits(None), logits(1), logits(0)
    np.testing.assert_array_equal(with_few, with_many)
    np.testing.assert_array_equal(with_many[1], without[1])
    assert (with_many[0] != without[0]).any(), "the adapter does nothing"
