"""The step as three small programs: what comes before the layers, one layer, and what comes after.

All layers have the same shapes and share one program, which the host calls once a layer. Compiling takes the time of
one layer instead of all, and each call costs the host some tens of microseconds: the better trade on a CPU, where XLA
needs half a minute for the demo's thirty layers and a step takes tens of milliseconds. The last layer is like the
others here, and runs for tokens that nobody reads. An accelerator gets `forward_step`, one program for the whole step.
"""

import dataclasses
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
    last_new_tokens,
    scaling_inputs,
    split_weights,
    step_context,
)
from dymerge_jax.step_batch import unpack_batch
from dymerge_jax.xlora import ExpertWeights, XLoraArray, XLoraTokens, expert_weights


@functools.partial(jax.jit, static_argnames=("structure", "num_seqs", "num_blocks", "block_size", "is_scaling_pass"))
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
    is_scaling_pass: bool,
) -> tuple[Stream, StepContext]:
    model, max_slots = structure.merge(weights), None
    inputs = tables.inputs(unpack_batch(batch, num_seqs)[0], last_tokens)
    if is_scaling_pass:
        inputs, max_slots = scaling_inputs(inputs)
    context = step_context(model.config, inputs, num_blocks=num_blocks, block_size=block_size, max_slots=max_slots)
    return model.embedded(context.tokens), context


@functools.partial(jax.jit, static_argnames="structure")
def _after_scaling_pass(
    structure: ModelStructure[Llama], weights: Weights, stream: Stream, xlora: XLoraArray, tokens: XLoraTokens
) -> ExpertWeights:
    model = structure.merge(weights)
    return expert_weights(model.config, xlora, tokens, model.normed(stream))


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
) -> tuple[Int[Array, " num_rows"], Float[Array, "num_seqs vocab"], Int[Array, " num_seqs"]]:
    model = structure.merge(weights)
    work, targets = unpack_batch(batch, num_seqs)
    return finish_step(model, model.normed(stream)[last_new_tokens(work)], last_tokens, targets)


@dataclasses.dataclass(frozen=True)
class _ScalingPass:
    """The programs of X-LoRA's first pass: what comes before its layers, one layer, and the classifiers."""

    before: jax.stages.Compiled
    layer: jax.stages.Compiled
    after: jax.stages.Compiled


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

        def lower_before(is_scaling_pass: bool) -> jax.stages.Lowered:
            return _before_layers.lower(
                structure,
                weights,
                last_tokens,
                tables,
                batch,
                num_seqs=num_seqs,
                num_blocks=cache.num_blocks,
                block_size=cache.block_size,
                is_scaling_pass=is_scaling_pass,
            )

        def compile_layer(stream: Stream, attention: AttentionContext, mix: MixContext) -> jax.stages.Compiled:
            lowered = _layer.lower(
                layer_structure,
                *self._layers[0],
                stream,
                cache.layers[0],
                attention,
                mix,
                implementations=implementations,
            )
            return lowered.compile()

        before, experts = lower_before(is_scaling_pass=False), None
        stream, context = before.out_info
        self._scaling: _ScalingPass | None = None
        if tables.xlora is not None:
            first = lower_before(is_scaling_pass=True)
            first_stream, first_context = first.out_info
            after = _after_scaling_pass.lower(structure, weights, first_stream, tables.xlora, context.xlora)
            experts = after.out_info
            first_layer = compile_layer(first_stream, first_context.attention, first_context.mix(tables.slots, None))
            self._scaling = _ScalingPass(first.compile(), first_layer, after.compile())
        self._before = before.compile()
        self._layer = compile_layer(stream, context.attention, context.mix(tables.slots, tables.gates, experts))
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
        experts = None
        if self._scaling is not None:
            first, first_context = self._scaling.before(weights, last_tokens, tables, batch)
            mix = first_context.mix(tables.slots, None)
            first, cache = self._run_layers(self._scaling.layer, first, cache, first_context.attention, mix)
            experts = self._scaling.after(weights, first, tables.xlora, context.xlora)
        mix = context.mix(tables.slots, tables.gates, experts)
        stream, cache = self._run_layers(self._layer, stream, cache, context.attention, mix)
        last_tokens, logits, tokens = self._after(weights, stream, last_tokens, batch)
        return StepResult(last_tokens, cache, logits, tokens)

    def _run_layers(
        self, program: jax.stages.Compiled, stream: Stream, cache: KVCache, attention: AttentionContext, mix: MixContext
    ) -> tuple[Stream, KVCache]:
        layers_kv = []
        for layer, kv in zip(self._layers, cache.layers, strict=True):
            stream, kv = program(*layer, stream, kv, attention, mix)
            layers_kv.append(kv)
        return stream, KVCache(layers=tuple(layers_kv))
