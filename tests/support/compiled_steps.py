"""A step of a model, compiled for a GPU that is not there."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp

from dymerge_jax.config import named_config
from dymerge_jax.gating import build_gate_array
from dymerge_jax.kv_cache import empty_cache
from dymerge_jax.lora import empty_slots
from dymerge_jax.model import Implementations, abstract_model
from dymerge_jax.step import StepTables, forward_step, forward_steps, split_weights
from dymerge_jax.step_batch import packed_len, packed_rows
from dymerge_jax.xlora import build_xlora_array
from tests.support.aot_h200 import H200
from tests.support.tiny_models import random_gated_set, random_xlora_set

# So many slots and blocks that a copy of one array would stand out from the step's activations.
NUM_SLOTS, SLOT_RANK, NUM_ROWS, NUM_BLOCKS, BLOCK_SIZE = 1024, 8, 32, 8192, 16


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def compile_step(
    gpu: H200,
    size: str,
    dtype: Any,
    num_tokens: int,
    num_seqs: int,
    *,
    gated: bool,
    xlora: bool = False,
    num_steps: int | None = None,
) -> tuple[Any, int, int]:
    """Compiles two layers of a named size, or `num_steps` runs of them in one program.

    Returns the program, the bytes of the cache, and those of the smallest array of slots or blocks.
    """
    config = dataclasses.replace(named_config(size), num_layers=2, vocab=4096)
    model = abstract_model(config, dtype)
    cache = jax.eval_shape(lambda: empty_cache(config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype))
    slots = jax.eval_shape(lambda: empty_slots(config, num_slots=NUM_SLOTS, slot_rank=SLOT_RANK, dtype=dtype))
    gates = None
    if gated:
        experts = [f"e{i}" for i in range(4)]
        sets = [
            random_gated_set(config, "l", experts, granularity="layer", top_k=2, renormalize=True, seed=0),
            random_gated_set(config, "p", experts, granularity="projection", top_k=None, renormalize=False, seed=0),
        ]
        gates = jax.eval_shape(lambda: build_gate_array(config, sets, num_slots=NUM_SLOTS))
    rows = jnp.asarray(packed_rows(NUM_ROWS, NUM_SLOTS).array)
    tables = StepTables(slots, gates, rows, block_tables := jnp.zeros((NUM_ROWS, NUM_BLOCKS // 8), jnp.int32))
    if xlora:
        xlora_sets = [
            random_xlora_set(config, "x", "abcdefgh", seed=0, depth=2, top_k=2),
            random_xlora_set(config, "p", "abc", seed=1, is_layerwise=True, pass_value=0.5),
        ]
        array = jax.eval_shape(lambda: build_xlora_array(xlora_sets, num_slots=NUM_SLOTS))
        tables = dataclasses.replace(tables, xlora=array, scaling_tables=block_tables)
    structure, weights = split_weights(model.graph, model.state)
    implementations = Implementations(gate_mix="pallas_triton" if gated else None)
    function = forward_step if num_steps is None else forward_steps
    step = functools.partial(function, structure, num_seqs=num_seqs, implementations=implementations)
    batch = ints(*(() if num_steps is None else (num_steps,)), packed_len(num_tokens, num_seqs))
    compiled = gpu.compile(step, weights, cache, ints(NUM_ROWS), tables, batch, donate_argnums=(1, 2))
    arrays = [*cache.layers, *(array for g in slots.groups.values() for array in (g.a, g.b))]
    return compiled, num_bytes(cache), min(map(num_bytes, arrays))


def kernels_of(compiled: Any) -> set[str]:
    """Names of the Triton kernels that a program launches."""
    launches = [line for line in str(compiled.as_text()).splitlines() if " custom-call(" in line]
    return {name for line in launches for name in re.findall(r'\bname = "(\w+)"', line)}


def num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
