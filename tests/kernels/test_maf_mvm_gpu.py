"""The compiled kernels on a GPU, on real shapes; test_maf_mvm.py has the cases that also run on a CPU."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.maf_mvm import Implementation, ProjectionSlots, maf_mvm
from pallas_kernels.maf_mvm.shapes import GROUPS, Group, named_shapes
from pallas_kernels.segments import build_segments
from tests.support.maf_cases import Case, Problem, make_case, mix_matrix
from tests.support.tolerances import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


def run(case: Case, implementation: Implementation | None = None, layer: int = 1) -> jax.Array:
    return maf_mvm(case.x, case.slots, case.segments, case.base, layer=layer, implementation=implementation)


def as_float32(case: Case) -> Case:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, case)


@pytest.mark.parametrize(
    ("dtype", "num_tokens"),
    [(jnp.bfloat16, 1), (jnp.bfloat16, 32), (jnp.bfloat16, 200), (jnp.float32, 32)],
    ids=["bfloat16-1", "bfloat16-32", "bfloat16-200", "float32-32"],
)
@pytest.mark.parametrize("group", GROUPS)
def test_the_8b_shape_matches_the_reference(
    rng: np.random.Generator, dtype: Any, num_tokens: int, group: Group
) -> None:
    in_features, widths = named_shapes()["llama-3-8b"].group(group)
    problem = Problem(num_tokens=num_tokens, num_slots=16, in_features=in_features, widths=widths, dtype=dtype)
    case = make_case(rng, problem, mix_matrix(rng, "zipf", num_tokens, 16, mix_size=3))
    first, second = run(case, "pallas_triton"), run(case, "pallas_triton")
    assert_close(first, run(as_float32(case), "reference"), dtype)
    assert np.asarray(first).tobytes() == np.asarray(second).tobytes()


@pytest.mark.parametrize("model", ["smollm2-135m", "llama-3.2-1b", "llama-3.2-3b"])
@pytest.mark.parametrize("group", ["qkv", "down"])
def test_every_model_matches_the_reference(rng: np.random.Generator, model: str, group: Group) -> None:
    in_features, widths = named_shapes()[model].group(group)
    case = make_case(rng, Problem(num_tokens=70, in_features=in_features, widths=widths, dtype=jnp.bfloat16))
    assert_close(run(case, "pallas_triton"), run(as_float32(case), "reference"), jnp.bfloat16)


def test_offsets_past_32_bits_reach_the_right_rows(rng: np.random.Generator) -> None:
    # b holds 2^32 elements (8 GiB), most of them NaN: a wrapped offset would read one.
    problem = Problem(num_tokens=16, in_features=64, widths=(16384,), slot_rank=16, dtype=jnp.bfloat16)
    small = make_case(rng, problem, mix_matrix(rng, "identical", 16, 6))
    num_layers, num_slots = 2, 8192
    a = jnp.full((num_layers, num_slots, 16, 64), jnp.nan, jnp.bfloat16).at[1, -6:].set(small.slots.a[1])
    fill = functools.partial(jax.jit, donate_argnums=0)(lambda b, new: b.at[1, -6:].set(new))
    b = fill(jnp.full((num_layers, num_slots, 16, 16384), jnp.nan, jnp.bfloat16), small.slots.b[1])
    assert b.size == 2**32
    scale = jnp.full((num_layers, num_slots, 1), jnp.nan).at[1, -6:].set(small.slots.scale[1])
    weights = np.zeros((16, 1, num_slots), np.float32)
    weights[:, :, -6:] = np.asarray(small.segments.weights)
    large = dataclasses.replace(
        small,
        slots=ProjectionSlots(a=a, b=b, scale=scale, widths=problem.widths),
        segments=build_segments(jnp.asarray(weights), tile_size=16),
    )
    assert_close(run(large, "pallas_triton"), run(as_float32(small), "reference"), jnp.bfloat16)
