"""Writes mixtures of LoRA experts as MoE-PEFT and MOELoRA-peft save them, and computes their formulas in float64.

The formulas here read the foreign tensors themselves and share no code with the imports under test.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from dymerge_jax.config import PROJECTIONS, LlamaConfig
from dymerge_jax.lora import AdapterWeights
from tests.support.numpy_llama import Delta
from tests.support.tiny_checkpoints import Tensors, projection_path, projection_shape, write_json

Family = Literal["mola", "loramoe"]

MLP = PROJECTIONS[4:]


def write_experts(path: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """The two files of a folder."""
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "adapter_config.json", config)
    save_file(dict(tensors), path / "adapter_model.safetensors")
    return path


def moe_peft_config(
    family: Family, *, num_experts: int, rank: int, modules: Sequence[str] = PROJECTIONS
) -> dict[str, Any]:
    """adapter_config.json as MoE-PEFT exports it; MoLA keeps the top 2."""
    config = {
        "bias": "none",
        "peft_type": family.upper(),
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "target_modules": list(modules),
        "routing_strategy": family,
        "num_experts": num_experts,
    }
    return config | ({"top_k": 2} if family == "mola" else {})


def moe_peft_tensors(
    config: LlamaConfig,
    family: Family,
    *,
    num_experts: int,
    rank: int,
    seed: int,
    modules: Sequence[str] = PROJECTIONS,
) -> Tensors:
    """Random experts and gates; LoRAMoE has ordinary LoRA in attention."""
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for layer in range(config.num_layers):
        for projection in modules:
            module = projection_path(layer, projection).replace("model.", f"{family}.", 1)
            out_features, in_features = projection_shape(config, projection)
            is_plain = family == "loramoe" and projection not in MLP
            for place in [""] if is_plain else [f".experts.{e}" for e in range(num_experts)]:
                tensors[f"{module}{place}.lora_A.weight"] = _normal(rng, (rank, in_features), in_features**-0.5)
                tensors[f"{module}{place}.lora_B.weight"] = _normal(rng, (out_features, rank), 0.5 * rank**-0.5)
            if not is_plain:
                tensors[f"{module}.moe_gate.weight"] = _normal(rng, (num_experts, in_features), 2 * in_features**-0.5)
    return tensors


def moe_peft_delta(config: Mapping[str, Any], tensors: Tensors) -> Delta:
    """MoLA's and LoRAMoE's formula, token by token."""
    family, scale = config["routing_strategy"], config["lora_alpha"] / config["r"]
    num_experts = config["num_experts"]

    def delta(layer: int, projection: str, x: np.ndarray, layer_input: np.ndarray) -> np.ndarray:
        module = projection_path(layer, projection).replace("model.", f"{family}.", 1)
        if f"{module}.lora_A.weight" in tensors:
            return scale * _product(tensors, f"{module}.lora_A.weight", f"{module}.lora_B.weight", x)
        if f"{module}.moe_gate.weight" not in tensors:
            return np.zeros(())
        weights = _softmax(x @ tensors[f"{module}.moe_gate.weight"].astype(np.float64).T)
        if "top_k" in config:
            least = np.sort(weights, axis=1)[:, -config["top_k"], None]
            weights = np.where(weights >= least, weights, 0)
            weights = weights / weights.sum(1, keepdims=True)
        outputs = [
            _product(tensors, f"{module}.experts.{e}.lora_A.weight", f"{module}.experts.{e}.lora_B.weight", x)
            for e in range(num_experts)
        ]
        return scale * sum(weights[:, e, None] * y for e, y in enumerate(outputs))

    return delta


def moelora_config(*, num_experts: int, num_tasks: int, rank: int, shares_gate: bool) -> dict[str, Any]:
    """adapter_config.json as MOELoRA-peft writes it."""
    return {
        "peft_type": "MMOELORAS" if shares_gate else "MMOELORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.1,
        "fan_in_fan_out": False,
        "bias": "none",
        "modules_to_save": None,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "task_num": num_tasks,
        "task_embedding_dim": 6,
        "expert_num": num_experts,
    }


def moelora_tensors(config: LlamaConfig, content: Mapping[str, Any], *, seed: int) -> Tensors:
    """Random experts under both of their names, gates of every linear layer and, if it shares one, of the model."""
    rng = np.random.default_rng(seed)
    rank = content["r"] // content["expert_num"]
    tensors: Tensors = {}

    def add_gate(prefix: str) -> None:
        shape = (content["task_num"] + 1, content["task_embedding_dim"])
        tensors[f"{prefix}lora_task_embedding.weight"] = _normal(rng, shape, 1)
        tensors[f"{prefix}lora_gate.GateL.weight"] = _normal(rng, (content["expert_num"], shape[1]), 1)

    for layer in range(config.num_layers):
        for projection in content["target_modules"]:
            module = f"base_model.model.{projection_path(layer, projection)}"
            out_features, in_features = projection_shape(config, projection)
            add_gate(f"{module}.")
            for e in range(content["expert_num"]):
                a = _normal(rng, (rank, in_features), in_features**-0.5)
                b = _normal(rng, (out_features, rank), rank**-0.5)
                for name in ("mlp.weight", "weight"):
                    tensors[f"{module}.lora_A.loraA.{e}.{name}"] = a
                    tensors[f"{module}.lora_B.loraB.{e}.{name}"] = b
    if content["peft_type"] == "MMOELORAS":
        add_gate("")
    return tensors


def moelora_delta(content: Mapping[str, Any], tensors: Tensors, task: int) -> Delta:
    """MOELoRA's formula for one task."""
    scale = content["lora_alpha"] / content["r"]

    def delta(layer: int, projection: str, x: np.ndarray, layer_input: np.ndarray) -> np.ndarray:
        if projection not in content["target_modules"]:
            return np.zeros(())
        module = f"base_model.model.{projection_path(layer, projection)}."
        gate = "" if content["peft_type"] == "MMOELORAS" else module
        embedding = tensors[f"{gate}lora_task_embedding.weight"][task].astype(np.float64)
        weights = _softmax(tensors[f"{gate}lora_gate.GateL.weight"].astype(np.float64) @ embedding)
        outputs = [
            _product(tensors, f"{module}lora_A.loraA.{e}.mlp.weight", f"{module}lora_B.loraB.{e}.mlp.weight", x)
            for e in range(content["expert_num"])
        ]
        return scale * sum(w * y for w, y in zip(weights, outputs, strict=True))

    return delta


