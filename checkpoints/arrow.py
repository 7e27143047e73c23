"""Arrow (arXiv 2405.11157): a gated set of plain adapters without training; the gate is read off the adapters.

An expert's prototype in a projection is the top right singular vector of B A: the direction of an input that the expert
changes most. An expert's logit is |prototype · x| / temperature; the top k of the experts get the softmax over their
logits. The input is not normalised, as in PEFT's `create_arrow_model`, whose result this is.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from checkpoints.errors import CheckpointError, refuse_if
from checkpoints.expert_tensors import layer_problems, read_finite
from checkpoints.files import TensorInfo, dtype_problems, open_safetensors, read_json
from checkpoints.gated_set import save_gated_set
from checkpoints.lora_config import read_lora_config
from checkpoints.peft_adapter import CONFIG_FILE, weights_file
from checkpoints.peft_header import BLOCK_OF, LORA_KEY, Site
from checkpoints.writing import new_folder

DEFAULT_TOP_K = 3
"""PEFT's; or all experts, if they are fewer."""


def make_arrow(
    adapters: Sequence[tuple[str, Path]], target: Path, *, top_k: int | None = None, temperature: float = 1.0
) -> list[str]:
    """Makes a gated set of PEFT adapters, which stay where they are.

    Args:
      adapters: name and folder of each expert.
      target: folder to make; must not exist.
      top_k: experts that keep a weight for a token; None is `DEFAULT_TOP_K`.
      temperature: above 1 evens the weights out, below 1 sharpens them.

    Returns:
      What was made, a line each.

    Raises:
      CheckpointError: If an adapter is damaged, or the adapters do not adapt the same projections; lists every reason.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists; give a folder that does not exist yet")
    kept = min(DEFAULT_TOP_K, len(adapters)) if top_k is None else top_k
    if not 1 <= kept <= len(adapters):
        raise CheckpointError(f"--top-k is {kept}; expected 1 to the number of adapters, {len(adapters)}")
    if not 1e-6 <= temperature <= 1e6:
        raise CheckpointError(f"--temperature is {temperature}; a number from 1e-6 to 1e6 was expected")
    prototypes = {name: _adapter_prototypes(folder) for name, folder in adapters}
    _refuse_different_projections(prototypes)
    sites = sorted(next(iter(prototypes.values())))
    gates = {site: np.stack([prototypes[name][site] for name, _ in adapters]) for site in sites}
    with new_folder(target) as folder:
        experts = [_expert(name, path, target) for name, path in adapters]
        save_gated_set(folder, experts, gates, top_k=kept, renormalize=True, is_absolute=True, temperature=temperature)
    return [
        f"{target}: Arrow over {len(adapters)} adapters, {len(gates)} gates, top {kept}, temperature {temperature:g}",
        f"serve it with --gated-sets {target} and ask for it by model {target.name!r}",
    ]


def _expert(name: str, folder: Path, target: Path) -> str:
    """An expert as gated_set.json names it, relative to the set's folder."""
    path = os.path.relpath(folder.resolve(), target.parent.resolve() / target.name)
    return path if "=" in name else f"{name}={path}"


def top_right_singular_vector(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The input direction that B A changes most, of length 1; its sign means nothing.

    The large sides never meet: with Aᵀ = Q R, B A = (B Rᵀ) Qᵀ, and Q has orthonormal columns. So the vector is Q u, u
    being the top eigenvector of R BᵀB Rᵀ, which is [rank, rank].

    Args:
      a: [rank, in_features].
      b: [out_features, rank].

    Returns:
      [in_features] float32; zeros if B A is zero.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    q, r = np.linalg.qr(a.T)
    values, vectors = np.linalg.eigh(r @ (b.T @ b) @ r.T)
    return (q @ vectors[:, -1] if values[-1] > 0 else np.zeros(a.shape[1])).astype(np.float32)


def _adapter_prototypes(folder: Path) -> dict[Site, np.ndarray]:
    """Reads an adapter, a projection at a time. What a model must have for it is checked when it is served."""
    file = weights_file(folder)
    _, problems = read_lora_config(read_json(folder / CONFIG_FILE))
    with open_safetensors(file) as reader:
        pairs, key_problems = _pairs(reader.header)
        problems += key_problems + dtype_problems(reader.header)
        refuse_if(problems, f"adapter {str(folder)!r}")
        return {
            site: top_right_singular_vector(read_finite(reader, pair["A"]), read_finite(reader, pair["B"]))
            for site, pair in sorted(pairs.items())
        }


def _pairs(header: dict[str, TensorInfo]) -> tuple[dict[Site, dict[str, str]], list[str]]:
    """Keys of A and B by site, and what is wrong with them."""
    pairs: dict[Site, dict[str, str]] = {}
    unexpected, problems = [], []
    for key in header:
        match = LORA_KEY.fullmatch(key)
        if match is None or BLOCK_OF.get(match["projection"]) != match["block"]:
            unexpected.append(key)
            continue
        site = (int(match["layer"]), match["projection"])
        if pairs.setdefault(site, {}).setdefault(match["side"], key) != key:
            unexpected.append(key)
    if unexpected:
        problems.append(f"unexpected tensors, which nothing would use: {', '.join(sorted(unexpected))}")
    if not pairs:
        problems.append("no LoRA tensor")
    for (layer, projection), pair in sorted(pairs.items()):
        shapes = [header[pair[side]].shape for side in "AB" if side in pair]
        if len(shapes) < 2 or len(shapes[0]) != 2 or len(shapes[1]) != 2 or shapes[0][0] != shapes[1][1]:
            problems.append(f"layers.{layer}.{projection} has {shapes}; expected A (r, in) and B (out, r)")
    return pairs, problems + layer_problems(pairs)


def _refuse_different_projections(prototypes: dict[str, dict[Site, np.ndarray]]) -> None:
    first, *others = prototypes
    expected = {site: vector.shape for site, vector in prototypes[first].items()}
    problems = []
    for name in others:
        shapes = {site: vector.shape for site, vector in prototypes[name].items()}
        if wrong := sorted(site for site in expected.keys() | shapes.keys() if expected.get(site) != shapes.get(site)):
            listed = ", ".join(f"layers.{layer}.{projection}" for layer, projection in wrong)
            problems.append(f"{name} and {first} differ in {listed}")
    refuse_if(problems, "Arrow over adapters that do not adapt the same projections")
