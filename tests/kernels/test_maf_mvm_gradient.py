"""Gradients of maf_mvm, whichever implementation went forward, against those of the dense float32 reference."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.lora_linear import lora_linear, lora_swiglu
from pallas_kernels.maf_mvm import Implementation, maf_mvm, maf_swiglu, swiglu
from tests.support.linear_cases import SITE, make_linear_case
from tests.support.maf_cases import Case, Problem, make_case, mix_matrix
from tests.support.tolerances import tolerance

pytestmark = [
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
    *([pytest.mark.gpu] if jax.default_backend() == "gpu" else []),
]
ARGUMENTS = ("x", "a", "b", "scale", "weights", "base")

Arrays = tuple[jax.Array, ...]


def arguments(case: Case) -> Arrays:
    return case.x, case.slots.a, case.slots.b, case.slots.scale, case.segments.weights, case.base


def run(case: Case, args: Arrays, implementation: Implementation | None, op: Callable[..., jax.Array]) -> jax.Array:
    x, a, b, scale, weights, base = args
    slots = dataclasses.replace(case.slots, a=a, b=b, scale=scale)
    return op(x, slots, case.segments.with_weights(weights), base, layer=1, implementation=implementation)


def gradients(
    case: Case, args: Arrays, implementation: Implementation | None, op: Callable[..., jax.Array] = maf_mvm
) -> Arrays:
    """Of a random weighting of the result, by every argument."""
    y = jax.eval_shape(lambda args: run(case, args, implementation, op), args)
    dy = jax.random.normal(jax.random.key(0), y.shape)
    loss = jax.grad(lambda args: (run(case, args, implementation, op).astype(jnp.float32) * dy).sum())
    return jax.jit(loss)(args)


def dense_mvm(x: jax.Array, slots, segments, base: jax.Array, *, layer: int, implementation: None) -> jax.Array:
    """The op's meaning in float32, written out with neither masks nor bits of `base` kept."""
    delta = []
    for p, columns in enumerate(slots.column_slices):
        rows = slice(p * slots.slot_rank, (p + 1) * slots.slot_rank)
        factor = segments.weights[:, min(p, segments.num_gates - 1)] * slots.scale[layer, :, p][None]
        u = jnp.einsum("ti,sri->tsr", x, slots.a[layer, :, rows], precision="highest")
        delta.append(jnp.einsum("ts,tsr,sro->to", factor, u, slots.b[layer, :, :, columns], precision="highest"))
    return base + jnp.concatenate(delta, axis=1)


def dense_swiglu(x: jax.Array, slots, segments, base: jax.Array, *, layer: int, implementation: None) -> jax.Array:
    return swiglu(dense_mvm(x, slots, segments, base, layer=layer, implementation=implementation))


def assert_gradients_match(
    case: Case,
    implementation: Implementation | None,
    op: Callable[..., jax.Array] = maf_mvm,
    dense: Callable[..., jax.Array] = dense_mvm,
) -> None:
    args = arguments(case)
    # The dense form knows no unused slots: it gets zeros where the op finds NaN.
    clean = tuple(jnp.nan_to_num(array.astype(jnp.float32)) for array in args)
    expected = gradients(case, clean, None, dense)
    limit = tolerance(case.x.dtype)
    for name, actual, want, arg in zip(
        ARGUMENTS, gradients(case, args, implementation, op), expected, args, strict=True
    ):
        assert (actual.shape, actual.dtype) == (arg.shape, arg.dtype)
        if name == "weights":  # zero is no pair
            want = jnp.where(case.segments.weights != 0, want, 0)
        size = float(jnp.abs(want).max())
        np.testing.assert_allclose(
            np.asarray(actual, np.float32), want, rtol=limit.rtol, atol=limit.atol * max(1, size), err_msg=name
        )


@pytest.mark.parametrize(
    ("implementation", "num_gates"),
    [
        (None, 1),
        *(pytest.param(name, n, marks=pytest.mark.slow) for name, n in ((None, 3), ("dense", 1), ("dense", 3))),
        *(pytest.param("pallas_triton", n, marks=pytest.mark.slow) for n in (1, 3)),
    ],
)
def test_gradients_equal_those_of_the_dense_form(
    rng: np.random.Generator, implementation: Implementation | None, num_gates: int
) -> None:
    # Two slots hold NaN: no token uses them.
    weights = mix_matrix(rng, "uniform", 7, 4, num_gates)
    weights = np.pad(weights, ((0, 0), (0, 0), (1, 1)))
    assert_gradients_match(make_case(rng, Problem(num_gates=num_gates), weights), implementation)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_gradients_of_random_shapes_equal_those_of_the_dense_form(seed: int) -> None:
    rng = np.random.default_rng(seed)
    widths = tuple(int(w) for w in rng.choice([16, 32, 48], rng.integers(1, 4)))
    problem = Problem(
        num_tokens=int(rng.integers(1, 70)),
        num_slots=int(rng.integers(2, 7)),
        slot_rank=int(rng.choice([1, 3, 4, 8])),
        in_features=int(rng.choice([16, 40, 64])),
        widths=widths,
        num_gates=int(rng.choice([1, len(widths)])),
        tile_size=16,
    )
    assert_gradients_match(make_case(rng, problem), None)


