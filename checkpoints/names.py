"""One table per format: foreign tensor names to our parameter paths."""

import dataclasses
from collections.abc import Mapping

from dymerge_jax.config import LlamaConfig

ParamPath = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """How a format calls the tensors of a Llama.

    Attributes:
      embed, final_norm, lm_head: names.
      input_norm, post_attention_norm: names with "{layer}".
      projections: names with "{layer}", by Hugging Face's projection name.
    """

    embed: str
    final_norm: str
    lm_head: str
    input_norm: str
    post_attention_norm: str
    projections: Mapping[str, str]


HF_NAMES = TensorNames(
    embed="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    lm_head="lm_head.weight",
    input_norm="model.layers.{layer}.input_layernorm.weight",
    post_attention_norm="model.layers.{layer}.post_attention_layernorm.weight",
    projections={
        "q_proj": "model.layers.{layer}.self_attn.q_proj.weight",
        "k_proj": "model.layers.{layer}.self_attn.k_proj.weight",
        "v_proj": "model.layers.{layer}.self_attn.v_proj.weight",
        "o_proj": "model.layers.{layer}.self_attn.o_proj.weight",
        "gate_proj": "model.layers.{layer}.mlp.gate_proj.weight",
        "up_proj": "model.layers.{layer}.mlp.up_proj.weight",
        "down_proj": "model.layers.{layer}.mlp.down_proj.weight",
    },
)

GGUF_NAMES = TensorNames(
    embed="token_embd.weight",
    final_norm="output_norm.weight",
    lm_head="output.weight",
    input_norm="blk.{layer}.attn_norm.weight",
    post_attention_norm="blk.{layer}.ffn_norm.weight",
    projections={
        "q_proj": "blk.{layer}.attn_q.weight",
        "k_proj": "blk.{layer}.attn_k.weight",
        "v_proj": "blk.{layer}.attn_v.weight",
        "o_proj": "blk.{layer}.attn_output.weight",
        "gate_proj": "blk.{layer}.ffn_gate.weight",
        "up_proj": "blk.{layer}.ffn_up.weight",
        "down_proj": "blk.{layer}.ffn_down.weight",
    },
)


@dataclasses.dataclass(frozen=True)
class ParamSource:
    """One parameter of ours and the foreign tensors it is made of.

    Attributes:
      path: keys from the root of the parameters.
      tensors: foreign shapes by name, in the order of concatenation along the first axis.
      is_transposed: the foreign tensors are [out_features, in_features] and ours is [in_features, out_features].
    """

    path: ParamPath
    tensors: Mapping[str, tuple[int, ...]]
    is_transposed: bool = False

    @property
    def param_shape(self) -> tuple[int, ...]:
        """Shape of our parameter."""
        shapes = list(self.tensors.values())
        whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return whole[::-1] if self.is_transposed else whole


def param_sources(config: LlamaConfig, names: TensorNames) -> list[ParamSource]:
    """Every parameter of the model, in the order of the forward pass, with the foreign tensors that fill it."""
    vector, table = (config.hidden,), (config.vocab, config.hidden)
    sources = [ParamSource(("embed",), {names.embed: table})]
    for layer in range(config.num_layers):
        groups = {name: _group_source(config, names, layer, name) for name in config.groups}
        norms = {
            "input_norm": names.input_norm.format(layer=layer),
            "post_attention_norm": names.post_attention_norm.format(layer=layer),
        }
        norm_sources = {key: ParamSource(("layers", layer, key), {name: vector}) for key, name in norms.items()}
        parts = groups | norm_sources
        order = ("input_norm", "qkv", "o", "post_attention_norm", "gate_up", "down")
        sources += [parts[key] for key in order]
    sources.append(ParamSource(("final_norm",), {names.final_norm: vector}))
    if not config.tie_word_embeddings:
        sources.append(ParamSource(("lm_head",), {names.lm_head: table}, is_transposed=True))
    return sources


def _group_source(config: LlamaConfig, names: TensorNames, layer: int, group_name: str) -> ParamSource:
    group = config.groups[group_name]
    tensors = {
        names.projections[projection].format(layer=layer): (width, group.in_features)
        for projection, width in zip(group.projections, group.widths, strict=True)
    }
    return ParamSource(("layers", layer, group_name), tensors, is_transposed=True)


def expected_tensors(sources: list[ParamSource]) -> dict[str, tuple[int, ...]]:
    """Foreign shapes of all tensors that `sources` need, by name."""
    return {name: shape for source in sources for name, shape in source.tensors.items()}
