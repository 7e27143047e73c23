"""Writes a gated set in the project's own format; see `checkpoints.gated_set`."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from checkpoints.gated_set import GATE_FILE, SET_FILE
from dymerge_jax.gating import GatedSetWeights


def write_gated_set(folder: Path, gated_set: GatedSetWeights) -> None:
    """Writes a gated set into an existing folder; its experts as named: adapters, or paths from that folder."""
    content = {
        "name": gated_set.name,
        "experts": list(gated_set.experts),
        "granularity": gated_set.granularity,
        "top_k": gated_set.top_k,
        "renormalize": gated_set.renormalize,
    }
    gates = {
        f"layers.{layer}.gate.weight"
        if site == "layer"
        else f"layers.{layer}.{site}.gate.weight": np.ascontiguousarray(g)
        for (layer, site), g in gated_set.gates.items()
    }
    save_file(gates, folder / GATE_FILE)
    (folder / SET_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
