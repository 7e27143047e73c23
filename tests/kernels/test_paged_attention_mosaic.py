"""The Mosaic kernel of paged_attention against the float32 reference, interpreted on a CPU, compiled on a GPU.

Cache cells that no token owns hold NaN. Interpretation takes seconds a case: the fast loop has one of each kind.
"""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import build_query_tiles, paged_attention, pallas_mosaic
from pallas_kernels.paged_attention.config import MosaicConfig
from pallas_kernels.paged_attention.shapes import SHAPES, AttentionInputs, AttentionShape, random_inputs
from tests.support.attention_cases import check_each_sequence_alone, make_case, moved_to_the_end, owned_tokens

is_gpu = jax.default_backend() == "gpu"
pytestmark = [pytest.mark.gpu] if is_gpu else []


def shape(seq_lens: tuple[int, ...], context_lens: tuple[int, ...], **sizes: int) -> AttentionShape:
    defaults = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "tile_size": 64}
    return AttentionShape(seq_lens, context_lens, **(defaults | sizes))


CASES: dict[str, AttentionShape] = {
    "tiles_that_start_anywhere": shape((70, 1, 0, 9), (3, 20, 9, 130)),
    "whole_tiles": shape((128, 64), (0, 64)),
    "many_chunks": shape((65,), (520,)),
    "contexts_that_end_at_a_chunk": shape((64, 28, 1), (64, 100, 127)),
    "contexts_that_end_one_past_a_chunk": shape((65, 29, 1), (64, 100, 128)),
    "padded": shape((3, 0, 60, 7), (0, 5, 9, 0), padded_len=64),
    "nobody": shape((0, 0), (5, 0), padded_len=64),
    "group_4_head_dim_128": shape((67, 2), (33, 140), num_q_heads=8, head_dim=128),
    "block_size_8": shape((66,), (11,), block_size=8),
    "block_size_128": shape((66,), (100,), block_size=128),
}


