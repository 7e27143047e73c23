"""Llama as Flax NNX modules: every tensor is declared here once; the forward pass from tokens to hidden states.

The modules are the border: `split_model` turns them into a graph (static) and a state (a pytree of arrays), and the
jitted steps are pure functions of that state. Layers are unrolled and hold their own tensors: scanning over stacked
weights copies each layer's weights first (11.2 ms a decode step against 4.15 on an H200).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dymerge_jax.attention import AttentionContext, WholeSequences, attend, attend_at_ends
from dymerge_jax.config import LlamaConfig
from dymerge_jax.gating import GateArray, GatedTokens, add_layer_gates, add_projection_gates
from dymerge_jax.kv_cache import KVCache, LayerKV
from dymerge_jax.lora import SlotArray
from dymerge_jax.xlora import ExpertWeights, xlora_columns
from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.decode_attention import Implementation as AttentionImplementation
from pallas_kernels.gate_mix import Implementation as GateImplementation
from pallas_kernels.lora_linear import Implementation as LinearImplementation
from pallas_kernels.lora_linear import lora_linear, lora_swiglu, new_arrivals
from pallas_kernels.maf_mvm.api import Implementation as MafImplementation
from pallas_kernels.matmul import matmul
from pallas_kernels.paged_attention import QueryTiles
from pallas_kernels.pytree import pytree_dataclass
from pallas_kernels.segments import Segments

_GROUPS = ("qkv", "o", "gate_up", "down")

Params = dict[str, Any]
"""Nested plain dict of the model's arrays: embed, layers (by int) of input_norm, qkv, o, post_attention_norm, gate_up
and down, final_norm, and lm_head unless tied. Matrices are [in_features, out_features]."""


@dataclasses.dataclass(frozen=True)
class Implementations:
    """Which implementation of each op a step is compiled with; None lets the op pick by backend and shape.

    Attributes:
      maf_mvm: named, it is what the linear layers call after their GEMM, unless `lora_linear` is named too.
      paged_attention: of attention.
      lora_linear: of a linear layer with its adapters.
      gate_mix: of the gates of a site.
    """

    maf_mvm: MafImplementation | None = None
    paged_attention: AttentionImplementation | None = None
    lora_linear: LinearImplementation | None = None
    gate_mix: GateImplementation | None = None

    @property
    def linear(self) -> LinearImplementation | None:
        """What `lora_linear` is called with."""
        return "separate" if self.lora_linear is None and self.maf_mvm is not None else self.lora_linear


@pytree_dataclass
class Stream:
    """What goes from layer to layer, besides the cache.

    Attributes:
      x: [num_tokens, hidden] residual stream, without what the layer before has put out; after the model's last layer
        maybe of some tokens only, see `SequenceEnds`.
      delta: [num_partials, num_tokens, hidden] partial sums of that output: the next norm adds them up on the way.
      arrivals: counters of the launches, see `pallas_kernels.lora_linear`; each layer has a row for each group.
    """

    x: Float[Array, "num_tokens hidden"]
    delta: Float[Array, "num_partials num_tokens hidden"]
    arrivals: Int[Array, "num_sites cells"]


@pytree_dataclass
class MixContext:
    """The adapters of a step's tokens.

    Attributes:
      slots: adapters on the device.
      segments: token–LoRA pairs sorted by slot, with the static weights; None for a step without adapters.
      gates: gates of all gated sets; None if there are none.
      tokens: which gate each token uses; None if there are none.
      expert_weights: what X-LoRA's classifiers have given the tokens; None where no token uses an X-LoRA set.
    """

    slots: SlotArray
    segments: Segments | None
    gates: GateArray | None
    tokens: GatedTokens | None
    expert_weights: ExpertWeights | None = None


@pytree_dataclass
class SequenceEnds:
    """The last new token of each sequence of a step: the only ones whose output of the last layer is read.

    Attributes:
      index: [num_seqs] int32, where they lie among the tokens of the step; any place for unused sequences.
      tiles: query tiles of them, one token each.
      mix: their adapters.
    """

    index: Int[Array, " num_seqs"]
    tiles: QueryTiles
    mix: MixContext


class LlamaLayer(nnx.Module):
    """One transformer layer: attention and SwiGLU, each behind an RMSNorm, each added to the residual stream."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        def matrix(group: str) -> nnx.Param:
            g = config.groups[group]
            return nnx.Param(
                jax.random.normal(rngs.params(), (g.in_features, g.out_features), dtype)
                * jnp.asarray(g.in_features**-0.5, dtype)
            )

        self.config = config
        self.input_norm = nnx.Param(jnp.ones((config.hidden,), dtype))
        self.qkv = matrix("qkv")
        self.o = matrix("o")
        self.post_attention_norm = nnx.Param(jnp.ones((config.hidden,), dtype))
        self.gate_up = matrix("gate_up")
        self.down = matrix("down")

    def __call__(
        self,
        stream: Stream,
        kv: LayerKV,
        context: AttentionContext | WholeSequences,
        mix: MixContext,
        implementations: Implementations,
        layer: int | Int[Array, ""],
        ends: SequenceEnds | None = None,
    ) -> tuple[Stream, LayerKV]:
        """The layer's output for all tokens, or for `ends` alone; keys and values of all go into the cache."""
        x, h = self._normed(stream.x, stream.delta, self.input_norm)
        arrivals = stream.arrivals
        layer_mix = self._layer_mix(h, mix, layer, implementations)

        def project(name: str, x: Float[Array, "num_tokens in_features"]) -> Array:
            nonlocal arrivals
            op = lora_swiglu if name == "gate_up" else lora_linear
            with jax.named_scope(name):
                y, arrivals = op(
                    x,
                    getattr(self, name)[...],
                    mix.slots.groups[name],
                    self._segments(name, x, mix, layer_mix, layer, implementations),
                    arrivals,
                    layer=layer,
                    site=len(_GROUPS) * layer + _GROUPS.index(name),
                    implementation=implementations.linear,
                    maf_implementation=implementations.maf_mvm,
                )
            return y

        with jax.named_scope("attention"):
            qkv, implementation = project("qkv", h), implementations.paged_attention
            if ends is None:
                attended, kv = attend(qkv, kv, context, self.config, implementation)
            else:
                assert isinstance(context, AttentionContext), "whole sequences are read as a whole"
                attended, kv = attend_at_ends(qkv, kv, context, ends.index, ends.tiles, self.config, implementation)
                x, mix = x[ends.index], ends.mix
                layer_mix = None if layer_mix is None else layer_mix[ends.index]
            o = project("o", attended)
        with jax.named_scope("mlp"):
            x, h = self._normed(x, o, self.post_attention_norm)
            delta = project("down", project("gate_up", h))
        return Stream(x, delta, arrivals), kv

    def _normed(
        self,
        x: Float[Array, "num_tokens hidden"],
        delta: Float[Array, "num_partials num_tokens hidden"],
        weight: nnx.Param,
    ) -> tuple[Float[Array, "num_tokens hidden"], Float[Array, "num_tokens hidden"]]:
        with jax.named_scope("norm"):
            return add_rms_norm(x, delta, weight[...], eps=self.config.rms_norm_eps)

    def _layer_mix(
        self,
        h: Float[Array, "num_tokens hidden"],
        mix: MixContext,
        layer: int | Int[Array, ""],
        implementations: Implementations,
    ) -> Float[Array, "num_tokens 1 num_slots"] | None:
        """The weights of this layer: static ones plus what one gate for the whole layer gives."""
        if mix.segments is None:
            return None
        if mix.gates is None or mix.tokens is None:
            return mix.segments.weights
        with jax.named_scope("gate"):
            return add_layer_gates(
                mix.segments.weights, mix.gates, mix.tokens, layer, h, implementation=implementations.gate_mix
            )

    def _segments(
        self,
        group: str,
        x: Float[Array, "num_tokens in_features"],
        mix: MixContext,
        layer_mix: Float[Array, "num_tokens 1 num_slots"] | None,
        layer: int | Int[Array, ""],
        implementations: Implementations,
    ) -> Segments | None:
        """The step's segments with this group's weights: those of the layer plus what the group's own gates give."""
        if mix.segments is None:
            return None
        assert layer_mix is not None
        if mix.gates is None and mix.expert_weights is None:
            return mix.segments
        weights = layer_mix
        with jax.named_scope("gate"):
            if mix.gates is not None and mix.tokens is not None:
                weights = add_projection_gates(
                    weights,
                    mix.gates,
                    mix.tokens,
                    layer,
                    self.config.groups[group],
                    x,
                    implementation=implementations.gate_mix,
                )
            if mix.expert_weights is not None:
                columns = xlora_columns(mix.expert_weights, layer, self.config.groups[group])
                weights = jnp.add(*jnp.broadcast_arrays(weights, columns))
            segments = mix.segments.with_weights(weights)
            # A decode step is one tile, in which hardly a slot stays unused, and cannot afford the sort.
            return segments if segments.num_tiles == 1 else segments.compacted(mix.slots.groups[group].scale[layer])


