"""The Mosaic kernels of lora_linear become H200 machine code, two launches a call, on a machine without a GPU."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.lora_linear import Implementation, lora_linear, lora_swiglu, new_arrivals, pallas_mosaic
from pallas_kernels.lora_linear.mosaic_config import MosaicConfig, MosaicProblem, pick_config
from pallas_kernels.maf_mvm import ProjectionSlots, token_tile_size
from pallas_kernels.maf_mvm.shapes import GROUPS, Group, named_shapes
from pallas_kernels.segments import build_segments
from tests.support.aot_h200 import H200, h200_target
from tests.support.linear_cases import LinearCase


@pytest.fixture(scope="module")
def h200() -> Iterator[H200]:
    with h200_target() as target:
        yield target


def structs(
    model: str, group: Group, num_tokens: int, *, num_slots: int = 128, slot_rank: int = 8, has_segments: bool = True
) -> LinearCase:
    """Shapes of the op's arguments."""
    in_features, widths = named_shapes()[model].group(group)

    def build() -> LinearCase:
        weights = jnp.zeros((num_tokens, 1, num_slots))
        return LinearCase(
            x=jnp.zeros((num_tokens, in_features), jnp.bfloat16),
            w=jnp.zeros((in_features, sum(widths)), jnp.bfloat16),
            slots=ProjectionSlots(
                a=jnp.zeros((2, num_slots, len(widths) * slot_rank, in_features), jnp.bfloat16),
                b=jnp.zeros((2, num_slots, slot_rank, sum(widths)), jnp.bfloat16),
                scale=jnp.zeros((2, num_slots, len(widths))),
                widths=widths,
            ),
            segments=build_segments(weights, tile_size=token_tile_size(num_tokens)) if has_segments else None,
            arrivals=new_arrivals(1),
        )

    return jax.eval_shape(build)


def call(group: Group, case: LinearCase, layer: jax.Array, config: MosaicConfig | None = None) -> jax.Array:
    op = pallas_mosaic.lora_swiglu if group == "gate_up" else pallas_mosaic.lora_linear
    return op(case.x, case.w, case.slots, case.segments, layer, config=config)


def compile_group(
    h200: H200, group: Group, case: LinearCase, config: MosaicConfig | None = None
) -> jax.stages.Compiled:
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    return h200.compile(lambda case, layer: call(group, case, layer, config), case, scalar)


def launches_of(compiled: jax.stages.Compiled) -> list[str]:
    """The operations of the program that launch something."""
    entry = str(compiled.as_text()).split("ENTRY")[1]
    names = ("fusion(", "custom-call(", "copy(", "copy-start(", "dynamic-slice(", "dynamic-update-slice(", "while(")
    return [line for line in entry.splitlines() if any(f" {name}" in line for name in names)]


@pytest.mark.parametrize("num_tokens", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 64)), 32])
@pytest.mark.parametrize("group", [*(pytest.param(g, marks=pytest.mark.slow) for g in ("o", "down")), "qkv", "gate_up"])
def test_decode_of_the_8b_shape_is_two_launches_that_copy_nothing(h200: H200, group: Group, num_tokens: int) -> None:
    compiled = compile_group(h200, group, structs("llama-3-8b", group, num_tokens))
    shrink, site = launches_of(compiled)
    assert "/lora_shrink/" in shrink
    assert ("/lora_swiglu/" if group == "gate_up" else "/lora_linear/") in site
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 1 << 22  # v alone


def test_a_call_without_segments_is_one_launch_without_scratch(h200: H200) -> None:
    compiled = compile_group(h200, "qkv", structs("llama-3-8b", "qkv", 32, has_segments=False))
    [launch] = launches_of(compiled)
    assert "/linear/" in launch
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 1 << 12


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("has_segments", [False, True])
def test_only_base_weights_are_fetched_before_the_wait_for_the_kernels_ahead(has_segments: bool) -> None:
    """Whatever else a launch reads, a kernel of the same step may have just written."""
    case = structs("llama-3-8b", "gate_up", 32, has_segments=has_segments)
    config = pick_config(MosaicProblem(4096, (14336, 14336), True))
    traced = jax.jit(lambda case, layer: call("gate_up", case, layer)).trace(case, jnp.int32(0))
    # What stands ahead of each wait in the jaxpr that it is in.
    aheads = [text.rsplit("lambda", 1)[1] for text in str(traced.jaxpr).split("griddepcontrol_wait")[:-1]]
    assert len(aheads) == (2 if has_segments else 1)
    assert not any(" <- " in ahead or "_to_gmem" in ahead for ahead in aheads)
    fetches = [ahead.count("copy_gmem_to_smem") for ahead in aheads]
    assert fetches[-1] == 2 * config.buffers  # a tile of the gate's weights and one of the up projection's
    assert fetches[:-1] == [0] * has_segments


