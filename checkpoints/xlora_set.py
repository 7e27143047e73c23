"""X-LoRA in the project's own form: a gated set whose gated_set.json says "kind": "xlora".

    {"kind": "xlora", "experts": ["./legal", "./french"], "softmax": true, "top_k": null}

gate.safetensors holds the classifier's linear layers, "classifier.0.weight" [out_features, in_features] and
"classifier.0.bias" on. "sites" lists the linear layers that have weights of their own, such as "layers.0.q_proj", in
the order of the classifier's outputs; without it, one weight an expert serves all. The other fields are those of
`XLoraRule`, with its defaults: softmax, temperature, top_k, softmax_of_kept, global_weight, pass_value.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from checkpoints.errors import refuse_if
from checkpoints.expert_tensors import MAX_EXPERTS
from checkpoints.files import TensorInfo, dtype_problems, open_safetensors, read_json, tensor_problems
from checkpoints.json_values import is_float32
from checkpoints.lora_config import read_lora_config
from checkpoints.peft_adapter import CONFIG_FILE, weights_file
from checkpoints.peft_header import BLOCK_OF, LORA_KEY, Site
from checkpoints.writing import write_json
from dymerge_jax.config import PROJECTIONS, LlamaConfig
from dymerge_jax.xlora import XLoraRule, XLoraSetWeights

XLORA_KIND = "xlora"
MAX_DEPTH = 64
"""Linear layers of a classifier; PEFT's default is 1."""

_RULE_FIELDS = ("softmax", "temperature", "top_k", "softmax_of_kept", "global_weight", "pass_value")
_FIELDS = ("kind", "name", "experts", "sites", *_RULE_FIELDS)
_SITE = re.compile(rf"layers\.(\d{{1,6}})\.({'|'.join(PROJECTIONS)})")

Layers = Sequence[tuple[np.ndarray, np.ndarray]]
"""(weight [out_features, in_features], bias [out_features]) of a classifier's linear layers."""


def xlora_field_problems(content: Mapping[str, Any]) -> list[str]:
    """What is wrong with gated_set.json, besides the names of the set and of its experts."""
    problems = []
    if unknown := [field for field in content if field not in _FIELDS]:
        problems.append(f"unknown fields: {', '.join(unknown)}; known are {', '.join(_FIELDS)}")
    experts = content.get("experts")
    num_experts = len(experts) if isinstance(experts, list) else 0
    if num_experts > MAX_EXPERTS:
        problems.append(f"there are {num_experts} experts; at most {MAX_EXPERTS} are supported")
    problems += rule_problems({f: content[f] for f in _RULE_FIELDS if f in content}, num_experts)
    if (sites := content.get("sites")) is not None:
        is_list = isinstance(sites, list) and all(isinstance(site, str) and _SITE.fullmatch(site) for site in sites)
        if not is_list or not sites or len(set(sites)) != len(sites):
            problems.append(f"sites is {sites!r}; a list of names such as 'layers.0.q_proj', each once, was expected")
    return problems


