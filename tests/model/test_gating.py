"""Padded, masked gating against a loop over tokens and experts in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dymerge_jax.gating import GatedSetWeights, build_gate_array
from dymerge_jax.library import Model, pad_batch
from dymerge_jax.model import Implementations, params_of
from pallas_kernels.gate_mix.reference import mixture_weights
from tests.support import numpy_llama
from tests.support.tiny_models import random_adapter, random_gated_set, tiny_model

PROMPTS = [[5, 9, 2, 40, 7], [1, 2, 3], [100, 90, 80, 70, 60, 50, 40], [8, 8], [17, 4, 99, 3], [11, 12, 13]]


@pytest.fixture(scope="module")
def gated_model() -> tuple[Model, dict, list[GatedSetWeights]]:
    return make_gated_model(Implementations())


def make_gated_model(implementations: Implementations) -> tuple[Model, dict, list[GatedSetWeights]]:
    split = tiny_model()
    model = Model(split, None, adapter_slots=16, slot_rank=4, implementations=implementations)
    adapters = {f"e{i}": random_adapter(split.config, rank=r, seed=i) for i, r in enumerate([4, 8, 3, 12, 1])}
    for name, adapter in adapters.items():
        model.add_adapter(name, adapter)
    make = [
        ("dense-layer", ["e0", "e1", "e2"], "layer", None, False),
        ("top1-layer", ["e3", "e1"], "layer", 1, False),
        ("top2-projection", ["e0", "e1", "e2", "e3", "e4"], "projection", 2, True),
        ("dense-projection", ["e4", "e2"], "projection", None, True),
    ]
    sets = [
        random_gated_set(split.config, name, experts, granularity=g, top_k=k, renormalize=r, seed=50 + i)  # type: ignore[arg-type]
        for i, (name, experts, g, k, r) in enumerate(make)
    ]
    model.add_gated_sets(sets)
    return model, adapters, sets


def test_a_batch_of_gated_static_and_base_rows_equals_a_loop_over_tokens(gated_model) -> None:
    model, adapters, sets = gated_model
    static = {"e0": 0.7, "e3": -0.5}
    rows = [*(s.name for s in sets), static, {}]
    logits = np.asarray(model.logits(pad_batch(PROMPTS), model.mix(rows)))
    params = params_of(model.split)
    deltas = [
        *(numpy_llama.gated_delta(s, adapters) for s in sets),
        numpy_llama.static_delta(static, adapters),
        None,
    ]
    for row, (prompt, delta) in enumerate(zip(PROMPTS, deltas, strict=True)):
        want = numpy_llama.logits(model.config, params, prompt, delta)
        np.testing.assert_allclose(logits[row, : len(prompt)], want, atol=1e-4, err_msg=f"row {row}: {rows[row]}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_one_launch_a_site_gives_the_tokens_of_the_library_product(gated_model) -> None:
    reference, _, sets = gated_model
    model, _, _ = make_gated_model(Implementations(gate_mix="pallas_triton"))
    rows = [*(s.name for s in sets), {"e0": 0.7, "e3": -0.5}, {}]
    actual, expected = (np.asarray(m.logits(pad_batch(PROMPTS), m.mix(rows))) for m in (model, reference))
    for row, prompt in enumerate(PROMPTS):
        own, other = actual[row, : len(prompt)], expected[row, : len(prompt)]
        np.testing.assert_allclose(own, other, atol=2e-5)
        np.testing.assert_array_equal(own.argmax(-1), other.argmax(-1))
    assert (actual != expected).any(), "the two implementations are one"


def test_the_rows_of_the_test_batch_differ_from_the_base_model(gated_model) -> None:
    model, _, sets = gated_model
    rows = [*(s.name for s in sets), {}, {}]
    logits = np.asarray(model.logits(pad_batch([PROMPTS[2]] * 6), model.mix(rows)))
    assert (np.abs(logits[:4] - logits[4]).max(axis=(1, 2)) > 0.1).all()
    np.testing.assert_array_equal(logits[4], logits[5])


def test_a_gated_row_does_not_depend_on_its_batch(gated_model) -> None:
    model, _, sets = gated_model
    rows = [sets[2].name, sets[0].name, {"e1": 1.0}, {}, sets[1].name, sets[3].name]
    together = np.asarray(model.logits(pad_batch(PROMPTS), model.mix(rows)))
    longest = max(map(len, PROMPTS))
    for i, prompt in enumerate(PROMPTS):
        # The same shapes, so that nothing is compiled anew, but another place and base rows of one token beside it.
        others = [[0] * longest] * 5
        batch = dataclasses.replace(
            pad_batch([*others, prompt + [0] * (longest - len(prompt))]),
            lengths=jnp.asarray([1] * 5 + [len(prompt)], jnp.int32),
        )
        alone = np.asarray(model.logits(batch, model.mix([{}] * 5 + [rows[i]])))
        np.testing.assert_allclose(together[i, : len(prompt)], alone[5, : len(prompt)], atol=2e-5)


def test_an_unknown_gated_set_is_refused_by_name(gated_model) -> None:
    model, _, _ = gated_model
    with pytest.raises(ValueError, match=r"no gated set is named 'nope'.*dense-layer"):
        model.mix(["nope"])


def test_top_k_above_the_number_of_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k 3; expected 1 to 2"):
        random_gated_set(tiny_model().config, "s", ["a", "b"], granularity="layer", top_k=3, renormalize=True, seed=0)


@pytest.mark.parametrize(("top_k", "kept"), [(1, [1, 0, 0]), (2, [0.5, 0.5, 0]), (3, [1 / 3, 1 / 3, 1 / 3])])
def test_equally_likely_experts_are_kept_by_their_order(top_k: int, kept: list[float]) -> None:
    config, experts = tiny_model().config, ["a", "b", "c"]
    tied = random_gated_set(config, "s", experts, granularity="layer", top_k=top_k, renormalize=True, seed=0)
    gates = build_gate_array(config, [tied], num_slots=1)
    assert gates is not None
    weights = mixture_weights(jnp.ones((1, 1, 3)), gates.rules)
    np.testing.assert_allclose(np.asarray(weights)[0, 0], kept, rtol=1e-6)
