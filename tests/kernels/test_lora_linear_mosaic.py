"""The Mosaic kernels of lora_linear against the float32 reference, interpreted on a CPU, compiled on a GPU.

Slots that no segment uses hold NaN. Interpretation takes seconds a case: the fast loop has one of each kind.
"""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.lora_linear import lora_linear, lora_swiglu, pallas_mosaic, tune
from pallas_kernels.lora_linear.mosaic_config import MosaicConfig, MosaicProblem, pick_config
from pallas_kernels.maf_mvm.shapes import GROUPS, Group, named_shapes
from pallas_kernels.segments import Segments, build_segments
from tests.support.linear_cases import (
    LinearCase,
    as_float32,
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

is_gpu = jax.default_backend() == "gpu"
pytestmark = [pytest.mark.gpu] if is_gpu else []
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not is_gpu, reason="needs a GPU")]
GATE_UP = (32, 32)
SPLIT_CONFIG = MosaicConfig(
    columns=32, depth=32, buffers=2, splits=2, shrink_splits=2, shrink_depth=32, shrink_buffers=2
)
"""For 128 input features: two partial sums of two steps, two shares of v, blocks of 16 rank rows."""


def slow(*values: Any) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def run_mosaic(case: LinearCase, *, is_swiglu: bool = False, config: MosaicConfig | None = None) -> jax.Array:
    op = pallas_mosaic.lora_swiglu if is_swiglu else pallas_mosaic.lora_linear
    return op(case.x, case.w, case.slots, case.segments, jnp.int32(1), config=config)


def assert_matches_reference(case: LinearCase, *, is_swiglu: bool = False, config: MosaicConfig | None = None) -> None:
    y = run_mosaic(case, is_swiglu=is_swiglu, config=config)
    assert y.dtype == (jnp.bfloat16 if y.ndim == 2 or len(y) == 1 else jnp.float32)
    expected = run(as_float32(case), "reference", is_swiglu=is_swiglu)
    assert_close(total(y), total(expected), jnp.bfloat16)


def base_of(case: LinearCase) -> LinearCase:
    return dataclasses.replace(case, segments=None)


# Results


@pytest.mark.parametrize("mixes", ["uniform", *slow("identical", "distinct", "zipf", "skewed")])
def test_three_projections_in_partial_sums_match_the_reference(rng: np.random.Generator, mixes: Mixes) -> None:
    problem = bfloat16_problem(in_features=128)
    case = make_linear_case(rng, problem, mix_matrix(rng, mixes, 7, 6))
    assert_matches_reference(case, config=SPLIT_CONFIG)


@pytest.mark.parametrize("mixes", ["distinct", *slow("identical", "uniform", "zipf", "skewed")])
def test_swiglu_matches_the_reference(rng: np.random.Generator, mixes: Mixes) -> None:
    problem = bfloat16_problem(widths=GATE_UP)
    case = make_linear_case(rng, problem, mix_matrix(rng, mixes, 7, 6))
    assert_matches_reference(case, is_swiglu=True)


@pytest.mark.parametrize("num_tokens", slow(1, 8, 33, 64))
def test_every_number_of_tokens_matches_the_reference(rng: np.random.Generator, num_tokens: int) -> None:
    case = make_linear_case(rng, bfloat16_problem(num_tokens=num_tokens, in_features=128))
    assert_matches_reference(case, config=SPLIT_CONFIG)


