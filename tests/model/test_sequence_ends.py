"""Of a step's last layer only each sequence's last new token goes beyond keys and values."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from dymerge_jax.kv_cache import KVCache, empty_cache
from dymerge_jax.library import Model
from dymerge_jax.model import Implementations
from dymerge_jax.step import StepInputs, StepTables, ends_batch, forward_step, hidden_states, split_weights
from dymerge_jax.step_batch import StepBatch, packed_batch, packed_rows
from tests.support.tiny_models import random_adapter, random_gated_set, tiny_model


def mixed_step(rng: np.random.Generator, num_seqs: int) -> StepBatch:
    """Decode rows, prompt chunks, sequences without work, and padding between them."""
    lens = rng.integers(0, 4, num_seqs)
    starts = np.cumsum(lens + rng.integers(0, 2, num_seqs)) - lens
    is_decode = (lens == 1) & (rng.random(num_seqs) < 0.5)
    ints = [jnp.asarray(x, jnp.int32) for x in (rng.permutation(num_seqs), starts, lens, rng.integers(0, 5, num_seqs))]
    rows, seq_starts, seq_lens, context_lens = ints
    tokens = jnp.asarray(rng.integers(0, 50, starts[-1] + lens[-1] + 3), jnp.int32)
    return StepBatch(tokens, rows, seq_starts, seq_lens, context_lens, jnp.asarray(is_decode))


def test_the_ends_of_a_step_are_a_decode_step_in_which_unused_sequences_stay_unused() -> None:
    tokens, rows, seq_starts, seq_lens, context_lens = (
        jnp.asarray(x, jnp.int32) for x in ([1, 2, 3, 7, 5, 6, 8, 9], [2, 0, 1], [3, 0, 4], [1, 0, 4], [6, 5, 0])
    )
    is_decode = jnp.asarray([True, False, False])
    ends = ends_batch(StepBatch(tokens, rows, seq_starts, seq_lens, context_lens, is_decode))
    assert ends.is_decode
    assert ends.tokens.tolist()[::2] == [7, 9]
    assert ends.rows.tolist() == [2, 0, 1]
    assert ends.seq_lens.tolist() == [1, 0, 1]
    assert ends.context_lens.tolist() == [6, 5, 3]
    assert ends.use_last_token.tolist() == [True, False, False]


def test_the_ends_get_what_they_get_among_all_tokens(rng: np.random.Generator) -> None:
    """More sequences than one launch takes, of a model whose only layer is its last, with static mixes and gates."""
    num_seqs = 70
    split = tiny_model(num_layers=1)
    model = Model(split, None, adapter_slots=6, slot_rank=4)
    for seed, name in enumerate("ab"):
        model.add_adapter(name, random_adapter(split.config, rank=5, seed=seed))
    gated = [
        random_gated_set(split.config, kind, "ab", granularity=kind, top_k=1, renormalize=False, seed=3)
        for kind in ("layer", "projection")
    ]
    model.add_gated_sets(gated)
    some = [{}, {"a": 0.7, "b": -0.5}, "layer", "projection", {"b": 2.0}]
    mix = model.mix([some[i % len(some)] for i in range(num_seqs)])
    llama, batch = nnx.merge(split.graph, split.state), mixed_step(rng, num_seqs)
    tables = jnp.arange(3 * num_seqs, dtype=jnp.int32).reshape(num_seqs, 3)
    last_tokens = jnp.arange(num_seqs, dtype=jnp.int32)
    inputs = StepInputs(model.slots, model.gates, mix, tables, last_tokens, batch)
    cache = empty_cache(split.config, num_blocks=3 * num_seqs, block_size=4, dtype=split.dtype)

    @functools.partial(jax.jit, static_argnames="ends_only")
    def run(inputs: StepInputs, *, ends_only: bool) -> tuple[Array, KVCache]:
        return hidden_states(llama, cache, inputs, Implementations(), ends_only=ends_only)

    everything, cache_of_all = run(inputs, ends_only=False)
    ends, cache_of_ends = run(inputs, ends_only=True)
    used = np.flatnonzero(batch.seq_lens)
    assert 20 < len(used) < num_seqs
    assert ends.shape == (num_seqs, split.config.hidden)
    index = (np.asarray(batch.seq_starts) + np.asarray(batch.seq_lens) - 1)[used]
    np.testing.assert_allclose(np.asarray(ends)[used], np.asarray(everything)[index], rtol=1e-5, atol=1e-5)
    assert np.isfinite(np.asarray(ends)).all()
    np.testing.assert_allclose(cache_of_ends.layers[0], cache_of_all.layers[0], rtol=1e-6, atol=1e-6)


def test_tokens_that_nobody_reads_get_keys_and_values_alone_from_the_last_layer() -> None:
    split = tiny_model()
    config, model = split.config, Model(split, None, adapter_slots=2, slot_rank=4)
    structure, weights = split_weights(split.graph, split.state)
    cache = empty_cache(config, num_blocks=12, block_size=4, dtype=split.dtype)
    block_tables = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
    tables = StepTables(model.slots, None, jnp.asarray(packed_rows(3, 2).array), block_tables)
    batch = packed_batch(8, 2)
    args = structure, weights, cache, jnp.zeros(3, jnp.int32), tables, batch.array
    program = forward_step.lower(*args, num_seqs=2, max_slots=0).as_text()

    def num_products(num_tokens: int, group: str) -> int:
        shape = f"{num_tokens}x{config.groups[group].out_features}xf32"
        return len(re.findall(rf"dot_general .*-> tensor<{shape}>", program))

    num_layers = config.num_layers
    assert config.groups["o"].out_features == config.groups["down"].out_features
    assert len({config.groups[group].out_features for group in ("qkv", "o", "gate_up")}) == 3
    assert [num_products(8, group) for group in ("qkv", "gate_up")] == [num_layers, num_layers - 1]
    assert num_products(2, "gate_up") == 1
    assert num_products(8, "o") == 2 * (num_layers - 1)
    assert num_products(2, "o") == 2
