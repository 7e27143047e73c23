"""What the parity goldens hold: models, adapters, prompts and mixes, the same for the reference side and for ours.

Numpy and safetensors only, and Python 3.11: the reference environment has PyTorch, but neither JAX nor this project.
The writers here are the reference's own, on purpose: they do not share code with the readers under test.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

GOLDENS = Path(__file__).parent / "goldens"
NUM_GREEDY = 32

HIDDEN, FFN, NUM_LAYERS, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 64, 128, 2, 4, 2, 16
MAX_POSITION = 256


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """A random Llama of 2 layers.

    Attributes:
      vocab: rows of the embedding.
      is_tied: the output matrix is the embedding.
      rope_scaling: Llama 3's frequency scaling as config.json says it, or None.
      seed: of the weights.
    """

    vocab: int
    is_tied: bool
    rope_scaling: dict[str, Any] | None
    seed: int


TINY_MODELS = {
    "untied": TinyModel(vocab=128, is_tied=False, rope_scaling=None, seed=10),
    "tied": TinyModel(vocab=250, is_tied=True, rope_scaling=None, seed=11),
    "llama3_rope": TinyModel(
        vocab=128,
        is_tied=False,
        # The context before scaling is short, so that some of the 8 frequencies fall in each of the three bands.
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        seed=3,
    ),
}


@dataclasses.dataclass(frozen=True)
class TinyAdapter:
    """A random adapter; fields as in PEFT's adapter_config.json, and `decay`: each rank row is smaller by it."""

    rank: int
    alpha: int
    modules: tuple[str, ...]
    seed: int
    use_rslora: bool = False
    rank_pattern: dict[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: dict[str, int] = dataclasses.field(default_factory=dict)
    decay: float = 1.0


SHAPES = {
    "q_proj": (NUM_Q_HEADS * HEAD_DIM, HIDDEN),
    "k_proj": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
    "v_proj": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
    "o_proj": (HIDDEN, NUM_Q_HEADS * HEAD_DIM),
    "gate_proj": (FFN, HIDDEN),
    "up_proj": (FFN, HIDDEN),
    "down_proj": (HIDDEN, FFN),
}
"""(out_features, in_features) by projection."""

TINY_ADAPTERS = {
    "a": TinyAdapter(rank=4, alpha=8, modules=tuple(SHAPES), seed=11),
    "b": TinyAdapter(rank=8, alpha=4, modules=("q_proj", "v_proj", "o_proj", "down_proj"), seed=12, use_rslora=True),
    "c": TinyAdapter(
        rank=16,
        alpha=16,
        modules=tuple(SHAPES),
        seed=13,
        rank_pattern={"q_proj": 3, "layers.1.mlp.down_proj": 12},
        alpha_pattern={"layers.0.self_attn.v_proj": 40, "up_proj": 8},
    ),
}

# PEFT's Arrow wants equal ranks and projections. Its 15 power iterations find a prototype to float32's precision only
# where one singular value is well above the others.
ARROW_ADAPTERS = {
    f"arrow{i}": TinyAdapter(
        rank=4, alpha=alpha, modules=("q_proj", "o_proj", "up_proj", "down_proj"), seed=20 + i, decay=0.4
    )
    for i, alpha in enumerate((8, 16, 12, 6))
}
ARROW_MODEL, ARROW_TOP_K, ARROW_TEMPERATURE = "untied", 2, 0.7


@dataclasses.dataclass(frozen=True)
class XLoraCase:
    """An X-LoRA set over `TINY_ADAPTERS` and `ARROW_ADAPTERS`.

    Attributes:
      experts: in the order of the classifier's outputs.
      fields: of PEFT's adapter_config.json; those that are left out have PEFT's defaults.
      seed: of the classifier.
    """

    experts: tuple[str, ...]
    fields: dict[str, Any]
    seed: int


_UNLIKE, _ALIKE = ("b", "arrow0", "a"), ("b", "arrow0", "arrow1")
XLORA_CASES = {
    "defaults": XLoraCase(("a", "b", "c"), {}, seed=31),
    "deep": XLoraCase(
        _UNLIKE, {"xlora_depth": 3, "xlora_size": 24, "xlora_dropout_p": 0.0, "softmax_temperature": 0.5}, seed=32
    ),
    # The experts leave out k_proj and gate_proj, which so have no number among the layers.
    "layerwise": XLoraCase(_ALIKE, {"xlora_depth": 2, "xlora_size": 16, "layerwise_scalings": True}, seed=33),
    "top_k": XLoraCase(_UNLIKE, {"layerwise_scalings": True, "top_k_lora": 2}, seed=34),
    "softmax_of_top_k": XLoraCase(
        _ALIKE, {"enable_softmax": False, "enable_softmax_topk": True, "top_k_lora": 2}, seed=35
    ),
    "scaling_pass": XLoraCase(
        _UNLIKE,
        {"enable_softmax": False, "global_scaling_weight": 0.4, "scaling_pass_value": 0.6, "xlora_depth": 2,
         "xlora_size": 16},
        seed=36,
    ),
    "softmax_twice": XLoraCase(
        _ALIKE,
        {"enable_softmax_topk": True, "scaling_pass_value": 0.2, "global_scaling_weight": 1.5,
         "layerwise_scalings": True},
        seed=37,
    ),
}  # fmt: skip
XLORA_MODEL, XLORA_GREEDY = "untied", 10


def xlora_prompt() -> list[int]:
    """21 random tokens."""
    return np.random.default_rng(30).integers(0, TINY_MODELS[XLORA_MODEL].vocab, 21).tolist()


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPES: dict[str, dict[str, Any]] = {
    "none": {"head_dim": 64, "rope_theta": 1e5, "rope_scaling": None},
    "llama-3.1-8b": {
        "head_dim": 128, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **_LLAMA3},
    },
    "llama-3.2-1b": {
        "head_dim": 64, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 32.0, **_LLAMA3},
    },
    "type": {"head_dim": 64, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", "factor": 32.0, **_LLAMA3}},
}  # fmt: skip
"""Fields of config.json whose rotary frequencies the goldens hold."""