@pytest.fixture
def race_detection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the interpreter look for races, in programs of its own."""
    kernel: Any = pallas_mosaic._paged_attention
    params = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(pallas_mosaic, "interpret_args", lambda _: {"interpret": params})
    kernel.clear_cache()
    yield
    kernel.clear_cache()


def fast_first(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if i == 0 else pytest.mark.slow) for i, name in enumerate(names)]


def attend(inputs: AttentionInputs, **kwargs: Any) -> Array:
    return pallas_mosaic.paged_attention(inputs.q, inputs.kv, inputs.block_tables, inputs.tiles, **kwargs)


@pytest.mark.parametrize("name", fast_first(list(CASES)))
def test_the_kernel_matches_the_reference(name: str, rng: np.random.Generator) -> None:
    case = make_case(CASES[name], jnp.bfloat16, rng)
    out = attend(case.inputs)
    case.check(out)
    is_owned = owned_tokens(case.shape)
    np.testing.assert_array_equal(np.asarray(out)[~is_owned], np.asarray(case.inputs.q)[~is_owned])


@pytest.mark.slow
@pytest.mark.parametrize("config", [MosaicConfig(64, 3), MosaicConfig(128, 3), MosaicConfig(64, 2)])
def test_every_block_size_matches_the_reference(config: MosaicConfig, rng: np.random.Generator) -> None:
    case = make_case(CASES["many_chunks"], jnp.bfloat16, rng)
    case.check(attend(case.inputs, config=config))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_batches_match_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lens, contexts = rng.integers(0, 90, 4), rng.integers(0, 300, 4)
    lens[0] += 64
    head_dim, block_size, q_per_kv = (int(rng.choice(sizes)) for sizes in ((64, 128), (8, 16, 32, 64), (2, 4, 6)))
    sizes = {"num_q_heads": 2 * q_per_kv, "head_dim": head_dim, "block_size": block_size}
    case = make_case(shape(tuple(lens.tolist()), tuple(contexts.tolist()), **sizes), jnp.bfloat16, rng)
    case.check(attend(case.inputs))


@pytest.mark.slow
def test_a_sequence_gets_the_same_bits_whatever_shares_its_batch(rng: np.random.Generator) -> None:
    check_each_sequence_alone(make_case(CASES["tiles_that_start_anywhere"], jnp.bfloat16, rng), attend)


@pytest.mark.slow
def test_a_sequence_gets_the_same_bits_wherever_its_tiles_lie(rng: np.random.Generator) -> None:
    """Its last tile is moved up where the batch ends with it."""
    seq = shape((70,), (130,))
    inputs = random_inputs(seq, jnp.bfloat16, rng)
    first = attend(inputs)
    for before, after in ((0, 64), (13, 0), (13, 5)):
        rows = [jnp.zeros((n, *inputs.q.shape[1:]), inputs.q.dtype) for n in (before, after)]
        tiles = build_query_tiles(
            *(jnp.asarray([n], jnp.int32) for n in (before, 70, 130)), num_tokens=before + 70 + after, tile_size=64
        )
        q = jnp.concatenate([rows[0], inputs.q, rows[1]])
        moved = attend(dataclasses.replace(inputs, q=q, tiles=tiles))
        np.testing.assert_array_equal(moved[before : before + 70], first)


@pytest.mark.slow
def test_the_same_batch_twice_gives_the_same_bits(rng: np.random.Generator) -> None:
    inputs = random_inputs(CASES["tiles_that_start_anywhere"], jnp.bfloat16, rng)
    np.testing.assert_array_equal(attend(inputs), attend(inputs))


@pytest.mark.slow
@pytest.mark.skipif(is_gpu, reason="needs the interpreter")
def test_the_interpreter_finds_no_race(rng: np.random.Generator, race_detection: None) -> None:
    for name in ("tiles_that_start_anywhere", "many_chunks"):
        case = make_case(CASES[name], jnp.bfloat16, rng)
        case.check(attend(case.inputs))
        assert not gpu_callbacks.get_races().races_found


@pytest.mark.slow
@pytest.mark.skipif(is_gpu, reason="needs the interpreter")
def test_the_interpreter_would_find_a_race(
    rng: np.random.Generator, race_detection: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clear_alone(values: Any, num_owned: Array, *_: Any) -> None:
        """Both clear all rows, and neither waits for the other."""
        for first in range(0, values.shape[0], 64):
            part = values.at[pl.ds(first, 64)]
            numbers = plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False)
            part[...] = jnp.where(pallas_mosaic._iota(numbers.shape, 0) + first < num_owned, numbers, 0)
        plgpu.commit_smem()

    monkeypatch.setattr(pallas_mosaic, "_clear_unowned", clear_alone)
    try:
        attend(make_case(CASES["tiles_that_start_anywhere"], jnp.bfloat16, rng).inputs)
        is_found = gpu_callbacks.get_races().races_found
    except jax.errors.JaxRuntimeError as error:  # JAX 0.12's way of telling
        is_found = "RACE DETECTED" in str(error)
    assert is_found


# What is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tile_size": 32}, "tiles of 64 tokens and as many tokens, got tiles of 32 and 80 tokens"),
        ({"seq_lens": (9, 0, 0, 0)}, "got tiles of 64 and 9 tokens"),
        ({"head_dim": 32}, "head_dim 64 or 128 .* got 32 and 2"),
        ({"num_q_heads": 2}, "even number of query heads to a KV head, got 64 and 1"),
        ({"block_size": 48}, "block_size that divides 128 and is a multiple of 8, got 48"),
        ({"block_size": 4}, "block_size that divides 128 and is a multiple of 8, got 4"),
    ],
)
def test_shapes_that_are_not_supported_are_named(changes: dict[str, Any], words: str, rng: np.random.Generator) -> None:
    changed = dataclasses.replace(CASES["tiles_that_start_anywhere"], **changes)
    inputs = random_inputs(changed, jnp.bfloat16, rng)
    with pytest.raises(NotImplementedError, match=words):
        paged_attention(inputs.q, inputs.kv, inputs.block_tables, inputs.tiles, implementation="pallas_mosaic")


def test_float32_is_refused(rng: np.random.Generator) -> None:
    inputs = random_inputs(CASES["tiles_that_start_anywhere"], jnp.float32, rng)
    with pytest.raises(NotImplementedError, match="bfloat16, got float32"):
        attend(inputs)


def test_block_sizes_that_cannot_be_are_refused(rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="64 or 128 and num_buffers at least 2, got 96 and 2"):
        MosaicConfig(96, 2)
    with pytest.raises(ValueError, match="got 64 and 1"):
        MosaicConfig(64, 1)
    inputs = random_inputs(CASES["group_4_head_dim_128"], jnp.bfloat16, rng)
    with pytest.raises(NotImplementedError, match="needs 265216 bytes of shared memory; a CTA has 232448"):
        attend(inputs, config=MosaicConfig(128, 3))


def test_another_gpu_is_refused(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs(CASES["tiles_that_start_anywhere"], jnp.bfloat16, rng)

    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability="10.0")])
    with pytest.raises(NotImplementedError, match=r"compute capability 10\.0"):
        attend(inputs)


# Real sizes: long rings, and more CTAs than a GPU runs at once


@pytest.mark.gpu
@pytest.mark.skipif(not is_gpu, reason="needs a GPU: minutes in the interpreter")
@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("8b_prefill")])
def test_model_shapes_match_the_reference_and_give_the_same_bits_every_time(
    name: str, rng: np.random.Generator
) -> None:
    case = make_case(dataclasses.replace(SHAPES[name], tile_size=64), jnp.bfloat16, rng)
    out = attend(case.inputs)
    case.check(out)
    for _ in range(50):
        np.testing.assert_array_equal(np.asarray(attend(case.inputs)), np.asarray(out))


@pytest.mark.gpu
@pytest.mark.skipif(not is_gpu, reason="needs a GPU: the interpreter computes no addresses")
def test_cells_beyond_two_to_the_31_elements_are_reached(rng: np.random.Generator) -> None:
    """A cache of over 2^31 bfloat16 elements whose last blocks are the live ones."""
    case = make_case(shape((70, 1), (300, 40), num_q_heads=16, num_kv_heads=8, head_dim=128), jnp.bfloat16, rng)
    case.check(attend(moved_to_the_end(case.inputs, num_elements=1 << 31)))
