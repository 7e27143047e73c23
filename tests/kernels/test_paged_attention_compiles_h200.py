"""The Pallas kernel of paged_attention becomes H200 machine code, on a machine without a GPU."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention import (
    QueryTiles,
    build_query_tiles,
    paged_attention,
    pallas_mosaic,
    pallas_triton,
    query_tile_size,
)
from pallas_kernels.paged_attention.bench import SWEPT, SWEPT_MOSAIC
from pallas_kernels.paged_attention.config import KernelConfig, MosaicConfig
from pallas_kernels.paged_attention.shapes import SHAPES, AttentionShape
from tests.support.aot_h200 import H200, h200_target, triton_offsets


@pytest.fixture(scope="module")
def h200() -> Iterator[H200]:
    with h200_target() as target:
        yield target


def structs(shape: AttentionShape, dtype: str, num_blocks: int = 4096):
    """Shapes of the op's arguments for a step of `shape`."""
    tile_size = shape.tile_size or query_tile_size(shape.num_tokens, shape.num_seqs)
    per_seq = jax.ShapeDtypeStruct((shape.num_seqs,), jnp.int32)

    def tiles(starts, lens, contexts) -> QueryTiles:
        return build_query_tiles(starts, lens, contexts, num_tokens=shape.num_tokens, tile_size=tile_size)

    blocks_per_seq = -(-max(shape.context_ends) // shape.block_size)
    return (
        jax.ShapeDtypeStruct((shape.num_tokens, shape.num_q_heads, shape.head_dim), dtype),
        jax.ShapeDtypeStruct((num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim), dtype),
        jax.ShapeDtypeStruct((shape.num_seqs, blocks_per_seq), jnp.int32),
        jax.eval_shape(tiles, per_seq, per_seq, per_seq),
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("8b_decode_32x2048", "bfloat16"),
        ("8b_decode_1x8192", "bfloat16"),
        ("8b_mixed_512", "bfloat16"),
        ("135m_decode_32x256", "float32"),
        ("135m_mixed_256", "bfloat16"),
    ],
)
def test_model_shapes_compile_and_copy_nothing(name: str, dtype: str, h200: H200):
    args = structs(SHAPES[name], dtype)
    compiled = h200.compile(lambda q, *rest: paged_attention(q, *rest), *args, donate_argnums=0)
    assert "paged_attention" in str(compiled.as_text())
    # Partial results of the splits at most: the cache is read in place, and the output takes q's buffer.
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == args[0].size * args[0].dtype.itemsize
    assert memory.temp_size_in_bytes < 33 * args[0].size * 4 + (1 << 16)


@pytest.mark.slow
@pytest.mark.parametrize(("tile_size", "chunk_tokens", "num_warps", "num_stages"), SWEPT)
def test_every_block_size_of_the_sweep_compiles(h200: H200, tile_size, chunk_tokens, num_warps, num_stages):
    shape = dataclasses.replace(SHAPES["8b_prefill_4x2048+0"], tile_size=tile_size)
    config = KernelConfig(chunk_tokens, num_splits=1, num_warps=num_warps, num_stages=num_stages)
    attend = functools.partial(pallas_triton.paged_attention, config=config, interpret=False)
    compiled = h200.compile(attend, *structs(shape, "bfloat16"), donate_argnums=0)
    assert "paged_attention" in str(compiled.as_text())


def test_o1_a_cache_of_more_than_two_to_the_31_elements_is_indexed_with_64_bits(h200: H200):
    shape = SHAPES["8b_decode_32x1024"]
    per_block = 2 * shape.num_kv_heads * shape.block_size * shape.head_dim
    large, small = (
        triton_offsets(h200.lower(paged_attention, *structs(shape, "bfloat16", num_blocks=num_blocks)))
        for num_blocks in ((1 << 31) // per_block + 1, 4096)
    )
    assert ("bf16", "i64") in large
    assert ("bf16", "i64") not in small


def test_heads_of_an_odd_width_compile(h200: H200):
    shape = AttentionShape((5, 1), (3, 40), num_q_heads=6, num_kv_heads=2, head_dim=24)
    compiled = h200.compile(paged_attention, *structs(shape, "float32"))
    assert "paged_attention" in str(compiled.as_text())


@pytest.mark.parametrize(
    ("name", "context", "dtype", "num_kv_heads", "words"),
    [
        ("8b_prefill_4x2048+0", 2048, "bfloat16", 8, "mosaic_gpu"),
        ("8b_prefill_4x2048+0", 2032, "bfloat16", 8, "triton"),
        ("8b_prefill_4x2048+0", 2048, "float32", 8, "triton"),
        ("8b_prefill_4x2048+0", 2048, "bfloat16", 32, "triton"),  # an odd number of query heads to a KV head: refused
        ("8b_prefill_512+0", 8192, "bfloat16", 8, "triton"),
        ("8b_mixed_512", 8192, "bfloat16", 8, "triton"),
    ],
)
def test_long_prompts_take_the_mosaic_kernel_where_it_supports_them(
    name: str, context: int, dtype: str, num_kv_heads: int, words: str, h200: H200
):
    """By how long they may be: the width of the block tables."""
    shape = dataclasses.replace(SHAPES[name], num_kv_heads=num_kv_heads)
    q, kv, _, tiles = structs(shape, dtype)
    tables = jax.ShapeDtypeStruct((shape.num_seqs, context // shape.block_size), jnp.int32)
    lowered = h200.lower(lambda *args: paged_attention(*args), q, kv, tables, tiles).as_text()
    assert [word for word in ("mosaic_gpu", "triton") if word in lowered] == [words]


@pytest.mark.parametrize("config", SWEPT_MOSAIC)
@pytest.mark.parametrize(("head_dim", "block_size"), [(128, 16), (128, 8), (64, 8), (64, 64)])
def test_the_mosaic_kernel_copies_nothing_and_keeps_its_registers(
    config: MosaicConfig,
    head_dim: int,
    block_size: int,
    h200: H200,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")  # what the assembler says of the kernel
    kernel: Any = pallas_mosaic._paged_attention
    kernel.clear_cache()
    shape = dataclasses.replace(SHAPES["8b_prefill_4x2048+0"], head_dim=head_dim, block_size=block_size)
    args = structs(shape, "bfloat16")
    attend = functools.partial(pallas_mosaic.paged_attention, config=config, interpret=False)
    compiled = h200.compile(attend, *args, donate_argnums=0)
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == args[0].size * args[0].dtype.itemsize
    assert memory.temp_size_in_bytes == 0
    log = "".join(capfd.readouterr())
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    assert "Used 168 registers" in log, "of which set_max_registers makes 56 and 224"
    assert "setmaxnreg" not in log, "the assembler ignores set_max_registers, and says why"
    assert "wgmma" not in log, "the assembler serializes products, and says why"
