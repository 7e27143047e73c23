"""Inputs of the ops lora_linear and lora_swiglu: those of maf_mvm, base weights, and counters of three sites."""

import dataclasses
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.lora_linear import Implementation, lora_linear, lora_swiglu, new_arrivals, pallas_triton
from pallas_kernels.lora_linear.config import KernelConfig
from pallas_kernels.maf_mvm import ProjectionSlots
from pallas_kernels.pytree import pytree_dataclass
from pallas_kernels.segments import Segments, build_segments
from tests.support.maf_cases import Problem, make_case, mix_matrix
from tests.support.tolerances import assert_close

SITE = 1
"""Of three: the rows before and after it belong to somebody else."""


@pytree_dataclass
class LinearCase:
    """Arguments of one call."""

    x: Array
    w: Array
    slots: ProjectionSlots
    segments: Segments | None
    arrivals: Array


def bfloat16_problem(**kwargs: Any) -> Problem:
    """A problem that the kernel supports."""
    return Problem(**{"dtype": jnp.bfloat16} | kwargs)


def make_linear_case(rng: np.random.Generator, problem: Problem, weights: np.ndarray | None = None) -> LinearCase:
    """Random arrays of order 1; slots that no weight touches hold NaN, and other sites' counters anything."""
    case = make_case(rng, problem, weights)
    w = rng.standard_normal((problem.in_features, sum(problem.widths)), np.float32) * problem.in_features**-0.5
    arrivals = rng.integers(1, 100, new_arrivals(3).shape, np.int32)
    arrivals[SITE] = 0
    return LinearCase(case.x, jnp.asarray(w, problem.dtype), case.slots, case.segments, jnp.asarray(arrivals))


def make_full_case(rng: np.random.Generator, problem: Problem) -> LinearCase:
    """A case whose slots all hold numbers: `with_mixes` makes any batch of it."""
    p = problem
    return make_linear_case(rng, p, mix_matrix(rng, "identical", p.num_tokens, p.num_slots, mix_size=p.num_slots))


def with_mixes(case: LinearCase, weights: np.ndarray | Array, max_segments: int | None = None) -> LinearCase:
    """The same arrays with other mixes; NaN in all slots that they do not use."""
    assert case.segments is not None
    unused = ~(np.asarray(weights) != 0).any((0, 1))

    def fill(array: Array) -> Array:
        filled = np.array(array)
        filled[:, unused] = np.nan
        return jnp.asarray(filled)

    segments = build_segments(jnp.asarray(weights), tile_size=case.segments.tile_size, max_segments=max_segments)
    return dataclasses.replace(case, slots=jax.tree.map(fill, case.slots), segments=segments)


def run(
    case: LinearCase,
    implementation: Implementation | None = "pallas_triton",
    *,
    is_swiglu: bool = False,
    layer: int | Array = 1,
    site: int | Array = SITE,
    config: KernelConfig | None = None,
) -> Array:
    """What the op returns. The counters of other sites are checked on the way.

    A `config` overrides the kernel's own choice of block sizes.
    """
    args = (case.x, case.w, case.slots, case.segments, case.arrivals)
    if config is None:
        op = lora_swiglu if is_swiglu else lora_linear
        y, arrivals = op(*args, layer=layer, site=site, implementation=implementation)
    else:
        op = pallas_triton.lora_swiglu if is_swiglu else pallas_triton.lora_linear
        y, arrivals = op(*args, jnp.asarray(layer, jnp.int32), jnp.asarray(site, jnp.int32), config=config)
    if not isinstance(arrivals, jax.core.Tracer):
        np.testing.assert_array_equal(np.delete(arrivals, site, 0), np.delete(case.arrivals, site, 0))
    return y


def total(y: Array) -> Array:
    """[num_tokens, out_features] of what either op returns: partial sums added up in order, as their consumer does."""
    if y.ndim == 2:
        return y
    summed = y[0].astype(jnp.float32)
    for partial in y[1:]:
        summed += partial.astype(jnp.float32)
    return summed


def as_float32(case: LinearCase) -> LinearCase:
    """The same values in float32, so that the reference has no rounding of its own."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, case)


def assert_matches_reference(
    case: LinearCase,
    implementation: Implementation | None = "pallas_triton",
    *,
    is_swiglu: bool = False,
    layer: int = 1,
    config: KernelConfig | None = None,
) -> None:
    """Compares with the float32 reference, with the tolerance of the dtype of x."""
    y = run(case, implementation, is_swiglu=is_swiglu, layer=layer, config=config)
    assert y.dtype == (case.x.dtype if y.ndim == 2 or len(y) == 1 else jnp.float32)
    expected = run(as_float32(case), "reference", is_swiglu=is_swiglu, layer=layer)
    assert_close(total(y), total(expected), case.x.dtype)


def assert_same_bits(actual: Array, expected: Array) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()
