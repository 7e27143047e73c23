"""The compiled kernel of lora_linear on a GPU, on real shapes; test_lora_linear.py has the cases for a CPU too."""

import dataclasses
import functools
import itertools
import json
from importlib import resources

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.lora_linear import lora_linear, lora_swiglu, new_arrivals
from pallas_kernels.lora_linear.config import Problem
from pallas_kernels.maf_mvm import ProjectionSlots, token_tile_size
from pallas_kernels.maf_mvm.shapes import GROUPS, Group, named_shapes
from pallas_kernels.segments import build_segments
from tests.support.linear_cases import (
    LinearCase,
    as_float32,
    assert_same_bits,
    run,
    total,
    with_mixes,
)
from tests.support.maf_cases import ALL_MIXES, mix_matrix
from tests.support.tolerances import tolerance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
NUM_SLOTS, RANK = 96, 8
each_group = pytest.mark.parametrize("group", GROUPS)


def make_real_case(rng: np.random.Generator, group: Group, num_tokens: int, *, model: str = "llama-3-8b") -> LinearCase:
    """Arrays of order 1; `with_mixes` gives it its batch."""
    in_features, widths = named_shapes()[model].group(group)

    def normal(*shape: int, size: float = 1.0) -> jax.Array:
        # Repeated, for the weights of one layer are 10^8 numbers; a prime, so that no two rows are alike.
        block = (rng.standard_normal(1_000_003, np.float32) * np.float32(size)).astype(jnp.bfloat16)
        return jnp.asarray(np.resize(block, shape))

    return LinearCase(
        x=normal(num_tokens, in_features),
        w=normal(in_features, sum(widths), size=in_features**-0.5),
        slots=ProjectionSlots(
            a=normal(1, NUM_SLOTS, len(widths) * RANK, in_features, size=in_features**-0.5),
            b=normal(1, NUM_SLOTS, RANK, sum(widths), size=RANK**-0.5),
            scale=jnp.asarray(rng.uniform(0.25, 1, (1, NUM_SLOTS, len(widths))), jnp.float32),
            widths=widths,
        ),
        segments=build_segments(jnp.zeros((num_tokens, 1, NUM_SLOTS)), tile_size=token_tile_size(num_tokens)),
        arrivals=new_arrivals(3),
    )


def run_real(case: LinearCase, group: Group, *, is_reference: bool = False) -> jax.Array:
    implementation = "reference" if is_reference else "pallas_triton"
    return run(case, implementation, is_swiglu=group == "gate_up", layer=0)


def without_pairs(case: LinearCase) -> LinearCase:
    return with_mixes(case, np.zeros((case.x.shape[0], 1, NUM_SLOTS), np.float32))


def assert_close_for_its_size(actual: jax.Array, expected: jax.Array, *, num_factors: int) -> None:
    """Within bfloat16's tolerance of the outputs' own size, once for each factor of a product: each is rounded."""
    y, want = (np.asarray(total(array), np.float32) for array in (actual, expected))
    rtol, atol = tolerance(jnp.bfloat16)
    np.testing.assert_allclose(y, want, rtol=rtol, atol=atol * num_factors * max(1.0, float(want.std())))


@pytest.mark.parametrize("num_tokens", [32, 64])
@each_group
def test_all_mixes_of_the_8b_shape_match_the_reference_and_repeat(
    rng: np.random.Generator, group: Group, num_tokens: int
) -> None:
    full = make_real_case(rng, group, num_tokens)
    for mixes in ALL_MIXES:
        case = with_mixes(full, mix_matrix(rng, mixes, num_tokens, NUM_SLOTS, mix_size=3))
        y = run_real(case, group)
        expected = run_real(as_float32(case), group, is_reference=True)
        assert_close_for_its_size(y, expected, num_factors=2 if group == "gate_up" else 1)
        assert_same_bits(run_real(case, group), y)


