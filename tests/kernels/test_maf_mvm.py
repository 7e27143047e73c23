"""Every implementation of maf_mvm against the dense float32 reference; compiled on a GPU, interpreted on a CPU."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu import HOPPER_SHARED_BYTES
from pallas_kernels.maf_mvm import Implementation, maf_mvm, maf_swiglu, pallas_triton, swiglu
from pallas_kernels.maf_mvm.checks import dynamic_validate
from pallas_kernels.maf_mvm.config import pick_config
from pallas_kernels.maf_mvm.shapes import GROUPS, named_shapes
from tests.support.maf_cases import ALL_MIXES, Case, Mixes, Problem, make_case, mix_matrix
from tests.support.tolerances import assert_close

IMPLEMENTATIONS: tuple[Implementation, ...] = ("dense", "loop", "pallas_triton")

pytestmark = [
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
    *([pytest.mark.gpu] if jax.default_backend() == "gpu" else []),  # there the same cases run the compiled kernels
]
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
each_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


def run(case: Case, implementation: Implementation, layer: int | jax.Array = 1) -> jax.Array:
    return maf_mvm(case.x, case.slots, case.segments, case.base, layer=layer, implementation=implementation)


def as_float32(case: Case) -> Case:
    """The same values in float32, so that the reference has no rounding of its own."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, case)


def assert_matches_reference(case: Case, implementation: Implementation, layer: int = 1) -> None:
    dynamic_validate(case.slots, case.segments, layer)
    actual = run(case, implementation, layer)
    assert actual.dtype == case.x.dtype
    assert_close(actual, run(as_float32(case), "reference", layer), case.x.dtype)


def assert_same_bits(actual: jax.Array, expected: jax.Array) -> None:
    assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


def test_reference_equals_a_loop_over_tokens_and_slots(rng: np.random.Generator) -> None:
    case = make_case(rng, Problem(num_gates=3))
    x, base, weights = np.asarray(case.x), np.asarray(case.base), np.asarray(case.segments.weights)
    a, b, scale = (np.asarray(array)[1] for array in (case.slots.a, case.slots.b, case.slots.scale))
    expected = base.astype(np.float64)
    for t, s, (p, columns) in itertools.product(range(7), range(6), enumerate(case.slots.column_slices)):
        if weights[t, p, s]:
            u = x[t].astype(np.float64) @ a[s, p * 8 : (p + 1) * 8].T
            expected[t, columns] += weights[t, p, s] * scale[s, p] * (u @ b[s][:, columns])
    assert_close(run(case, "reference"), expected)


@each_implementation
@each_dtype
@pytest.mark.parametrize("mixes", ALL_MIXES)
def test_every_distribution_of_adapters_matches_the_reference(
    rng: np.random.Generator, implementation: Implementation, dtype: jnp.dtype, mixes: Mixes
) -> None:
    weights = mix_matrix(rng, mixes, 7, 6)
    assert_matches_reference(make_case(rng, Problem(dtype=dtype), weights), implementation)


@each_implementation
@pytest.mark.parametrize("num_tokens", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3)), 133])
def test_every_number_of_tokens_matches_the_reference(
    rng: np.random.Generator, implementation: Implementation, num_tokens: int
) -> None:
    assert_matches_reference(make_case(rng, Problem(num_tokens=num_tokens)), implementation)


@pytest.mark.parametrize("widths", [(64, 32), (32, 32)])
def test_the_large_steps_of_a_few_tiles_match_the_reference(rng: np.random.Generator, widths: tuple[int, ...]) -> None:
    """An expand that reads blocks of several shrink programs, of which the last were never written; and two splits."""
    problem = Problem(num_tokens=130, num_slots=16, in_features=256, widths=widths, dtype=jnp.bfloat16)
    sizes = pick_config(
        num_tiles=3, tile_size=64, num_slots=16, slot_rank=8, in_features=256, widths=widths, dtype_bytes=2
    )
    assert (sizes.expand_rows, sizes.shrink_rows, sizes.shrink_splits) == (128, 32, 2)
    weights = mix_matrix(rng, "distinct", 130, 16)
    weights[64:128, :, 5:] = 0  # a tile of five segments
    assert_matches_reference(make_case(rng, problem, weights), "pallas_triton")


