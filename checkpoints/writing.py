"""Writes folders that appear whole or not at all, and adapters as PEFT saves them."""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from checkpoints.errors import CheckpointError
from checkpoints.files import FLOAT_DTYPES

_ALIGNMENT = 8  # the safetensors package starts the data there


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` at the end of the block, or vanishes if the block raises.

    Raises:
      CheckpointError: If `path` exists.
    """
    if path.exists():
        raise CheckpointError(f"{path} exists; give a folder that does not exist yet")
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place, so that the rename stays on one file system.
    partial = path.parent / f".{path.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes one JSON object."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def safetensors_head(tensors: Mapping[str, tuple[int, ...]], dtype: str, metadata: Mapping[str, str]) -> bytes:
    """What a safetensors file begins with whose tensors, given as shapes by name, follow in this order.

    Args:
      tensors: shape of each.
      dtype: of all of them: float32, float16 or bfloat16.
      metadata: kept in the header.
    """
    stored_name = next(name for name, own in FLOAT_DTYPES.items() if own == dtype)
    content: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    start = 0
    for name, shape in tensors.items():
        stop = start + math.prod(shape) * jnp.dtype(dtype).itemsize
        content[name] = {"dtype": stored_name, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_adapter(
    path: Path, tensors: Mapping[str, np.ndarray], *, rank: int, alpha: float, use_rslora: bool, base: str | None
) -> None:
    """Writes an adapter as PEFT does.

    Args:
      path: its folder; must not exist.
      tensors: A [rank, in_features] and B [out_features, rank] by PEFT's names.
      rank, alpha, use_rslora: what its scale follows from.
      base: what the adapter's config says of its base model.
    """
    path.mkdir()
    projections = {name.rsplit(".", 3)[1] for name in tensors}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "use_rslora": use_rslora,
        "target_modules": sorted(projections),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(path / "adapter_config.json", config)
    # A view of another tensor would be written as the whole of it.
    save_file({name: np.ascontiguousarray(w) for name, w in tensors.items()}, path / "adapter_model.safetensors")
