"""Every implementation of paged_attention against the dense reference; interpreted on a CPU, compiled on a GPU."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from pallas_kernels.paged_attention import QueryTiles, paged_attention, pallas_triton
from pallas_kernels.paged_attention.api import Implementation
from pallas_kernels.paged_attention.config import KernelConfig
from pallas_kernels.paged_attention.shapes import SHAPES, AttentionInputs, AttentionShape, random_inputs
from tests.support.attention_cases import (
    ATTENTION_CASES,
    check_each_sequence_alone,
    jitted_tiles,
    make_case,
    moved_to_the_end,
    named_case,
)
from tests.support.tolerances import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

IMPLEMENTATIONS: tuple[Implementation, ...] = ("portable", "pallas_triton")


def attend(inputs: AttentionInputs, implementation: Implementation | None) -> Array:
    call = jax.jit(paged_attention, static_argnames="implementation")
    return call(inputs.q, inputs.kv, inputs.block_tables, inputs.tiles, implementation=implementation)


def one_chunk(context_len: int, num_tokens: int, *, tile_size: int) -> QueryTiles:
    """The tiles of one sequence's prefill chunk or decode row."""
    seq = (jnp.full((1,), x, jnp.int32) for x in (0, num_tokens, context_len))
    return jitted_tiles(*seq, num_tokens=num_tokens, tile_size=tile_size)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if i % 6 == 0 else pytest.mark.slow) for i, n in enumerate(ATTENTION_CASES)]
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float32_matches_the_reference(name: str, implementation: Implementation):
    case = named_case(name)
    case.check(attend(case.inputs, implementation))