def measured_problems() -> list[tuple[str, Group, int]]:
    """What the table of block sizes holds: there a step without adapters may have sizes of its own."""
    table = json.loads(resources.files("pallas_kernels.lora_linear").joinpath("h200.json").read_text())
    found = []
    for (model, shape), group, num_tokens in itertools.product(named_shapes().items(), GROUPS, (16, 32, 64)):
        in_features, widths = shape.group(group)
        if Problem(num_tokens, NUM_SLOTS * RANK, in_features, widths, group == "gate_up").key in table["configs"]:
            found.append((model, group, num_tokens))
    return found


@pytest.mark.parametrize(("model", "group", "num_tokens"), measured_problems())
def test_rows_on_the_base_model_get_the_same_bits_with_and_without_segments(
    rng: np.random.Generator, model: str, group: Group, num_tokens: int
) -> None:
    full = make_real_case(rng, group, num_tokens, model=model)
    base = run_real(dataclasses.replace(full, segments=None), group)
    assert_same_bits(run_real(without_pairs(full), group), base)
    weights = mix_matrix(rng, "uniform", num_tokens, NUM_SLOTS, mix_size=3)
    weights[::3] = 0
    assert_same_bits(run_real(with_mixes(full, weights), group)[..., ::3, :], base[..., ::3, :])
    weights[:, :, 3:] = 0
    weights[1, :, :3] = 0.5
    few = with_mixes(full, weights)
    assert few.segments is not None
    few = dataclasses.replace(few, segments=dataclasses.replace(few.segments, max_segments=8))
    y, is_base = run_real(few, group), (weights == 0).all((1, 2))
    assert_same_bits(y[..., is_base, :], base[..., is_base, :])
    expected = run_real(as_float32(few), group, is_reference=True)
    assert_close_for_its_size(y, expected, num_factors=2 if group == "gate_up" else 1)


@pytest.mark.parametrize("num_tokens", [32, 64])
@each_group
def test_200_launches_of_changing_mixes_give_the_bits_of_the_first(
    rng: np.random.Generator, group: Group, num_tokens: int
) -> None:
    """A program that did not wait for all rank rows, or saw old ones, would give other bits sooner or later."""
    full = make_real_case(rng, group, num_tokens)
    weights = [mix_matrix(rng, mixes, num_tokens, NUM_SLOTS, mix_size=3) for mixes in ALL_MIXES]
    cases = [with_mixes(full, w) for w in (*weights, np.zeros_like(weights[0]))]
    segments = jax.tree.map(lambda *arrays: jnp.stack(arrays), *(case.segments for case in cases))
    # NaN of the unused slots stays out: one slot array serves all mixes.
    expected = jnp.stack([run_real(dataclasses.replace(full, segments=case.segments), group) for case in cases])
    differing = count_differing(full, segments, expected, is_swiglu=group == "gate_up")
    assert int(differing) == 0


@functools.partial(jax.jit, static_argnames="is_swiglu")
def count_differing(case: LinearCase, segments: object, expected: jax.Array, *, is_swiglu: bool) -> jax.Array:
    """Elements of 200 launches whose bits are not those expected of their mix."""
    op = lora_swiglu if is_swiglu else lora_linear
    num_launches, num_mixes = 200, expected.shape[0]

    def launch(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        arrivals, differing = state
        mix = lax.rem(i * 5, num_mixes)
        own = jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, mix, keepdims=False), segments)
        y, arrivals = op(case.x, case.w, case.slots, own, arrivals, layer=0, site=i, implementation="pallas_triton")
        bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.dtype(f"uint{8 * y.dtype.itemsize}"))
        is_other = bits(y) != bits(lax.dynamic_index_in_dim(expected, mix, keepdims=False))
        return arrivals, differing + is_other.sum(dtype=jnp.int32)

    return lax.fori_loop(0, num_launches, launch, (new_arrivals(num_launches), jnp.int32(0)))[1]
