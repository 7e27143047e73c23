"""Every implementation of lora_linear and lora_swiglu against the float32 reference.

The kernel runs compiled on a GPU and interpreted on a CPU. Slots that no segment uses hold NaN, and the counters of
other sites hold numbers that must stay; `tests.support.linear_cases.run` checks those in every test.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lora_linear import Implementation, lora_linear, lora_swiglu, new_arrivals
from pallas_kernels.lora_linear import config as linear_config
from pallas_kernels.lora_linear.arrivals import ARRIVALS_PER_SITE
from pallas_kernels.lora_linear.config import KernelConfig, pick_config
from pallas_kernels.lora_linear.tune import is_valid
from pallas_kernels.maf_mvm import ProjectionSlots
from pallas_kernels.maf_mvm.checks import dynamic_validate
from pallas_kernels.segments import build_segments
from tests.support.linear_cases import (
    SITE,
    LinearCase,
    as_float32,
    assert_matches_reference,
    assert_same_bits,
    bfloat16_problem,
    make_full_case,
    make_linear_case,
    run,
    total,
    with_mixes,
)
from tests.support.maf_cases import ALL_MIXES, Mixes, mix_matrix
from tests.support.tolerances import assert_close

pytestmark = [
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
    *([pytest.mark.gpu] if jax.default_backend() == "gpu" else []),  # there the same cases run the compiled kernels
]


def slow(*values: Any) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


IMPLEMENTATIONS: tuple[Implementation, ...] = ("separate", "pallas_triton")
GATE_UP = (32, 32)
SPLIT_CONFIG = KernelConfig(
    columns=32,
    depth=16,
    splits=2,
    tail_rows=16,
    shrink_rows=16,
    shrink_columns=16,
    shrink_splits=2,
    shrink_programs=5,
    shrink_unroll=2,
    num_stages=2,
    num_warps=4,
)
"""Of the default problem: two partial sums, and programs that do several jobs."""

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
each_op = pytest.mark.parametrize("is_swiglu", [False, True], ids=["linear", "swiglu"])
mostly_linear = pytest.mark.parametrize("is_swiglu", [False, *slow(True)], ids=["linear", "swiglu"])


def widths_of(is_swiglu: bool) -> tuple[int, ...]:
    return GATE_UP if is_swiglu else (64, 32, 32)


# What the op means


def test_the_reference_is_the_base_product_and_a_loop_over_tokens_and_slots(rng: np.random.Generator) -> None:
    case = make_linear_case(rng, bfloat16_problem(dtype=jnp.float32, num_gates=3))
    assert case.segments is not None
    x, w, weights = (np.asarray(array, np.float64) for array in (case.x, case.w, case.segments.weights))
    a, b, scale = (np.asarray(array, np.float64)[1] for array in (case.slots.a, case.slots.b, case.slots.scale))
    expected = x @ w
    for t, s, (p, columns) in itertools.product(range(7), range(6), enumerate(case.slots.column_slices)):
        if weights[t, p, s]:
            u = x[t] @ a[s, p * 8 : (p + 1) * 8].T
            expected[t, columns] += weights[t, p, s] * scale[s, p] * (u @ b[s][:, columns])
    assert_close(run(case, "reference")[0], expected)


def test_the_reference_of_swiglu_is_silu_of_the_gate_times_up(rng: np.random.Generator) -> None:
    case = make_linear_case(rng, bfloat16_problem(dtype=jnp.float32, widths=GATE_UP))
    gate, up = np.split(np.asarray(run(case, "reference")[0], np.float64), 2, axis=1)
    assert_close(run(case, "reference", is_swiglu=True), gate / (1 + np.exp(-gate)) * up)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("mixes", ALL_MIXES)
@each_op
def test_separate_launches_match_the_reference(
    rng: np.random.Generator, dtype: jnp.dtype, mixes: Mixes, is_swiglu: bool
) -> None:
    problem = bfloat16_problem(dtype=dtype, widths=widths_of(is_swiglu))
    assert_matches_reference(
        make_linear_case(rng, problem, mix_matrix(rng, mixes, 7, 6)), "separate", is_swiglu=is_swiglu
    )


@pytest.mark.parametrize("mixes", ALL_MIXES)
@each_op
def test_every_distribution_of_adapters_matches_the_reference(
    rng: np.random.Generator, mixes: Mixes, is_swiglu: bool
) -> None:
    problem = bfloat16_problem(widths=widths_of(is_swiglu))
    assert_matches_reference(make_linear_case(rng, problem, mix_matrix(rng, mixes, 7, 6)), is_swiglu=is_swiglu)


@pytest.mark.parametrize("num_tokens", [1, *slow(2, 3, 16, 33), 64])
@mostly_linear
def test_every_number_of_tokens_matches_the_reference(
    rng: np.random.Generator, num_tokens: int, is_swiglu: bool
) -> None:
    problem = bfloat16_problem(num_tokens=num_tokens, widths=widths_of(is_swiglu))
    assert_matches_reference(make_linear_case(rng, problem), is_swiglu=is_swiglu)


@pytest.mark.parametrize("slot_rank", slow(1, 2, 4, 16, 32))
def test_every_slot_rank_matches_the_reference(rng: np.random.Generator, slot_rank: int) -> None:
    problem = bfloat16_problem(slot_rank=slot_rank, num_slots=3)
    assert_matches_reference(make_linear_case(rng, problem))


@pytest.mark.parametrize("num_slots", [*slow(1, 2, 5), 20])
@pytest.mark.parametrize("slot_rank", [*slow(4, 8), 16])
def test_every_number_of_slots_matches_the_reference(rng: np.random.Generator, num_slots: int, slot_rank: int) -> None:
    weights = mix_matrix(rng, "zipf", 7, num_slots, mix_size=min(2, num_slots))
    problem = bfloat16_problem(num_slots=num_slots, slot_rank=slot_rank)
    assert_matches_reference(make_linear_case(rng, problem, weights))


@pytest.mark.parametrize("widths", [*slow((64,), (16, 16, 16, 16)), (32, 16)])
def test_every_group_of_projections_matches_the_reference(rng: np.random.Generator, widths: tuple[int, ...]) -> None:
    assert_matches_reference(make_linear_case(rng, bfloat16_problem(widths=widths, in_features=96)))


@pytest.mark.parametrize("implementation", [*slow("separate"), "pallas_triton"])
@mostly_linear
def test_gates_per_projection_match_the_reference(
    rng: np.random.Generator, implementation: Implementation, is_swiglu: bool
) -> None:
    widths = widths_of(is_swiglu)
    case = make_linear_case(rng, bfloat16_problem(num_gates=len(widths), widths=widths))
    assert case.segments is not None
    # A slot may serve some of a token's projections only.
    weights = case.segments.weights.at[2, 1].set(0).at[:, 1, 4].set(0)
    case = dataclasses.replace(case, segments=case.segments.with_weights(weights))
    assert_matches_reference(case, implementation, is_swiglu=is_swiglu)


# Who gets what


@pytest.mark.parametrize("implementation", [*slow("separate"), "pallas_triton"])
@mostly_linear
def test_every_pattern_of_empty_segments_matches_the_reference(
    rng: np.random.Generator, implementation: Implementation, is_swiglu: bool
) -> None:
    full = make_full_case(rng, bfloat16_problem(num_slots=3, slot_rank=4, widths=widths_of(is_swiglu)))
    assert full.segments is not None
    for pattern in itertools.product([False, True], repeat=3):
        case = with_mixes(full, np.where(pattern, full.segments.weights, 0))
        assert_matches_reference(case, implementation, is_swiglu=is_swiglu)


@each_implementation
@each_op
@pytest.mark.parametrize("num_tokens", [7, pytest.param(16, marks=pytest.mark.slow)])
def test_a_batch_without_pairs_has_the_bits_of_one_without_segments(
    rng: np.random.Generator, implementation: Implementation, is_swiglu: bool, num_tokens: int
) -> None:
    problem = bfloat16_problem(num_tokens=num_tokens, widths=widths_of(is_swiglu))
    case = make_linear_case(rng, problem, np.zeros((num_tokens, 1, 6), np.float32))
    assert np.isnan(np.asarray(case.slots.a, np.float32)).all()
    base = dataclasses.replace(case, segments=None)
    assert_same_bits(run(case, implementation, is_swiglu=is_swiglu), run(base, implementation, is_swiglu=is_swiglu))
    assert_matches_reference(base, implementation, is_swiglu=is_swiglu)


@pytest.mark.parametrize("config", [None, SPLIT_CONFIG], ids=["whole", "split"])
def test_tokens_without_pairs_get_the_bits_of_the_base_whatever_their_neighbours_do(
    rng: np.random.Generator, config: KernelConfig | None
) -> None:
    full = make_full_case(rng, bfloat16_problem())
    base = run(dataclasses.replace(full, segments=None), config=config)
    for mixes in ALL_MIXES:
        weights = mix_matrix(rng, mixes, 7, 6)
        weights[[0, 3, 6]] = 0
        y = run(with_mixes(full, weights), config=config)
        for token in (0, 3, 6):
            assert_same_bits(y[:, token], base[:, token])
        for token in (1, 2, 4, 5):
            assert not np.array_equal(total(y)[token], total(base)[token])


def test_swiglu_of_tokens_without_pairs_has_the_bits_of_the_base(rng: np.random.Generator) -> None:
    full = make_full_case(rng, bfloat16_problem(widths=GATE_UP))
    base = run(dataclasses.replace(full, segments=None), is_swiglu=True)
    weights = mix_matrix(rng, "uniform", 7, 6)
    weights[[0, 3, 6]] = 0
    y = run(with_mixes(full, weights), is_swiglu=True)
    for token in (0, 3, 6):
        assert_same_bits(y[token], base[token])


@each_implementation
@pytest.mark.parametrize("value", [np.inf, np.nan], ids=["inf", "nan"])
@each_op
def test_a_token_that_is_not_finite_poisons_no_other(
    rng: np.random.Generator, implementation: Implementation, value: float, is_swiglu: bool
) -> None:
    case = make_linear_case(rng, bfloat16_problem(widths=widths_of(is_swiglu)), mix_matrix(rng, "identical", 7, 6))
    sound = total(run(case, implementation, is_swiglu=is_swiglu))
    # The last one too: what stands for the padding of the tile.
    broken = dataclasses.replace(case, x=case.x.at[2].set(value).at[6].set(value))
    y = total(run(broken, implementation, is_swiglu=is_swiglu))
    others = jnp.asarray([0, 1, 3, 4, 5])
    assert_same_bits(y[others], sound[others])
    assert not np.isfinite(np.asarray(y[jnp.asarray([2, 6])], np.float32)).any()


@pytest.mark.parametrize("config", [*slow(None), SPLIT_CONFIG], ids=["whole", "split"])
def test_a_one_hot_mix_equals_the_adapter_served_alone_bit_for_bit(
    rng: np.random.Generator, config: KernelConfig | None
) -> None:
    full = make_full_case(rng, bfloat16_problem())
    for slot in range(6):
        weights = np.zeros((7, 1, 6), np.float32)
        weights[:, 0, slot] = 1
        slots = jax.tree.map(lambda array, slot=slot: array[:, slot : slot + 1], full.slots)
        segments = build_segments(jnp.ones((7, 1, 1)), tile_size=16)
        alone = dataclasses.replace(full, slots=slots, segments=segments)
        assert_same_bits(run(with_mixes(full, weights), config=config), run(alone, config=config))


def test_a_slot_that_a_gate_switched_off_adds_nothing(rng: np.random.Generator) -> None:
    # The segments keep every expert of the gated set; this layer's gate gives token 2 a weight for slot 1 alone.
    case = make_linear_case(rng, bfloat16_problem(), mix_matrix(rng, "identical", 7, 6, mix_size=3))
    assert case.segments is not None
    weights = jnp.zeros_like(case.segments.weights).at[2, 0, 1].set(0.5)
    y = run(dataclasses.replace(case, segments=case.segments.with_weights(weights)))
    alone = np.zeros((7, 1, 6), np.float32)
    alone[2, 0, 1] = 0.5
    assert_close(total(y), total(run(as_float32(with_mixes(case, alone)), "reference")), jnp.bfloat16)
    base = run(dataclasses.replace(case, segments=None))
    assert_same_bits(y[:, :2], base[:, :2])


# Bits


@each_implementation
@each_op
def test_the_same_input_twice_gives_the_same_bits(
    rng: np.random.Generator, implementation: Implementation, is_swiglu: bool
) -> None:
    case = make_linear_case(rng, bfloat16_problem(widths=widths_of(is_swiglu)))
    assert_same_bits(run(case, implementation, is_swiglu=is_swiglu), run(case, implementation, is_swiglu=is_swiglu))


def test_tokens_in_another_order_get_the_same_bits(rng: np.random.Generator) -> None:
    case = make_linear_case(rng, bfloat16_problem())
    assert case.segments is not None
    order = rng.permutation(7)
    segments = build_segments(case.segments.weights[order], tile_size=16)
    shuffled = dataclasses.replace(case, x=case.x[order], segments=segments)
    for config in (None, SPLIT_CONFIG):
        assert_same_bits(run(shuffled, config=config), run(case, config=config)[:, order])


@mostly_linear
def test_a_traced_layer_and_site_equal_static_ones(rng: np.random.Generator, is_swiglu: bool) -> None:
    case = make_linear_case(rng, bfloat16_problem(widths=widths_of(is_swiglu)))
    case = dataclasses.replace(case, arrivals=jnp.zeros_like(case.arrivals))
    traced = jax.jit(lambda layer, site: run(case, is_swiglu=is_swiglu, layer=layer, site=site))
    layers = [run(case, is_swiglu=is_swiglu, layer=layer) for layer in (0, 1)]
    assert not np.array_equal(layers[0], layers[1])
    for layer, site in itertools.product((0, 1), (0, 2)):
        assert_same_bits(traced(jnp.int32(layer), jnp.int32(site)), layers[layer])
        assert_same_bits(run(case, is_swiglu=is_swiglu, layer=layer, site=site), layers[layer])


# Partial sums and block sizes


@pytest.mark.parametrize("splits", [*slow(1), 2, *slow(4)])
def test_partial_sums_are_float32_and_add_up_to_y(rng: np.random.Generator, splits: int) -> None:
    whole = make_linear_case(rng, bfloat16_problem())
    config = dataclasses.replace(SPLIT_CONFIG, splits=splits)
    for case in (whole, dataclasses.replace(whole, segments=None)):
        y = run(case, config=config)
        assert y.shape == (splits, 7, 128)
        assert y.dtype == (jnp.bfloat16 if splits == 1 else jnp.float32)
        assert_close(total(y), total(run(as_float32(case), "reference")), jnp.bfloat16)


def random_config(rng: np.random.Generator, problem: linear_config.Problem) -> KernelConfig:
    """Block sizes that the kernel can run, of every kind: also larger than there are rank rows."""
    while True:
        config = KernelConfig(
            columns=int(rng.choice([16, 32])),
            depth=int(rng.choice([16, 32])),
            splits=int(rng.choice([1, 2, 3, 4])),
            tail_rows=int(rng.choice([16, 32, 64, 128])),
            shrink_rows=int(rng.choice([16, 32, 64])),
            shrink_columns=int(rng.choice([16, 32])),
            shrink_splits=int(rng.integers(1, 9)),
            shrink_programs=int(rng.choice([1, 2, 3, 5, 8, 132])),
            shrink_unroll=int(rng.choice([1, 2, 4])),
            num_stages=2,
            num_warps=4,
        )
        if is_valid(config, problem):
            return config


@pytest.mark.parametrize("seed", [*range(2), *slow(*range(2, 48))])
def test_every_choice_of_block_sizes_gives_the_result_of_the_reference(rng: np.random.Generator, seed: int) -> None:
    is_swiglu = seed % 3 == 2
    widths = GATE_UP if is_swiglu else ((64,), (32, 32), (64, 32, 32))[rng.integers(3)]
    problem = bfloat16_problem(
        num_tokens=int(rng.choice([1, 5, 16, 20])),
        num_slots=int(rng.choice([1, 3, 6, 13])),
        slot_rank=int(rng.choice([4, 8, 16])),
        in_features=int(rng.choice([64, 96, 128])),
        widths=widths,
        num_gates=int(rng.choice([1, len(widths)])),
        num_layers=2,
    )
    full = make_full_case(rng, problem)
    rows = problem.num_slots * problem.slot_rank
    config = random_config(rng, linear_config.Problem(32, rows, problem.in_features, widths, is_swiglu))
    max_segments = int(rng.integers(1, problem.num_slots + 1))
    promise = max_segments if seed % 2 else None
    # One compile, batches that use from none to all of the slots.
    for num_used in sorted({0, 1, max_segments, problem.num_slots if promise is None else max_segments}):
        weights = rng.uniform(-1, 1, (problem.num_tokens, problem.num_gates, problem.num_slots)).astype(np.float32)
        weights[:, :, rng.permutation(problem.num_slots)[num_used:]] = 0
        weights[rng.random(weights.shape) < 0.3] = 0
        case = with_mixes(full, weights, promise)
        assert case.segments is not None
        dynamic_validate(case.slots, case.segments, 1)
        assert_matches_reference(case, is_swiglu=is_swiglu, config=config)


def test_a_promise_of_few_segments_changes_no_bits(rng: np.random.Generator) -> None:
    full = make_full_case(rng, bfloat16_problem())
    for num_used in (0, 2, 3):
        weights = np.asarray(mix_matrix(rng, "identical", 7, 6, mix_size=num_used))[:, :, ::-1]
        few, any_number = with_mixes(full, weights, max_segments=3), with_mixes(full, weights)
        assert_same_bits(run(few, config=SPLIT_CONFIG), run(any_number, config=SPLIT_CONFIG))


def test_a_chain_of_sites_counts_each_in_its_own_row(rng: np.random.Generator) -> None:
    case = make_linear_case(rng, bfloat16_problem(widths=(64,)))

    @jax.jit
    def chain(x: jax.Array, arrivals: jax.Array) -> tuple[jax.Array, jax.Array]:
        for site, layer in enumerate((0, 1)):
            x, arrivals = lora_linear(
                x, case.w, case.slots, case.segments, arrivals, layer=layer, site=site, implementation="pallas_triton"
            )
            x = total(x).astype(jnp.bfloat16)
        return x, arrivals

    y, arrivals = chain(case.x, new_arrivals(4))
    one_by_one = case
    for layer in (0, 1):
        x = total(run(one_by_one, layer=layer)).astype(jnp.bfloat16)
        one_by_one = dataclasses.replace(one_by_one, x=x)
    assert_same_bits(y, one_by_one.x)
    arrivals = np.asarray(arrivals)
    assert arrivals[0].any()
    assert (arrivals[1] == arrivals[0]).all()
    assert not arrivals[2:].any()


# Which implementation, and what it refuses


@each_op
def test_none_picks_separate_launches_on_a_cpu(rng: np.random.Generator, is_swiglu: bool) -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU picks the kernel")
    case = make_linear_case(rng, bfloat16_problem(widths=widths_of(is_swiglu)))
    assert_same_bits(run(case, None, is_swiglu=is_swiglu), run(case, "separate", is_swiglu=is_swiglu))


@each_op
def test_none_falls_back_to_separate_launches_where_the_kernel_refuses(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, is_swiglu: bool
) -> None:
    monkeypatch.setattr("pallas_kernels.lora_linear.api._pick", lambda: "pallas_triton")
    widths = widths_of(is_swiglu)
    case = make_linear_case(rng, bfloat16_problem(widths=widths))
    assert_same_bits(run(case, None, is_swiglu=is_swiglu), run(case, "pallas_triton", is_swiglu=is_swiglu))
    case = make_linear_case(rng, bfloat16_problem(widths=widths, dtype=jnp.float32))
    assert_same_bits(run(case, None, is_swiglu=is_swiglu), run(case, "separate", is_swiglu=is_swiglu))


@pytest.mark.usefixtures("unchecked_annotations")
@each_op
def test_separate_launches_call_the_named_maf_mvm(rng: np.random.Generator, is_swiglu: bool) -> None:
    case = make_linear_case(rng, bfloat16_problem(widths=widths_of(is_swiglu)))
    with pytest.raises(ValueError, match="implementation 'abacus' is unknown"):
        _call(case, is_swiglu, implementation="separate", maf_implementation="abacus")
    dense, _ = _call(case, is_swiglu, implementation="separate", maf_implementation="dense")
    expected = run(as_float32(case), "reference", is_swiglu=is_swiglu)
    assert_close(total(dense), total(expected), jnp.bfloat16)


@pytest.mark.usefixtures("unchecked_annotations")
@each_op
def test_an_unknown_implementation_is_named(rng: np.random.Generator, is_swiglu: bool) -> None:
    case = make_linear_case(rng, bfloat16_problem(widths=widths_of(is_swiglu)))
    with pytest.raises(ValueError, match=r"'abacus' is unknown; expected .*, 'pallas_triton' or 'pallas_mosaic'"):
        _call(case, is_swiglu, implementation="abacus")


def _call(case: LinearCase, is_swiglu: bool, **kwargs: Any) -> Any:
    op = lora_swiglu if is_swiglu else lora_linear
    return op(case.x, case.w, case.slots, case.segments, case.arrivals, layer=1, site=SITE, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dtype": jnp.float32}, "x is float32; the kernel multiplies bfloat16 only; use 'separate'"),
        ({"num_tokens": 20, "tile_size": 16}, "20 tokens make 2 tiles; one launch takes one tile"),
        ({"slot_rank": 6}, "slot_rank 6 is not supported; use a power of two such as 8 or 16"),
        ({"num_tokens": 65, "tile_size": 128}, "128 tokens are not supported; at most 64 fit one launch"),
        ({"in_features": 72}, "in_features 72 is not supported; it must be a multiple of 16"),
        ({"widths": (72, 72)}, "width 72 is not supported; it must be a multiple of 16"),
        ({"tile_size": 8}, "tile_size 8 of the segments is not supported; use 16, 32 or 64"),
        ({"tile_size": 24}, "tile_size 24 of the segments is not supported"),
    ],
)
def test_what_one_launch_does_not_support_is_refused_by_the_kernel_alone(
    rng: np.random.Generator, kwargs: dict[str, Any], message: str
) -> None:
    case = make_linear_case(rng, bfloat16_problem(**{"widths": GATE_UP} | kwargs))
    for is_swiglu in (False, True):
        with pytest.raises(NotImplementedError, match=message):
            run(case, is_swiglu=is_swiglu)
    assert jax.eval_shape(lambda: run(case, "separate")).shape == (1, case.x.shape[0], case.w.shape[1])


def test_more_tokens_than_a_launch_takes_are_refused_without_segments_too(rng: np.random.Generator) -> None:
    case = dataclasses.replace(make_linear_case(rng, bfloat16_problem(num_tokens=65)), segments=None)
    with pytest.raises(NotImplementedError, match="128 tokens are not supported"):
        run(case)
    assert_matches_reference(case, "separate")


def test_more_blocks_of_rank_rows_than_a_site_counts_are_refused() -> None:
    def structs(num_slots: int, max_segments: int | None) -> Any:
        def build(key: jax.Array) -> LinearCase:
            slots = ProjectionSlots(
                a=jnp.zeros((1, num_slots, 8, 16), jnp.bfloat16),
                b=jnp.zeros((1, num_slots, 8, 16), jnp.bfloat16),
                scale=jnp.zeros((1, num_slots, 1)),
                widths=(16,),
            )
            segments = build_segments(jnp.zeros((4, 1, num_slots)), tile_size=16, max_segments=max_segments)
            x, w = jnp.zeros((4, 16), jnp.bfloat16), jnp.zeros((16, 16), jnp.bfloat16)
            return LinearCase(x, w, slots, segments, new_arrivals(3))

        return jax.eval_shape(build, jax.random.key(0))

    def shape_of(num_slots: int, implementation: Implementation, max_segments: int | None = None) -> Any:
        case = structs(num_slots, max_segments)
        return jax.eval_shape(lambda case: run(case, implementation, layer=0), case).shape

    most = ARRIVALS_PER_SITE * pick_config(linear_config.Problem(16, 1 << 14, 16, (16,), False)).shrink_rows
    num_slots = most // 8
    assert shape_of(num_slots * 7 // 8, "pallas_triton") == (1, 4, 16)
    message = f"{num_slots} slots of rank 8 make {ARRIVALS_PER_SITE} blocks of rank rows, but one launch counts fewer"
    with pytest.raises(NotImplementedError, match=message):
        shape_of(num_slots, "pallas_triton")
    assert shape_of(num_slots, "pallas_triton", max_segments=12) == (1, 4, 16)
    assert shape_of(num_slots, "separate") == (1, 4, 16)


def test_swiglu_refuses_a_configuration_that_splits_its_sums(rng: np.random.Generator) -> None:
    case = make_linear_case(rng, bfloat16_problem(widths=GATE_UP))
    with pytest.raises(NotImplementedError, match="SwiGLU needs whole sums, but the configuration has 2 splits"):
        run(case, is_swiglu=True, config=SPLIT_CONFIG)


@pytest.mark.usefixtures("unchecked_annotations")
def test_wrong_shapes_dtypes_layers_and_sites_are_named(rng: np.random.Generator) -> None:
    case = make_linear_case(rng, bfloat16_problem())
    base = dataclasses.replace(case, segments=None)
    replace = dataclasses.replace
    float32 = case.x.astype(jnp.float32)
    half, half_w = case.x.astype(jnp.float16), case.w.astype(jnp.float16)
    for implementation in ("reference", *IMPLEMENTATIONS):
        for broken in (case, base):
            with pytest.raises(ValueError, match=r"w has shape \(64, 127\), but x \(7, 64\) and projections of widths"):
                run(replace(broken, w=case.w[:, :127]), implementation)
            with pytest.raises(ValueError, match=r"w has shape \(64, 128\), but x \(7, 32\)"):
                run(replace(broken, x=case.x[:, :32]), implementation)
            with pytest.raises(TypeError, match="w is bfloat16, but x is float32; expected the same dtype"):
                run(replace(broken, x=float32), implementation)
            with pytest.raises(TypeError, match="x is float16; expected float32 or bfloat16"):
                run(replace(broken, x=half, w=half_w), implementation)
            with pytest.raises(ValueError, match="layer 2 is out of range: the slot array has 2 layers"):
                run(broken, implementation, layer=2)
            with pytest.raises(ValueError, match="site 3 is out of range: arrivals has rows for 3 sites"):
                run(broken, implementation, site=3)
            with pytest.raises(ValueError, match=r"arrivals has shape \(3, 8\); .* from new_arrivals"):
                run(replace(broken, arrivals=case.arrivals[:, :8]), implementation)
            with pytest.raises(TypeError, match="arrivals is float32; expected int32"):
                run(replace(broken, arrivals=case.arrivals.astype(jnp.float32)), implementation)
        slots = replace(case.slots, a=case.slots.a[:, :, :16])
        with pytest.raises(ValueError, match=r"slots.a has shape \(2, 6, 16, 64\), but x \(7, 64\)"):
            run(replace(case, slots=slots), implementation)
        with pytest.raises(TypeError, match=r"slots\.b is float32, but x is bfloat16"):
            run(replace(case, slots=replace(case.slots, b=case.slots.b.astype(jnp.float32))), implementation)


def test_swiglu_wants_two_projections_of_equal_width(rng: np.random.Generator) -> None:
    for widths in ((64, 32), (32,), (32, 32, 32)):
        case = make_linear_case(rng, bfloat16_problem(widths=widths))
        with pytest.raises(ValueError, match=r"widths \(.*\); expected two of equal width, gate and up"):
            run(case, is_swiglu=True)