Mix = dict[str, float]
TINY_MIXES: dict[str, Mix] = {
    "base": {},
    "a": {"a": 1.0},
    "b": {"b": 1.0},
    "c": {"c": 1.0},
    "mix": {"a": 1.0, "b": 0.7, "c": -0.5},
}


def tiny_prompts(model: TinyModel) -> list[list[int]]:
    """Random prompts of 1, 7 and 40 tokens."""
    rng = np.random.default_rng(model.seed)
    return [rng.integers(0, model.vocab, length).tolist() for length in (1, 7, 40)]


MERGE_ADAPTERS = {
    "p": TinyAdapter(rank=4, alpha=8, modules=tuple(SHAPES), seed=21, alpha_pattern={"up_proj": 3}),
    "q": TinyAdapter(rank=4, alpha=6, modules=("q_proj", "v_proj", "down_proj"), seed=22, use_rslora=True),
    "r": TinyAdapter(rank=4, alpha=2, modules=tuple(SHAPES), seed=23),
    "wide": TinyAdapter(rank=7, alpha=7, modules=("q_proj", "up_proj"), seed=24, rank_pattern={"up_proj": 3}),
}
"""What is merged: equal ranks but for "wide", and projections that some do not have."""


@dataclasses.dataclass(frozen=True)
class MergeCase:
    """A merge; fields as in PEFT's add_weighted_adapter.

    Attributes:
      method: combination_type.
      weights: by adapter, in order.
      settings: further arguments.
    """

    method: str
    weights: dict[str, float]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


_THREE = {"p": 0.8, "q": -0.6, "r": 1.7}
MERGE_CASES = {
    "cat": MergeCase("cat", {"p": 0.8, "q": -0.6, "wide": 0.3}),
    "svd": MergeCase("svd", {"p": 0.8, "q": -0.6, "wide": 0.3}),
    "svd_rank_3": MergeCase("svd", _THREE, {"svd_rank": 3}),
    "linear": MergeCase("linear", _THREE),
    "linear_one": MergeCase("linear", {"p": -0.6}),
    "ties": MergeCase("ties", _THREE, {"density": 0.3}),
    "ties_frequency": MergeCase("ties", _THREE, {"density": 0.6, "majority_sign_method": "frequency"}),
    "ties_whole": MergeCase("ties", _THREE, {"density": 1.0}),
    "magnitude_prune": MergeCase("magnitude_prune", _THREE, {"density": 0.45}),
    # PEFT's result has the scaling sqrt(rank) here, since its first adapter has rslora.
    "rslora_first": MergeCase("cat", {"q": 0.5, "p": 1.0}),
}
MERGE_SITES = {(0, "q_proj"): 8, (1, "up_proj"): 16, (1, "down_proj"): 8}
"""The projections whose product B A the goldens hold, and the step in which their rows are taken."""


DEMO_PROMPTS = {
    # The chat template around "Items: lamp, river, stone", with the template's own system prompt.
    "chat": [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182,
             2, 198, 1, 4093, 198, 37807, 42, 17559, 28, 4626, 28, 5692, 2, 198, 1, 520, 9531, 198],
    # "The capital of France is", without a template.
    "plain": [504, 3575, 282, 4649, 314],
}  # fmt: skip
DEMO_MIXES: dict[str, Mix] = {
    "base": {},
    "sign": {"sign": 1.0},
    "reverse": {"reverse": 1.0},
    "echo": {"echo": 1.0},
    "signed_reverse": {"sign": 1.0, "reverse": 1.0, "echo": -0.5},
    "weighted": {"sign": 1.0, "reverse": 0.7, "echo": -0.5},
}
DEMO_VOCAB_STRIDE = 64