@each_implementation
@pytest.mark.parametrize("slot_rank", [4, *(pytest.param(r, marks=pytest.mark.slow) for r in (16, 32, 64))])
def test_every_slot_rank_matches_the_reference(
    rng: np.random.Generator, implementation: Implementation, slot_rank: int
) -> None:
    assert_matches_reference(make_case(rng, Problem(slot_rank=slot_rank, num_slots=3)), implementation)


@each_implementation
@pytest.mark.parametrize("widths", [*(pytest.param(w, marks=pytest.mark.slow) for w in ((64,), (128, 128))), (32, 16)])
def test_every_group_of_projections_matches_the_reference(
    rng: np.random.Generator, implementation: Implementation, widths: tuple[int, ...]
) -> None:
    assert_matches_reference(make_case(rng, Problem(widths=widths, in_features=192)), implementation)


@each_implementation
def test_every_pattern_of_empty_segments_matches_the_reference(
    rng: np.random.Generator, implementation: Implementation
) -> None:
    # Two tiles of 16 tokens; each pattern says which of three slots each tile uses.
    problem = Problem(num_tokens=20, num_slots=3, slot_rank=4, widths=(32,), tile_size=16, num_layers=1)
    full = make_case(rng, problem, mix_matrix(rng, "identical", 20, 3, mix_size=3))
    for pattern in itertools.product([False, True], repeat=6):
        is_used = np.repeat(np.array(pattern).reshape(2, 1, 3), [16, 4], axis=0)
        weights = np.where(is_used, np.asarray(full.segments.weights), 0).astype(np.float32)
        case = make_case(rng, problem, weights)
        assert_matches_reference(case, implementation, layer=0)


@each_implementation
def test_gates_per_projection_match_the_reference(rng: np.random.Generator, implementation: Implementation) -> None:
    case = make_case(rng, Problem(num_gates=3))
    # A slot may serve some of a token's projections only.
    weights = case.segments.weights.at[2, 1].set(0).at[:, 2, 4].set(0)
    case = dataclasses.replace(case, segments=case.segments.with_weights(weights))
    assert_matches_reference(case, implementation)


@each_implementation
def test_a_traced_layer_equals_a_static_one(rng: np.random.Generator, implementation: Implementation) -> None:
    case = make_case(rng, Problem())
    traced = jax.jit(lambda layer: run(case, implementation, layer))
    for layer in (0, 1):
        assert_same_bits(traced(jnp.int32(layer)), run(case, implementation, layer))
        assert_close(traced(jnp.int32(layer)), run(case, "reference", layer))


@each_implementation
def test_a_float32_base_is_added_before_rounding(rng: np.random.Generator, implementation: Implementation) -> None:
    case = make_case(rng, Problem(dtype=jnp.bfloat16))
    case = dataclasses.replace(case, base=case.base.astype(jnp.float32) * 1.001)
    assert_matches_reference(case, implementation)


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
@each_dtype
def test_tokens_without_pairs_keep_the_bits_of_their_base(
    rng: np.random.Generator, implementation: Implementation, dtype: jnp.dtype
) -> None:
    weights = mix_matrix(rng, "uniform", 7, 6)
    weights[[0, 3, 6]] = 0
    case = make_case(rng, Problem(dtype=dtype), weights)
    x = case.x.at[0].set(jnp.nan).at[3].set(jnp.inf)  # padding may hold anything
    base = case.base.at[6].set(-0.0)
    y = run(dataclasses.replace(case, x=x, base=base), implementation)
    for token in (0, 3, 6):
        assert_same_bits(y[token], base[token])
    assert np.isfinite(np.asarray(y, np.float32)).all()


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
def test_a_batch_without_pairs_is_the_base_though_all_slots_hold_nan(
    rng: np.random.Generator, implementation: Implementation
) -> None:
    case = make_case(rng, Problem(), np.zeros((7, 1, 6), np.float32))
    assert np.isnan(np.asarray(case.slots.a)).all()
    assert_same_bits(run(case, implementation), case.base)


@each_implementation
def test_a_slot_that_a_gate_switched_off_adds_nothing(rng: np.random.Generator, implementation: Implementation) -> None:
    # The segments keep every expert of the gated set; this layer's gate gives token 2 a weight for slot 1 alone.
    case = make_case(rng, Problem(), mix_matrix(rng, "identical", 7, 6, mix_size=3))
    weights = jnp.zeros_like(case.segments.weights).at[2, 0, 1].set(0.5)
    y = run(dataclasses.replace(case, segments=case.segments.with_weights(weights)), implementation)
    alone = np.zeros((7, 1, 6), np.float32)
    alone[2, 0, 1] = 0.5
    assert_close(
        y, run(dataclasses.replace(case, segments=case.segments.with_weights(jnp.asarray(alone))), "reference")
    )
    assert_same_bits(y[:2], case.base[:2])


