"""The step programs compile for an H200, write the KV cache in place and copy no slot array."""

import functools
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from dymerge_jax.step import sample_step
from dymerge_jax.step_batch import NUM_SEQ_FIELDS, packed_rows
from tests.support.aot_h200 import H200, h200_target
from tests.support.compiled_steps import (
    NUM_ROWS,
    NUM_SLOTS,
    compile_step,
    ints,
    kernels_of,
)


@pytest.fixture(scope="module")
def h200() -> Iterator[H200]:
    with h200_target() as target:
        yield target


def assert_one_launch_reads_the_gates_of_a_site(program: str, num_layers: int) -> None:
    """One for all groups of a layer and one for each; nothing else reads a gate array, in whole or in part."""
    entry = program.split("ENTRY")[1]
    arrays = re.findall(r"(%tables_gates_(?:layer|projection)[\w.]*) = f32\S* parameter", entry)
    assert len(arrays) == 5, "the gate arrays are not among the program's parameters"
    arrays += re.findall(rf"(%[\w.]+) = \S+ bitcast\((?:{'|'.join(map(re.escape, arrays))})\)", entry)
    is_read = re.compile(rf" (?!bitcast)[\w-]+\([^)]*(?:{'|'.join(map(re.escape, arrays))})[,)]")
    readers = [line for line in entry.splitlines() if " parameter(" not in line and is_read.search(line)]
    assert len(readers) == 5 * num_layers
    assert all("custom-call(" in line and "/gate_mix/" in line for line in readers)


@pytest.mark.parametrize(
    ("size", "dtype", "num_tokens", "num_seqs", "gated"),
    [
        pytest.param("llama-3-8b", jnp.bfloat16, 32, 32, False, id="8b-decode"),
        pytest.param("llama-3-8b", jnp.bfloat16, 512, 32, False, id="8b-prefill", marks=pytest.mark.slow),
        pytest.param("llama-3-8b", jnp.bfloat16, 32, 32, True, id="8b-decode-gated", marks=pytest.mark.slow),
        pytest.param("smollm2-135m", jnp.float32, 1, 1, False, id="smollm2-decode-1", marks=pytest.mark.slow),
        pytest.param("smollm2-135m", jnp.bfloat16, 64, 32, False, id="smollm2-prefill", marks=pytest.mark.slow),
        pytest.param("llama-3.2-1b", jnp.bfloat16, 32, 32, False, id="1b-decode", marks=pytest.mark.slow),
        pytest.param("llama-3.2-3b", jnp.bfloat16, 512, 32, False, id="3b-prefill", marks=pytest.mark.slow),
    ],
)
def test_a_step_program_compiles_and_updates_the_cache_in_place(h200, size, dtype, num_tokens, num_seqs, gated) -> None:
    compiled, cache_bytes, smallest_bytes = compile_step(h200, size, dtype, num_tokens, num_seqs, gated=gated)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < smallest_bytes, "an array of slots or blocks is copied"
    own = "lora_linear" if num_tokens <= 64 and dtype == jnp.bfloat16 else "maf_mvm_shrink"
    attention = "decode_paged_attention" if num_tokens == num_seqs else "paged_attention"
    assert kernels_of(compiled) >= {own, attention}
    if num_tokens == num_seqs:  # its last layer is like the others
        assert not kernels_of(compiled) & {"paged_attention", "rope_kv_write"}
    if gated:
        assert_one_launch_reads_the_gates_of_a_site(str(compiled.as_text()), num_layers=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "num_tokens", "gated", "num_layers"),
    [("llama-3-8b", 8192, False, 1), ("llama-3.2-1b", 1024, True, 1), ("llama-3-8b", 512, False, 0)],
)
def test_long_prefills_take_gate_and_up_as_one_kernel(h200, size, num_tokens, gated, num_layers) -> None:
    """Of the first of two layers; the last takes what decode steps do, as it runs for 32 tokens."""
    compiled, *_ = compile_step(h200, size, jnp.bfloat16, num_tokens, 32, gated=gated)
    launches = [line for line in compiled.as_text().splitlines() if " custom-call(" in line]
    assert sum("/lora_swiglu_prefill/" in line for line in launches) == num_layers
    assert sum("/lora_swiglu/" in line for line in launches) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "num_tokens", "num_seqs", "gated"),
    [(jnp.bfloat16, 32, 32, True), (jnp.bfloat16, 512, 32, False), (jnp.float32, 1, 1, False)],
    ids=["decode", "prefill", "float32-decode-1"],
)
def test_a_step_program_with_a_scaling_pass_compiles_and_copies_no_cache(
    h200, dtype, num_tokens, num_seqs, gated
) -> None:
    compiled, cache_bytes, smallest_bytes = compile_step(
        h200, "llama-3-8b", dtype, num_tokens, num_seqs, gated=gated, xlora=True
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < smallest_bytes, "an array of slots or blocks is copied"
    assert ("decode_paged_attention" if num_tokens == num_seqs else "paged_attention") in kernels_of(compiled)


def test_the_last_tokens_keep_their_memory_where_every_row_is_a_sequence(h200: H200) -> None:
    """There the step's tokens have the same shape, and XLA would copy last_tokens had JAX given their memory away."""
    compiled, _, _ = compile_step(h200, "llama-3.2-1b", jnp.bfloat16, NUM_ROWS, NUM_ROWS, gated=False)
    program = str(compiled.as_text())
    parameters = dict(re.findall(r"%(last_tokens|cache_layers_\d)\S* = \S+ parameter\((\d+)\)", program))
    aliases = re.findall(r"\{(\d+)\}: \((\d+), \{\}", program.splitlines()[0])
    results = ("last_tokens", "cache_layers_0", "cache_layers_1")
    assert dict(aliases) == {str(i): parameters[name] for i, name in enumerate(results)}


@pytest.mark.slow
def test_many_steps_compile_to_a_loop_that_copies_no_cache(h200: H200) -> None:
    compiled, cache_bytes, smallest_bytes = compile_step(
        h200, "llama-3.2-1b", jnp.bfloat16, NUM_ROWS, NUM_ROWS, gated=False, num_steps=4
    )
    memory, program = compiled.memory_analysis(), str(compiled.as_text())
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < smallest_bytes, "an array of slots or blocks is copied"
    assert re.search(r' while\(.*"known_trip_count":{"n":"4"}', program), "the host would ask the device when to stop"


@pytest.mark.slow
@pytest.mark.parametrize("with_logprobs", [False, True])
def test_a_sampler_program_compiles(h200, with_logprobs) -> None:
    n = 32
    step = functools.partial(sample_step, with_logprobs=with_logprobs)
    logits = jax.ShapeDtypeStruct((n, 128256), jnp.float32)
    rows = ints(*packed_rows(n, NUM_SLOTS).array.shape)
    compiled = h200.compile(step, logits, ints(n), rows, ints(NUM_SEQ_FIELDS, n), donate_argnums=(1,))
    assert compiled.memory_analysis().alias_size_in_bytes > 0
