"""Reads gated sets: gated_set.json (experts and how their gate is read) and gate.safetensors (the gates).

    {"experts": ["legal", "./french"], "granularity": "layer", "top_k": 2, "renormalize": true, "name": "moe"}

Gates are named "layers.{layer}.gate.weight" [num_experts, hidden], or with granularity "projection"
"layers.{layer}.{projection}.gate.weight" [num_experts, in_features], for those of "projections" (all seven if it is
left out). "absolute" takes the size of gate @ x, and "temperature" divides it. Only "experts" is required; the defaults
are granularity "layer", top_k null (all experts), renormalize and absolute false, temperature 1, and the folder's name.
An expert is an adapter's name, a folder relative to the set's own, or name=folder. With "kind": "xlora" it is another
form, see `xlora_set`.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from checkpoints.errors import MissingFileError, refuse_if
from checkpoints.files import dtype_problems, open_safetensors, read_json, tensor_problems
from checkpoints.peft_adapter import CONFIG_FILE
from checkpoints.writing import write_json
from checkpoints.xlora_set import XLORA_KIND, read_xlora_set, uncovered_problems, xlora_field_problems
from dymerge_jax.config import PROJECTIONS, LlamaConfig
from dymerge_jax.gating import GatedSetWeights
from dymerge_jax.xlora import GatedSet, XLoraSetWeights

SET_FILE = "gated_set.json"
GATE_FILE = "gate.safetensors"

_FIELDS = ("name", "experts", "granularity", "top_k", "renormalize", "projections", "absolute", "temperature")


def load_gated_set(path: str | Path, config: LlamaConfig) -> GatedSet:
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
            foreign = (path / CONFIG_FILE).is_file()
            hint = "; import what another project trained by `python -m checkpoints import-gated`" if foreign else ""
            raise MissingFileError(f"gated set {str(path)!r} does not exist or holds no {file}{hint}")
    content = read_json(path / SET_FILE)
    subject = f"gated set {str(path)!r}"
    is_xlora = content.get("kind") == XLORA_KIND
    problems = (xlora_field_problems if is_xlora else _field_problems)(content)
    refuse_if(_name_problems(content) + problems, f"{subject} ({SET_FILE})")
    name = content.get("name") or path.resolve().name
    experts = tuple(_resolve_expert(path, expert) for expert in content["experts"])
    if is_xlora:
        return read_xlora_set(name, experts, content, path / GATE_FILE, config, subject)
    granularity = content.get("granularity", "layer")
    sites = _gate_sites(config, granularity, content.get("projections", PROJECTIONS))
    temperature = np.float32(content.get("temperature", 1.0))
    expected = {_gate_key(site): (len(experts), width) for site, width in sites.items()}
    with open_safetensors(path / GATE_FILE) as reader:
        refuse_if([*tensor_problems(reader.header, expected), *dtype_problems(reader.header)], subject)
        with np.errstate(over="ignore"):  # what becomes infinite is refused
            gates = {site: reader.read(_gate_key(site)).astype(np.float32) / temperature for site in sites}
    broken = [_gate_key(site) for site, gate in gates.items() if not np.isfinite(gate).all()]
    refuse_if([f"NaN or infinite weights: {', '.join(broken)}"] if broken else [], subject)
    return GatedSetWeights(
        name=name,
        experts=experts,
        granularity=granularity,
        top_k=content.get("top_k"),
        renormalize=content.get("renormalize", False),
        gates=gates,
        is_absolute=content.get("absolute", False),
    )


def save_gated_set(
    path: Path,
    experts: Sequence[str],
    gates: Mapping[tuple[int, str], np.ndarray],
    *,
    top_k: int | None,
    renormalize: bool,
    is_absolute: bool = False,
    temperature: float = 1.0,
    name: str | None = None,
) -> None:
    """Writes the two files of a gated set into an existing folder.

    Args:
      path: the folder.
      experts: as in gated_set.json, in the order of the gates' rows.
      gates: [num_experts, in_features] by (layer, "layer" or projection), not divided by the temperature.
      top_k, renormalize, is_absolute: see `GatedSetWeights`.
      temperature: divides the logits.
      name: what a request calls it; None is the folder's name.
    """
    sites = {site for _, site in gates}
    content: dict[str, Any] = {"experts": list(experts), "granularity": "layer" if sites == {"layer"} else "projection"}
    if "layer" not in sites:
        content["projections"] = [name for name in PROJECTIONS if name in sites]
    content |= {"top_k": top_k, "renormalize": renormalize, "absolute": is_absolute, "temperature": temperature}
    if name is not None:
        content["name"] = name
    save_file({_gate_key(site): np.ascontiguousarray(gate) for site, gate in gates.items()}, path / GATE_FILE)
    write_json(path / SET_FILE, content)


def load_gated_sets(
    folders: Sequence[str | Path], config: LlamaConfig, adapters: Sequence[tuple[str, Path]]
) -> tuple[list[GatedSet], list[tuple[str, Path]]]:
    """Reads gated sets and names their experts.

    Args:
      folders: of the sets.
      config: the base model.
      adapters: (name, folder) of every adapter that is served.

    Returns:
      The sets, whose experts are all adapter names now; and the adapters, with the folders among the experts that
      were not among them: such an adapter has its folder's name, or "set/folder" if that is taken.

    Raises:
      MissingFileError, CheckpointError: See `load_gated_set`; or if an expert, given by folder or by name, adapts a
        linear layer that its X-LoRA set has no weights for.
      ValueError: If an expert is in a set twice.
    """
    adapters = list(adapters)
    sets = []
    for gated_set in (load_gated_set(folder, config) for folder in folders):
        experts = tuple(_expert_name(expert, gated_set.name, adapters) for expert in gated_set.experts)
        sets.append(dataclasses.replace(gated_set, experts=experts))
    for folder, gated_set in zip(folders, sets, strict=True):  # now: an expert may have come with a later set
        _refuse_uncovered(folder, gated_set, adapters)
    return sets, adapters


def _refuse_uncovered(path: str | Path, gated_set: GatedSet, adapters: Iterable[tuple[str, Path]]) -> None:
    """Checks the experts that there are; whoever takes the set in refuses one that there is not."""
    if not isinstance(gated_set, XLoraSetWeights) or gated_set.sites is None:
        return
    folders = {name: folder for name, folder in adapters if name in gated_set.experts}
    refuse_if(uncovered_problems(folders, gated_set.sites), f"gated set {str(path)!r}")


def _expert_name(expert: str, set_name: str, adapters: list[tuple[str, Path]]) -> str:
    """The expert's name; an adapter folder that has none yet gets one and joins `adapters`."""
    wanted, _, folder = ("", "", expert) if Path(expert).is_absolute() else expert.partition("=")
    path = Path(folder)
    if not path.is_absolute():
        return expert
    for name, known in adapters:
        if known.resolve() == path:
            return name
    wanted = wanted or path.name
    is_taken = wanted in (name for name, _ in adapters)
    adapters.append((f"{set_name}/{wanted}" if is_taken else wanted, path))
    return adapters[-1][0]