@each_implementation
def test_the_same_input_twice_gives_the_same_bits(rng: np.random.Generator, implementation: Implementation) -> None:
    case = make_case(rng, Problem())
    assert_same_bits(run(case, implementation), run(case, implementation))


@each_implementation
def test_two_half_weighted_slots_of_equal_content_are_one_adapter(
    rng: np.random.Generator, implementation: Implementation
) -> None:
    weights = np.zeros((7, 1, 6), np.float32)
    weights[:, 0, [1, 3]] = 0.5
    case = make_case(rng, Problem(), weights)
    copied = jax.tree.map(lambda array: array.at[:, 3].set(array[:, 1]), case.slots)
    one = jnp.zeros((7, 1, 6)).at[:, 0, 1].set(1)
    twice = run(dataclasses.replace(case, slots=copied), implementation)
    once = run(dataclasses.replace(case, slots=copied, segments=case.segments.with_weights(one)), implementation)
    assert_close(twice, once)


@pytest.mark.parametrize(("num_tokens", "dtype"), [(7, jnp.float32), (133, jnp.float32), (133, jnp.bfloat16)])
def test_an_expand_that_ends_in_swiglu_matches_the_reference(
    rng: np.random.Generator, num_tokens: int, dtype: jnp.dtype
) -> None:
    case = make_case(rng, Problem(num_tokens=num_tokens, widths=(64, 64), dtype=dtype))
    actual = maf_swiglu(case.x, case.slots, case.segments, case.base, layer=1, implementation="pallas_triton")
    assert actual.dtype == dtype
    y = run(as_float32(case), "reference").astype(dtype)
    assert_close(actual, swiglu(y.astype(jnp.float32)), dtype)


def test_a_tile_without_segments_still_goes_through_swiglu(rng: np.random.Generator) -> None:
    weights = mix_matrix(rng, "uniform", 48, 6)
    weights[16:32] = 0
    case = make_case(rng, Problem(num_tokens=48, widths=(64, 64), tile_size=16), weights)
    actual = maf_swiglu(case.x, case.slots, case.segments, case.base, layer=1, implementation="pallas_triton")
    assert_close(actual[16:32], swiglu(case.base[16:32]))


def test_gate_and_up_must_be_equally_wide(rng: np.random.Generator) -> None:
    case = make_case(rng, Problem(widths=(64, 32)))
    with pytest.raises(ValueError, match=r"widths \(64, 32\); expected two of equal width, gate and up"):
        maf_swiglu(case.x, case.slots, case.segments, case.base, layer=1)


