"""Reads gated sets: gated_set.json (experts and how their gate is read) and gate.safetensors (the gates).

    {"experts": ["legal", "./french"], "granularity": "layer", "top_k": 2, "renormalize": true, "name": "moe"}

Gates are named "layers.{layer}.gate.weight" [num_experts, hidden], or with granularity "projection"
"layers.{layer}.{projection}.gate.weight" [num_experts, in_features]. Only "experts" is required; the defaults are
granularity "layer", top_k null (all experts), renormalize false, and the folder's name.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import MissingFileError, refuse_if
from checkpoints.files import dtype_problems, open_safetensors, read_json, tensor_problems
from checkpoints.peft_adapter import CONFIG_FILE
from dymerge_jax.config import LlamaConfig
from dymerge_jax.gating import GatedSetWeights

SET_FILE = "gated_set.json"
GATE_FILE = "gate.safetensors"

_FIELDS = ("name", "experts", "granularity", "top_k", "renormalize")


def load_gated_set(path: str | Path, config: LlamaConfig) -> GatedSetWeights:
    """Reads a gated set to the host.

    Args:
      path: its folder.
      config: the base model.

    Returns:
      The set; an expert given as a path is an absolute path there, one given by adapter name is that name.

    Raises:
      MissingFileError: If the folder or one of its two files is missing.
      CheckpointError: If a field or gate is wrong; lists every reason.
    """
    path = Path(path)
    for file in (SET_FILE, GATE_FILE):
        if not (path / file).is_file():
            raise MissingFileError(f"gated set {str(path)!r} does not exist or holds no {file}")
    content = read_json(path / SET_FILE)
    subject = f"gated set {str(path)!r}"
    refuse_if(_field_problems(content), f"{subject} ({SET_FILE})")
    experts = tuple(_resolve_expert(path, expert) for expert in content["experts"])
    granularity = content.get("granularity", "layer")
    sites = _gate_sites(config, granularity)
    expected = {_gate_key(site): (len(experts), width) for site, width in sites.items()}
    with open_safetensors(path / GATE_FILE) as reader:
        refuse_if([*tensor_problems(reader.header, expected), *dtype_problems(reader.header)], subject)
        gates = {site: reader.read(_gate_key(site)).astype(np.float32) for site in sites}
    broken = [_gate_key(site) for site, gate in gates.items() if not np.isfinite(gate).all()]
    refuse_if([f"NaN or infinite weights: {', '.join(broken)}"] if broken else [], subject)
    return GatedSetWeights(
        name=content.get("name") or path.resolve().name,
        experts=experts,
        granularity=granularity,
        top_k=content.get("top_k"),
        renormalize=content.get("renormalize", False),
        gates=gates,
    )


def load_gated_sets(
    folders: Sequence[str | Path], config: LlamaConfig, adapters: Sequence[tuple[str, Path]]
) -> tuple[list[GatedSetWeights], list[tuple[str, Path]]]:
    """Reads gated sets and names their experts.

    Args:
      folders: of the sets.
      config: the base model.
      adapters: (name, folder) of every adapter that is served.

    Returns:
      The sets, whose experts are all adapter names now; and the adapters, with the folders among the experts that
      were not among them: such an adapter has its folder's name, or "set/folder" if that is taken.

    Raises:
      MissingFileError, CheckpointError: See `load_gated_set`.
      ValueError: If an expert is in a set twice.
    """
    adapters = list(adapters)
    sets = []
    for gated_set in (load_gated_set(folder, config) for folder in folders):
        experts = tuple(_expert_name(expert, gated_set.name, adapters) for expert in gated_set.experts)
        sets.append(dataclasses.replace(gated_set, experts=experts))
    return sets, adapters


def _expert_name(expert: str, set_name: str, adapters: list[tuple[str, Path]]) -> str:
    """The expert's name; an adapter folder that has none yet gets one and joins `adapters`."""
    path = Path(expert)
    if not path.is_absolute():
        return expert
    for name, folder in adapters:
        if folder.resolve() == path:
            return name
    is_taken = path.name in (name for name, _ in adapters)
    adapters.append((f"{set_name}/{path.name}" if is_taken else path.name, path))
    return adapters[-1][0]


def _field_problems(content: dict[str, Any]) -> list[str]:
    problems = []
    if unknown := [field for field in content if field not in _FIELDS]:
        problems.append(f"unknown fields: {', '.join(unknown)}; known are {', '.join(_FIELDS)}")
    experts = content.get("experts")
    is_list = isinstance(experts, list) and all(isinstance(expert, str) and expert for expert in experts)
    if not is_list or not experts:
        problems.append(f"experts is {experts!r}; a list of adapter names or folders was expected")
    elif twice := sorted({expert for expert in experts if experts.count(expert) > 1}):
        problems.append(f"experts named twice: {', '.join(twice)}")
    if content.get("granularity", "layer") not in ("layer", "projection"):
        problems.append(f"granularity is {content['granularity']!r}; expected 'layer' or 'projection'")
    top_k = content.get("top_k")
    most = len(experts) if is_list and experts else None
    if top_k is not None and (type(top_k) is not int or top_k < 1 or (most is not None and top_k > most)):
        problems.append(f"top_k is {top_k!r}; expected 1 to the number of experts ({most}), or null for all")
    if not isinstance(content.get("renormalize", False), bool):
        problems.append(f"renormalize is {content['renormalize']!r}; true or false was expected")
    if "name" in content and not (isinstance(content["name"], str) and content["name"]):
        problems.append(f"name is {content['name']!r}; text was expected")
    return problems


def _resolve_expert(path: Path, expert: str) -> str:
    """An adapter's name, or the absolute path of an adapter folder given relative to the set's own."""
    folder = path / expert
    is_path = (folder / CONFIG_FILE).is_file()
    if not is_path and (Path(expert).is_absolute() or expert.startswith(("./", "../"))):
        raise MissingFileError(f"gated set {str(path)!r}: expert {expert!r} is no folder with {CONFIG_FILE}")
    return str(folder.resolve()) if is_path else expert


def _gate_sites(config: LlamaConfig, granularity: str) -> dict[tuple[int, str], int]:
    """Input width of every gate by (layer, "layer" or projection name)."""
    widths = {"layer": config.hidden}
    if granularity == "projection":
        widths = {name: group.in_features for group in config.groups.values() for name in group.projections}
    return {(layer, site): width for layer in range(config.num_layers) for site, width in widths.items()}


def _gate_key(site: tuple[int, str]) -> str:
    layer, name = site
    return f"layers.{layer}.gate.weight" if name == "layer" else f"layers.{layer}.{name}.gate.weight"
