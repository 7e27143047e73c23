"""Writes tiny random checkpoints as Hugging Face and PEFT lay them out, with numpy and safetensors only.

    base = write_tiny_llama(tmp_path / "base")
    a = write_adapter(tmp_path / "a", named_config("tiny"), rank=4, alpha=8, seed=1)

Weights are scaled so that every layer, and every adapter, changes the greedy text.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from checkpoints.gated_set import load_gated_set
from dymerge_jax.config import PROJECTIONS, LlamaConfig, named_config
from dymerge_jax.gating import GatedSetWeights

Tensors = dict[str, np.ndarray]
Dtype = Literal["float32", "bfloat16", "float16"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def projection_path(layer: int, projection: str) -> str:
    """Hugging Face's module path of a projection, such as "model.layers.0.self_attn.q_proj"."""
    block = "self_attn" if projection in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
    return f"model.layers.{layer}.{block}.{projection}"


def projection_shape(config: LlamaConfig, projection: str) -> tuple[int, int]:
    """(out_features, in_features) of a projection."""
    for group in config.groups.values():
        if projection in group.projections:
            return group.widths[group.projections.index(projection)], group.in_features
    raise ValueError(f"no projection is named {projection!r}; the names are {', '.join(PROJECTIONS)}")


def tiny_llama_tensors(config: LlamaConfig, seed: int = 0) -> Tensors:
    """Random float32 weights under Hugging Face's names, matrices [out_features, in_features]."""
    rng = np.random.default_rng(seed)

    def normal(shape: tuple[int, ...], std: float) -> np.ndarray:
        return (rng.standard_normal(shape) * std).astype(np.float32)

    # A small embedding under wide layers: the next token depends on the context more than on the last token.
    tensors = {"model.embed_tokens.weight": normal((config.vocab, config.hidden), 0.1)}
    for layer in range(config.num_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = 1 + normal((config.hidden,), 0.1)
        for projection in PROJECTIONS:
            out_features, in_features = projection_shape(config, projection)
            weight = normal((out_features, in_features), 1.5 * in_features**-0.5)
            tensors[f"{projection_path(layer, projection)}.weight"] = weight
    tensors["model.norm.weight"] = 1 + normal((config.hidden,), 0.1)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = normal((config.vocab, config.hidden), 2 * config.hidden**-0.5)
    return tensors


def tiny_llama_config_json(
    config: LlamaConfig, *, dtype: Dtype = "float32", rope_keys: Literal["new", "old"] = "new"
) -> dict[str, Any]:
    """`config` as config.json says it; `rope_keys` "old" is transformers 4's spelling, "new" transformers 5's."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope.factor is not None:
        rope = {
            "rope_type": "llama3",
            "factor": config.rope.factor,
            "low_freq_factor": config.rope.low_freq_factor,
            "high_freq_factor": config.rope.high_freq_factor,
            "original_max_position_embeddings": config.rope.original_max_position,
        }
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _int_or_list(config.eos_token_ids),
    }
    if rope_keys == "new":
        return content | {"dtype": dtype, "rope_parameters": rope | {"rope_theta": config.rope.theta}}
    scaling = None if config.rope.factor is None else rope
    return content | {"torch_dtype": dtype, "rope_theta": config.rope.theta, "rope_scaling": scaling}


def write_tiny_llama(
    path: Path,
    *,
    config: LlamaConfig = named_config("tiny"),  # noqa: B008  (frozen)
    seed: int = 0,
    num_shards: int = 1,
    tokenizer: bool = True,
    dtype: Dtype = "float32",
    rope_keys: Literal["new", "old"] = "new",
    config_overrides: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    without_tensors: Iterable[str] = (),
) -> Path:
    """Writes a random Llama as a Hugging Face directory.

    Args:
      path: the directory; made with its parents.
      config: shapes and constants.
      seed: of the weights.
      num_shards: safetensors files; more than one adds model.safetensors.index.json.
      tokenizer: also write a byte-level tokenizer with a ChatML template, whose ids fill the vocabulary.
      dtype: of the stored tensors.
      rope_keys: spelling of the rope fields, see `tiny_llama_config_json`.
      config_overrides: fields set in config.json afterwards, None meaning null.
      generation_config: content of generation_config.json; None writes no such file.
      extra_tensors: further tensors, or replacements, stored as they are.
      without_tensors: names left out.

    Returns:
      `path`.
    """
    path.mkdir(parents=True, exist_ok=True)
    content = tiny_llama_config_json(config, dtype=dtype, rope_keys=rope_keys) | dict(config_overrides or {})
    write_json(path / "config.json", content)
    if generation_config is not None:
        write_json(path / "generation_config.json", generation_config)
    tensors = {name: w.astype(jnp.dtype(dtype)) for name, w in tiny_llama_tensors(config, seed).items()}
    tensors |= dict(extra_tensors or {})
    write_shards(path, {k: w for k, w in tensors.items() if k not in set(without_tensors)}, num_shards)
    if tokenizer:
        write_tokenizer(path, config.vocab)
    return path


def write_shards(path: Path, tensors: Tensors, num_shards: int) -> None:
    """model.safetensors, or model-0000i-of-0000n.safetensors and their index, tensors dealt out in turn."""
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    weight_map = {tensor: names[i % num_shards] for i, tensor in enumerate(tensors)}
    for name in names:
        shard = {tensor: tensors[tensor] for tensor, file in weight_map.items() if file == name}
        save_file(shard, path / name, metadata={"format": "pt"})
    total = sum(w.nbytes for w in tensors.values())
    write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_tokenizer(path: Path, vocab: int) -> None:
    """A byte-level BPE tokenizer without merges: 0 to 2 are `SPECIAL_TOKENS`, then one id a byte, then filler.

    With fewer than 259 ids only printable ASCII, newline and as many other bytes as fit are there.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    first = [10, *range(32, 127)]
    symbols = [_byte_symbol(b) for b in [*first, *(b for b in range(256) if b not in first)]]
    filler = [a + b for a in "abcdefghijklmnopqrstuvwxyz" for b in symbols[66:92]]
    while len(filler) < vocab:
        filler += [a + b for a in "abcdefghijklmnopqrstuvwxyz" for b in filler[-(26**2) :]]
    tokens = [*SPECIAL_TOKENS, *symbols, *filler][:vocab]
    model = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, [], fuse_unk=False))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    model.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[2],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(path / "tokenizer_config.json", settings)


