"""Writes an adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from checkpoints.peft_adapter import CONFIG_FILE, WEIGHTS_FILE
from dymerge_jax.config import PROJECTIONS
from dymerge_jax.lora import AdapterWeights


def write_peft_adapter(
    folder: Path, adapter: AdapterWeights, *, alpha: float, base_model: str, dtype: str = "float32"
) -> None:
    """Writes an adapter of one rank into an existing folder.

    Args:
      folder: gets the two files.
      adapter: every projection has the same rank, and scale alpha / rank.
      alpha: lora_alpha.
      base_model: what the config says of the model it was made for.
      dtype: of the stored tensors: float32, float16 or bfloat16.

    Raises:
      ValueError: If ranks or scales differ.
    """
    rank = adapter.rank
    if others := [site for site, p in adapter.projections.items() if (p.rank, p.scale) != (rank, alpha / rank)]:
        raise ValueError(f"projections {others} have another rank than {rank} or another scale than {alpha / rank}")
    targets = {name for _, name in adapter.projections}
    tensors: dict[str, np.ndarray] = {}
    for (layer, name), projection in sorted(adapter.projections.items()):
        block = "self_attn" if name in PROJECTIONS[:4] else "mlp"
        prefix = f"base_model.model.model.layers.{layer}.{block}.{name}"
        for side, matrix in (("A", projection.a), ("B", projection.b)):
            tensors[f"{prefix}.lora_{side}.weight"] = np.ascontiguousarray(matrix.astype(jnp.dtype(dtype)))
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": [name for name in PROJECTIONS if name in targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
