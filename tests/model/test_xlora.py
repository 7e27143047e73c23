"""X-LoRA's classifiers on the device: their weights by the formula, their columns, and the scaling pass of a step."""

import jax.numpy as jnp
import numpy as np
import pytest

from dymerge_jax.config import PROJECTIONS, named_config
from dymerge_jax.kv_cache import empty_cache
from dymerge_jax.layered_step import LayeredStep
from dymerge_jax.library import Model
from dymerge_jax.model import Implementations
from dymerge_jax.step import StepTables, forward_step, split_weights
from dymerge_jax.step_batch import AdapterMix, packed_batch, packed_rows
from dymerge_jax.xlora import (
    ExpertWeights,
    XLoraRule,
    XLoraSetWeights,
    build_xlora_array,
    expert_weights,
    place_xlora_experts,
    scaling_mix,
    set_id_of_row,
    xlora_columns,
    xlora_tokens,
)
from tests.support.tiny_models import random_adapter, random_xlora_set, tiny_model

TINY = named_config("tiny")
EXPERTS = ("a", "b", "c")


def formula(rule: XLoraRule, logits: np.ndarray) -> np.ndarray:
    """Weights of one token at one site, float64, written for reading only."""
    weights = logits.astype(np.float64)
    if rule.softmax:
        exps = np.exp(weights / rule.temperature - (weights / rule.temperature).max())
        weights = exps / exps.sum()
    if rule.top_k is not None:
        dropped = np.argsort(-weights, kind="stable")[rule.top_k :]
        weights[dropped] = 0
    if rule.softmax_of_kept:
        kept = weights != 0
        weights[kept] = np.exp(weights[kept]) / np.exp(weights[kept]).sum()
    return weights * rule.global_weight


def classifier_logits(xlora_set: XLoraSetWeights, hidden: np.ndarray) -> np.ndarray:
    x = hidden.astype(np.float64)
    for i, (weight, bias) in enumerate(xlora_set.layers):
        x = np.maximum(x, 0) if i else x
        x = x @ weight.T.astype(np.float64) + bias
    return x.reshape(len(x), -1, xlora_set.num_experts)


def test_a_batch_of_sets_of_different_sizes_and_rules_gets_the_weights_of_the_formula(rng: np.random.Generator) -> None:
    sets = [
        random_xlora_set(TINY, "plain", EXPERTS[:2], seed=0, temperature=0.5),
        random_xlora_set(TINY, "deep", EXPERTS, seed=1, depth=3, softmax=False, global_weight=-0.5),
        random_xlora_set(TINY, "layered", EXPERTS, seed=2, is_layerwise=True, top_k=2),
        random_xlora_set(TINY, "kept", EXPERTS, seed=3, top_k=2, softmax=False, softmax_of_kept=True),
    ]
    xlora = build_xlora_array(sets, num_slots=4)
    assert xlora is not None
    ids = [*range(4), -1, 2, 1]
    hidden = rng.normal(size=(len(ids), TINY.hidden)).astype(np.float32)
    hidden[4] = np.nan  # a token without a set: nobody may read it
    rows = jnp.asarray([-1 if i < 0 else set_id_of_row(i) for i in ids], jnp.int32)
    result = np.asarray(expert_weights(TINY, xlora, xlora_tokens(xlora, rows), jnp.asarray(hidden)).weights)
    assert result.shape == (7, 14, 3)
    for token, set_id in enumerate(ids):
        if set_id < 0:
            assert (result[token] == 0).all()
            continue
        logits = classifier_logits(sets[set_id], hidden[token : token + 1])[0]
        want = np.stack([formula(sets[set_id].rule, site) for site in logits])
        padding = np.zeros((len(want), 3 - want.shape[1]))
        want = np.broadcast_to(np.concatenate([want, padding], axis=1), (14, 3))
        np.testing.assert_allclose(result[token], want, atol=1e-5, err_msg=sets[set_id].name)


def test_a_group_takes_the_weights_of_its_own_layer_and_projections() -> None:
    weights = np.arange(14 * 3, dtype=np.float32).reshape(1, 14, 3)
    experts = ExpertWeights(jnp.asarray(weights), jnp.asarray([[2, -1, 0, 2]], jnp.int32))
    for layer in range(2):
        for group in TINY.groups.values():
            columns = np.asarray(xlora_columns(experts, layer, group))
            assert columns.shape == (1, len(group.projections), 4)
            for p, projection in enumerate(group.projections):
                site = weights[0, layer * 7 + PROJECTIONS.index(projection)]
                np.testing.assert_array_equal(columns[0, p], [site[2], 0, site[0], site[2]])