@pytest.mark.parametrize("slot_rank", slow(16, 24, 32, 64))
def test_every_slot_rank_matches_the_reference(rng: np.random.Generator, slot_rank: int) -> None:
    case = make_linear_case(rng, bfloat16_problem(slot_rank=slot_rank, num_slots=3, in_features=128))
    assert_matches_reference(case, config=SPLIT_CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize("is_swiglu", [False, True])
def test_gates_per_projection_match_the_reference(rng: np.random.Generator, is_swiglu: bool) -> None:
    widths = GATE_UP if is_swiglu else (64, 32, 32)
    case = make_linear_case(rng, bfloat16_problem(widths=widths, num_gates=len(widths)))
    assert case.segments is not None
    # A slot may serve some of a token's projections only.
    weights = case.segments.weights.at[2, 1].set(0).at[:, 1, 4].set(0)
    case = dataclasses.replace(case, segments=case.segments.with_weights(weights))
    assert_matches_reference(case, is_swiglu=is_swiglu)


@pytest.mark.slow
@pytest.mark.parametrize("config", [None, SPLIT_CONFIG], ids=["picked", "split"])
def test_a_promise_of_few_segments_changes_no_bit(rng: np.random.Generator, config: MosaicConfig | None) -> None:
    full = make_full_case(rng, bfloat16_problem(num_slots=12, in_features=128))
    weights = np.zeros((7, 1, 12), np.float32)
    weights[:, 0, [3, 11]] = rng.uniform(0.5, 1, (7, 2))
    promised = run_mosaic(with_mixes(full, weights, max_segments=2), config=config)
    assert_same_bits(promised, run_mosaic(with_mixes(full, weights), config=config))


# Who gets what


@pytest.mark.parametrize("is_swiglu", [False, *slow(True)], ids=["linear", "swiglu"])
def test_a_batch_without_pairs_has_the_bits_of_one_without_segments(rng: np.random.Generator, is_swiglu: bool) -> None:
    problem = bfloat16_problem(widths=GATE_UP)
    case = make_linear_case(rng, problem, np.zeros((7, 1, 6), np.float32))
    assert np.isnan(np.asarray(case.slots.a, np.float32)).all()
    base = run_mosaic(base_of(case), is_swiglu=is_swiglu)
    assert_same_bits(run_mosaic(case, is_swiglu=is_swiglu), base)
    expected = run(as_float32(base_of(case)), "reference", is_swiglu=is_swiglu)
    assert_close(total(base), total(expected), jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("is_swiglu", [False, True], ids=["linear", "swiglu"])
def test_tokens_without_pairs_get_the_bits_of_the_base(rng: np.random.Generator, is_swiglu: bool) -> None:
    problem = bfloat16_problem(in_features=128, widths=GATE_UP)
    config = dataclasses.replace(SPLIT_CONFIG, splits=1 if is_swiglu else 2)
    full = make_full_case(rng, problem)
    base = total(run_mosaic(base_of(full), is_swiglu=is_swiglu, config=config))
    for mixes in ("identical", "zipf"):
        weights = mix_matrix(rng, mixes, 7, 6)
        weights[[0, 3, 6]] = 0
        y = total(run_mosaic(with_mixes(full, weights), is_swiglu=is_swiglu, config=config))
        for token in (0, 3, 6):
            assert_same_bits(y[token], base[token])
        for token in (1, 2, 4, 5):
            assert not np.array_equal(y[token], base[token])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("value", [np.inf, np.nan], ids=["inf", "nan"])
def test_a_token_that_is_not_finite_poisons_no_other(rng: np.random.Generator, value: float) -> None:
    case = make_linear_case(rng, bfloat16_problem(), mix_matrix(rng, "identical", 7, 6))
    sound = run_mosaic(case)[0]
    y = run_mosaic(dataclasses.replace(case, x=case.x.at[2].set(value).at[6].set(value)))[0]
    others = jnp.asarray([0, 1, 3, 4, 5])
    assert_same_bits(y[others], sound[others])
    assert not np.isfinite(np.asarray(y[jnp.asarray([2, 6])], np.float32)).any()


@pytest.mark.slow
def test_a_one_hot_mix_equals_the_adapter_served_alone_bit_for_bit(rng: np.random.Generator) -> None:
    full = make_full_case(rng, bfloat16_problem(in_features=128))
    for slot in (0, 5):
        weights = np.zeros((7, 1, 6), np.float32)
        weights[:, 0, slot] = 1
        slots = jax.tree.map(lambda array, slot=slot: array[:, slot : slot + 1], full.slots)
        alone = dataclasses.replace(full, slots=slots, segments=build_segments(jnp.ones((7, 1, 1)), tile_size=16))
        y = run_mosaic(with_mixes(full, weights), config=SPLIT_CONFIG)
        assert_same_bits(y, run_mosaic(alone, config=SPLIT_CONFIG))


@pytest.mark.slow
def test_every_pattern_of_empty_segments_matches_the_reference(rng: np.random.Generator) -> None:
    full = make_full_case(rng, bfloat16_problem(num_slots=3))
    assert full.segments is not None
    for pattern in ([True, False, False], [False, True, False], [False, False, True], [True, False, True]):
        assert_matches_reference(with_mixes(full, np.where(pattern, full.segments.weights, 0)))


@pytest.mark.slow
@pytest.mark.skipif(is_gpu, reason="needs the interpreter")
def test_the_interpreter_finds_no_race_in_shared_memory(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(pallas_mosaic, "interpret_args", lambda _: {"interpret": params})
    launches: tuple[Any, ...] = (pallas_mosaic._launch_shrink, pallas_mosaic._launch_site)
    for launch in launches:
        launch.clear_cache()
    for is_swiglu in (False, True):
        run_mosaic(make_linear_case(rng, bfloat16_problem(widths=GATE_UP)), is_swiglu=is_swiglu)
        assert not gpu_callbacks.get_races().races_found
    for launch in launches:
        launch.clear_cache()


@pytest.mark.skipif(is_gpu, reason="needs the interpreter")
def test_every_fetch_starts_at_a_multiple_of_16_bytes(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one does not, a GPU reports an illegal instruction; the interpreter would let it pass."""
    task, starts = gpu_callbacks.AsyncCopyGmemToSmemTask, []

    def start(self: Any, tma_thread_id: int, shared_memory: Any) -> None:
        _, dtype = shared_memory.buffer_shape_and_dtype(self.src_allocation_key)
        columns = self.src_access.range[-1]
        starts.append(columns.start * np.dtype(dtype).itemsize)

    monkeypatch.setattr(task, "pre_read", start)
    weights = np.zeros((7, 1, 12), np.float32)
    weights[:, 0, [1, 3, 10, 11]] = 1
    assert_matches_reference(make_linear_case(rng, bfloat16_problem(num_slots=12), weights))
    assert max(starts) > 16
    assert not any(start % 16 for start in starts)


@pytest.mark.parametrize("has_segments", [False, *slow(True)])
@pytest.mark.parametrize("is_swiglu", [False, True], ids=["linear", "swiglu"])
def test_the_op_runs_it_by_name_and_leaves_the_counters_alone(
    rng: np.random.Generator, has_segments: bool, is_swiglu: bool
) -> None:
    case = make_linear_case(rng, bfloat16_problem(widths=GATE_UP))
    case = case if has_segments else base_of(case)
    op = lora_swiglu if is_swiglu else lora_linear
    args = (case.x, case.w, case.slots, case.segments, case.arrivals)
    y, arrivals = op(*args, layer=1, site=1, implementation="pallas_mosaic")
    assert_same_bits(y, run_mosaic(case, is_swiglu=is_swiglu))
    assert_same_bits(arrivals, case.arrivals)


# What is refused, and what is picked


def test_unsupported_arguments_are_named(rng: np.random.Generator) -> None:
    case = make_linear_case(rng, bfloat16_problem())
    with pytest.raises(NotImplementedError, match="x is float32; the kernels multiply bfloat16 only"):
        run_mosaic(as_float32(case))
    with pytest.raises(NotImplementedError, match="slot_rank 4 is not supported; use a multiple of 8"):
        run_mosaic(make_linear_case(rng, bfloat16_problem(slot_rank=4)))
    with pytest.raises(NotImplementedError, match="65 tokens are not supported; at most 64"):
        run_mosaic(base_of(make_linear_case(rng, bfloat16_problem(num_tokens=65))))
    with pytest.raises(NotImplementedError, match="20 tokens make 2 tiles"):
        run_mosaic(make_linear_case(rng, bfloat16_problem(num_tokens=20, tile_size=16)))
    with pytest.raises(NotImplementedError, match=r"widths \(72,\) are not supported; every width must be"):
        run_mosaic(make_linear_case(rng, bfloat16_problem(widths=(72,))))


@pytest.mark.parametrize("capability", ["8.6", "10.0"])
def test_other_gpus_are_refused_by_name(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, capability: str
) -> None:
    case = make_linear_case(rng, bfloat16_problem())
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])
    with pytest.raises(NotImplementedError, match=f"compute capability {capability} is not supported; wgmma exists on"):
        run_mosaic(case)


def test_configurations_that_cannot_run_are_named() -> None:
    def check(message: str, *, is_swiglu: bool = False, **fields: int) -> None:
        config = dataclasses.replace(SPLIT_CONFIG, **fields)
        with pytest.raises(NotImplementedError, match=message):
            pallas_mosaic.check_supported(MosaicProblem(128, GATE_UP, is_swiglu), config)

    check("in_features 128 is not supported; it must be a multiple of 192", splits=6)
    check("in_features 128 is not supported; it must be a multiple of 512", shrink_depth=256)
    check("width 32 is not supported; it must be a multiple of 64 columns", columns=64)
    check("has blocks of 8.0 rank rows; take a multiple of 16", shrink_splits=4)
    check("SwiGLU needs whole sums, but the configuration has 2 splits", is_swiglu=True)
    check("bytes of shared memory; a CTA has 232448", buffers=64)


@pytest.mark.parametrize("model", list(named_shapes()))
@pytest.mark.parametrize("group", GROUPS)
def test_every_named_shape_has_a_configuration_that_fits(model: str, group: Group) -> None:
    in_features, widths = named_shapes()[model].group(group)
    problem = MosaicProblem(in_features, widths, group == "gate_up")
    config = pick_config(problem)
    # One CTA of each kernel on one SM: the site kernel may fetch weights while the last rank rows are multiplied.
    assert problem.site_bytes(config) + problem.shrink_bytes(config) <= 228 * 1024


# On a GPU: real shapes, and launches that overlap


def gpu_case(group: Group, num_tokens: int) -> tune.Case:
    return tune.make_case("llama-3-8b", group, num_tokens, num_slots=96, slot_rank=8, num_layers=1)


@functools.partial(jax.jit, static_argnames="is_swiglu")
def run_real(case_args: tuple[Any, ...], segments: Segments | None, *, is_swiglu: bool) -> jax.Array:
    x, ws, slots = case_args
    op = pallas_mosaic.lora_swiglu if is_swiglu else pallas_mosaic.lora_linear
    return op(x, ws[0], slots, segments, jnp.int32(0))


def with_pairs(num_tokens: int, weights: np.ndarray) -> Segments:
    return build_segments(jnp.asarray(weights), tile_size=max(num_tokens, 16))


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("num_tokens", [1, 32, 64])
    @pytest.mark.parametrize("group", GROUPS)
    def test_the_8b_shape_matches_the_reference_and_repeats(self, group: Group, num_tokens: int) -> None:
        case = gpu_case(group, num_tokens)
        is_swiglu = group == "gate_up"
        y = run_real(case.args, case.mixes["three"], is_swiglu=is_swiglu)
        error = jnp.linalg.norm(total(y).astype(jnp.float32) - case.expected) / jnp.linalg.norm(case.expected)
        assert float(error) < 1e-2
        assert_same_bits(run_real(case.args, case.mixes["three"], is_swiglu=is_swiglu), y)

    @pytest.mark.parametrize("group", GROUPS)
    def test_rows_on_the_base_model_get_the_same_bits_with_and_without_segments(
        self, rng: np.random.Generator, group: Group
    ) -> None:
        case, is_swiglu = gpu_case(group, 32), group == "gate_up"
        base = run_real(case.args, None, is_swiglu=is_swiglu)
        weights = mix_matrix(rng, "uniform", 32, 96, mix_size=3)
        weights[::3] = 0
        y = run_real(case.args, with_pairs(32, weights), is_swiglu=is_swiglu)
        assert_same_bits(y[..., ::3, :], base[..., ::3, :])
        assert_same_bits(run_real(case.args, case.mixes["base"], is_swiglu=is_swiglu), base)

    @pytest.mark.parametrize("group", GROUPS)
    def test_200_launches_of_changing_mixes_give_the_bits_of_the_first(
        self, rng: np.random.Generator, group: Group
    ) -> None:
        """A launch that did not wait for the one ahead would sooner or later see its predecessor's v."""
        case, is_swiglu = gpu_case(group, 32), group == "gate_up"
        mixes = [with_pairs(32, mix_matrix(rng, mixes, 32, 96, mix_size=3)) for mixes in ALL_MIXES]
        segments = jax.tree.map(lambda *arrays: jnp.stack(arrays), *mixes)
        expected = jnp.stack([run_real(case.args, mix, is_swiglu=is_swiglu) for mix in mixes])

        @jax.jit
        def count_differing(args: Any, segments: Segments, expected: jax.Array) -> jax.Array:
            def launch(i: jax.Array, differing: jax.Array) -> jax.Array:
                mix = lax.rem(i * 3, len(mixes))
                own = jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, mix, keepdims=False), segments)
                y = run_real(args, own, is_swiglu=is_swiglu)
                is_other = y != lax.dynamic_index_in_dim(expected, mix, keepdims=False)
                return differing + is_other.sum(dtype=jnp.int32)

            return lax.fori_loop(0, 200, launch, jnp.int32(0))

        assert int(count_differing(case.args, segments, expected)) == 0

    def test_a_chain_in_one_program_has_the_bits_of_one_call_at_a_time(self) -> None:
        """There a launch starts before the one that makes its x has ended."""
        case = gpu_case("o", 32)
        x, ws, slots = case.args

        def link(x: jax.Array) -> jax.Array:
            y = run_real((x, ws, slots), case.mixes["three"], is_swiglu=False)
            return total(y).astype(jnp.bfloat16)

        in_one = jax.jit(lambda x: functools.reduce(lambda x, _: link(x), range(8), x))(x)
        for _ in range(8):
            x = jax.block_until_ready(link(x))
        assert_same_bits(in_one, x)
