"""The model's own layers over whole sequences, differentiable; the frozen weights stacked, one program for all layers.

Serving unrolls its layers, since slicing stacked weights costs a decode step more than its products. A training step
has hundreds of tokens, so that the slices cost little, and compiles in the time of one layer instead of thirty.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dymerge_jax.attention import WholeSequences
from dymerge_jax.gating import GateArray, gated_tokens, layer_weights
from dymerge_jax.kv_cache import empty_cache
from dymerge_jax.layers import rope_angles
from dymerge_jax.lora import SlotArray
from dymerge_jax.model import Implementations, Llama, LlamaLayer, MixContext, SplitModel, Stream
from dymerge_jax.step import ModelStructure, Weights, split_weights
from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.maf_mvm import token_tile_size
from pallas_kernels.pytree import pytree_dataclass, static_field
from pallas_kernels.segments import build_segments


@pytree_dataclass
class FrozenModel:
    """A base model as training takes it.

    Attributes:
      ends: weights of what comes before and after the layers.
      layers: weights of the layers, each [num_layers, ...].
      ends_structure, layer_structure: the static halves.
    """

    ends: Weights
    layers: Weights
    ends_structure: ModelStructure[Llama] = static_field()
    layer_structure: ModelStructure[LlamaLayer] = static_field()

    def merged_ends(self) -> Llama:
        """The model without its layers."""
        return self.ends_structure.merge(self.ends)


def freeze_model(model: SplitModel) -> FrozenModel:
    """Stacks the layers' weights: a second copy of them, until `model` is gone."""
    whole = nnx.merge(model.graph, model.state)
    layers = [split_weights(*nnx.split(layer)) for layer in whole.layers]
    structure = layers[0][0]
    assert all(other == structure for other, _ in layers), "layers differ in structure"
    whole.layers = nnx.List([])
    ends_structure, ends = split_weights(*nnx.split(whole))
    stacked = tuple(jnp.stack(arrays) for arrays in zip(*(weights for _, weights in layers), strict=True))
    return FrozenModel(ends=ends, layers=stacked, ends_structure=ends_structure, layer_structure=structure)


@pytree_dataclass
class TrainBatch:
    """Samples of one step, padded on the right, and the tokens that are to be learnt.

    Attributes:
      tokens: [num_seqs, seq_len] int32.
      lengths: [num_seqs] int32, tokens of each sample, at least 1.
      sources: [num_targets] int32, index into the flat tokens of the token before each target; any for padding.
      targets: [num_targets] int32, token ids.
      is_target: [num_targets] bool, False for padding.
      mate_weights: [num_seqs, num_mates] float32, weight of each frozen mate.
    """

    tokens: Int[Array, "num_seqs seq_len"]
    lengths: Int[Array, " num_seqs"]
    sources: Int[Array, " num_targets"]
    targets: Int[Array, " num_targets"]
    is_target: Bool[Array, " num_targets"]
    mate_weights: Float[Array, "num_seqs num_mates"]


