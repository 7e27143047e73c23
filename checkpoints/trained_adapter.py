"""Writes an adapter that was trained here as PEFT saves it: adapter_config.json and adapter_model.safetensors."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from checkpoints.peft_adapter import CONFIG_FILE, WEIGHTS_FILE
from checkpoints.peft_writer import adapter_config_json, module_path
from checkpoints.writing import write_json
from dymerge_jax.config import PROJECTIONS
from dymerge_jax.lora import AdapterWeights


def write_trained_adapter(
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
    tensors: dict[str, np.ndarray] = {}
    for site, projection in sorted(adapter.projections.items()):
        for side, matrix in (("A", projection.a), ("B", projection.b)):
            name = f"base_model.model.{module_path(site)}.lora_{side}.weight"
            tensors[name] = np.ascontiguousarray(matrix.astype(jnp.dtype(dtype)))
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    targets = {name for _, name in adapter.projections}
    config = adapter_config_json(rank, [name for name in PROJECTIONS if name in targets], base_model)
    write_json(folder / CONFIG_FILE, config | {"lora_alpha": alpha})