def rule_problems(values: Mapping[str, Any], num_experts: int, names: Mapping[str, str] | None = None) -> list[str]:
    """What is wrong with the fields of a rule.

    Args:
      values: by field of `XLoraRule`; one that is left out has its default.
      num_experts: of the set; 0 if it is not known.
      names: what the user calls a field, where that is not its name.
    """
    problems = []

    def check(field: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            problems.append(f"{(names or {}).get(field, field)} is {values[field]!r}; {expected} was expected")

    for field, value in values.items():
        match field:
            case "softmax" | "softmax_of_kept" | "is_layerwise":
                check(field, isinstance(value, bool), "true or false")
            case "top_k":
                is_count = type(value) is int and value >= 1 and (num_experts == 0 or value <= num_experts)
                check(field, value is None or is_count, f"null or 1 to the number of experts ({num_experts})")
            case "temperature":
                check(field, is_float32(value) and 1e-6 <= value <= 1e6, "a number from 1e-6 to 1e6")
            case _:
                check(field, is_float32(value), "a finite number")
    top_k, pass_value = values.get("top_k"), values.get("pass_value", 0.0)
    if not problems and pass_value and top_k is not None and top_k != num_experts:
        shown = {field: (names or {}).get(field, field) for field in ("pass_value", "top_k")}
        problems.append(
            f"{shown['pass_value']} is {pass_value} and {shown['top_k']} is {top_k}: which of the experts, all of one "
            "weight in the first pass, are the top is left to chance, and differs between a CPU and a GPU in PEFT; "
            f"{shown['pass_value']} 0, or no {shown['top_k']}, was expected"
        )
    return problems


def read_xlora_set(
    name: str, experts: tuple[str, ...], content: Mapping[str, Any], weights: Path, config: LlamaConfig, subject: str
) -> XLoraSetWeights:
    """Reads the classifier of a set whose fields are checked.

    Args:
      name, experts: of the set.
      content: of gated_set.json.
      weights: its safetensors file.
      config: the base model.
      subject: what errors call the set.

    Raises:
      CheckpointError: If a tensor is wrong or a site is none of the model's; lists every reason.
    """
    sites = None if content.get("sites") is None else [_parse_site(site) for site in content["sites"]]
    outside = [site for site in sites or () if site[0] >= config.num_layers]
    listed = ", ".join(map(site_name, outside))
    problems = [f"sites outside the model, which has {config.num_layers} layers: {listed}"] if outside else []
    if sites is not None:
        places = {expert: Path(expert.rpartition("=")[2]) for expert in experts}
        problems += uncovered_problems({name: place for name, place in places.items() if place.is_absolute()}, sites)
    with open_safetensors(weights) as reader:
        keys = [
            (f"classifier.{i}.weight", f"classifier.{i}.bias") for i in range(max(1, (len(reader.header) + 1) // 2))
        ]
        num_out = len(experts) * (1 if sites is None else len(sites))
        problems += classifier_problems(reader.header, keys, config.hidden, num_out)
        refuse_if(problems, subject)
        layers = [(reader.read(w).astype(np.float32), reader.read(b).astype(np.float32)) for w, b in keys]
    refuse_if(finite_problems(keys, layers), subject)
    if sites is not None:
        layers[-1] = _spread(*layers[-1], sites, config.num_layers)
    given = {field: content[field] for field in _RULE_FIELDS if field in content}
    rule = XLoraRule(is_layerwise=sites is not None, **given)
    listed_sites = None if sites is None else tuple(sites)
    return XLoraSetWeights(name=name, experts=experts, layers=tuple(layers), rule=rule, sites=listed_sites)


def uncovered_problems(folders: Mapping[str, Path], sites: Sequence[Site]) -> list[str]:
    """Names what experts adapt beside the sites: no output says their weights there.

    Args:
      folders: of the experts, by name.
      sites: of the set.

    Raises:
      MissingFileError, CheckpointError: See `adapted_sites`.
    """
    if uncovered := [site for site in adapted_sites(folders) if site not in sites]:
        return [
            f"linear layers that experts adapt and sites leaves out: {', '.join(map(site_name, uncovered))}; use the "
            "experts that the classifier was trained with"
        ]
    return []


def classifier_problems(
    header: Mapping[str, TensorInfo], keys: Sequence[tuple[str, str]], num_in: int, num_out: int
) -> list[str]:
    """Compares a classifier's tensors with the sizes that it must have.

    Args:
      header: of its file.
      keys: of weight and bias of its linear layers, in order.
      num_in, num_out: its inputs and outputs; the width between follows from the first layer.
    """
    first = header.get(keys[0][0])
    width = first.shape[0] if first is not None and first.shape else 0
    sizes = [num_in, *[width] * (len(keys) - 1), num_out]
    expected = {}
    for (weight, bias), fan_in, fan_out in zip(keys, sizes[:-1], sizes[1:], strict=True):
        expected |= {weight: (fan_out, fan_in), bias: (fan_out,)}
    return [*tensor_problems(header, expected), *dtype_problems(header)]


def finite_problems(keys: Sequence[tuple[str, str]], layers: Layers) -> list[str]:
    """Names the tensors that hold something else than finite numbers."""
    pairs = zip(keys, layers, strict=True)
    broken = [k for names, arrays in pairs for k, x in zip(names, arrays, strict=True) if not np.isfinite(x).all()]
    return [f"NaN or infinite weights: {', '.join(broken)}"] if broken else []


def save_xlora_set(
    path: Path, experts: Sequence[str], layers: Layers, rule: XLoraRule, sites: Sequence[Site] | None
) -> None:
    """Writes the two files of an X-LoRA set into an existing folder.

    Args:
      path: the folder.
      experts: as in gated_set.json, in the order of the classifier's outputs.
      layers: the classifier; its last layer has an output for each site and expert.
      rule: what becomes of the outputs.
      sites: the linear layers that have weights of their own; None without.
    """
    content: dict[str, Any] = {"kind": XLORA_KIND, "experts": list(experts)}
    if sites is not None:
        content["sites"] = [site_name(site) for site in sites]
    content |= {field: value for field, value in dataclasses.asdict(rule).items() if field in _RULE_FIELDS}
    tensors = {}
    for i, (weight, bias) in enumerate(layers):
        tensors |= {f"classifier.{i}.weight": np.ascontiguousarray(weight), f"classifier.{i}.bias": bias}
    save_file(tensors, path / "gate.safetensors")
    write_json(path / "gated_set.json", content)


def adapted_sites(folders: Mapping[str, Path]) -> list[Site]:
    """The linear layers that some expert adapts, as PEFT numbers them: by layer, in the order of `PROJECTIONS`.

    Args:
      folders: of the experts, by name.

    Raises:
      MissingFileError, CheckpointError: If an expert is none that can be served; lists every reason.
    """
    sites: set[Site] = set()
    problems = []
    for name, folder in folders.items():
        _, config_problems = read_lora_config(read_json(folder / CONFIG_FILE))
        problems += [f"expert {name}: {problem}" for problem in config_problems]
        with open_safetensors(weights_file(folder)) as reader:
            for key in reader.header:
                match = LORA_KEY.fullmatch(key)
                if match is None or BLOCK_OF.get(match["projection"]) != match["block"]:
                    problems.append(f"expert {name}: unexpected tensor {key}, which nothing would use")
                else:
                    sites.add((int(match["layer"]), match["projection"]))
    refuse_if(problems, "X-LoRA's experts")
    return sorted(sites, key=lambda site: (site[0], PROJECTIONS.index(site[1])))


def site_name(site: Site) -> str:
    """A site in words."""
    return f"layers.{site[0]}.{site[1]}"


def _parse_site(name: str) -> Site:
    match = _SITE.fullmatch(name)
    assert match is not None, f"{name} was checked before"
    return int(match[1]), match[2]


def _spread(
    weight: np.ndarray, bias: np.ndarray, sites: Sequence[Site], num_layers: int
) -> tuple[np.ndarray, np.ndarray]:
    """The last layer with outputs for every projection of every layer; those that it has none for are zero."""
    places = [layer * len(PROJECTIONS) + PROJECTIONS.index(projection) for layer, projection in sites]
    num_sites, num_experts = num_layers * len(PROJECTIONS), weight.shape[0] // len(sites)
    all_weights = np.zeros((num_sites, num_experts, weight.shape[1]), np.float32)
    all_biases = np.zeros((num_sites, num_experts), np.float32)
    all_weights[places] = weight.reshape(len(sites), num_experts, -1)
    all_biases[places] = bias.reshape(len(sites), num_experts)
    return all_weights.reshape(-1, weight.shape[1]), all_biases.reshape(-1)