def test_the_scaling_pass_is_a_static_mix_of_equal_weights() -> None:
    sets = [
        random_xlora_set(TINY, "none", EXPERTS, seed=0),
        random_xlora_set(TINY, "some", EXPERTS[:2], seed=1, pass_value=0.5, global_weight=3.0),
        random_xlora_set(TINY, "shared", EXPERTS, seed=2, pass_value=0.5, softmax_of_kept=True),
    ]
    xlora = build_xlora_array(sets, num_slots=4)
    assert xlora is not None
    xlora = place_xlora_experts(xlora, sets, {"a": (0,), "b": (1, 3)})
    mix = AdapterMix(jnp.full((4, 4), 9.0), jnp.asarray([set_id_of_row(i) for i in (0, 1, 2)] + [-1], jnp.int32))
    first = scaling_mix(xlora, mix)
    np.testing.assert_allclose(first.weights[0], [0, 0, 0, 0])
    np.testing.assert_allclose(first.weights[1], [1.5, 1.5, 0, 1.5])
    np.testing.assert_allclose(first.weights[2], [1 / 3, 1 / 3, 0, 1 / 3])
    assert (np.asarray(first.gated_set_ids) == -1).all()
    without = build_xlora_array(sets[:1], num_slots=4)
    assert without is not None
    assert without.pass_weights is None, "a scaling pass on the base model alone is to know of no adapters"


@pytest.mark.parametrize("field", [{"top_k": 0}, {"top_k": 4}])
def test_a_set_that_keeps_none_or_more_experts_than_it_has_is_refused(field: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected 1 to 3 experts"):
        random_xlora_set(TINY, "x", EXPERTS, seed=0, **field)


@pytest.mark.slow
@pytest.mark.parametrize("pass_value", [0.0, 0.4])
def test_a_layered_step_with_a_scaling_pass_equals_the_step_as_one_program(pass_value: float) -> None:
    split = tiny_model()
    model = Model(split, None, adapter_slots=6, slot_rank=4)
    for seed, name in enumerate("ab"):
        model.add_adapter(name, random_adapter(split.config, rank=5, seed=seed))
    options = {"is_layerwise": True, "pass_value": pass_value}
    model.add_gated_sets([random_xlora_set(split.config, "x", "ab", seed=5, **options)])
    structure, weights = split_weights(split.graph, split.state)
    rows = packed_rows(3, 6)
    mix = model.mix(["x", {}, {"a": -0.5}])
    rows.weights[:], rows.gated_set_ids[:] = mix.weights, mix.gated_set_ids
    blocks = jnp.arange(24, dtype=jnp.int32).reshape(2, 3, 4)
    tables = StepTables(model.slots, None, jnp.asarray(rows.array), blocks[0], model.xlora, blocks[1])
    caches = [empty_cache(split.config, num_blocks=24, block_size=4, dtype=split.dtype) for _ in range(2)]
    last_tokens = [jnp.asarray([17, 3, 0], jnp.int32) for _ in range(2)]
    prefill, decode = packed_batch(8, 2), packed_batch(2, 2)
    prefill.tokens[:] = [5, 9, 2, 40, 7, 33, 100, 0]
    prefill.seqs.T[:] = [[2, 0, 4, 0, 0, 1, 0], [0, 4, 3, 0, 0, 1, 0]]
    decode.seqs.T[:] = [[2, 0, 1, 4, 1, 1, 1], [0, 1, 1, 3, 1, 1, 0]]
    for batch in (prefill, decode):
        layered = LayeredStep(
            split, caches[1], last_tokens[1], tables, batch.array, num_seqs=2, implementations=Implementations()
        )
        before = caches
        expected = forward_step(structure, weights, caches[0], last_tokens[0], tables, batch.array, num_seqs=2)
        actual = layered(weights, caches[1], last_tokens[1], tables, batch.array)
        np.testing.assert_allclose(actual.logits, expected.logits, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(actual.cache.layers, expected.cache.layers, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
        assert all(x.is_deleted() for cache in before for x in cache.layers), "a cache is copied, not updated in place"
        written = np.abs(np.asarray(actual.cache.layers[1])).max((1, 2, 3, 4)) > 0
        assert np.flatnonzero(written).tolist() in ([0, 8, 12], [0, 8, 9, 12]), "row 0 has two caches, row 2 has one"
        caches, last_tokens = [expected.cache, actual.cache], [expected.last_tokens, actual.last_tokens]
