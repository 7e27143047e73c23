"""What is trained is what is served: logits of the two forward passes, and the gradient of the loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dymerge_jax.config import PROJECTIONS
from dymerge_jax.gating import Granularity
from dymerge_jax.generate import Batch
from dymerge_jax.library import Model
from dymerge_jax.model import Implementations, SplitModel
from dymerge_jax.train.adapter import (
    Factors,
    adapter_loss,
    adapter_weights,
    new_factors,
    parse_targets,
    place_mates,
    slot_weights,
    trained_slots,
)
from dymerge_jax.train.batches import BatchPlan
from dymerge_jax.train.data import Sample
from dymerge_jax.train.forward import TrainBatch, differentiable_implementations, freeze_model, hidden_states
from dymerge_jax.train.gate import gate_array, gate_loss, gated_set, imbalance, place_in_slots
from tests.support.tiny_models import random_adapter, random_gated_set, tiny_model

SCALE = 2.0
IMPLEMENTATIONS = differentiable_implementations()


def random_factors(split: SplitModel, rng: np.random.Generator, projections: tuple[str, ...] = PROJECTIONS) -> Factors:
    factors = new_factors(split.config, projections, rank=8, seed=0)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(size=x.shape) * 0.1, jnp.float32), factors)


def some_batch(rng: np.random.Generator, mates: tuple[str, ...] = ()) -> TrainBatch:
    """Three samples of 5 to 20 tokens; the second has its own weights of the mates."""
    lengths = (5, 20, 11)
    own = dict.fromkeys(mates, -0.5)
    samples = [
        Sample(rng.integers(0, 128, n).astype(np.int32), np.arange(n) >= n // 2, i, own if i == 1 else None)
        for i, n in enumerate(lengths)
    ]
    return BatchPlan(samples, 3, 0, mates, dict.fromkeys(mates, 0.7)).batch(0)


def assert_same_logits(actual: jax.Array, expected: jax.Array, batch: TrainBatch) -> None:
    for row, length in enumerate(np.asarray(batch.lengths)):
        np.testing.assert_allclose(actual[row, :length], expected[row, :length], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_logits_in_training_are_those_in_serving(rng: np.random.Generator) -> None:
    split = tiny_model()
    config = split.config
    mates = {"m": random_adapter(config, rank=12, seed=1), "n": random_adapter(config, rank=3, seed=2)}
    batch = some_batch(rng, tuple(mates))
    factors = random_factors(split, rng, ("q_proj", "o_proj", "up_proj", "down_proj"))
    placed = place_mates(config, list(mates.values()), slot_rank=8, dtype="float32")
    frozen = freeze_model(split)

    @jax.jit
    def logits(factors: Factors) -> jax.Array:
        slots = trained_slots(config, factors, placed, scale=SCALE, dtype="float32")
        weights = slot_weights(batch, placed)
        hidden, _ = hidden_states(frozen, batch, slots, weights, None, implementations=IMPLEMENTATIONS, remat=False)
        return frozen.merged_ends().logits(hidden).reshape(*batch.tokens.shape, -1)

    model = Model(split, None, adapter_slots=5)
    for name, adapter in {"t": adapter_weights(factors, scale=SCALE), **mates}.items():
        model.add_adapter(name, adapter)
    # Batches are sorted by length: the row with its own mates is the last.
    np.testing.assert_array_equal(batch.lengths, [5, 11, 20])
    rows = [{"t": 1.0, "m": w, "n": w} for w in (0.7, 0.7, -0.5)]
    served = model.logits(Batch(batch.tokens, batch.lengths), model.mix(rows))
    assert_same_logits(logits(factors), served, batch)
    base = model.logits(Batch(batch.tokens, batch.lengths), model.mix([{}] * 3))
    assert np.abs(np.asarray(served - base))[0, :5].max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("granularity", "top_k"), [("layer", 2), ("projection", None)])
def test_logits_of_a_gate_in_training_are_those_in_serving(
    rng: np.random.Generator, granularity: Granularity, top_k: int | None
) -> None:
    split = tiny_model()
    config = split.config
    experts = {f"e{i}": random_adapter(config, rank=4 + 8 * (i == 1), seed=i) for i in range(3)}
    wanted = random_gated_set(
        config,
        "g",
        list(experts),
        granularity=granularity,
        top_k=top_k,
        renormalize=top_k is not None,
        seed=5,
    )
    sites = {site for _, site in wanted.gates}
    gates = {s: jnp.asarray(np.stack([wanted.gates[layer, s] for layer in range(config.num_layers)])) for s in sites}
    assert {k: v.tolist() for k, v in gated_set(gates, wanted).gates.items()} == {
        k: v.tolist() for k, v in wanted.gates.items()
    }
    batch = some_batch(rng)
    placed = place_in_slots(config, experts, wanted, slot_rank=8, dtype="float32")
    frozen = freeze_model(split)
    array = gate_array(config, gates, placed.gates)
    static = jnp.zeros((3, placed.slots.num_slots), jnp.float32)
    hidden, usage = hidden_states(
        frozen, batch, placed.slots, static, array, implementations=IMPLEMENTATIONS, remat=False
    )
    logits = frozen.merged_ends().logits(hidden).reshape(*batch.tokens.shape, -1)
    if granularity == "layer":
        np.testing.assert_allclose(usage.sum(1), np.ones(2), rtol=1e-5)  # pyright: ignore[reportOptionalMemberAccess]
    else:
        assert usage is None

    model = Model(split, None, adapter_slots=4)
    for name, adapter in experts.items():
        model.add_adapter(name, adapter)
    model.add_gated_sets([wanted])
    assert_same_logits(logits, model.logits(Batch(batch.tokens, batch.lengths), model.mix(["g"] * 3)), batch)

    loss = functools.partial(gate_loss, implementations=IMPLEMENTATIONS, remat=False)
    if top_k is None:  # a top-k jumps where two experts are equal, which a finite difference may step over
        assert_gradient_is_that_of_finite_differences(loss, gates, (frozen, placed), batch, rng)
    else:
        gradient = jax.jit(jax.grad(loss))(gates, (frozen, placed), batch)
        assert all(np.isfinite(g).all() and np.asarray(g).any() for g in jax.tree.leaves(gradient))


def assert_gradient_is_that_of_finite_differences(loss, trained, frozen, batch, rng: np.random.Generator) -> None:
    """Along one random direction."""
    value_and_grad = jax.jit(jax.value_and_grad(loss))
    _, gradient = value_and_grad(trained, frozen, batch)
    direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), trained)
    step = 2e-3 / float(jnp.sqrt(sum((d * d).sum() for d in jax.tree.leaves(direction)))) * 10
    ahead, behind = (
        float(value_and_grad(jax.tree.map(lambda x, d, s=s: x + s * d, trained, direction), frozen, batch)[0])
        for s in (step, -step)
    )
    along = sum(float((g * d).sum()) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
    np.testing.assert_allclose((ahead - behind) / (2 * step), along, rtol=0.02, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_the_gradient_of_the_loss_is_that_of_finite_differences(rng: np.random.Generator, remat: bool) -> None:
    split = tiny_model()
    placed = place_mates(split.config, [random_adapter(split.config, rank=3, seed=1)], slot_rank=8, dtype="float32")
    loss = functools.partial(adapter_loss, scale=SCALE, implementations=IMPLEMENTATIONS, remat=remat)
    assert_gradient_is_that_of_finite_differences(
        loss, random_factors(split, rng), (freeze_model(split), placed), some_batch(rng, ("m",)), rng
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("maf", ["loop", "pallas_triton"])
def test_the_gradient_does_not_depend_on_the_implementation_that_went_forward(
    rng: np.random.Generator, maf: str
) -> None:
    split = tiny_model(num_layers=1)
    frozen = freeze_model(split), place_mates(split.config, [], slot_rank=8, dtype="float32")
    factors, batch = random_factors(split, rng), some_batch(rng)

    def gradient(implementations: Implementations) -> Factors:
        loss = functools.partial(adapter_loss, scale=SCALE, implementations=implementations, remat=False)
        return jax.jit(jax.grad(loss))(factors, frozen, batch)

    expected = gradient(IMPLEMENTATIONS)
    actual = gradient(Implementations(maf_mvm=maf, lora_linear="separate"))  # pyright: ignore[reportArgumentType]
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=2e-5, rtol=1e-3), actual, expected)


@pytest.mark.slow
def test_a_bfloat16_model_gives_float32_factors_nearly_the_gradient_of_a_float32_model(
    rng: np.random.Generator,
) -> None:
    split = tiny_model()
    half = dataclasses.replace(split, state=jax.tree.map(lambda x: x.astype(jnp.bfloat16), split.state))
    factors, batch = random_factors(split, rng), some_batch(rng)
    gradients = []
    for model in (split, half):
        placed = place_mates(model.config, [], slot_rank=8, dtype=model.dtype)
        loss = functools.partial(adapter_loss, scale=SCALE, implementations=IMPLEMENTATIONS, remat=False)
        gradient = jax.jit(jax.grad(loss))(factors, (freeze_model(model), placed), batch)
        assert {g.dtype.name for g in jax.tree.leaves(gradient)} == {"float32"}
        gradients.append(np.concatenate([np.asarray(g).ravel() for g in jax.tree.leaves(gradient)]))
    a, b = gradients
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.99


def test_imbalance_is_zero_for_equal_use_and_largest_for_one_expert_alone() -> None:
    assert float(imbalance(jnp.full((2, 4), 0.25))) == 0
    assert float(imbalance(jnp.eye(4)[:2])) == 3


def test_targets_are_groups_or_projections_in_the_models_order() -> None:
    assert parse_targets("all-linear") == PROJECTIONS
    assert parse_targets("v_proj, q_proj") == ("q_proj", "v_proj")
    assert parse_targets("mlp,o_proj") == ("o_proj", "gate_proj", "up_proj", "down_proj")
    with pytest.raises(ValueError, match="target 'qproj' is unknown; expected all-linear, attention, mlp, or"):
        parse_targets("qproj")
