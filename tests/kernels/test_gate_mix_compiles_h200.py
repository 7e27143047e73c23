"""gate_mix compiles to one launch for an H200, on a machine without a GPU."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gate_mix import gate_mix
from pallas_kernels.lent_counters import NONE_ENDED
from tests.support.aot_h200 import H200, h200_target, triton_modules, triton_offsets
from tests.support.gate_cases import structs


@pytest.fixture(scope="module")
def h200() -> Iterator[H200]:
    with h200_target() as target:
        yield target


def lower(h200: H200, args: tuple[Any, ...]) -> jax.stages.Lowered:
    """One call of the kernel, the layer being an argument."""
    return h200.lower(lambda *arrays: gate_mix(*arrays[:-1], layer=arrays[-1], implementation="pallas_triton"), *args)


def launches(compiled: jax.stages.Compiled) -> list[str]:
    entry = str(compiled.as_text()).split("ENTRY")[1]
    kinds = (" fusion(", " custom-call(", " copy(", " copy-start(", " while(", " call(")
    return [line for line in entry.splitlines() if any(kind in line for kind in kinds)]


@pytest.mark.parametrize(
    ("num_tokens", "in_features", "num_gates", "num_experts", "num_slots", "dtype"),
    [
        pytest.param(32, 4096, 3, 8, 64, jnp.bfloat16, id="8b-qkv"),
        pytest.param(32, 4096, 1, 8, 64, jnp.bfloat16, id="8b-layer", marks=pytest.mark.slow),
        pytest.param(64, 4096, 2, 8, 1024, jnp.bfloat16, id="8b-gate_up", marks=pytest.mark.slow),
        pytest.param(1, 576, 3, 4, 10, jnp.float32, id="demo", marks=pytest.mark.slow),
        pytest.param(3, 100, 2, 1, 1, jnp.float32, id="one-expert", marks=pytest.mark.slow),
        pytest.param(8, 2048, 3, 20, 100, jnp.bfloat16, id="20-experts", marks=pytest.mark.slow),
        pytest.param(8, 2048, 4, 128, 300, jnp.bfloat16, id="128-experts", marks=pytest.mark.slow),
    ],
)
def test_it_compiles_to_one_launch_and_takes_no_memory(
    h200: H200, num_tokens: int, in_features: int, num_gates: int, num_experts: int, num_slots: int, dtype: Any
) -> None:
    args = structs(num_tokens, in_features, num_gates, num_experts=num_experts, num_slots=num_slots, dtype=dtype)
    compiled = lower(h200, args).compile()
    [launch] = launches(compiled)
    assert "gate_mix" in launch
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes == 0


@pytest.mark.parametrize("num_experts", [8, pytest.param(4, id="4-with-a-tail"), 128])
def test_layers_whose_programs_share_a_tokens_features_share_their_counters(h200: H200, num_experts: int) -> None:
    def two_layers(*arrays: Any) -> Any:
        x, gates, set_ids, rules, experts, base, layer = arrays
        for i in (layer, layer + 1):
            base = gate_mix(x, gates, set_ids, rules, experts, base, layer=i, implementation="pallas_triton")
        return base

    compiled = h200.lower(two_layers, *structs(32, 14336, 1, num_experts=num_experts, dtype=jnp.bfloat16)).compile()
    lines = launches(compiled)
    assert sum(" custom-call(" in line for line in lines) == 2
    assert sum(re.search(r"= s32\[32,1\]\S* fusion\(", line) is not None for line in lines) == 1
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 80 * 1024  # partial sums of one layer


def test_the_counters_are_no_other_operand_even_where_the_set_ids_are_constants(h200: H200) -> None:
    def run(*arrays: Any) -> Any:
        x, gates, _, rules, experts, base, layer = arrays
        set_ids = jnp.zeros((64, 1), jnp.int32)
        return gate_mix(x, gates, set_ids, rules, experts, base, layer=layer, implementation="pallas_triton")

    compiled = h200.lower(run, *structs(64, 14336, 1, dtype=jnp.bfloat16)).compile()
    [launch] = [line for line in launches(compiled) if " custom-call(" in line]
    operands = re.findall(r"%[\w.]+", launch.split(" custom-call(")[1].split(")")[0])
    assert len(operands) == len(set(operands)) == 11


def test_the_last_program_of_a_token_leaves_the_counter_as_it_was(h200: H200) -> None:
    [kernel] = triton_modules(lower(h200, structs(32, 14336, 1, dtype=jnp.bfloat16)))
    [name] = re.findall(rf"(%\S+) = arith.constant {NONE_ENDED} : i32", kernel)
    after_count = kernel.split("tt.atomic_rmw")[1]
    assert re.search(rf"tt\.store %\S+, {re.escape(name)} ", after_count)


@pytest.mark.parametrize(("in_features", "num_gates"), [(4096, 3), (14336, 1)])
def test_a_program_without_a_gate_loads_no_gates(h200: H200, in_features: int, num_gates: int) -> None:
    [kernel] = triton_modules(lower(h200, structs(32, in_features, num_gates, dtype=jnp.bfloat16)))
    before, ungated, *others = kernel.split("scf.if")
    gated = "".join(others)
    tile_load = r"tt\.load .*tensor<8x2048x!tt\.ptr<f32>>"
    assert re.search(tile_load, gated), "the pattern finds no load of gates at all"
    assert not re.search(tile_load, before + ungated)
    assert not re.search(r"tt\.load .*bf16", before + ungated), "x is loaded where no gate reads it"


def test_a_large_gate_array_is_reached_by_64_bit_offsets(h200: H200) -> None:
    args = structs(32, 14336, 1, dtype=jnp.bfloat16)
    assert ("f32", "i64") not in triton_offsets(lower(h200, args))
    large = jax.ShapeDtypeStruct((32, 700, 1, 8, 14336), jnp.float32)
    assert ("f32", "i64") in triton_offsets(lower(h200, (args[0], large, *args[2:])))