@pytest.mark.parametrize("num_tokens", [7, 33, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 9, 31, 63))])
def test_numbers_of_tokens_that_are_no_power_of_two_compile(h200: H200, num_tokens: int) -> None:
    compiled = compile_group(h200, "qkv", structs("llama-3.2-1b", "qkv", num_tokens))
    assert compiled.out_info.shape[1] == num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("model", list(named_shapes()))
@pytest.mark.parametrize("group", GROUPS)
def test_every_named_shape_compiles(h200: H200, model: str, group: Group) -> None:
    assert len(launches_of(compile_group(h200, group, structs(model, group, 32)))) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("num_slots", "slot_rank"), [(4, 8), (64, 16), (64, 24), (64, 32), (16, 64), (256, 8)])
def test_every_slot_array_compiles(h200: H200, num_slots: int, slot_rank: int) -> None:
    case = structs("llama-3-8b", "qkv", 32, num_slots=num_slots, slot_rank=slot_rank)
    assert len(launches_of(compile_group(h200, "qkv", case))) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "shrink_splits"), [(64, 1), (64, 4), (128, 1), (128, 2), (128, 8)])
@pytest.mark.parametrize("columns", [64, 128])
def test_block_sizes_of_a_sweep_compile(h200: H200, depth: int, shrink_splits: int, columns: int) -> None:
    config = MosaicConfig(columns, depth, 3, 2, shrink_splits, 64, 3)
    assert len(launches_of(compile_group(h200, "o", structs("llama-3-8b", "o", 32), config))) == 2


# Prefill


def compile_prefill(
    h200: H200, case: LinearCase, group: Group = "gate_up", implementation: Implementation | None = None
) -> jax.stages.Compiled:
    """What a GPU picks, or a named implementation."""
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    op = functools.partial(lora_swiglu if group == "gate_up" else lora_linear, site=0, implementation=implementation)

    def call(case: LinearCase, layer: jax.Array) -> jax.Array:
        return op(case.x, case.w, case.slots, case.segments, case.arrivals, layer=layer)[0]

    return h200.compile(call, case, scalar)


@pytest.mark.parametrize(
    ("model", "num_tokens", "slot_rank"),
    [
        ("llama-3-8b", 8192, 8),
        *(
            pytest.param(model, num_tokens, slot_rank, marks=pytest.mark.slow)
            for model, num_tokens, slot_rank in [
                ("llama-3-8b", 2048, 64),
                ("llama-3.2-3b", 4096, 16),
                ("llama-3.2-1b", 2048, 32),
            ]
        ),
    ],
)
def test_a_long_prefill_is_a_shrink_and_one_launch_that_copies_nothing(
    h200: H200, model: str, num_tokens: int, slot_rank: int
) -> None:
    case = structs(model, "gate_up", num_tokens, slot_rank=slot_rank)
    compiled = compile_prefill(h200, case)
    shrink, rest = launches_of(compiled)
    assert "/maf_mvm_shrink/" in shrink
    assert "/lora_swiglu_prefill/" in rest
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes <= num_tokens * 2 * 128 * slot_rank * 2  # v alone


@pytest.mark.parametrize("num_tokens", [512, pytest.param(8192, marks=pytest.mark.slow)])
@pytest.mark.parametrize("group", ["qkv", *(pytest.param(g, marks=pytest.mark.slow) for g in ("o", "down"))])
def test_other_projections_of_a_prefill_are_a_shrink_and_one_launch_by_name(
    h200: H200, group: Group, num_tokens: int
) -> None:
    compiled = compile_prefill(h200, structs("llama-3-8b", group, num_tokens), group, "pallas_mosaic")
    shrink, rest = launches_of(compiled)
    assert "/maf_mvm_shrink/" in shrink
    assert "/lora_linear_prefill/" in rest


def test_a_long_prefill_without_adapters_is_one_launch_without_scratch(h200: H200) -> None:
    compiled = compile_prefill(h200, structs("llama-3-8b", "gate_up", 8192, has_segments=False))
    [launch] = launches_of(compiled)
    assert "/lora_swiglu_prefill/" in launch
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 1 << 12


@pytest.mark.parametrize(("model", "num_tokens", "slot_rank"), [("llama-3-8b", 512, 8), ("llama-3-8b", 2048, 4)])
def test_other_prefills_take_the_librarys_gemm(h200: H200, model: str, num_tokens: int, slot_rank: int) -> None:
    launches = "".join(launches_of(compile_prefill(h200, structs(model, "gate_up", num_tokens, slot_rank=slot_rank))))
    assert "lora_swiglu_prefill" not in launches
    assert "/maf_mvm_expand_swiglu/" in launches
