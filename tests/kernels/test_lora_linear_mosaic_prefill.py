"""The Mosaic kernel of linear layers in prefills against the float32 reference, interpreted or compiled on a GPU.

Slots that no segment uses hold NaN, and the interpreter's memory does until it is written.
"""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.lora_linear import lora_linear, lora_swiglu, pallas_mosaic_prefill, separate
from pallas_kernels.maf_mvm.shapes import GROUPS, Group, named_shapes
from pallas_kernels.segments import build_segments
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
from tests.support.maf_cases import ALL_MIXES, Mixes, Problem, mix_matrix
from tests.support.tolerances import assert_close

is_gpu = jax.default_backend() == "gpu"
pytestmark = [
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
    *([pytest.mark.gpu] if is_gpu else []),
]


@pytest.fixture
def retraced() -> Iterator[None]:
    """The kernel is traced anew with what a test patches, and without it for the tests after."""
    launch: Any = pallas_mosaic_prefill._launch
    launch.clear_cache()
    yield
    launch.clear_cache()


def slow(*values: Any) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def prefill_problem(**kwargs: Any) -> Problem:
    return bfloat16_problem(**{"num_tokens": 128, "widths": (128, 128)} | kwargs)


def run_prefill(case: LinearCase, *, is_swiglu: bool = True) -> jax.Array:
    op = pallas_mosaic_prefill.lora_swiglu if is_swiglu else pallas_mosaic_prefill.lora_linear
    return op(case.x, case.w, case.slots, case.segments, jnp.int32(1))


def assert_matches_reference(case: LinearCase, *, is_swiglu: bool = True) -> None:
    z = run_prefill(case, is_swiglu=is_swiglu)
    assert z.dtype == jnp.bfloat16
    assert_close(z, total(run(as_float32(case), "reference", is_swiglu=is_swiglu)), jnp.bfloat16)


def base_of(case: LinearCase) -> LinearCase:
    return dataclasses.replace(case, segments=None)


# Results


@pytest.mark.parametrize("widths", [(128, 128), *slow((256, 128, 128))], ids=["swiglu", "qkv"])
@pytest.mark.parametrize("mixes", ["zipf", *slow("identical", "distinct", "uniform", "skewed")])
def test_mixes_match_the_reference(rng: np.random.Generator, mixes: Mixes, widths: tuple[int, ...]) -> None:
    assert set(ALL_MIXES) == {"identical", "distinct", "uniform", "zipf", "skewed"}
    # More slots in a tile than one step of the tail takes.
    problem = prefill_problem(num_tokens=256, num_slots=12, widths=widths)
    case = make_linear_case(rng, problem, mix_matrix(rng, mixes, 256, 12))
    assert_matches_reference(case, is_swiglu=len(widths) == 2)


@pytest.mark.usefixtures("retraced")
@pytest.mark.parametrize("num_ctas", [132, *slow(1)], ids=["one_block", "two_blocks"])
def test_a_linear_layer_without_swiglu_matches_the_reference(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, num_ctas: int
) -> None:
    """Blocks of a tile that lie in different projections, and v in two partial sums."""
    monkeypatch.setattr(pallas_mosaic_prefill, "num_multiprocessors", lambda: num_ctas)
    tiles = pallas_mosaic_prefill._Tiles.of(256, 256, (128, 128), is_swiglu=False)
    assert tiles.num_blocks == (2 if num_ctas == 1 else 1)
    problem = prefill_problem(num_tokens=256, in_features=256, num_slots=10)
    case = make_linear_case(rng, problem)
    assert case.segments is not None
    v = pallas_mosaic_prefill._shrink(case.x, case.slots, case.segments, jnp.int32(1), interpret=not is_gpu)
    assert v.shape[0] == 2
    assert_matches_reference(case, is_swiglu=False)
    assert_matches_reference(base_of(case), is_swiglu=False)


@pytest.mark.parametrize(("num_slots", "used"), [(3, [1]), (12, [0, 4, 11])])
def test_few_rank_rows_match_the_reference(rng: np.random.Generator, num_slots: int, used: list[int]) -> None:
    """Fewer than a step of the tail takes, of slots that are fewer or not the first: beside them lies NaN."""
    weights = np.zeros((128, 1, num_slots), np.float32)
    weights[:, 0, used] = rng.uniform(0.2, 1, (128, len(used)))
    assert_matches_reference(make_linear_case(rng, prefill_problem(num_slots=num_slots), weights))