def hidden_states(
    model: FrozenModel,
    batch: TrainBatch,
    slots: SlotArray,
    weights: Float[Array, "num_seqs num_slots"],
    gates: GateArray | None,
    *,
    implementations: Implementations,
    remat: bool,
) -> tuple[Float[Array, "num_tokens hidden"], Float[Array, "num_layers num_experts"] | None]:
    """Runs a batch through all layers.

    Args:
      model: the frozen weights.
      batch: the samples.
      slots: adapters, trained or not.
      weights: static weight of each slot for each sample.
      gates: one gated set, which every sample uses; None for static mixes alone.
      implementations: of the ops; they must be differentiable, see `differentiable_implementations`.
      remat: compute a layer's activations again in the backward pass instead of keeping them.

    Returns:
      [num_seqs * seq_len, hidden] after the final norm, of no meaning for padding; and the mean weight of each expert
      over the samples' tokens, for gates of one a layer.
    """
    ends = model.merged_ends()
    num_seqs, seq_len = batch.tokens.shape
    positions = jnp.tile(jnp.arange(seq_len, dtype=jnp.int32), num_seqs)
    is_real = (jnp.arange(seq_len, dtype=jnp.int32)[None, :] < batch.lengths[:, None]).reshape(-1)
    cos, sin = rope_angles(positions, ends.config.head_dim, ends.config.rope)
    context = WholeSequences(cos=cos, sin=sin, num_seqs=num_seqs)
    no_cache = empty_cache(ends.config, num_blocks=0, block_size=1, dtype=model.ends[0].dtype).layers[0]

    static = jnp.where(is_real[:, None], jnp.repeat(weights, seq_len, axis=0), 0.0)
    is_used, tokens = static != 0, None
    if gates is not None:
        tokens = gated_tokens(gates, jnp.where(is_real, 0, -1))
        is_used = is_used | tokens.is_used
    segments = build_segments(static[:, None, :], tile_size=token_tile_size(positions.shape[0]), is_used=is_used)

    def run_layer(stream: Stream, xs: tuple[Weights, SlotArray, _GateWeights]) -> tuple[Stream, Array | None]:
        layer_weights, *one_layer = xs
        # To the model a slot array and gates of one layer, which is layer 0.
        layer_slots, (layer_gate, projection_gates) = jax.tree.map(lambda array: array[None], tuple(one_layer))
        layer_gates = gates and dataclasses.replace(gates, layer=layer_gate, projection=projection_gates)
        mix = MixContext(slots=layer_slots, segments=segments, gates=layer_gates, tokens=tokens)
        layer = model.layer_structure.merge(layer_weights)
        usage = _expert_usage(layer, stream, mix, is_real)
        stream, _ = layer(stream, no_cache, context, mix, implementations, 0)
        return stream, usage

    body = jax.checkpoint(run_layer) if remat else run_layer
    gate_weights = (None, None) if gates is None else (gates.layer, gates.projection)
    xs = model.layers, slots, gate_weights
    stream, usage = jax.lax.scan(body, ends.embedded(batch.tokens.reshape(-1)), xs)
    return ends.normed(stream), usage


def _expert_usage(
    layer: LlamaLayer, stream: Stream, mix: MixContext, is_real: Bool[Array, " num_tokens"]
) -> Float[Array, " num_experts"] | None:
    """Mean weight of each expert by the layer's own gate, if it has one; XLA finds that the layer computes the same."""
    if mix.gates is None or mix.tokens is None or mix.gates.layer is None:
        return None
    _, h = add_rms_norm(stream.x, stream.delta, layer.input_norm[...], eps=layer.config.rms_norm_eps)
    weights = layer_weights(mix.gates, mix.tokens, 0, h)
    assert weights is not None
    total = jnp.where(is_real[:, None], weights[:, 0], 0.0).sum(0)
    return total / is_real.sum().astype(jnp.float32)


_GateWeights = tuple[Array | None, dict[str, Array] | None]
"""`layer` and `projection` of a gate array."""


def mean_loss(model: FrozenModel, hidden: Float[Array, "num_tokens hidden"], batch: TrainBatch) -> Float[Array, ""]:
    """Mean cross-entropy of the batch's targets, in nats; logits are made where there is one only."""
    logits = model.merged_ends().logits(hidden[batch.sources])
    of_target = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets[:, None], axis=1)[:, 0]
    return -jnp.where(batch.is_target, of_target, 0.0).sum() / batch.is_target.sum().astype(jnp.float32)


def differentiable_implementations() -> Implementations:
    """Implementations that have gradients, by backend.

    On a CPU `dense`: all slots of a training step are in use, and its few large products are faster there than the
    loop's many small ones. One launch for product and mix has no gradient, nor has one for the gates of a site; they
    would be for small steps only.
    """
    return Implementations(
        maf_mvm="dense" if jax.default_backend() == "cpu" else None, lora_linear="separate", gate_mix="reference"
    )
