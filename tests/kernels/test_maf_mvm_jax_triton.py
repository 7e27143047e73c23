"""The raw Triton kernels of maf_mvm against the float32 reference: in Triton's interpreter, where it is installed."""

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.maf_mvm
from pallas_kernels.maf_mvm import maf_mvm
from tests.support.maf_cases import ALL_MIXES, Case, Mixes, Problem, make_case, mix_matrix
from tests.support.tolerances import assert_close

HAS_TRITON = all(importlib.util.find_spec(name) is not None for name in ("triton", "jax_triton"))
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs pip install jax-triton==0.4.1 (190 MB, with triton)")
each_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """jax_triton.py with its kernels in Triton's interpreter."""
    from tests.support.triton_interpreter import interpreted

    with interpreted(Path(pallas_kernels.maf_mvm.__file__).with_name("jax_triton.py")) as module:
        yield module


def run(kernels: ModuleType, case: Case) -> jax.Array:
    return kernels.maf_mvm(case.x, case.slots, case.segments, case.base, jnp.int32(1))


def assert_matches_reference(kernels: ModuleType, case: Case) -> None:
    actual = run(kernels, case)
    assert actual.dtype == case.x.dtype
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, case)
    expected = maf_mvm(exact.x, exact.slots, exact.segments, exact.base, layer=1, implementation="reference")
    assert_close(actual, expected, case.x.dtype)


@needs_triton
@each_dtype
@pytest.mark.parametrize(
    "mixes", [pytest.param(mixes, marks=[] if mixes == "zipf" else pytest.mark.slow) for mixes in ALL_MIXES]
)
def test_every_distribution_of_adapters_matches_the_reference(
    rng: np.random.Generator, kernels: ModuleType, dtype: jnp.dtype, mixes: Mixes
) -> None:
    assert_matches_reference(kernels, make_case(rng, Problem(dtype=dtype), mix_matrix(rng, mixes, 7, 6)))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 133])
def test_every_number_of_tokens_matches_the_reference(
    rng: np.random.Generator, kernels: ModuleType, num_tokens: int
) -> None:
    assert_matches_reference(kernels, make_case(rng, Problem(num_tokens=num_tokens)))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("slot_rank", [4, 64])
@pytest.mark.parametrize("widths", [(64,), (128, 128), (32, 16, 16)])
def test_every_slot_rank_and_group_matches_the_reference(
    rng: np.random.Generator, kernels: ModuleType, slot_rank: int, widths: tuple[int, ...]
) -> None:
    problem = Problem(slot_rank=slot_rank, num_slots=3, widths=widths, in_features=192)
    assert_matches_reference(kernels, make_case(rng, problem))


@needs_triton
@pytest.mark.slow
def test_gates_per_projection_match_the_reference(rng: np.random.Generator, kernels: ModuleType) -> None:
    case = make_case(rng, Problem(num_gates=3))
    weights = case.segments.weights.at[2, 1].set(0).at[:, 2, 4].set(0)
    assert_matches_reference(kernels, dataclasses.replace(case, segments=case.segments.with_weights(weights)))


@needs_triton
def test_tokens_without_pairs_keep_the_bits_of_their_base(rng: np.random.Generator, kernels: ModuleType) -> None:
    weights = mix_matrix(rng, "uniform", 7, 6)
    weights[[0, 3, 6]] = 0
    case = make_case(rng, Problem(), weights)
    x = case.x.at[0].set(jnp.nan).at[3].set(jnp.inf)  # padding may hold anything
    base = case.base.at[6].set(-0.0)
    y = run(kernels, dataclasses.replace(case, x=x, base=base))
    for token in (0, 3, 6):
        assert np.asarray(y[token]).tobytes() == np.asarray(base[token]).tobytes()
    assert np.isfinite(np.asarray(y)).all()


@needs_triton
def test_a_batch_without_pairs_is_the_base(rng: np.random.Generator, kernels: ModuleType) -> None:
    case = make_case(rng, Problem(), np.zeros((7, 1, 6), np.float32))
    np.testing.assert_array_equal(run(kernels, case), case.base)
