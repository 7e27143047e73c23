"""The bench's competitors compute the same op as maf_mvm; a comparison of speeds would mean nothing otherwise."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.maf_mvm import baselines, maf_mvm
from tests.support.maf_cases import ALL_MIXES, Case, Mixes, Problem, make_case, mix_matrix
from tests.support.tolerances import assert_close

pytestmark = [
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
    *([pytest.mark.gpu] if jax.default_backend() == "gpu" else []),
]
each_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
each_mixes = pytest.mark.parametrize(
    "mixes",
    [pytest.param(mixes, marks=[] if mixes in ("uniform", "skewed") else pytest.mark.slow) for mixes in ALL_MIXES],
)
LAYER = jnp.int32(1)


def active_adapters(case: Case) -> jax.Array:
    return jnp.asarray(np.flatnonzero((np.asarray(case.segments.weights) != 0).any((0, 1))), jnp.int32)


def composites_of(case: Case) -> baselines.Composites:
    rows = np.asarray(case.segments.weights)[:, 0]
    mixes = [[(int(s), float(row[s])) for s in np.flatnonzero(row)] for row in rows]
    return baselines.plan_composites(mixes, tile_size=case.segments.tile_size)


def assert_matches_reference(actual: jax.Array, case: Case, dtype: Any) -> None:
    case = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, case)
    expected = maf_mvm(case.x, case.slots, case.segments, case.base, layer=1, implementation="reference")
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize("baseline", [baselines.naive, baselines.bmm])
@each_dtype
@each_mixes
def test_naive_and_bmm_match_the_reference(rng: np.random.Generator, baseline: Any, dtype: Any, mixes: Mixes) -> None:
    case = make_case(rng, Problem(dtype=dtype), mix_matrix(rng, mixes, 7, 6))
    y = baseline(case.x, case.slots, case.segments, case.base, active_adapters(case), LAYER)
    assert y.dtype == dtype
    assert_matches_reference(y, case, dtype)


@pytest.mark.parametrize("baseline", [baselines.naive, baselines.bmm])
def test_naive_and_bmm_take_a_gate_per_projection(rng: np.random.Generator, baseline: Any) -> None:
    case = make_case(rng, Problem(num_gates=3))
    y = baseline(case.x, case.slots, case.segments, case.base, active_adapters(case), LAYER)
    assert_matches_reference(y, case, jnp.float32)


def test_the_naive_loop_reaches_every_adapter_of_a_long_list(rng: np.random.Generator) -> None:
    case = make_case(rng, Problem(num_tokens=21, num_slots=21), mix_matrix(rng, "distinct", 21, 21))
    y = baselines.naive(case.x, case.slots, case.segments, case.base, active_adapters(case), LAYER)
    assert_matches_reference(y, case, jnp.float32)


@each_dtype
@each_mixes
def test_copy_and_sgmv_match_the_reference(rng: np.random.Generator, dtype: Any, mixes: Mixes) -> None:
    weights = mix_matrix(rng, mixes, 7, 6)
    weights[3] = 0  # a request of the base model
    case = make_case(rng, Problem(dtype=dtype), weights)
    composites = composites_of(case)
    run = functools.partial(baselines.copy_sgmv, implementation="dense")
    y = run(case.x, case.slots, composites, case.base, LAYER)
    assert_matches_reference(y, case, dtype)
    copied = baselines.copy_composites(case.slots, composites, LAYER)
    alone = baselines.sgmv(case.x, copied, composites, case.base, jnp.int32(0), implementation="dense")
    np.testing.assert_array_equal(np.asarray(alone, np.float32), np.asarray(y, np.float32))


def test_requests_of_equal_mix_share_a_composite() -> None:
    composites = baselines.plan_composites([[(4, 0.5), (1, 0.5)], [(2, 1.0)], [], [(4, 0.5), (1, 0.5)]], tile_size=16)
    assert composites.adapter_ids.tolist() == [[2, 2], [4, 1]]
    assert composites.weights.tolist() == [[1, 0], [0.5, 0.5]]
    assert composites.segments.weights[:, 0].tolist() == [[0, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]]


def test_a_batch_without_adapters_has_no_composites() -> None:
    with pytest.raises(ValueError, match="mixes holds no adapter at all"):
        baselines.plan_composites([[], []], tile_size=16)


def test_sgmv_takes_the_pallas_kernel(rng: np.random.Generator) -> None:
    case = make_case(rng, Problem(), mix_matrix(rng, "uniform", 7, 6))
    composites = composites_of(case)
    y = baselines.copy_sgmv(case.x, case.slots, composites, case.base, LAYER, implementation="pallas_triton")
    assert_matches_reference(y, case, jnp.float32)


@pytest.mark.parametrize("implementation", ["bmm", "copy_sgmv"])
@pytest.mark.parametrize(
    "mixes",
    [pytest.param(mixes, marks=[] if mixes == "skewed" else pytest.mark.slow) for mixes in ALL_MIXES],
)
def test_a_baseline_takes_the_place_of_the_op_in_a_step(
    rng: np.random.Generator, implementation: Any, mixes: Mixes
) -> None:
    weights = mix_matrix(rng, mixes, 7, 6)
    weights[3] = 0  # a request of the base model
    case = make_case(rng, Problem(), weights)
    slots = jax.tree.map(jnp.nan_to_num, case.slots)  # a slot array starts as zeros
    y = maf_mvm(case.x, slots, case.segments, case.base, layer=1, implementation=implementation)
    assert_matches_reference(y, case, jnp.float32)


def test_bmm_of_a_step_gathers_no_more_slots_than_are_promised(rng: np.random.Generator) -> None:
    case = make_case(rng, Problem(), mix_matrix(rng, "identical", 7, 6))
    segments = dataclasses.replace(case.segments, max_segments=2)  # the other four slots hold NaN
    y = maf_mvm(case.x, case.slots, segments, case.base, layer=1, implementation="bmm")
    assert_matches_reference(y, case, jnp.float32)