def _field_problems(content: dict[str, Any]) -> list[str]:
    problems = []
    if unknown := [field for field in content if field not in _FIELDS]:
        problems.append(f"unknown fields: {', '.join(unknown)}; known are {', '.join(_FIELDS)}")
    if content.get("granularity", "layer") not in ("layer", "projection"):
        problems.append(f"granularity is {content['granularity']!r}; expected 'layer' or 'projection'")
    problems += _projections_problems(content)
    experts, top_k = content.get("experts"), content.get("top_k")
    most = len(experts) if isinstance(experts, list) and experts else None
    if top_k is not None and (type(top_k) is not int or top_k < 1 or (most is not None and top_k > most)):
        problems.append(f"top_k is {top_k!r}; expected 1 to the number of experts ({most}), or null for all")
    for field in ("renormalize", "absolute"):
        if not isinstance(content.get(field, False), bool):
            problems.append(f"{field} is {content[field]!r}; true or false was expected")
    temperature = content.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 1e-6 <= temperature <= 1e6:
        problems.append(f"temperature is {temperature!r}; a number from 1e-6 to 1e6 was expected")
    return problems


def _name_problems(content: Mapping[str, Any]) -> list[str]:
    """What is wrong with the names of the set and of its experts."""
    problems = []
    experts = content.get("experts")
    is_list = isinstance(experts, list) and all(isinstance(expert, str) and expert for expert in experts)
    if not is_list or not experts:
        problems.append(f"experts is {experts!r}; a list of adapter names or folders was expected")
    elif twice := sorted({expert for expert in experts if experts.count(expert) > 1}):
        problems.append(f"experts named twice: {', '.join(twice)}")
    if "name" in content and not (isinstance(content["name"], str) and content["name"]):
        problems.append(f"name is {content['name']!r}; text was expected")
    return problems


def _projections_problems(content: Mapping[str, Any]) -> list[str]:
    if "projections" not in content:
        return []
    given = content["projections"]
    is_list = isinstance(given, list) and all(isinstance(name, str) and name in PROJECTIONS for name in given)
    if not is_list or not given or len(set(given)) != len(given):
        return [f"projections is {given!r}; a list of some of {', '.join(PROJECTIONS)}, each once, was expected"]
    if content.get("granularity", "layer") == "layer":
        return ["projections is given with granularity 'layer', whose gate serves all; leave it out"]
    return []


def _resolve_expert(path: Path, expert: str) -> str:
    """An adapter's name, or the absolute path of an adapter folder given relative to the set's own, "name=" kept."""
    name, _, place = expert.partition("=") if not (path / expert).exists() and "=" in expert else ("", "", expert)
    folder = path / place
    is_path = (folder / CONFIG_FILE).is_file()
    if not is_path and (Path(place).is_absolute() or place.startswith(("./", "../"))):
        raise MissingFileError(f"gated set {str(path)!r}: expert {expert!r} is no folder with {CONFIG_FILE}")
    if not is_path:
        return expert
    return f"{name}={folder.resolve()}" if name else str(folder.resolve())


def _gate_sites(config: LlamaConfig, granularity: str, projections: Iterable[str]) -> dict[tuple[int, str], int]:
    """Input width of every gate by (layer, "layer" or projection name)."""
    widths = {"layer": config.hidden}
    if granularity == "projection":
        in_features = {name: group.in_features for group in config.groups.values() for name in group.projections}
        widths = {name: in_features[name] for name in projections}
    return {(layer, site): width for layer in range(config.num_layers) for site, width in widths.items()}


def _gate_key(site: tuple[int, str]) -> str:
    layer, name = site
    return f"layers.{layer}.gate.weight" if name == "layer" else f"layers.{layer}.{name}.gate.weight"