def strided_vocab(vocab: int) -> np.ndarray:
    """The token ids whose logits the demo goldens hold."""
    return np.arange(0, vocab, DEMO_VOCAB_STRIDE)


def write_tiny_model(path: Path, model: TinyModel) -> Path:
    """Writes the Hugging Face directory of `model`, float32, with both spellings of the rope fields."""
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(model.seed)
    tensors = {"model.embed_tokens.weight": _normal(rng, (model.vocab, HIDDEN), 0.2)}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = 1 + _normal(rng, (HIDDEN,), 0.1)
        for projection, shape in SHAPES.items():
            tensors[f"{prefix}.{_block(projection)}.{projection}.weight"] = _normal(rng, shape, 1.5 * shape[1] ** -0.5)
    tensors["model.norm.weight"] = 1 + _normal(rng, (HIDDEN,), 0.1)
    if not model.is_tied:
        tensors["lm_head.weight"] = _normal(rng, (model.vocab, HIDDEN), 2 * HIDDEN**-0.5)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    theta = 10_000.0
    scaling = model.rope_scaling or {"rope_type": "default"}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": model.vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_Q_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": MAX_POSITION,
        "tie_word_embeddings": model.is_tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
        "rope_theta": theta,
        "rope_scaling": model.rope_scaling,
        "rope_parameters": {**scaling, "rope_theta": theta},
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return path


def write_tiny_adapters(path: Path) -> list[Path]:
    """Writes every adapter of `TINY_ADAPTERS` as a PEFT directory below `path`."""
    return [_write_tiny_adapter(path / name, adapter) for name, adapter in TINY_ADAPTERS.items()]


def write_arrow_adapters(path: Path) -> list[Path]:
    """Writes every adapter of `ARROW_ADAPTERS` as a PEFT directory below `path`."""
    return [_write_tiny_adapter(path / name, adapter) for name, adapter in ARROW_ADAPTERS.items()]


def write_xlora(path: Path, case: XLoraCase, adapters: str) -> Path:
    """Writes the PEFT directory of an X-LoRA set, whose experts are in folders of their names below `adapters`."""
    path.mkdir(parents=True, exist_ok=True)
    fields = case.fields
    depth, size = fields.get("xlora_depth", 1), fields.get("xlora_size", 2048)
    stride = 3 if fields.get("xlora_dropout_p", 0.2) > 0 else 2
    num_out = len(case.experts)
    if fields.get("layerwise_scalings"):
        every = TINY_ADAPTERS | ARROW_ADAPTERS
        num_out *= NUM_LAYERS * len({module for name in case.experts for module in every[name].modules})
    rng = np.random.default_rng(case.seed)
    sizes = [HIDDEN, *[size] * (depth - 1), num_out]
    tensors = {}
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        key = f"base_model.internal_xlora_classifier.layers.{stride * i}"
        tensors[f"{key}.weight"] = _normal(rng, (fan_out, fan_in), 1.5 * fan_in**-0.5)
        tensors[f"{key}.bias"] = _normal(rng, (fan_out,), 0.3)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    experts = {str(i): f"{adapters}/{name}" for i, name in enumerate(case.experts)}
    config = {"peft_type": "XLORA", "task_type": "CAUSAL_LM", "hidden_size": HIDDEN, "adapters": experts, **fields}
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2))
    return path


def write_merge_adapters(path: Path) -> dict[str, Path]:
    """Writes every adapter of `MERGE_ADAPTERS` as a PEFT directory below `path`; their folders by name."""
    return {name: _write_tiny_adapter(path / name, adapter) for name, adapter in MERGE_ADAPTERS.items()}


def _write_tiny_adapter(path: Path, adapter: TinyAdapter) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(adapter.seed)
    tensors = {}
    for layer in range(NUM_LAYERS):
        for projection in adapter.modules:
            module = f"model.layers.{layer}.{_block(projection)}.{projection}"
            rank = next((r for key, r in adapter.rank_pattern.items() if module.endswith(f".{key}")), adapter.rank)
            out_features, in_features = SHAPES[projection]
            a = _normal(rng, (rank, in_features), in_features**-0.5)
            a *= (adapter.decay ** np.arange(rank, dtype=np.float32))[:, None]
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = _normal(rng, (out_features, rank), 0.5 * rank**-0.5)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "use_rslora": adapter.use_rslora,
        "rank_pattern": adapter.rank_pattern,
        "alpha_pattern": adapter.alpha_pattern,
        "target_modules": list(adapter.modules),
        "bias": "none",
        "inference_mode": True,
    }
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2))
    return path


def module_path(layer: int, projection: str) -> str:
    """Path of a projection in the base model."""
    return f"model.layers.{layer}.{_block(projection)}.{projection}"


def _block(projection: str) -> str:
    return "self_attn" if projection in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"


def _normal(rng: np.random.Generator, shape: Sequence[int], std: float) -> np.ndarray:
    return (rng.standard_normal(shape) * std).astype(np.float32)