def write_adapter(
    path: Path,
    config: LlamaConfig,
    *,
    rank: int,
    alpha: float,
    seed: int,
    modules: Sequence[str] = PROJECTIONS,
    layers: Sequence[int] | None = None,
    use_rslora: bool = False,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    dtype: Dtype = "float32",
    prefix: str = "base_model.model.",
    infix: str = "",
    config_overrides: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    without_tensors: Iterable[str] = (),
) -> Path:
    """Writes a random adapter as a PEFT directory; B is not zero.

    Args:
      path: the directory; made with its parents.
      config: the base model's shapes.
      rank, alpha: `r` and `lora_alpha`.
      seed: of the weights.
      modules: which projections are adapted.
      layers: `layers_to_transform`; None adapts all.
      use_rslora: written to the config; the tensors do not change.
      rank_pattern, alpha_pattern: PEFT's patterns; the ranks of the tensors follow rank_pattern.
      dtype: of the stored tensors.
      prefix: before "model.layers..." in the keys.
      infix: between "lora_A" and ".weight", such as ".default".
      config_overrides: fields set in adapter_config.json afterwards.
      extra_tensors: further tensors, or replacements, under their full names.
      without_tensors: full names left out.

    Returns:
      `path`.
    """
    path.mkdir(parents=True, exist_ok=True)
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "use_rslora": use_rslora,
        "use_dora": False,
        "rank_pattern": dict(rank_pattern or {}),
        "alpha_pattern": dict(alpha_pattern or {}),
        "target_modules": list(modules),
        "layers_to_transform": None if layers is None else list(layers),
        "layers_pattern": None,
        "modules_to_save": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    write_json(path / "adapter_config.json", content | dict(config_overrides or {}))
    tensors = adapter_tensors(
        config, rank=rank, seed=seed, modules=modules, layers=layers, rank_pattern=rank_pattern, prefix=prefix,
        infix=infix,
    )  # fmt: skip
    tensors = {name: w.astype(jnp.dtype(dtype)) for name, w in tensors.items()} | dict(extra_tensors or {})
    save_file({k: w for k, w in tensors.items() if k not in set(without_tensors)}, path / "adapter_model.safetensors")
    return path


def adapter_tensors(
    config: LlamaConfig,
    *,
    rank: int,
    seed: int,
    modules: Sequence[str] = PROJECTIONS,
    layers: Sequence[int] | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    prefix: str = "base_model.model.",
    infix: str = "",
) -> Tensors:
    """Random float32 A [rank, in_features] and B [out_features, rank] of every adapted projection, by PEFT's keys."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config.num_layers) if layers is None else layers:
        for projection in modules:
            module = projection_path(layer, projection)
            r = matching_value(rank_pattern or {}, module, rank)
            out_features, in_features = projection_shape(config, projection)
            a = rng.standard_normal((r, in_features)) * in_features**-0.5
            b = rng.standard_normal((out_features, r)) * 0.7 * r**-0.5
            tensors[f"{prefix}{module}.lora_A{infix}.weight"] = a.astype(np.float32)
            tensors[f"{prefix}{module}.lora_B{infix}.weight"] = b.astype(np.float32)
    return tensors


def matching_value[T](pattern: Mapping[str, T], module: str, default: T) -> T:
    """PEFT's rule for rank_pattern and alpha_pattern: the first key that ends the module path wins."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def write_gated_set(
    path: Path,
    config: LlamaConfig,
    experts: Sequence[str],
    *,
    granularity: Literal["layer", "projection"] = "layer",
    top_k: int | None = None,
    renormalize: bool = False,
    seed: int = 0,
    name: str | None = None,
) -> Path:
    """Writes a gated set of random gates over `experts` (adapter names, or paths relative to `path`)."""
    path.mkdir(parents=True, exist_ok=True)
    content = {"experts": list(experts), "granularity": granularity, "top_k": top_k, "renormalize": renormalize}
    write_json(path / "gated_set.json", content if name is None else content | {"name": name})
    rng = np.random.default_rng(seed)
    widths = {"": config.hidden}
    if granularity == "projection":
        widths = {f"{projection}.": projection_shape(config, projection)[1] for projection in PROJECTIONS}
    gates = {
        f"layers.{layer}.{site}gate.weight": (
            rng.standard_normal((len(experts), width)) * 2 * width**-0.5
        ).astype(np.float32)
        for layer in range(config.num_layers)
        for site, width in widths.items()
    }  # fmt: skip
    save_file(gates, path / "gate.safetensors")
    return path


def load_plain_set(path: Path, config: LlamaConfig) -> GatedSetWeights:
    """`load_gated_set` of a set with gates in its layers."""
    loaded = load_gated_set(path, config)
    assert isinstance(loaded, GatedSetWeights)
    return loaded


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _int_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return list(ids) if len(ids) > 1 else next(iter(ids), None)


def _byte_symbol(byte: int) -> str:
    """The printable character by which byte-level BPE writes a byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))
