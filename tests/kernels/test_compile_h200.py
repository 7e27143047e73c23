"""The Triton kernels of maf_mvm compile to H200 machine code, on a machine without a GPU."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.maf_mvm import ProjectionSlots, maf_mvm, maf_swiglu, token_tile_size
from pallas_kernels.maf_mvm.shapes import GROUPS, Group, named_shapes
from pallas_kernels.segments import build_segments
from tests.support.aot_h200 import H200, h200_target, triton_offsets


@pytest.fixture(scope="module")
def h200() -> Iterator[H200]:
    with h200_target() as target:
        yield target


def lower_group(
    h200: H200,
    model: str,
    group: Group,
    *,
    num_tokens: int,
    num_slots: int = 64,
    slot_rank: int = 8,
    num_layers: int = 2,
    dtype: Any = jnp.bfloat16,
    op: Callable[..., jax.Array] = maf_mvm,
    **jit_kwargs: Any,
) -> jax.stages.Lowered:
    """Lowers one call of maf_mvm, the segments built inside, with the layer as an argument."""
    in_features, widths = named_shapes()[model].group(group)
    rows, out_features = len(widths) * slot_rank, sum(widths)
    struct = jax.ShapeDtypeStruct
    slots = ProjectionSlots(
        a=struct((num_layers, num_slots, rows, in_features), dtype),  # pyright: ignore[reportArgumentType]
        b=struct((num_layers, num_slots, slot_rank, out_features), dtype),  # pyright: ignore[reportArgumentType]
        scale=struct((num_layers, num_slots, len(widths)), jnp.float32),  # pyright: ignore[reportArgumentType]
        widths=widths,
    )

    def call(x: jax.Array, slots: ProjectionSlots, weights: jax.Array, base: jax.Array, layer: jax.Array) -> jax.Array:
        segments = build_segments(weights, tile_size=token_tile_size(num_tokens))
        return op(x, slots, segments, base, layer=layer, implementation="pallas_triton")

    return h200.lower(
        call,
        struct((num_tokens, in_features), dtype),
        slots,
        struct((num_tokens, 1, num_slots), jnp.float32),
        struct((num_tokens, out_features), dtype),
        struct((), jnp.int32),
        **jit_kwargs,
    )


def compile_group(h200: H200, model: str, group: Group, **kwargs: Any) -> jax.stages.Compiled:
    return lower_group(h200, model, group, **kwargs).compile()


@pytest.mark.parametrize("group", GROUPS)
def test_decode_of_the_8b_shape_compiles(h200: H200, group: Group) -> None:
    compiled = compile_group(h200, "llama-3-8b", group, num_tokens=32)
    text = compiled.as_text()
    assert text is not None
    assert text.count("maf_mvm_shrink") >= 1
    assert text.count("maf_mvm_expand") >= 1


@pytest.mark.slow
@pytest.mark.parametrize("model", list(named_shapes()))
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("dtype", "num_tokens"),
    [(jnp.bfloat16, 1), (jnp.bfloat16, 32), (jnp.bfloat16, 512), (jnp.float32, 64)],
    ids=["bfloat16-1", "bfloat16-32", "bfloat16-512", "float32-64"],
)
def test_every_named_shape_compiles(h200: H200, model: str, group: Group, dtype: Any, num_tokens: int) -> None:
    compile_group(h200, model, group, num_tokens=num_tokens, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("slot_rank", [4, 16, 32, 64])
@pytest.mark.parametrize("num_tokens", [32, 512])
def test_every_slot_rank_compiles(h200: H200, slot_rank: int, num_tokens: int) -> None:
    compile_group(h200, "llama-3-8b", "qkv", num_tokens=num_tokens, slot_rank=slot_rank)


def test_a_prefill_of_the_8b_shape_compiles_and_adds_onto_its_base(h200: H200) -> None:
    compiled = compile_group(h200, "llama-3-8b", "qkv", num_tokens=8192, num_slots=128, donate_argnums=3)
    stats = compiled.memory_analysis()
    assert stats is not None
    assert stats.alias_size_in_bytes == 8192 * 6144 * 2


def test_a_prefill_that_ends_in_swiglu_compiles_and_never_writes_the_sum(h200: H200) -> None:
    compiled = compile_group(h200, "llama-3-8b", "gate_up", num_tokens=8192, num_slots=128, op=maf_swiglu)
    assert "maf_mvm_expand_swiglu" in str(compiled.as_text())
    stats = compiled.memory_analysis()
    assert stats is not None
    assert stats.output_size_in_bytes == 8192 * 14336 * 2
    # v, the mix matrix and the segments; the sum would be 448 MiB.
    assert stats.temp_size_in_bytes < 100 << 20


def test_the_slot_array_is_read_in_place(h200: H200) -> None:
    compiled = compile_group(h200, "llama-3-8b", "gate_up", num_tokens=32, num_layers=8)
    stats = compiled.memory_analysis()
    assert stats is not None
    one_layer_of_a = 64 * 16 * 4096 * 2
    assert stats.temp_size_in_bytes < one_layer_of_a / 2


def test_all_layers_share_one_kernel(h200: H200) -> None:
    num_slots, rank, width, num_layers = 64, 8, 2048, 16
    struct = jax.ShapeDtypeStruct
    slots = ProjectionSlots(
        a=struct((num_layers, num_slots, rank, width), jnp.bfloat16),  # pyright: ignore[reportArgumentType]
        b=struct((num_layers, num_slots, rank, width), jnp.bfloat16),  # pyright: ignore[reportArgumentType]
        scale=struct((num_layers, num_slots, 1), jnp.float32),  # pyright: ignore[reportArgumentType]
        widths=(width,),
    )

    def chain(x: jax.Array, slots: ProjectionSlots, weights: jax.Array) -> jax.Array:
        segments = build_segments(weights, tile_size=32)
        for layer in range(num_layers):
            x = maf_mvm(x, slots, segments, x, layer=layer, implementation="pallas_triton")
        return x

    lowered = h200.lower(
        chain, struct((32, width), jnp.bfloat16), slots, struct((32, 1, num_slots), jnp.float32)
    ).as_text()
    assert lowered.count("maf_mvm_shrink") < num_layers


def test_o1_arrays_over_4_gib_are_indexed_with_64_bits(h200: H200) -> None:
    """Row numbers fit 32 bits; offsets would not, they would wrap past row 149 796 of x."""
    lowered = lower_group(h200, "llama-3-8b", "down", num_tokens=600_000, num_slots=4096, num_layers=32, slot_rank=16)
    bfloat16_offsets = {offset for dtype, offset in triton_offsets(lowered) if dtype == "bf16"}  # x, A, v, B, base, y
    assert bfloat16_offsets == {"i64"}


def test_o1_offsets_of_32_bits_end_where_a_sign_bit_would_be_needed(h200: H200) -> None:
    """They count elements: the 2 GiB of the reported case (87 383 tokens of 24 576 bytes) are not the border."""
    last = 2**31 // named_shapes()["llama-3-8b"].group("down")[0]
    for num_tokens, offset in ((last, "i32"), (last + 1, "i64")):
        lowered = lower_group(h200, "llama-3-8b", "down", num_tokens=num_tokens)
        assert max(o for dtype, o in triton_offsets(lowered) if dtype == "bf16") == offset
