"""The kernels of maf_mvm also compile for a GPU with less shared memory than an H200."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.maf_mvm import ProjectionSlots, pallas_triton, token_tile_size
from pallas_kernels.maf_mvm.shapes import Group, named_shapes
from pallas_kernels.segments import build_segments
from tests.support.aot_h200 import H200, l40_target

NUM_SLOTS, SLOT_RANK = 128, 8


@pytest.fixture(scope="module")
def l40() -> Iterator[H200]:
    with l40_target() as target:
        yield target


@pytest.mark.parametrize("group", ["gate_up", "down"])
@pytest.mark.parametrize("num_tokens", [32, 128, 512, 2048])
def test_a_step_of_any_number_of_tokens_compiles(l40: H200, group: Group, num_tokens: int) -> None:
    in_features, widths = named_shapes()["llama-3-8b"].group(group)
    struct = jax.ShapeDtypeStruct
    slots = ProjectionSlots(
        a=struct((2, NUM_SLOTS, len(widths) * SLOT_RANK, in_features), jnp.bfloat16),  # pyright: ignore[reportArgumentType]
        b=struct((2, NUM_SLOTS, SLOT_RANK, sum(widths)), jnp.bfloat16),  # pyright: ignore[reportArgumentType]
        scale=struct((2, NUM_SLOTS, len(widths)), jnp.float32),  # pyright: ignore[reportArgumentType]
        widths=widths,
    )
    weights = struct((num_tokens, 1, NUM_SLOTS), jnp.float32)
    segments = jax.eval_shape(functools.partial(build_segments, tile_size=token_tile_size(num_tokens)), weights)
    compiled = l40.compile(
        functools.partial(pallas_triton.maf_mvm, ends_in_swiglu=group == "gate_up"),
        struct((num_tokens, in_features), jnp.bfloat16),
        slots,
        segments,
        struct((num_tokens, sum(widths)), jnp.bfloat16),
        struct((), jnp.int32),
    )
    assert "maf_mvm_shrink" in str(compiled.as_text())