class Llama(nnx.Module):
    """A Llama-architecture decoder.

    Args:
      config: its shape.
      dtype: of every tensor, bfloat16 or float32.
      rngs: initializes random weights (for tests and benchmarks; checkpoints replace them).
    """

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (config.vocab, config.hidden), dtype))
        self.layers = nnx.List([LlamaLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.final_norm = nnx.Param(jnp.ones((config.hidden,), dtype))
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Param(
                jax.random.normal(rngs.params(), (config.hidden, config.vocab), dtype)
                * jnp.asarray(config.hidden**-0.5, dtype)
            )

    def __call__(
        self,
        tokens: Int[Array, " num_tokens"],
        cache: KVCache,
        context: AttentionContext,
        mix: MixContext,
        implementations: Implementations,
        ends: SequenceEnds | None = None,
    ) -> tuple[Float[Array, "num_read hidden"], KVCache]:
        """Runs a flat batch of tokens through all layers.

        Args:
          tokens: [num_tokens] token ids; padding may hold any valid id.
          cache: earlier tokens' keys and values.
          context: where the tokens stand.
          mix: the adapters of the tokens.
          implementations: of the ops.
          ends: the tokens that go through the whole of the last layer; None for all.

        Returns:
          [num_tokens, hidden] hidden states after the final norm, or [num_seqs, hidden] of `ends`; and the cache with
          all tokens in it.
        """
        stream = self.embedded(tokens)
        layers_kv = []
        for i, (layer, kv) in enumerate(zip(self.layers, cache.layers, strict=True)):
            is_last = i == len(self.layers) - 1
            stream, kv = layer(stream, kv, context, mix, implementations, i, ends if is_last else None)
            layers_kv.append(kv)
        return self.normed(stream), KVCache(layers=tuple(layers_kv))

    def embedded(self, tokens: Int[Array, " num_tokens"]) -> Stream:
        """What the first layer takes."""
        with jax.named_scope("embed"):
            x = self.embed[...][tokens]
        return Stream(x, jnp.zeros_like(x)[None], new_arrivals(len(_GROUPS) * self.config.num_layers))

    def normed(self, stream: Stream) -> Float[Array, "num_tokens hidden"]:
        """The final norm of what the last layer gives."""
        with jax.named_scope("norm"):
            return add_rms_norm(stream.x, stream.delta, self.final_norm[...], eps=self.config.rms_norm_eps)[1]

    def logits(self, hidden: Float[Array, "num_rows hidden"]) -> Float[Array, "num_rows vocab"]:
        """Scores of every token id, float32."""
        with jax.named_scope("lm_head"):
            if not self.config.tie_word_embeddings:
                return matmul(hidden, self.lm_head[...], out_dtype=jnp.float32)
            return matmul(hidden, self.embed[...].T, out_dtype=jnp.float32)


@dataclasses.dataclass(frozen=True)
class SplitModel:
    """A model as the jitted steps take it.

    Attributes:
      config: its shape.
      graph: static structure, hashable.
      state: pytree of all arrays.
    """

    config: LlamaConfig
    graph: nnx.GraphDef[Llama]
    state: nnx.State

    @property
    def dtype(self) -> jnp.dtype:
        """Of all arrays."""
        return jax.tree.leaves(self.state)[0].dtype


def abstract_model(config: LlamaConfig, dtype: DTypeLike) -> SplitModel:
    """The model with shapes in place of arrays: for loading into, and for compiling without weights."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0))))
    return SplitModel(config=config, graph=graph, state=state)


def random_model(config: LlamaConfig, dtype: DTypeLike, *, seed: int = 0) -> SplitModel:
    """A model of random weights, made on the device: for tests and benchmarks."""

    # Not under jit: one small program a shape, reused by every layer, compiles faster than one large one.
    graph, state = nnx.split(Llama(config, dtype=dtype, rngs=nnx.Rngs(seed)))
    return SplitModel(config=config, graph=graph, state=state)


def model_from_params(config: LlamaConfig, params: Params) -> SplitModel:
    """Puts loaded arrays in their places.

    Raises:
      ValueError: If a tensor is missing, unexpected or of another shape; all of them are named.
    """
    dtype = params["embed"].dtype
    abstract = abstract_model(config, dtype)
    want = _flatten(nnx.to_pure_dict(abstract.state))
    have = _flatten(params)
    problems = [f"missing {k} {want[k].shape}" for k in sorted(want.keys() - have.keys())]
    problems += [f"unexpected {k} {have[k].shape}" for k in sorted(have.keys() - want.keys())]
    for k in sorted(want.keys() & have.keys()):
        if (have[k].shape, have[k].dtype) != (want[k].shape, want[k].dtype):
            problems.append(f"{k} is {have[k].dtype}{have[k].shape}, expected {want[k].dtype}{want[k].shape}")
    if problems:
        raise ValueError("parameters do not fit the model: " + "; ".join(problems))
    state = abstract.state
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, params))
    return SplitModel(config=config, graph=abstract.graph, state=state)


def params_of(model: SplitModel) -> Params:
    """The model's arrays as a nested plain dict."""
    return nnx.to_pure_dict(model.state)


def _flatten(params: Params) -> dict[str, jax.Array | np.ndarray | jax.ShapeDtypeStruct]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
