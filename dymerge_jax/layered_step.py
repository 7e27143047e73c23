"""The step as three small programs: what comes before the layers, one layer, and what comes after.

All layers have the same shapes and share one program, which the host calls once a layer. Compiling takes the time of
one layer instead of all, and each call costs the host some tens of microseconds: the better trade on a CPU, where XLA
needs half a minute for the demo's thirty layers and a step takes tens of milliseconds. An accelerator gets
`forward_step`, one program for the whole step.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dymerge_jax.attention import AttentionContext
from dymerge_jax.kv_cache import KVCache, LayerKV
from dymerge_jax.model import Implementations, Llama, LlamaLayer, MixContext, SplitModel, Stream
from dymerge_jax.step import (
    ModelStructure,
    StepContext,
    StepResult,
    StepTables,
    Weights,
    finish_step,
    split_weights,
    step_context,
)
from dymerge_jax.step_batch import unpack_batch


@functools.partial(jax.jit, static_argnames=("structure", "num_seqs", "num_blocks", "block_size"))
def _before_layers(
    structure: ModelStructure[Llama],
    weights: Weights,
    last_tokens: Int[Array, " num_rows"],
    tables: StepTables,
    batch: Int[Array, " packed_len"],
    *,
    num_seqs: int,
    num_blocks: int,
    block_size: int,
) -> tuple[Stream, StepContext]:
    model = structure.merge(weights)
    inputs = tables.inputs(unpack_batch(batch, num_seqs)[0], last_tokens)
    context = step_context(model.config, inputs, num_blocks=num_blocks, block_size=block_size)
    return model.embedded(context.tokens), context


@functools.partial(jax.jit, static_argnames=("structure", "implementations"), donate_argnames=("stream", "kv"))
def _layer(
    structure: ModelStructure[LlamaLayer],
    weights: Weights,
    layer: Int[Array, ""],
    stream: Stream,
    kv: LayerKV,
    attention: AttentionContext,
    mix: MixContext,
    implementations: Implementations,
) -> tuple[Stream, LayerKV]:
    return structure.merge(weights)(stream, kv, attention, mix, implementations, layer)


@functools.partial(jax.jit, static_argnames=("structure", "num_seqs"), donate_argnames="last_tokens")
def _after_layers(
    structure: ModelStructure[Llama],
    weights: Weights,
    stream: Stream,
    last_tokens: Int[Array, " num_rows"],
    batch: Int[Array, " packed_len"],
    *,
    num_seqs: int,
) -> tuple[Float[Array, "num_seqs vocab"], Int[Array, " num_seqs"], Int[Array, " num_rows"]]:
    model = structure.merge(weights)
    return finish_step(model, model.normed(stream), last_tokens, *unpack_batch(batch, num_seqs))


class LayeredStep:
    """A compiled step; called like a compiled `forward_step` and with the same results, to rounding.

    Args:
      model: weights; used again on every call.
      cache, last_tokens, tables, batch: arrays, or their shapes, as every call has them.
      num_seqs: sequences of the batch.
      implementations: of the ops.
    """

    def __init__(
        self,
        model: SplitModel,
        cache: KVCache,
        last_tokens: Int[Array, " num_rows"] | jax.ShapeDtypeStruct,
        tables: StepTables,
        batch: Int[Array | np.ndarray, " packed_len"] | jax.ShapeDtypeStruct,
        *,
        num_seqs: int,
        implementations: Implementations,
    ) -> None:
        layers = [split_weights(*nnx.split(layer)) for layer in nnx.merge(model.graph, model.state).layers]
        layer_structure = layers[0][0]
        assert all(other == layer_structure for other, _ in layers), "layers differ in structure"
        self._layers = [(weights, jnp.int32(i)) for i, (_, weights) in enumerate(layers)]
        structure, weights = split_weights(model.graph, model.state)
        before = _before_layers.lower(
            structure,
            weights,
            last_tokens,
            tables,
            batch,
            num_seqs=num_seqs,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
        )
        stream, context = before.out_info
        self._before = before.compile()
        self._layer = _layer.lower(
            layer_structure,
            *self._layers[0],
            stream,
            cache.layers[0],
            context.attention,
            context.mix(tables.slots, tables.gates),
            implementations=implementations,
        ).compile()
        self._after = _after_layers.lower(structure, weights, stream, last_tokens, batch, num_seqs=num_seqs).compile()

    def __call__(
        self,
        weights: Weights,
        cache: KVCache,
        last_tokens: Int[Array, " num_rows"],
        tables: StepTables,
        batch: Int[Array | np.ndarray, " packed_len"],
    ) -> StepResult:
        """Logits and greedy tokens; cache and last_tokens are donated."""
        stream, context = self._before(weights, last_tokens, tables, batch)
        mixes = context.mix(tables.slots, tables.gates)
        layers_kv = []
        for layer, kv in zip(self._layers, cache.layers, strict=True):
            stream, kv = self._layer(*layer, stream, kv, context.attention, mixes)
            layers_kv.append(kv)
        logits, tokens, last_tokens = self._after(weights, stream, last_tokens, batch)
        return StepResult(logits, tokens, last_tokens, KVCache(layers=tuple(layers_kv)))