@pytest.mark.slow
def test_gradients_in_bfloat16_are_near_those_in_float32(rng: np.random.Generator) -> None:
    assert_gradients_match(make_case(rng, Problem(dtype=jnp.bfloat16, num_tokens=20)), "dense")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [None, "pallas_triton"])
def test_gradients_through_swiglu_equal_those_of_the_dense_form(
    rng: np.random.Generator, implementation: Implementation | None
) -> None:
    case = make_case(rng, Problem(widths=(32, 32)))
    assert_gradients_match(case, implementation, maf_swiglu, dense_swiglu)


def test_tokens_without_pairs_may_hold_nan_and_get_the_gradient_of_their_base(rng: np.random.Generator) -> None:
    weights = mix_matrix(rng, "identical", 7, 3)
    weights[3:] = 0
    case = make_case(rng, Problem(num_slots=3), weights)
    args = (case.x.at[3:].set(jnp.nan), *arguments(case)[1:])
    dx, da, db, d_scale, d_weights, d_base = gradients(case, args, None)
    assert not np.asarray(dx[3:]).any()
    assert not np.asarray(d_weights[3:]).any()
    for array in (dx, da, db, d_scale, d_weights, d_base):
        assert np.isfinite(array).all()
    assert not np.asarray(da[:, 2]).any(), "a slot that nobody uses"
    assert np.asarray(da[1, 0]).any()
    assert not np.asarray(da[0]).any(), "another layer"


@pytest.mark.slow
def test_a_step_without_pairs_has_gradients_of_zero(rng: np.random.Generator) -> None:
    case = make_case(rng, Problem(num_slots=2), np.zeros((7, 1, 2), np.float32))
    *others, d_base = gradients(case, arguments(case), None)
    assert not any(np.asarray(array).any() for array in others)
    assert np.asarray(d_base).all()


def test_an_adapter_that_begins_with_b_zero_gets_a_gradient(rng: np.random.Generator) -> None:
    """JAX's own derivative of the reference has none there: delta is zero, and base is kept bit for bit."""
    case = make_case(rng, Problem(num_slots=2), mix_matrix(rng, "identical", 7, 2))
    case = dataclasses.replace(case, slots=dataclasses.replace(case.slots, b=jnp.zeros_like(case.slots.b)))
    assert_gradients_match(case, None)
    assert np.abs(gradients(case, arguments(case), None)[2]).max() > 0.1


@pytest.mark.slow
def test_linear_layers_with_adapters_have_the_gradients_of_finite_differences(rng: np.random.Generator) -> None:
    case = make_linear_case(rng, Problem(widths=(16, 16), in_features=16, num_slots=2, slot_rank=4))
    assert case.segments is not None

    def loss(op: Callable[..., tuple[jax.Array, jax.Array]], *args: jax.Array) -> jax.Array:
        x, w, a = map(jnp.asarray, args)  # check_grads gives numpy's
        slots = dataclasses.replace(case.slots, a=a)
        y, _ = op(x, w, slots, case.segments, case.arrivals, layer=1, site=SITE, implementation="separate")
        return jnp.sin(y).sum()

    for op in (lora_linear, lora_swiglu):
        args = case.x, case.w, case.slots.a
        check_grads(lambda *args, op=op: loss(op, *args), args, order=1, modes=["rev"], atol=5e-2, rtol=5e-2)


@pytest.mark.slow
def test_the_norm_kernel_has_the_gradient_of_its_reference(rng: np.random.Generator) -> None:
    x, delta, weight, dy = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((5, 64), (2, 5, 64), (64,), (5, 64))
    )

    def loss(implementation: str, *args: jax.Array) -> jax.Array:
        total, normed = add_rms_norm(*args, eps=1e-5, implementation=implementation)  # pyright: ignore[reportArgumentType]
        return (normed * dy + jnp.sin(total)).sum()

    actual, expected = (
        jax.grad(lambda *args, name=name: loss(name, *args), argnums=(0, 1, 2))(x, delta, weight)
        for name in ("pallas_triton", "reference")
    )
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5)
