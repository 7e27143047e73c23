"""The step as three small programs: what comes before the layers, one layer, and what comes after.

All layers have the same shapes and share one program, which the host calls once a layer. Compiling takes the time of
one layer instead of all, and each call costs the host some tens of microseconds: the better trade on a CPU, where XLA
needs half a minute for the demo's thirty layers and a step takes tens of milliseconds. An accelerator gets
`forward_step`, one program for the whole step.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dymerge_jax.attention import AttentionContext
from dymerge_jax.kv_cache import KVCache, LayerKV
from dymerge_jax.model import Implementations, Llama, LlamaLayer, MixContext, SplitModel
from dymerge_jax.step import StepBatch, StepContext, StepInputs, last_logits, step_context


@functools.partial(jax.jit, static_argnames=("graph", "num_blocks", "block_size"))
def _before_layers(
    graph: nnx.GraphDef[Llama],
    state: nnx.State,
    inputs: StepInputs,
    *,
    num_blocks: int,
    block_size: int,
) -> tuple[Float[Array, "num_tokens hidden"], StepContext]:
    model = nnx.merge(graph, state)
    context = step_context(model.config, inputs, num_blocks=num_blocks, block_size=block_size)
    return model.embedded(context.tokens), context


@functools.partial(jax.jit, static_argnames=("graph", "implementations"), donate_argnames=("x", "kv"))
def _layer(
    graph: nnx.GraphDef[LlamaLayer],
    state: nnx.State,
    layer: Int[Array, ""],
    x: Float[Array, "num_tokens hidden"],
    kv: LayerKV,
    attention: AttentionContext,
    mix: MixContext,
    implementations: Implementations,
) -> tuple[Float[Array, "num_tokens hidden"], LayerKV]:
    return nnx.merge(graph, state)(x, kv, attention, mix, implementations, layer)


@functools.partial(jax.jit, static_argnames=("graph",))
def _after_layers(
    graph: nnx.GraphDef[Llama], state: nnx.State, x: Float[Array, "num_tokens hidden"], batch: StepBatch
) -> Float[Array, "num_seqs vocab"]:
    model = nnx.merge(graph, state)
    return last_logits(model, model.normed(x), batch)


class LayeredStep:
    """A compiled step; called like a compiled `forward_step` and with the same results, to rounding.

    Args:
      model: weights; used again on every call.
      cache, inputs: arrays, or their shapes, as every call has them.
      implementations: of the ops.
    """

    def __init__(self, model: SplitModel, cache: KVCache, inputs: StepInputs, implementations: Implementations) -> None:
        layers = [nnx.split(layer) for layer in nnx.merge(model.graph, model.state).layers]
        graph = layers[0][0]
        assert all(other == graph for other, _ in layers), "layers differ in structure"
        self._layers = [(state, jnp.int32(i)) for i, (_, state) in enumerate(layers)]
        before = _before_layers.lower(
            model.graph, model.state, inputs, num_blocks=cache.num_blocks, block_size=cache.block_size
        )
        x, context = before.out_info
        self._before = before.compile()
        self._layer = _layer.lower(
            graph,
            *self._layers[0],
            x,
            cache.layers[0],
            context.attention,
            context.mix(inputs.slots, inputs.gates),
            implementations=implementations,
        ).compile()
        self._after = _after_layers.lower(model.graph, model.state, x, inputs.batch).compile()

    def __call__(
        self, state: nnx.State, cache: KVCache, inputs: StepInputs
    ) -> tuple[Float[Array, "num_seqs vocab"], KVCache]:
        """Logits after each sequence's last new token, and the cache (donated)."""
        x, context = self._before(state, inputs)
        mixes = context.mix(inputs.slots, inputs.gates)
        layers_kv = []
        for layer, kv in zip(self._layers, cache.layers, strict=True):
            x, kv = self._layer(*layer, x, kv, context.attention, mixes)
            layers_kv.append(kv)
        return self._after(state, x, inputs.batch), KVCache(layers=tuple(layers_kv))
