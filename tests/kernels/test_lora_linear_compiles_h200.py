"""The kernel of lora_linear becomes H200 machine code, one launch a call, on a machine without a GPU."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.lora_linear import lora_linear, lora_swiglu, new_arrivals
from pallas_kernels.maf_mvm import ProjectionSlots, token_tile_size
from pallas_kernels.maf_mvm.shapes import GROUPS, Group, named_shapes
from pallas_kernels.segments import build_segments
from tests.support.aot_h200 import H200, h200_target, triton_offsets
from tests.support.linear_cases import LinearCase

NUM_LAYERS = 2


@pytest.fixture(scope="module")
def h200() -> Iterator[H200]:
    with h200_target() as target:
        yield target


def structs(
    model: str,
    group: Group,
    *,
    num_tokens: int,
    num_slots: int = 128,
    slot_rank: int = 8,
    num_layers: int = NUM_LAYERS,
    has_segments: bool = True,
) -> LinearCase:
    """Shapes of the op's arguments."""
    in_features, widths = named_shapes()[model].group(group)

    def build() -> LinearCase:
        weights = jnp.zeros((num_tokens, 1, num_slots))
        return LinearCase(
            x=jnp.zeros((num_tokens, in_features), jnp.bfloat16),
            w=jnp.zeros((in_features, sum(widths)), jnp.bfloat16),
            slots=ProjectionSlots(
                a=jnp.zeros((num_layers, num_slots, len(widths) * slot_rank, in_features), jnp.bfloat16),
                b=jnp.zeros((num_layers, num_slots, slot_rank, sum(widths)), jnp.bfloat16),
                scale=jnp.zeros((num_layers, num_slots, len(widths))),
                widths=widths,
            ),
            segments=build_segments(weights, tile_size=token_tile_size(num_tokens)) if has_segments else None,
            arrivals=new_arrivals(4 * num_layers),
        )

    return jax.eval_shape(build)


def lower_group(h200: H200, group: Group, case: LinearCase) -> jax.stages.Lowered:
    """Lowers one call of the kernel, the layer and the site as arguments, the counters donated."""

    def call(arrivals: jax.Array, case: LinearCase, layer: jax.Array, site: jax.Array) -> tuple[jax.Array, jax.Array]:
        op = lora_swiglu if group == "gate_up" else lora_linear
        args = (case.x, case.w, case.slots, case.segments, arrivals)
        return op(*args, layer=layer, site=site, implementation="pallas_triton")

    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    return h200.lower(call, case.arrivals, case, scalar, scalar, donate_argnums=0)


def launches_of(compiled: jax.stages.Compiled) -> list[str]:
    """The operations of the program that launch something."""
    entry = str(compiled.as_text()).split("ENTRY")[1]
    names = ("fusion(", "custom-call(", "copy(", "copy-start(", "dynamic-slice(", "dynamic-update-slice(", "while(")
    return [line for line in entry.splitlines() if any(f" {name}" in line for name in names)]


@pytest.mark.parametrize("num_tokens", [32, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 64))])
@pytest.mark.parametrize("group", GROUPS)
def test_decode_of_the_8b_shape_is_one_launch_that_copies_nothing(h200: H200, group: Group, num_tokens: int) -> None:
    case = structs("llama-3-8b", group, num_tokens=num_tokens)
    compiled = lower_group(h200, group, case).compile()
    [launch] = launches_of(compiled)
    assert ("lora_swiglu" if group == "gate_up" else "lora_linear") in launch
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == case.arrivals.size * 4
    # v and its float32 shares: nothing as large as a layer of A or B, or as W.
    arrays = [case.w.size, case.slots.a.size / NUM_LAYERS, case.slots.b.size / NUM_LAYERS]
    assert memory.temp_size_in_bytes < 2 * min(arrays)


@pytest.mark.parametrize("group", [pytest.param("qkv", marks=pytest.mark.slow), "gate_up"])
def test_a_call_without_segments_is_one_launch_without_scratch(h200: H200, group: Group) -> None:
    compiled = lower_group(h200, group, structs("llama-3-8b", group, num_tokens=32, has_segments=False)).compile()
    [launch] = launches_of(compiled)
    assert ("swiglu" if group == "gate_up" else "linear") in launch
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 1 << 12


def test_all_layers_share_one_kernel_and_the_counters(h200: H200) -> None:
    num_layers = 4
    case = structs("llama-3-8b", "o", num_tokens=32, num_layers=num_layers)

    def chain(arrivals: jax.Array, case: LinearCase) -> tuple[jax.Array, jax.Array]:
        x = case.x
        for layer in range(num_layers):
            args = (x, case.w, case.slots, case.segments, arrivals)
            y, arrivals = lora_linear(*args, layer=layer, site=layer, implementation="pallas_triton")
            x = y.sum(0, dtype=jnp.float32).astype(jnp.bfloat16)
        return x, arrivals

    lowered = h200.lower(chain, case.arrivals, case, donate_argnums=0)
    assert lowered.as_text().count('name = "lora_linear"') == 1
    compiled = lowered.compile()
    kernels = [launch for launch in launches_of(compiled) if "lora_linear" in launch]
    assert len(kernels) == num_layers
    assert not [launch for launch in launches_of(compiled) if " copy" in launch]
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == case.arrivals.size * 4


def test_a_gpu_picks_the_kernel_where_it_supports_the_shapes(h200: H200) -> None:
    def kernels(num_tokens: int, dtype: Any) -> str:
        case = structs("llama-3.2-1b", "o", num_tokens=num_tokens)
        case = jax.tree.map(lambda x: x.update(dtype=dtype) if x.dtype == jnp.bfloat16 else x, case)
        return h200.lower(
            lambda case: lora_linear(case.x, case.w, case.slots, case.segments, case.arrivals, layer=0, site=0), case
        ).as_text()

    assert "lora_linear" in kernels(64, jnp.bfloat16)
    for num_tokens, dtype in ((65, jnp.bfloat16), (64, jnp.float32)):
        text = kernels(num_tokens, dtype)
        assert "maf_mvm" in text
        assert 'name = "lora_linear"' not in text


def test_o1_arrays_over_4_gib_are_indexed_with_64_bits(h200: H200) -> None:
    """A and B of the 8B shape with 512 slots in 32 layers hold more than 2^31 elements."""
    large = lower_group(h200, "gate_up", structs("llama-3-8b", "gate_up", num_tokens=32, num_slots=512, num_layers=32))
    small = lower_group(h200, "gate_up", structs("llama-3-8b", "gate_up", num_tokens=32))
    assert ("bf16", "i64") in triton_offsets(large)
    assert ("bf16", "i64") not in triton_offsets(small)


@pytest.mark.slow
@pytest.mark.parametrize("model", list(named_shapes()))
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("num_tokens", [1, 32, 64])
def test_every_named_shape_compiles(h200: H200, model: str, group: Group, num_tokens: int) -> None:
    [launch] = launches_of(lower_group(h200, group, structs(model, group, num_tokens=num_tokens)).compile())
    assert "lora" in launch


@pytest.mark.slow
@pytest.mark.parametrize(("num_slots", "slot_rank"), [(1, 8), (64, 4), (64, 16), (64, 32), (256, 8), (1024, 8)])
def test_every_slot_array_compiles(h200: H200, num_slots: int, slot_rank: int) -> None:
    case = structs("llama-3-8b", "qkv", num_tokens=32, num_slots=num_slots, slot_rank=slot_rank)
    assert len(launches_of(lower_group(h200, "qkv", case).compile())) == 1
