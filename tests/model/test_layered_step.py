"""The step as one program a stage, beside the step as one program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dymerge_jax.kv_cache import empty_cache
from dymerge_jax.layered_step import LayeredStep
from dymerge_jax.library import Model
from dymerge_jax.model import Implementations
from dymerge_jax.step import AdapterMix, StepBatch, StepInputs, forward_step
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


def step_batches() -> list[StepBatch]:
    """A prefill of two sequences, then a decode step of both."""

    def ints(*values: int) -> jax.Array:
        return jnp.asarray(values, jnp.int32)

    no, yes = jnp.zeros((2,), bool), jnp.ones((2,), bool)
    prompts = ints(5, 9, 2, 40, 7, 33, 100, 0)
    return [
        StepBatch(prompts, ints(2, 0), ints(0, 4), ints(4, 3), ints(0, 0), no),
        StepBatch(ints(0, 0), ints(2, 0), ints(0, 1), ints(1, 1), ints(4, 3), yes),
    ]


def test_a_layered_step_equals_the_step_as_one_program(case: tuple[Model, AdapterMix]) -> None:
    model, mix = case
    split, last_tokens = model.split, jnp.asarray([17, 3, 0], jnp.int32)
    caches = [empty_cache(split.config, num_blocks=12, block_size=4, dtype=split.dtype) for _ in range(2)]
    for batch in step_batches():
        inputs = StepInputs(model.slots, model.gates, mix, BLOCK_TABLES, last_tokens, batch)
        layered = LayeredStep(split, caches[1], inputs, Implementations())
        expected, caches[0] = forward_step(split.graph, split.state, caches[0], inputs)
        before = caches[1]
        actual, caches[1] = layered(split.state, caches[1], inputs)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
        assert all(array.is_deleted() for array in before.layers), "the cache is copied, not updated in place"
