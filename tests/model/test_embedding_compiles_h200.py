"""What embeds prompts compiles for an H200, without a copy of the weights, adapter slots or a cache."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from dymerge_jax import embedding
from dymerge_jax.config import named_config
from dymerge_jax.model import abstract_model
from dymerge_jax.step import split_weights
from tests.support.aot_h200 import H200, h200_target

NUM_TOKENS = embedding.MAX_ROWS * embedding.ROW_LEN


@pytest.fixture(scope="module")
def h200() -> Iterator[H200]:
    with h200_target() as target:
        yield target


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dtype"), [("llama-3-8b", jnp.bfloat16), ("smollm2-135m", jnp.float32)])
def test_the_programs_that_embed_compile_and_hold_little(h200: H200, size: str, dtype: Any) -> None:
    config = dataclasses.replace(named_config(size), num_layers=2, vocab=4096)
    model = abstract_model(config, dtype)
    structure, weights = split_weights(model.graph, model.state)
    layer_structure, layer_weights = split_weights(*nnx.split(nnx.merge(model.graph, model.state).layers[0]))
    tokens = jax.ShapeDtypeStruct((embedding.MAX_ROWS, embedding.ROW_LEN), jnp.int32)
    stream, context = jax.eval_shape(lambda w, t: embedding._before_layers(structure, w, t), weights, tokens)
    stream = jax.eval_shape(lambda w, s, c: embedding._layer(layer_structure, w, s, c), layer_weights, stream, context)

    def layer(weights: Any, stream: Any) -> Any:
        cos, sin = (jnp.zeros(x.shape, x.dtype) for x in (context.cos, context.sin))
        return embedding._layer(layer_structure, weights, stream, dataclasses.replace(context, cos=cos, sin=sin))

    compiled = h200.compile(layer, layer_weights, stream, donate_argnums=1)
    memory: Any = compiled.memory_analysis()
    activations = NUM_TOKENS * 2 * config.ffn * 4
    assert memory.temp_size_in_bytes < 4 * activations
    assert "add_rms_norm" in str(compiled.as_text()), "the norm's own kernel is not in the program"
    h200.compile(lambda w, t: embedding._before_layers(structure, w, t), weights, tokens)
    lengths = jax.ShapeDtypeStruct((embedding.MAX_ROWS,), jnp.int32)
    h200.compile(lambda s, n: embedding._mean_states(s, n, num_skipped=3), stream, lengths)
