"""Imports X-LoRA as PEFT saves it: a classifier, and the experts as adapters in folders of their own.

adapter_config.json names the experts' folders; keys that it lacks have PEFT's defaults. The classifier is a sequence of
linear layers, each but the last followed by a ReLU and, if xlora_dropout_p is above 0, by a dropout that counts in the
numbering: its tensors are internal_xlora_classifier.layers.{0, 3, 6, ...}, without dropout {0, 2, 4, ...}.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError, MissingFileError, refuse_if
from checkpoints.expert_tensors import MAX_EXPERTS, read_count
from checkpoints.files import TensorInfo, open_safetensors
from checkpoints.peft_adapter import CONFIG_FILE
from checkpoints.writing import new_folder
from checkpoints.xlora_set import (
    MAX_DEPTH,
    adapted_sites,
    classifier_problems,
    finite_problems,
    rule_problems,
    save_xlora_set,
)
from dymerge_jax.xlora import XLoraRule

ORIGINAL_CONFIG_FILE = "xlora_config.json"
"""Of the format of X-LoRA's own repository, which came before PEFT's."""

_RULE_FIELDS = {
    "softmax": "enable_softmax",
    "temperature": "softmax_temperature",
    "top_k": "top_k_lora",
    "softmax_of_kept": "enable_softmax_topk",
    "global_weight": "global_scaling_weight",
    "pass_value": "scaling_pass_value",
    "is_layerwise": "layerwise_scalings",
}
_KNOWN_FIELDS = {
    *_RULE_FIELDS.values(), "adapters", "hidden_size", "xlora_depth", "xlora_size", "xlora_dropout_p",
    "use_trainable_adapters", "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path",
    "revision", "inference_mode",
}  # fmt: skip
_NEUTRAL = (None, False, "", [], {})
_DEFAULT_HIDDEN, _DEFAULT_SIZE, _DEFAULT_DROPOUT = 4096, 2048, 0.2  # PEFT's
_MAX_WIDTH = 1 << 20
_CLASSIFIER_KEY = re.compile(r"(?:.*\.)?internal_xlora_classifier\.layers\.(\d{1,6})\.(weight|bias)")


def import_xlora(
    content: dict[str, Any], weights: Path, target: Path, adapters: Sequence[tuple[str, Path]] = ()
) -> list[str]:
    """Makes a gated set of an X-LoRA folder; the experts stay where they are.

    Args:
      content: of its adapter_config.json.
      weights: its safetensors file.
      target: folder to make.
      adapters: (name, folder) of experts that are elsewhere than the config says.

    Returns:
      What was made, a line each.

    Raises:
      MissingFileError: If an expert's folder is missing.
      CheckpointError: If something is wrong; lists every reason.
    """
    source, subject = weights.parent, f"X-LoRA folder {str(weights.parent)!r}"
    problems: list[str] = []
    names = _expert_names(content, [name for name, _ in adapters], problems)
    given = {field: content[key] for field, key in _RULE_FIELDS.items() if key in content}
    problems += rule_problems(given, len(names), _RULE_FIELDS)
    classifier = _Classifier(content, problems)
    problems += _unknown_field_problems(content)
    refuse_if(problems, f"{subject} ({CONFIG_FILE})")
    folders = _expert_folders(source, content["adapters"], names, dict(adapters))
    rule = XLoraRule(**given)
    sites = adapted_sites(dict(zip(names, folders, strict=True)))
    num_out = len(names) * (len(sites) if rule.is_layerwise else 1)
    keys, layers = classifier.read(weights, num_out, subject)
    refuse_if(finite_problems(keys, layers), subject)
    with new_folder(target) as folder:
        experts = [_expert(i, path, target) for i, path in enumerate(folders)]
        save_xlora_set(folder, experts, layers, rule, sites if rule.is_layerwise else None)
    where = f"weights for each of {len(sites)} linear layers" if rule.is_layerwise else "weights for all layers alike"
    lines = [
        f"{target}: X-LoRA, {len(names)} experts, classifier of {len(layers)} linear layers, {where}",
        f"serve it with --gated-sets {target} and ask for it by model {target.name!r}",
    ]
    if content.get("use_trainable_adapters"):
        lines.append(
            "its experts were trained with it, and PEFT does not save them there: see that the folders are new"
        )
    return lines


def _unknown_field_problems(content: Mapping[str, Any]) -> list[str]:
    unknown = {key: value for key, value in content.items() if key not in _KNOWN_FIELDS and value not in _NEUTRAL}
    return [f"{key} is {value!r}; what it changes is not known" for key, value in unknown.items()]


def _expert_names(content: Mapping[str, Any], given: Sequence[str], problems: list[str]) -> list[str]:
    """The experts in the order of the classifier's outputs.

    PEFT sorts the names as it saves them, "10" before "2", and knows no others than "0", "1", ... when it runs.
    """
    adapters = content.get("adapters")
    is_names = isinstance(adapters, dict) and all(isinstance(path, str) and path for path in adapters.values())
    if not isinstance(adapters, dict) or not is_names or not 1 <= len(adapters) <= MAX_EXPERTS:
        problems.append(f"adapters is {adapters!r}; an object of 1 to {MAX_EXPERTS} names and folders was expected")
        return []
    if unknown := [name for name in given if name not in adapters]:
        problems.append(f"--experts names {', '.join(unknown)}; adapters has {', '.join(adapters)}")
    names = list(adapters)
    if all(name.isdecimal() for name in names):
        names.sort(key=int)
    return names


def _expert_folders(
    source: Path, paths: Mapping[str, str], names: Sequence[str], given: Mapping[str, Path]
) -> list[Path]:
    folders = [given.get(name, source / paths[name]) for name in names]
    pairs = zip(names, folders, strict=True)
    if missing := [f"{name} ({str(folder)!r})" for name, folder in pairs if not (folder / CONFIG_FILE).is_file()]:
        raise MissingFileError(
            f"X-LoRA folder {str(source)!r}: its experts are no folders with {CONFIG_FILE}: {', '.join(missing)}; "
            "paths are relative to that folder, nothing is downloaded: say where an expert is by --experts NAME=FOLDER"
        )
    same = [[n for n, f in zip(names, folders, strict=True) if f.resolve() == folder.resolve()] for folder in folders]
    if twice := sorted({", ".join(group) for group in same if len(group) > 1}):
        raise CheckpointError(
            f"X-LoRA folder {str(source)!r}: experts of one folder: {'; '.join(twice)}; each needs one of its own"
        )
    return folders


class _Classifier:
    """The classifier's sizes as the config states them."""

    def __init__(self, content: Mapping[str, Any], problems: list[str]) -> None:
        self.hidden = read_count(content, "hidden_size", _MAX_WIDTH, problems, default=_DEFAULT_HIDDEN)
        self.depth = read_count(content, "xlora_depth", MAX_DEPTH, problems, default=1)
        self.size = read_count(content, "xlora_size", _MAX_WIDTH, problems, default=_DEFAULT_SIZE)
        dropout = content.get("xlora_dropout_p", _DEFAULT_DROPOUT)
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
            problems.append(f"xlora_dropout_p is {dropout!r}; a number from 0 to 1 was expected")
            dropout = 0
        self.stride = 3 if dropout > 0 else 2

    def read(
        self, weights: Path, num_out: int, subject: str
    ) -> tuple[list[tuple[str, str]], list[tuple[np.ndarray, np.ndarray]]]:
        """Its keys and tensors, float32."""
        with open_safetensors(weights) as reader:
            prefix, problems = _prefix(reader.header)
            numbers = [self.stride * i for i in range(self.depth)]
            keys = [(f"{prefix}layers.{n}.weight", f"{prefix}layers.{n}.bias") for n in numbers]
            problems += classifier_problems(reader.header, keys, self.hidden, num_out)
            first = reader.header.get(keys[0][0])
            if self.depth > 1 and first is not None and first.shape[:1] != (self.size,):
                problems.append(f"{keys[0][0]} has {first.shape}, expected {self.size} rows by xlora_size")
            if any(key.startswith("missing") for key in problems):
                problems.append(
                    f"tensors were expected by xlora_depth {self.depth} and xlora_dropout_p, which numbers them in "
                    f"steps of {self.stride}; PEFT 0.21 leaves those out whose number is also the name of an expert, "
                    'such as layers.0 beside the expert "0": save the classifier again from the model in memory'
                )
            refuse_if(problems, subject)
            return keys, [(reader.read(w).astype(np.float32), reader.read(b).astype(np.float32)) for w, b in keys]


def _prefix(header: Mapping[str, TensorInfo]) -> tuple[str, list[str]]:
    """What stands before "layers." in the classifier's keys."""
    found = {key[: key.rindex("layers.")] for key in header if _CLASSIFIER_KEY.fullmatch(key)}
    if len(found) > 1:
        return min(found), [f"several classifiers in one file: {', '.join(sorted(found))}"]
    return next(iter(found), "base_model.internal_xlora_classifier."), []


def _expert(index: int, folder: Path, target: Path) -> str:
    """An expert as gated_set.json names it, relative to the set's own folder."""
    path = os.path.relpath(folder.resolve(), target.parent.resolve() / target.name)
    return path if "=" in target.name else f"{target.name}-{index}={path}"
