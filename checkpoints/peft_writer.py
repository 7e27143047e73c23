"""Writes a LoRA adapter as PEFT does, one projection at a time: the whole adapter is never in memory."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.peft_adapter import CONFIG_FILE, WEIGHTS_FILE
from checkpoints.peft_header import BLOCK_OF, Site
from checkpoints.writing import new_folder, safetensors_head

AdapterDtype = Literal["float32", "float16", "bfloat16"]


def adapter_config_json(rank: int, target_modules: Sequence[str], base_model: str | None) -> dict[str, Any]:
    """adapter_config.json of an adapter with scaling 1: alpha is the rank, and no pattern says otherwise."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": list(target_modules),
        "modules_to_save": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def module_path(site: Site) -> str:
    """Path of a projection in the base model, such as "model.layers.0.self_attn.q_proj"."""
    layer, projection = site
    return f"model.layers.{layer}.{BLOCK_OF[projection]}.{projection}"


def write_peft_adapter(
    path: Path,
    config: Mapping[str, Any],
    shapes: Mapping[Site, tuple[int, int]],
    projections: Iterable[tuple[Site, np.ndarray, np.ndarray]],
    *,
    dtype: AdapterDtype,
    metadata: Mapping[str, str],
) -> None:
    """Writes an adapter's folder, wholly or not at all.

    Args:
      path: the folder; must not exist.
      config: of adapter_config.json; every projection has its `r` as the rank.
      shapes: (out_features, in_features) of every projection, in the order in which they come.
      projections: site, A [rank, in_features] and B [out_features, rank] of each, float32.
      dtype: of the stored tensors.
      metadata: kept in the header of the weights.

    Raises:
      CheckpointError: If `path` exists, or a weight is not finite in `dtype`.
    """
    with new_folder(path) as folder:
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tensors = {}
        for site, (out_features, in_features) in shapes.items():
            tensors[_key(site, "A")] = (config["r"], in_features)
            tensors[_key(site, "B")] = (out_features, config["r"])
        with (folder / WEIGHTS_FILE).open("wb") as file:
            file.write(safetensors_head(tensors, dtype, metadata))
            for (name, shape), array in zip(tensors.items(), _in_order(projections), strict=True):
                assert array.shape == shape, (name, array.shape, shape)
                file.write(_stored(name, array, dtype).tobytes())


def _key(site: Site, side: Literal["A", "B"]) -> str:
    return f"base_model.model.{module_path(site)}.lora_{side}.weight"


def _in_order(projections: Iterable[tuple[Site, np.ndarray, np.ndarray]]) -> Iterator[np.ndarray]:
    for _, a, b in projections:
        yield a
        yield b


def _stored(name: str, array: np.ndarray, dtype: AdapterDtype) -> np.ndarray:
    with np.errstate(over="ignore"):  # told below, with the tensor's name
        stored = array.astype(jnp.dtype(dtype))
    if not np.isfinite(stored).all():
        largest = float(np.abs(array).max())
        raise CheckpointError(
            f"{name} has weights up to {largest:.3g}, which {dtype} cannot hold; use a dtype of a wider range"
        )
    return stored
