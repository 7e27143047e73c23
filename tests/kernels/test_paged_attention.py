"""Every implementation of paged_attention against the dense reference; interpreted on a CPU, compiled on a GPU."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from pallas_kernels.paged_attention import (
    QueryTiles,
    build_query_tiles,
    paged_attention,
    pallas_triton,
    query_tile_size,
)
from pallas_kernels.paged_attention.api import Implementation
from pallas_kernels.paged_attention.config import KernelConfig, kernel_config
from pallas_kernels.paged_attention.shapes import SHAPES, AttentionInputs, AttentionShape, random_inputs
from tests.support.attention_cases import ATTENTION_CASES, owned_tokens, reference_output
from tests.support.tolerances import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

type Ints = Sequence[int] | np.ndarray

IMPLEMENTATIONS: tuple[Implementation, ...] = ("portable", "pallas_triton")


def attend(inputs: AttentionInputs, implementation: Implementation) -> Array:
    call = jax.jit(paged_attention, static_argnames="implementation")
    return call(inputs.q, inputs.kv, inputs.block_tables, inputs.tiles, implementation=implementation)


def build(
    seq_starts: Ints,
    seq_lens: Ints,
    context_lens: Ints,
    **sizes: int,
) -> QueryTiles:
    arrays = (jnp.asarray(x, jnp.int32) for x in (seq_starts, seq_lens, context_lens))
    return jax.jit(build_query_tiles, static_argnames=("num_tokens", "tile_size"))(*arrays, **sizes)


def check_against_reference(shape: AttentionShape, inputs: AttentionInputs, out: Array) -> None:
    is_owned = owned_tokens(shape)
    assert out.shape == inputs.q.shape
    assert out.dtype == inputs.q.dtype
    assert_close(np.asarray(out)[is_owned], np.asarray(reference_output(inputs))[is_owned], out.dtype)
    assert np.isfinite(np.asarray(out, np.float32)).all(), "a row outside the tiles is not finite"


@pytest.mark.parametrize("case", ATTENTION_CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float32_matches_the_reference(case: str, implementation: Implementation, rng: np.random.Generator):
    shape = ATTENTION_CASES[case]
    inputs = random_inputs(shape, jnp.float32, rng)
    check_against_reference(shape, inputs, attend(inputs, implementation))


@pytest.mark.parametrize("case", ["decode_at_block_borders", "group_3_head_dim_64"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_matches_the_reference(case: str, implementation: Implementation, rng: np.random.Generator):
    shape = ATTENTION_CASES[case]
    inputs = random_inputs(shape, jnp.bfloat16, rng)
    check_against_reference(shape, inputs, attend(inputs, implementation))


@pytest.mark.parametrize(
    ("case", "num_splits"),
    [
        ("decode_with_very_different_contexts", 1),
        ("decode_with_very_different_contexts", 4),
        ("mixed", 3),
        ("head_dim_not_a_power_of_two", 2),
    ],
)
def test_kernel_matches_the_reference_however_the_context_is_split(
    case: str, num_splits: int, rng: np.random.Generator
):
    shape = ATTENTION_CASES[case]
    inputs = random_inputs(shape, jnp.float32, rng)
    config = KernelConfig(chunk_tokens=16, num_splits=num_splits, num_warps=4, num_stages=2)
    out = pallas_triton.paged_attention(inputs.q, inputs.kv, inputs.block_tables, inputs.tiles, config=config)
    check_against_reference(shape, inputs, out)


def test_the_reference_matches_a_loop_over_tokens_and_heads(rng: np.random.Generator):
    shape = ATTENTION_CASES["mixed"]
    inputs = random_inputs(shape, jnp.float32, rng)
    q, kv, block_tables = (np.asarray(x) for x in (inputs.q, inputs.kv, inputs.block_tables))
    expected = np.zeros_like(q)
    for seq, (start, length, context) in enumerate(
        zip(shape.seq_starts, shape.seq_lens, shape.context_lens, strict=True)
    ):
        for i in range(length):
            cells = np.arange(context + i + 1)
            blocks, slots = block_tables[seq, cells // shape.block_size], cells % shape.block_size
            for head in range(shape.num_q_heads):
                kv_head = head // (shape.num_q_heads // shape.num_kv_heads)
                keys, values = kv[blocks, 0, kv_head, slots], kv[blocks, 1, kv_head, slots]
                weights = np.exp(keys @ q[start + i, head] / np.sqrt(shape.head_dim))
                expected[start + i, head] = weights @ values / weights.sum()
    assert_close(reference_output(inputs), expected, jnp.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", ["decode_with_very_different_contexts", "mixed"])
def test_a_sequence_gets_the_same_bits_whatever_shares_its_batch(
    case: str, implementation: Implementation, rng: np.random.Generator
):
    """The same program, once with all sequences and once with each of them alone in its row."""
    shape = ATTENTION_CASES[case]
    inputs = random_inputs(shape, jnp.float32, rng)
    together = np.asarray(attend(inputs, implementation))
    sizes = {"num_tokens": shape.num_tokens, "tile_size": inputs.tiles.tile_size}
    for seq, (start, length) in enumerate(zip(shape.seq_starts, shape.seq_lens, strict=True)):
        lens = [n if i == seq else 0 for i, n in enumerate(shape.seq_lens)]
        tiles = build(shape.seq_starts, lens, shape.context_lens, **sizes)
        alone = np.asarray(attend(dataclasses.replace(inputs, tiles=tiles), implementation))
        np.testing.assert_array_equal(alone[start : start + length], together[start : start + length])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_sequence_run_in_a_batch_of_its_own_size_agrees(implementation: Implementation, rng: np.random.Generator):
    shape = ATTENTION_CASES["decode_with_very_different_contexts"]
    inputs = random_inputs(shape, jnp.float32, rng)
    together = attend(inputs, implementation)
    for seq in (0, 4):
        tiles = build([0], [1], [shape.context_lens[seq]], num_tokens=1, tile_size=1)
        rows = slice(seq, seq + 1)
        alone = AttentionInputs(q=inputs.q[rows], kv=inputs.kv, block_tables=inputs.block_tables[rows], tiles=tiles)
        assert_close(attend(alone, implementation), together[rows])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_prefill_in_chunks_equals_one_prefill(implementation: Implementation, rng: np.random.Generator):
    shape = AttentionShape((40,), (0,), num_q_heads=6, num_kv_heads=2, head_dim=16, tile_size=16)
    inputs = random_inputs(shape, jnp.float32, rng)
    whole = attend(inputs, implementation)
    for first, length in ((0, 13), (13, 27)):
        tiles = build([0], [length], [first], num_tokens=length, tile_size=16)
        chunk = dataclasses.replace(inputs, q=inputs.q[first : first + length], tiles=tiles)
        assert_close(attend(chunk, implementation), whole[first : first + length])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_same_batch_twice_gives_the_same_bits(implementation: Implementation, rng: np.random.Generator):
    inputs = random_inputs(ATTENTION_CASES["mixed"], jnp.float32, rng)
    np.testing.assert_array_equal(attend(inputs, implementation), attend(inputs, implementation))


def test_the_default_on_a_cpu_is_the_portable_form(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    inputs = random_inputs(ATTENTION_CASES["mixed"], jnp.float32, rng)
    default = paged_attention(inputs.q, inputs.kv, inputs.block_tables, inputs.tiles)
    portable = paged_attention(inputs.q, inputs.kv, inputs.block_tables, inputs.tiles, implementation="portable")
    np.testing.assert_array_equal(default, portable)


# Tiles.


def as_rows(tiles: QueryTiles) -> list[tuple[int, int, int, int]]:
    """(seq_id, start, length, position) of the used tiles."""
    columns = (np.asarray(x).tolist() for x in (tiles.seq_ids, tiles.starts, tiles.lengths, tiles.positions))
    return [row for row in zip(*columns, strict=True) if row[2] > 0]


def test_tiles_never_cross_a_sequence():
    tiles = build([0, 9, 9, 10], [9, 0, 1, 4], [5, 8, 2, 0], num_tokens=16, tile_size=4)
    assert tiles.lengths.shape == (16 // 4 + 4,)
    assert as_rows(tiles) == [(0, 0, 4, 5), (0, 4, 4, 9), (0, 8, 1, 13), (2, 9, 1, 2), (3, 10, 4, 0)]


def test_sequences_may_lie_anywhere_in_the_batch():
    tiles = build([12, 0], [3, 5], [0, 7], num_tokens=24, tile_size=4)
    assert as_rows(tiles) == [(0, 12, 3, 0), (1, 0, 4, 7), (1, 4, 1, 11)]


def test_a_decode_batch_has_one_tile_a_sequence():
    tiles = build(range(4), [1, 0, 1, 1], [5, 6, 0, 9], num_tokens=4, tile_size=1)
    assert tiles.lengths.shape == (4,)
    assert as_rows(tiles) == [(0, 0, 1, 5), (2, 2, 1, 0), (3, 3, 1, 9)]


def test_tiles_of_one_token_hold_for_a_mixed_batch_as_long_as_its_table():
    tiles = build([0, 3, 3, 4], [3, 0, 1, 0], [2, 5, 7, 0], num_tokens=4, tile_size=1)
    assert as_rows(tiles) == [(0, 0, 1, 2), (0, 1, 1, 3), (0, 2, 1, 4), (2, 3, 1, 7)]


def test_as_many_tiles_as_a_batch_can_need_always_fit(rng: np.random.Generator):
    for _ in range(20):
        lens = rng.multinomial(23, rng.dirichlet(np.full(5, 0.5)))
        tiles = build(np.cumsum(lens) - lens, lens, lens, num_tokens=23, tile_size=4)
        assert sum(row[2] for row in as_rows(tiles)) == 23


def test_tile_sizes_follow_the_tokens_per_sequence():
    assert [query_tile_size(*sizes) for sizes in ((1, 1), (32, 32), (8, 32))] == [1, 1, 1]
    assert [query_tile_size(*sizes) for sizes in ((33, 32), (512, 32), (1024, 32), (512, 1))] == [16, 16, 32, 64]


def test_few_tiles_over_a_long_context_are_split_and_many_are_not():
    heads = {"num_kv_heads": 8, "q_per_kv": 4, "head_dim": 128, "dtype": jnp.bfloat16}
    assert kernel_config(num_tiles=1, tile_size=1, max_context=8192, **heads).num_splits == 32
    assert kernel_config(num_tiles=1, tile_size=1, max_context=64, **heads).num_splits == 1
    assert kernel_config(num_tiles=256, tile_size=1, max_context=8192, **heads).num_splits == 1


# Bad arguments.


def call_changed(change: Callable[[AttentionInputs], dict[str, Any]], rng: np.random.Generator, **kwargs: Any) -> None:
    inputs = random_inputs(ATTENTION_CASES["mixed"], jnp.float32, rng)
    names = ("q", "kv", "block_tables", "tiles")
    paged_attention(**{name: getattr(inputs, name) for name in names} | change(inputs), **kwargs)


@pytest.mark.usefixtures("unchecked_annotations")
def test_arguments_that_do_not_fit_are_refused_by_name(rng: np.random.Generator):
    with pytest.raises(ValueError, match="q has head_dim 8 but kv has 16"):
        call_changed(lambda x: {"q": x.q[..., :8]}, rng)
    with pytest.raises(ValueError, match="q has 3 heads, which is no multiple of the 2 heads of kv"):
        call_changed(lambda x: {"q": x.q[:, :3]}, rng)
    with pytest.raises(ValueError, match=r"expected q \[num_tokens, num_q_heads, head_dim\]"):
        call_changed(lambda x: {"q": x.q[0]}, rng)
    with pytest.raises(TypeError, match="q is bfloat16 but kv is float32"):
        call_changed(lambda x: {"q": x.q.astype(jnp.bfloat16)}, rng)
    with pytest.raises(TypeError, match="block_tables must hold integers, got float32"):
        call_changed(lambda x: {"block_tables": x.block_tables.astype(jnp.float32)}, rng)
    with pytest.raises(ValueError, match=r"one of \['pallas_triton', 'portable', 'reference'\] or None, got 'cuda'"):
        call_changed(lambda _: {}, rng, implementation="cuda")
    with pytest.raises(ValueError, match="tile_size and num_tokens must be at least 1, got 0 and 4"):
        build([0], [4], [0], num_tokens=4, tile_size=0)


def test_what_the_kernel_does_not_support_is_named_and_left_to_the_portable_form(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
):
    shape = dataclasses.replace(ATTENTION_CASES["mixed"], block_size=6)
    inputs = random_inputs(shape, jnp.float32, rng)
    with pytest.raises(NotImplementedError, match="block_size that is a power of two, got 6"):
        attend(inputs, "pallas_triton")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    out = paged_attention(inputs.q, inputs.kv, inputs.block_tables, inputs.tiles)
    check_against_reference(shape, inputs, out)


def test_every_implementation_is_tested():
    assert set(get_args(Implementation)) == {"reference", *IMPLEMENTATIONS}


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in SHAPES if "8192" not in name])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_model_shapes_match_the_reference_on_a_gpu(name: str, dtype: str, rng: np.random.Generator):
    inputs = random_inputs(SHAPES[name], dtype, rng)
    check_against_reference(SHAPES[name], inputs, attend(inputs, "pallas_triton"))


@pytest.mark.gpu
def test_cells_beyond_two_to_the_31_elements_are_reached(rng: np.random.Generator):
    """A cache of 2^31 + 2^21 bfloat16 elements whose last blocks are the live ones."""
    shape = AttentionShape((1, 20), (300, 40), num_q_heads=8, num_kv_heads=8, head_dim=128, tile_size=16)
    inputs = random_inputs(shape, jnp.bfloat16, rng)
    num_blocks = (1 << 31) // (2 * 8 * 16 * 128) + 64
    first = num_blocks - inputs.kv.shape[0]
    kv = jnp.full((num_blocks, *inputs.kv.shape[1:]), jnp.nan, jnp.bfloat16).at[first:].set(inputs.kv)
    moved = dataclasses.replace(inputs, kv=kv, block_tables=inputs.block_tables + first)
    is_owned = owned_tokens(shape)
    out, expected = np.asarray(attend(moved, "pallas_triton")), np.asarray(reference_output(inputs))
    assert_close(out[is_owned], expected[is_owned])