def arrow_delta(adapters: Sequence[AdapterWeights], *, top_k: int, temperature: float) -> Delta:
    """Arrow's formula, the prototypes by an SVD of the whole of B A."""

    def delta(layer: int, projection: str, x: np.ndarray, layer_input: np.ndarray) -> np.ndarray:
        parts = [adapter.projections[layer, projection] for adapter in adapters]
        products = [p.b.astype(np.float64) @ p.a.astype(np.float64) for p in parts]
        prototypes = np.stack([np.linalg.svd(product)[2][0] for product in products])
        logits = np.abs(x @ prototypes.T)
        least = np.sort(logits, axis=1)[:, -top_k, None]
        weights = _softmax(np.where(logits >= least, logits / temperature, -np.inf))
        outputs = [p.scale * (x @ product.T) for p, product in zip(parts, products, strict=True)]
        return np.einsum("te,eto->to", weights, np.stack(outputs))

    return delta


def _product(tensors: Tensors, a_key: str, b_key: str, x: np.ndarray) -> np.ndarray:
    return x @ tensors[a_key].astype(np.float64).T @ tensors[b_key].astype(np.float64).T


def _softmax(logits: np.ndarray) -> np.ndarray:
    exps = np.exp(logits - logits.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def _normal(rng: np.random.Generator, shape: Sequence[int], std: float) -> np.ndarray:
    return (rng.standard_normal(shape) * std).astype(np.float32)