def test_a_step_without_adapters_matches_the_reference(rng: np.random.Generator) -> None:
    assert_matches_reference(base_of(make_linear_case(rng, prefill_problem(in_features=192))))


@pytest.mark.parametrize("seed", slow(*range(6)))
def test_random_shapes_match_the_reference(seed: int) -> None:
    rng, is_swiglu = np.random.default_rng(seed), seed % 2 == 0
    widths = tuple(128 * int(n) for n in rng.integers(1, 4, 1 if is_swiglu else 3)) * (2 if is_swiglu else 1)
    num_slots, slot_rank = int(rng.integers(1, 40)), int(rng.choice([8, 16, 32, 64]))
    num_tokens, in_features = 128 * int(rng.integers(1, 5)), 64 * int(rng.integers(1, 7))
    problem = prefill_problem(
        num_tokens=num_tokens, in_features=in_features, widths=widths, num_slots=num_slots, slot_rank=slot_rank
    )
    weights = mix_matrix(rng, "uniform", num_tokens, num_slots, mix_size=min(3, num_slots))
    weights[rng.random(num_tokens) < 0.3] = 0
    assert_matches_reference(make_linear_case(rng, problem, weights), is_swiglu=is_swiglu)


@pytest.mark.usefixtures("retraced")
@pytest.mark.slow
def test_more_tiles_than_ctas_match_the_reference(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every CTA takes several tiles, some of them of a group of rows that is not full."""
    monkeypatch.setattr(pallas_mosaic_prefill, "num_multiprocessors", lambda: 3)
    monkeypatch.setattr(pallas_mosaic_prefill, "_GROUP_TILES", 2)
    problem = prefill_problem(num_tokens=640, widths=(256, 256), num_slots=20)
    case = make_linear_case(rng, problem, mix_matrix(rng, "distinct", 640, 20))
    assert_matches_reference(case)
    assert_matches_reference(base_of(case))


@pytest.mark.parametrize("rows", slow(1, 2, 5, 16, 21))
def test_tiles_cover_the_output_once_each(rows: int) -> None:
    tiles = pallas_mosaic_prefill._Tiles(rows, 7, 1, (896,), 1, False)
    places = [tuple(map(int, tiles.place(jnp.int32(i)))) for i in range(tiles.count)]
    assert sorted(places) == [(row, column) for row in range(rows) for column in range(7)]


@pytest.mark.parametrize(("num_blocks", "is_swiglu"), [(1, False), (2, False), (2, True)])
def test_blocks_cover_the_columns_once_each_and_lie_in_one_projection(num_blocks: int, is_swiglu: bool) -> None:
    widths = (384, 384) if is_swiglu else (512, 128, 128)
    tiles = pallas_mosaic_prefill._Tiles(1, 768 // 128 // num_blocks, 1, widths, num_blocks, is_swiglu)
    starts = [int(start) for column in range(tiles.columns) for start in tiles.blocks(jnp.int32(column))]
    assert sorted(starts) == list(range(0, 768, 128))
    projections = [int(tiles.projection(jnp.int32(start))) for start in sorted(starts)]
    assert projections == ([0] * 3 + [1] * 3 if is_swiglu else [0, 0, 0, 0, 1, 2])


@pytest.mark.slow
def test_gates_per_projection_match_the_reference(rng: np.random.Generator) -> None:
    case = make_linear_case(rng, prefill_problem(num_gates=2))
    assert case.segments is not None
    # A slot may serve one of a token's projections only.
    weights = case.segments.weights.at[2, 1].set(0).at[:, 1, 4].set(0)
    assert_matches_reference(dataclasses.replace(case, segments=case.segments.with_weights(weights)))


def test_tiles_without_segments_beside_full_ones_match_the_reference(rng: np.random.Generator) -> None:
    full = make_full_case(rng, prefill_problem(num_tokens=256, num_slots=10))
    weights = mix_matrix(rng, "identical", 256, 10, mix_size=10) / 4  # the sums are then of order 1
    for empty in (slice(0, 64), slice(64, 128), slice(128, 256)):
        mixes = weights.copy()
        mixes[empty] = 0
        assert_matches_reference(with_mixes(full, mixes))


# Who gets what


def test_a_batch_without_pairs_has_the_bits_of_one_without_segments(rng: np.random.Generator) -> None:
    case = make_linear_case(rng, prefill_problem(), np.zeros((128, 1, 6), np.float32))
    assert np.isnan(np.asarray(case.slots.a, np.float32)).all()
    assert_same_bits(run_prefill(case), run_prefill(base_of(case)))


@pytest.mark.parametrize("is_swiglu", [True, *slow(False)], ids=["swiglu", "linear"])
def test_tokens_without_pairs_get_the_bits_of_the_base(rng: np.random.Generator, is_swiglu: bool) -> None:
    weights = mix_matrix(rng, "zipf", 128, 6)
    weights[::3] = 0
    case = make_linear_case(rng, prefill_problem(), weights)
    z, base = (run_prefill(c, is_swiglu=is_swiglu) for c in (case, base_of(case)))
    assert_same_bits(z[::3], base[::3])
    assert not np.array_equal(z[1::3], base[1::3])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("value", [np.inf, np.nan], ids=["inf", "nan"])
def test_a_token_that_is_not_finite_poisons_no_other(rng: np.random.Generator, value: float) -> None:
    case = make_linear_case(rng, prefill_problem(), mix_matrix(rng, "identical", 128, 6))
    sound = run_prefill(case)
    z = run_prefill(dataclasses.replace(case, x=case.x.at[2].set(value).at[70].set(value)))
    others = np.delete(np.arange(128), [2, 70])
    assert_same_bits(z[others], sound[others])
    assert np.isnan(np.asarray(z[jnp.asarray([2, 70])], np.float32)).any(1).all()


@pytest.mark.slow
def test_who_shares_a_tile_changes_a_token_by_rounding_at_most(rng: np.random.Generator) -> None:
    full = make_full_case(rng, prefill_problem(num_slots=12))
    alone = np.zeros((128, 1, 12), np.float32)
    alone[5, 0, 3], alone[100, 0, 8] = 0.5, -0.25
    among = mix_matrix(rng, "uniform", 128, 12, mix_size=4)
    among[[5, 100]] = alone[[5, 100]]
    results = [run_prefill(with_mixes(full, weights)) for weights in (alone, among)]
    # Rank rows lie elsewhere in a step of the tail: sums of the same numbers, in another order.
    assert_close(results[1][jnp.asarray([5, 100])], results[0][jnp.asarray([5, 100])], jnp.bfloat16)
    assert not np.array_equal(results[0][:5], results[1][:5])


def test_large_gates_end_in_zero_or_in_the_gate_itself(rng: np.random.Generator) -> None:
    case = base_of(make_linear_case(rng, prefill_problem()))
    large = dataclasses.replace(case, x=case.x * 1e4, w=case.w.at[:, 128:].set(0).at[0, 128:].set(1e-4))
    z = run_prefill(large)
    assert np.isfinite(np.asarray(z, np.float32)).all()
    assert_close(z, run(as_float32(large), "reference", is_swiglu=True), jnp.bfloat16)


@pytest.mark.usefixtures("retraced")
@pytest.mark.slow
@pytest.mark.skipif(is_gpu, reason="needs the interpreter")
def test_the_interpreter_finds_no_race_in_shared_memory(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(pallas_mosaic_prefill, "interpret_args", lambda _: {"interpret": params})
    full = make_linear_case(rng, prefill_problem(num_slots=12, in_features=320))
    # One tile: that results leave before the next overwrite them, the interpreter does not know; a GPU's tests do.
    for case in (full, base_of(full)):
        for is_swiglu in (True, False):
            run_prefill(case, is_swiglu=is_swiglu)
            assert not gpu_callbacks.get_races().races_found


# The op


@pytest.mark.parametrize("is_swiglu", [True, *slow(False)], ids=["swiglu", "linear"])
@pytest.mark.parametrize("has_segments", [True, *slow(False)])
def test_the_ops_run_it_by_name_and_leave_the_counters_alone(
    rng: np.random.Generator, has_segments: bool, is_swiglu: bool
) -> None:
    case = make_linear_case(rng, prefill_problem())
    case = case if has_segments else base_of(case)
    op = lora_swiglu if is_swiglu else lora_linear
    args = (case.x, case.w, case.slots, case.segments, case.arrivals)
    z, arrivals = op(*args, layer=1, site=1, implementation="pallas_mosaic")
    assert_same_bits(z if is_swiglu else z[0], run_prefill(case, is_swiglu=is_swiglu))
    assert_same_bits(arrivals, case.arrivals)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora_swiglu", "lora_linear"])
@pytest.mark.parametrize("has_segments", [True, False])
def test_the_gradient_is_that_of_the_separate_form(rng: np.random.Generator, has_segments: bool, name: str) -> None:
    case = make_full_case(rng, prefill_problem(num_slots=3))
    case = case if has_segments else base_of(case)

    def gradients(op: Any) -> Any:
        def loss(case: LinearCase) -> jax.Array:
            y = op(case.x, case.w, case.slots, case.segments, jnp.int32(1))
            return jnp.sin(y.astype(jnp.float32)).sum()

        return jax.jit(jax.grad(loss, allow_int=True))(case)

    actual, expected = gradients(getattr(pallas_mosaic_prefill, name)), gradients(getattr(separate, name))
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, e)
    largest = [float(jnp.abs(g.astype(jnp.float32)).max()) for g in (actual.w, actual.slots.a, actual.slots.b)]
    assert [size > 0.1 for size in largest] == [True, has_segments, has_segments]


def test_unsupported_arguments_are_named(rng: np.random.Generator) -> None:
    case = make_linear_case(rng, prefill_problem())
    with pytest.raises(NotImplementedError, match="x is float32; the kernel multiplies bfloat16 only"):
        run_prefill(as_float32(case))
    for sizes in ({"num_tokens": 192}, {"in_features": 96}, {"widths": (64, 64)}):
        with pytest.raises(NotImplementedError, match="needs multiples of 128 tokens, 64 input features and 128 out"):
            run_prefill(base_of(make_linear_case(rng, prefill_problem(**sizes))))
    with pytest.raises(NotImplementedError, match="a slot_rank of 8, 16, 32 or 64, got 64 and 4"):
        run_prefill(make_linear_case(rng, prefill_problem(slot_rank=4)))
    with pytest.raises(NotImplementedError, match=r"needs segments of 64 tokens .* got 32 and 8"):
        run_prefill(make_linear_case(rng, prefill_problem(tile_size=32)))


@pytest.mark.parametrize("capability", ["8.9", "10.0"])
def test_other_gpus_are_refused_by_name(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, capability: str
) -> None:
    case = make_linear_case(rng, prefill_problem())
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])
    with pytest.raises(NotImplementedError, match=f"compute capability {capability} is not supported; wgmma exists on"):
        run_prefill(case)


# On a GPU: a real shape, and launch after launch


def largest_block_error(actual: jax.Array, right: jax.Array) -> float:
    """Of what one warpgroup stores at once, 64 by 128: the difference's norm, relative to that block's."""

    def norms(y: jax.Array) -> jax.Array:
        blocks = y.astype(jnp.float32).reshape(y.shape[0] // 64, 64, y.shape[1] // 128, 128)
        return jnp.linalg.norm(blocks, axis=(1, 3))

    return float((norms(actual.astype(jnp.float32) - right) / norms(right)).max())


@pytest.mark.gpu
@pytest.mark.skipif(not is_gpu, reason="needs a GPU")
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("model", "num_tokens"), [("llama-3-8b", 512), ("llama-3-8b", 2048), ("llama-3.2-1b", 1024)])
def test_model_shapes_match_the_reference_and_give_the_same_bits_every_time(
    rng: np.random.Generator, model: str, num_tokens: int, group: Group
) -> None:
    (in_features, widths), is_swiglu = named_shapes()[model].group(group), group == "gate_up"
    problem = prefill_problem(num_tokens=num_tokens, in_features=in_features, widths=widths, num_slots=40)
    full = make_full_case(rng, problem)
    prompts, decode = np.zeros((num_tokens, 1, 40), np.float32), np.zeros((num_tokens, 1, 40), np.float32)
    for i, tokens in enumerate(np.array_split(np.arange(num_tokens), 4)):
        prompts[tokens, 0, 3 * i : 3 * i + 3] = 0.5
    decode[np.arange(40), 0, np.arange(40)] = 1  # the first tile has many segments, the others none
    for weights in (prompts, decode, prompts + decode):
        case = with_mixes(full, weights)
        first = run_prefill(case, is_swiglu=is_swiglu)
        right = total(run(as_float32(case), "reference", is_swiglu=is_swiglu))
        assert first.dtype == jnp.bfloat16
        assert largest_block_error(first, right) < 2e-2
        for _ in range(20):
            assert_same_bits(run_prefill(case, is_swiglu=is_swiglu), first)
    base = run_prefill(base_of(full), is_swiglu=is_swiglu)
    segments = build_segments(jnp.asarray(decode), tile_size=64)
    among = run_prefill(dataclasses.replace(full, segments=segments), is_swiglu=is_swiglu)
    assert_same_bits(among[64:], base[64:])