@pytest.mark.parametrize("name", ["decode_at_block_borders", "group_3_head_dim_64"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_matches_the_reference(name: str, implementation: Implementation):
    case = named_case(name, "bfloat16")
    case.check(attend(case.inputs, implementation))


@pytest.mark.parametrize(
    ("name", "num_splits"),
    [
        ("decode_with_very_different_contexts", 1),
        ("decode_with_very_different_contexts", 4),
        ("mixed", 3),
        ("head_dim_not_a_power_of_two", 2),
    ],
)
def test_kernel_matches_the_reference_however_the_context_is_split(name: str, num_splits: int):
    case = named_case(name)
    x = case.inputs
    config = KernelConfig(chunk_tokens=16, num_splits=num_splits, num_warps=4, num_stages=2)
    case.check(pallas_triton.paged_attention(x.q, x.kv, x.block_tables, x.tiles, config=config))


def test_the_reference_matches_a_loop_over_tokens_and_heads():
    case = named_case("mixed")
    shape = case.shape
    q, kv, block_tables = (np.asarray(x) for x in (case.inputs.q, case.inputs.kv, case.inputs.block_tables))
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
    assert_close(case.expected, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["decode_with_very_different_contexts", "mixed"])
def test_a_sequence_gets_the_same_bits_whatever_shares_its_batch(name: str, implementation: Implementation):
    check_each_sequence_alone(named_case(name), functools.partial(attend, implementation=implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_sequence_run_in_a_batch_of_its_own_size_agrees(implementation: Implementation):
    case = named_case("decode_with_very_different_contexts")
    together = attend(case.inputs, implementation)
    for seq in (0, 4):
        row = slice(seq, seq + 1)
        alone = dataclasses.replace(
            case.inputs,
            q=case.inputs.q[row],
            block_tables=case.inputs.block_tables[row],
            tiles=one_chunk(case.shape.context_lens[seq], 1, tile_size=1),
        )
        assert_close(attend(alone, implementation), together[row])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_prefill_in_chunks_equals_one_prefill(implementation: Implementation, rng: np.random.Generator):
    shape = AttentionShape((40,), (0,), num_q_heads=6, num_kv_heads=2, head_dim=16, tile_size=16)
    inputs = random_inputs(shape, jnp.float32, rng)
    whole = attend(inputs, implementation)
    for first, length in ((0, 13), (13, 27)):
        tiles = one_chunk(first, length, tile_size=16)
        chunk = dataclasses.replace(inputs, q=inputs.q[first : first + length], tiles=tiles)
        assert_close(attend(chunk, implementation), whole[first : first + length])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_same_batch_twice_gives_the_same_bits(implementation: Implementation):
    inputs = named_case("mixed").inputs
    np.testing.assert_array_equal(attend(inputs, implementation), attend(inputs, implementation))


def test_the_default_on_a_cpu_is_the_portable_form(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    inputs = named_case("mixed").inputs
    np.testing.assert_array_equal(attend(inputs, None), attend(inputs, "portable"))


# Bad arguments.


def call_changed(change: Callable[[AttentionInputs], dict[str, Any]], **kwargs: Any) -> None:
    inputs = named_case("mixed").inputs
    names = ("q", "kv", "block_tables", "tiles")
    paged_attention(**{name: getattr(inputs, name) for name in names} | change(inputs), **kwargs)


@pytest.mark.usefixtures("unchecked_annotations")
def test_arguments_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ValueError, match="q has head_dim 8 but kv has 16"):
        call_changed(lambda x: {"q": x.q[..., :8]})
    with pytest.raises(ValueError, match="q has 3 heads, which is no multiple of the 2 heads of kv"):
        call_changed(lambda x: {"q": x.q[:, :3]})
    with pytest.raises(ValueError, match=r"expected q \[num_tokens, num_q_heads, head_dim\]"):
        call_changed(lambda x: {"q": x.q[0]})
    with pytest.raises(TypeError, match="q is bfloat16 but kv is float32"):
        call_changed(lambda x: {"q": x.q.astype(jnp.bfloat16)})
    with pytest.raises(TypeError, match="block_tables must hold integers, got float32"):
        call_changed(lambda x: {"block_tables": x.block_tables.astype(jnp.float32)})
    with pytest.raises(
        ValueError, match=r"one of \['pallas_mosaic', 'pallas_triton', 'portable', 'reference'\] or None, got 'cuda'"
    ):
        call_changed(lambda _: {}, implementation="cuda")


def test_what_the_kernel_does_not_support_is_named_and_left_to_the_portable_form(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
):
    case = make_case(dataclasses.replace(ATTENTION_CASES["mixed"], block_size=6), jnp.float32, rng)
    with pytest.raises(NotImplementedError, match="block_size that is a power of two, got 6"):
        attend(case.inputs, "pallas_triton")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    case.check(attend(case.inputs, None))


def test_every_implementation_is_tested():
    # pallas_mosaic, which takes large tiles alone, has a file of its own.
    assert set(get_args(Implementation)) == {"reference", "pallas_mosaic", *IMPLEMENTATIONS}


# Real sizes: compiled on a GPU, else interpreted among the slow tests, but for the largest.

LARGEST = ("8b_prefill_4x2048+0", "8b_prefill_4x2048+0_blocks_of_128", "8b_prefill_16x512+0", "8b_prefill_2048+2048")
needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU: a minute in the interpreter")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(name, "bfloat16", marks=needs_gpu if name in LARGEST else ()) for name in SHAPES]
    + [(name, "float32") for name in SHAPES if name.startswith("135m")]
    + [("8b_decode_32x1024", "float32"), ("8b_mixed_512", "float32")],
)
def test_model_shapes_match_the_reference(name: str, dtype: str, rng: np.random.Generator):
    case = make_case(SHAPES[name], dtype, rng)
    case.check(attend(case.inputs, "pallas_triton"))


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU: the interpreter computes no offsets")
def test_cells_beyond_two_to_the_31_elements_are_reached(rng: np.random.Generator):
    """A cache of over 2^31 bfloat16 elements whose last blocks are the live ones."""
    shape = AttentionShape((1, 20), (300, 40), num_q_heads=8, num_kv_heads=8, head_dim=128, tile_size=16)
    case = make_case(shape, jnp.bfloat16, rng)
    case.check(attend(moved_to_the_end(case.inputs, num_elements=1 << 31), "pallas_triton"))