@pytest.mark.parametrize("num_gates", [pytest.param(n, marks=pytest.mark.slow) for n in (1, 3)])
def test_the_programs_that_share_the_blocks_of_a_tile_do_not_change_a_bit(
    rng: np.random.Generator, num_gates: int
) -> None:
    problem = Problem(num_tokens=48, num_slots=20, tile_size=16, num_gates=num_gates)
    weights = mix_matrix(rng, "distinct", 48, 20, num_gates)
    weights[16:32] = 0  # no block at all; the other tiles have several
    case = make_case(rng, problem, weights)
    picked = pick_config(
        num_tiles=3, tile_size=16, num_slots=20, slot_rank=8, in_features=64, widths=(64, 32, 32), dtype_bytes=4
    )
    layer = jnp.int32(1)
    results = [
        pallas_triton.maf_mvm(
            case.x, case.slots, case.segments, case.base, layer, config=dataclasses.replace(picked, **sizes)
        )
        for sizes in (
            {"shrink_programs": picked.padded_rows(160) // picked.shrink_rows},
            {"shrink_programs": 1},
            {"shrink_programs": 2},
            {"shrink_programs": 2, "shrink_group": 3},
        )
    ]
    for result in results[1:]:
        assert_same_bits(result, results[0])
    assert_close(results[0], run(case, "reference"))


@pytest.mark.parametrize("dtype_bytes", [2, 4])
@pytest.mark.parametrize("num_tiles", [1, 2, 8, 16, 17, 64, 65, 512])
def test_block_sizes_divide_their_problem_and_fit_into_shared_memory(num_tiles: int, dtype_bytes: int) -> None:
    for shape in named_shapes().values():
        for group in GROUPS:
            in_features, widths = shape.group(group)
            for ends_in_swiglu in {False, group == "gate_up"}:
                config = pick_config(
                    num_tiles=num_tiles,
                    tile_size=64,
                    num_slots=128,
                    slot_rank=8,
                    in_features=in_features,
                    widths=widths,
                    dtype_bytes=dtype_bytes,
                    ends_in_swiglu=ends_in_swiglu,
                )
                step = config.shrink_columns * config.shrink_unroll
                assert in_features % (step * config.shrink_splits) == 0
                assert len(widths) % config.shrink_group == 0
                assert all(width % config.expand_columns == 0 for width in widths)
                rows = 64 + config.shrink_group * config.shrink_rows
                assert rows * step * dtype_bytes * config.shrink_stages <= HOPPER_SHARED_BYTES


def test_none_picks_an_implementation_that_matches_the_reference(rng: np.random.Generator) -> None:
    case = make_case(rng, Problem())
    actual = maf_mvm(case.x, case.slots, case.segments, case.base, layer=0)
    assert_close(actual, run(case, "reference", 0))


def test_unsupported_shapes_are_refused_by_the_kernel_alone(rng: np.random.Generator) -> None:
    case = make_case(rng, Problem(slot_rank=6))
    with pytest.raises(NotImplementedError, match="slot_rank 6 is not supported; use a power of two"):
        run(case, "pallas_triton")
    with pytest.raises(NotImplementedError, match="in_features 72 is not supported; it must be a multiple of 16"):
        run(make_case(rng, Problem(in_features=72)), "pallas_triton")
    with pytest.raises(NotImplementedError, match="tile_size 8 of the segments"):
        run(make_case(rng, Problem(tile_size=8)), "pallas_triton")
    assert_matches_reference(case, "dense")
    assert_matches_reference(case, "loop")


@pytest.mark.usefixtures("unchecked_annotations")
def test_wrong_shapes_dtypes_and_layers_are_named(rng: np.random.Generator) -> None:
    case = make_case(rng, Problem())
    with pytest.raises(ValueError, match=r"slots.a has shape \(2, 6, 24, 64\), but x \(7, 32\)"):
        run(dataclasses.replace(case, x=case.x[:, :32]), "loop")
    with pytest.raises(ValueError, match=r"base has shape \(7, 127\)"):
        run(dataclasses.replace(case, base=case.base[:, :127]), "loop")
    weights = jnp.concatenate([case.segments.weights] * 2, 1)
    with pytest.raises(ValueError, match="has 2 gates, but a group of 3 projections needs 1"):
        run(dataclasses.replace(case, segments=case.segments.with_weights(weights)), "loop")
    with pytest.raises(ValueError, match="layer 2 is out of range: the slot array has 2 layers"):
        run(case, "loop", layer=2)
    with pytest.raises(TypeError, match=r"slots\.a is float32, but x is bfloat16"):
        run(dataclasses.replace(case, x=case.x.astype(jnp.bfloat16)), "loop")
    with pytest.raises(TypeError, match="x is float16; expected float32 or bfloat16"):
        run(dataclasses.replace(case, x=case.x.astype(jnp.float16)), "loop")


def test_values_that_the_kernels_rely_on_are_checked(rng: np.random.Generator) -> None:
    case = make_case(rng, Problem(), mix_matrix(rng, "identical", 7, 6))
    outside = case.segments.with_weights(case.segments.weights.at[0, 0, 5].set(1))
    with pytest.raises(ValueError, match=r"slots \[5\] have weights in tile 0, but its segments are \[0, 1\]"):
        dynamic_validate(case.slots, outside, 0)
    descending = dataclasses.replace(case.segments, slot_ids=case.segments.slot_ids[:, ::-1])
    with pytest.raises(ValueError, match="must ascend"):
        dynamic_validate(case.slots, descending, 0)
    broken = dataclasses.replace(case.slots, b=case.slots.b.at[0, 1, 0, 0].set(jnp.inf))
    with pytest.raises(ValueError, match=r"slots\.b of slot 1, layer 0, has a segment and holds NaN or infinity"):
        dynamic_validate(broken, case.segments, 0)
