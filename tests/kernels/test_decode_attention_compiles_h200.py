"""The Pallas kernel of decode_attention becomes H200 machine code, one launch a layer, on a machine without a GPU."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from pallas_kernels.decode_attention import decode_attention, pallas_triton
from pallas_kernels.decode_attention.config import kernel_config
from pallas_kernels.decode_attention.shapes import HEADS, Heads
from tests.support.aot_h200 import H200, h200_target, triton_offsets

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def h200() -> Iterator[H200]:
    with h200_target() as target:
        yield target


def structs(
    num_seqs: int,
    max_context: int,
    heads: Heads,
    *,
    dtype: str = "bfloat16",
    num_partials: int | None = None,
    num_blocks: int = 4096,
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the op's arguments."""
    struct = jax.ShapeDtypeStruct
    qkv = struct((num_seqs, heads.qkv_width), dtype)
    if num_partials is not None:
        qkv = struct((num_partials, *qkv.shape), jnp.float32)
    angles = struct((num_seqs, heads.head_dim // 2), jnp.float32)
    return (
        qkv,
        struct((num_blocks, 2, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim), dtype),
        struct((num_seqs, max_context // BLOCK_SIZE), jnp.int32),
        struct((num_seqs,), jnp.int32),
        angles,
        angles,
    )


def num_bytes(array: jax.ShapeDtypeStruct) -> int:
    return array.size * array.dtype.itemsize


def kernels_of(compiled: jax.stages.Compiled) -> list[str]:
    """The operations of the program that launch something."""
    entry = str(compiled.as_text()).split("ENTRY")[1]
    launches = ("fusion(", "custom-call(", "copy(", "dynamic-update-slice(", "memset", "scatter(")
    return [line for line in entry.splitlines() if any(launch in line for launch in launches)]


@pytest.mark.parametrize(
    ("num_seqs", "max_context", "name", "dtype", "num_partials"),
    [
        (1, 8192, "8b", "bfloat16", None),
        (32, 512, "8b", "bfloat16", 4),
        (64, 8192, "1b", "bfloat16", None),
        (1, 2048, "135m", "float32", None),
    ],
)
def test_model_shapes_compile_to_one_launch_that_copies_nothing(
    num_seqs: int, max_context: int, name: str, dtype: str, num_partials: int | None, h200: H200
):
    args = structs(num_seqs, max_context, HEADS[name], dtype=dtype, num_partials=num_partials)
    compiled = h200.compile(decode_attention, *args, donate_argnums=1)
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == num_bytes(args[1])
    # Partial results of the ranges at most, and the places.
    assert memory.temp_size_in_bytes < 33 * args[0].size * 4 + num_bytes(args[2]) + (1 << 16)
    kernels = kernels_of(compiled)
    assert sum("decode_paged_attention" in kernel for kernel in kernels) == 1
    has_splits = num_seqs == 1
    assert len(kernels) == 2 + has_splits, kernels  # the places and the counters, once a step


def test_all_layers_of_a_step_share_the_places_and_the_counters(h200: H200):
    """Four layers launch four kernels, and two more in the whole step."""
    args = structs(2, 4096, HEADS["1b"])

    def layers(qkv: Array, caches: list[Array], *rest: Array) -> list[tuple[Array, Array]]:
        return [decode_attention(qkv, kv, *rest) for kv in caches]

    compiled = h200.compile(layers, args[0], [args[1]] * 4, *args[2:], donate_argnums=1)
    kernels = kernels_of(compiled)
    assert sum("decode_paged_attention" in kernel for kernel in kernels) == 4
    assert len(kernels) == 6, kernels


def test_the_hook_for_an_early_launch_compiles(h200: H200):
    args = structs(32, 512, HEADS["8b"])
    config = kernel_config(num_seqs=32, num_kv_heads=8, head_dim=128, max_context=512, dtype=jnp.bfloat16)

    def call(*args: Array) -> tuple[Array, Array]:
        return pallas_triton.decode_attention(*args, config=dataclasses.replace(config, launch_dependents=True))

    assert "decode_paged_attention" in str(h200.compile(call, *args).as_text())


def test_o1_a_cache_of_more_than_two_to_the_31_elements_is_indexed_with_64_bits(h200: H200):
    per_block = 2 * 8 * BLOCK_SIZE * 128
    large, small = (
        triton_offsets(h200.lower(decode_attention, *structs(32, 1024, HEADS["8b"], num_blocks=num_blocks)))
        for num_blocks in ((1 << 31) // per_block + 1, 4096)
    )
    assert ("bf16", "i64") in large
    assert ("bf16", "i64") not in small
