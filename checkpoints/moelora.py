"""Imports MOELoRA as MOELoRA-peft saves it: the gate reads the task's id, so the weights of a request never change.

    y = W x + sum_e g_e (alpha / r) B_e A_e x, with g = softmax(GateL embedding[task]), experts of rank r / E

With one gate for the model (MMOELORAS, the variant that its authors save) a task is a mix of the experts:
mixes.json names "SET:TASK" for each. With a gate in each linear layer (MMOELORA) no mix can say the weights, which
differ from layer to layer: then each task becomes one adapter of rank r, with the weights in its B.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError, refuse_if
from checkpoints.expert_tensors import (
    MAX_EXPERTS,
    FoundFactors,
    factor_problems,
    layer_problems,
    peft_key,
    read_count,
    read_finite,
    read_lora,
)
from checkpoints.files import SafetensorsReader, TensorInfo, dtype_problems, open_safetensors
from checkpoints.lora_config import LoraConfig
from checkpoints.peft_header import BLOCK_OF, Site
from checkpoints.writing import new_folder, write_adapter, write_json

MIXES_FILE = "mixes.json"

_MODULE = r"(?:base_model\.model\.)?model\.layers\.(?P<layer>\d{1,6})\.(?P<block>\w+)\.(?P<projection>\w+)"
_NAME = r"(?:\.(?!lora|GateL|weight)[^.]+)?"  # of the adapter, where it was not stripped
_FACTOR = re.compile(
    _MODULE + r"\.lora_(?P<side>[AB])" + _NAME + r"\.lora[AB]\.(?P<expert>\d{1,6})\.(?P<mlp>mlp\.)?weight"
)
_GATE_TENSOR = rf"(?P<kind>lora_gate{_NAME}\.GateL|lora_task_embedding{_NAME})\.weight"
_LINEAR_GATE, _MODEL_GATE = re.compile(rf"{_MODULE}\.{_GATE_TENSOR}"), re.compile(rf"(?:base_model\.)?{_GATE_TENSOR}")
_MAX_TASKS = 1000

GateKeys = dict[str, str]
"""Keys of a gate's two tensors, by "gate" [num_experts, dim] and "embedding" [num_tasks, dim]."""


def import_moelora(content: dict[str, Any], weights: Path, target: Path) -> list[str]:
    """Makes adapters and named mixes of a MOELoRA folder.

    Args:
      content: of its adapter_config.json.
      weights: its safetensors file.
      target: folder to make.

    Returns:
      What was made, a line each.

    Raises:
      CheckpointError: If something is wrong; lists every reason.
    """
    problems: list[str] = []
    lora = read_lora(content, problems)
    if lora is not None and lora.use_rslora:
        problems.append("use_rslora is true; MOELoRA has no such scaling")
    num_experts = read_count(content, "expert_num", MAX_EXPERTS, problems)
    num_tasks = read_count(content, "task_num", _MAX_TASKS, problems) + 1  # its embedding has one row more
    if lora is not None and num_experts and lora.r % num_experts:
        problems.append(f"r is {lora.r}, which expert_num {num_experts} does not divide")
    with open_safetensors(weights) as reader:
        keys = _Keys(reader.header)
        problems += keys.problems + dtype_problems(reader.header)
        if not problems and lora is not None:
            problems += factor_problems(
                keys.found, reader.header, dict.fromkeys(keys.found.sites, num_experts), lora.r // num_experts
            )
            problems += layer_problems(keys.found.sites) + keys.gate_problems(reader.header, num_experts, num_tasks)
        refuse_if(problems, f"MOELoRA folder {str(weights.parent)!r}")
        assert lora is not None
        keys.check_aliases(reader)
        base = content.get("base_model_name_or_path")
        with new_folder(target) as folder:
            write = _write_mixes if keys.model_gate else _write_task_adapters
            write(folder, target.name, _Source(keys, reader, lora, num_experts, num_tasks, base))
    form = (
        f"{num_experts} experts of rank {lora.r // num_experts} and a mix of them a task"
        if keys.model_gate
        else f"one adapter of rank {lora.r} a task, since each linear layer has a gate of its own"
    )
    return [
        f"{target}: MOELoRA, {num_tasks} tasks, 0 to {num_tasks - 1}: {form}",
        f"serve it with --adapters {target} --mixes {target / MIXES_FILE} and ask for a task by model "
        f"'{target.name}:1'",
    ]


class _Keys:
    """The tensors of a file by what they are.

    Attributes:
      found: the factors.
      aliases: (key, key of the same tensor under the name that is read) pairs: each expert is saved under two names.
      model_gate: keys of the gate of the whole model; empty if there is none.
      linear_gates: keys of the gate of each linear layer; not used where there is one for the model.
      problems: of the keys.
    """

    def __init__(self, header: Mapping[str, TensorInfo]) -> None:
        self.found = FoundFactors({}, [])
        self.aliases: list[tuple[str, str]] = []
        self.model_gate: GateKeys = {}
        self.linear_gates: dict[Site, GateKeys] = {}
        unexpected = [key for key in header if not self._take(key, header)]
        self.problems = list(self.found.problems)
        if unexpected:
            self.problems.append(
                f"unexpected tensors, which nothing would use: {', '.join(sorted(unexpected))}; expected "
                "[base_model.model.]model.layers.<layer>.<block>.<projection>.lora_A.loraA.<expert>.mlp.weight and "
                "lora_B.loraB, of Llama's seven projections, lora_gate.GateL.weight and lora_task_embedding.weight"
            )
        if not self.found.keys:
            self.problems.append("there is no expert")

    def _take(self, key: str, header: Mapping[str, TensorInfo]) -> bool:
        if match := _FACTOR.fullmatch(key):
            full = key if match["mlp"] else f"{key.removesuffix('weight')}mlp.weight"
            if full != key and full in header:
                self.aliases.append((key, full))
                return True
            site = (int(match["layer"]), match["projection"])
            return self.found.add(site, match["block"], int(match["expert"]), match["side"], key)
        if (match := _LINEAR_GATE.fullmatch(key)) and BLOCK_OF.get(match["projection"]) == match["block"]:
            gate = self.linear_gates.setdefault((int(match["layer"]), match["projection"]), {})
        elif match := _MODEL_GATE.fullmatch(key):
            gate = self.model_gate
        else:
            return False
        return gate.setdefault("gate" if "GateL" in match["kind"] else "embedding", key) == key

    def gate_problems(self, header: Mapping[str, TensorInfo], num_experts: int, num_tasks: int) -> list[str]:
        """Missing and misshaped tensors of the gates that are read."""
        gates = {"the model": self.model_gate} if self.model_gate else {}
        if not self.model_gate:
            gates = {f"layers.{site[0]}.{site[1]}": self.linear_gates.get(site, {}) for site in self.found.sites}
        problems = []
        for where, keys in gates.items():
            if absent := {"gate", "embedding"} - keys.keys():
                problems.append(f"{where} has no {' and no '.join(sorted(absent))} of its gate")
                continue
            gate, embedding = header[keys["gate"]].shape, header[keys["embedding"]].shape
            if gate[:1] != (num_experts,) or embedding[:1] != (num_tasks,) or gate[1:] != embedding[1:]:
                problems.append(
                    f"{keys['gate']} has {gate} and {keys['embedding']} has {embedding}; expected ({num_experts}, n) "
                    f"and ({num_tasks}, n) by expert_num and task_num"
                )
        return problems

    def check_aliases(self, reader: SafetensorsReader) -> None:
        """Raises CheckpointError if a tensor that is saved twice differs."""
        differing = [key for key, full in self.aliases if not np.array_equal(reader.read(key), reader.read(full))]
        if differing:
            raise CheckpointError(f"saved twice with different values: {', '.join(differing)}")


def _task_weights(reader: SafetensorsReader, keys: GateKeys) -> np.ndarray:
    """[num_tasks, num_experts] float64, softmax over the experts."""
    gate, embedding = (read_finite(reader, keys[kind]).astype(np.float64) for kind in ("gate", "embedding"))
    logits = embedding @ gate.T
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class _Source:
    """A checked folder that is open.

    Attributes:
      keys: of its tensors.
      reader: of their values.
      lora: rank and alpha of all experts together.
      num_experts, num_tasks: of every gate.
      base: name of the base model, if it is told.
    """

    keys: _Keys
    reader: SafetensorsReader
    lora: LoraConfig
    num_experts: int
    num_tasks: int
    base: str | None


def _write_mixes(folder: Path, name: str, source: _Source) -> None:
    """An adapter an expert, and the weights of each task as a mix."""
    weights = _task_weights(source.reader, source.keys.model_gate)
    names = [f"{name}-{expert}" for expert in range(source.num_experts)]
    for expert, expert_name in enumerate(names):
        of_expert = {(site, side): key for (site, e, side), key in source.keys.found.keys.items() if e == expert}
        tensors = {peft_key(*where): read_finite(source.reader, key) for where, key in sorted(of_expert.items())}
        # The scale stays alpha / r: both are divided by the number of experts.
        rank, alpha = source.lora.r // source.num_experts, source.lora.alpha / source.num_experts
        write_adapter(folder / expert_name, tensors, rank=rank, alpha=alpha, use_rslora=False, base=source.base)
    mixes = {f"{name}:{t}": dict(zip(names, weights[t].tolist(), strict=True)) for t in range(source.num_tasks)}
    write_json(folder / MIXES_FILE, mixes)


def _write_task_adapters(folder: Path, name: str, source: _Source) -> None:
    """An adapter a task: A of all experts one after another, B with each expert's weight in it."""
    weights = {site: _task_weights(source.reader, source.keys.linear_gates[site]) for site in source.keys.found.sites}
    names = [f"{name}-{task}" for task in range(source.num_tasks)]
    for task, task_name in enumerate(names):
        tensors = {}
        for site in source.keys.found.sites:
            a, b = (
                [
                    read_finite(source.reader, source.keys.found.keys[site, e, side]).astype(np.float32)
                    for e in range(source.num_experts)
                ]
                for side in "AB"
            )
            tensors[peft_key(site, "A")] = np.concatenate(a)
            scaled = [w * np.float32(g) for w, g in zip(b, weights[site][task], strict=True)]
            tensors[peft_key(site, "B")] = np.concatenate(scaled, axis=1)
        write_adapter(
            folder / task_name, tensors, rank=source.lora.r, alpha=source.lora.alpha, use_rslora=False, base=source.base
        )
    write_json(folder / MIXES_FILE, {f"{name}:{task}": {n: 1.0} for task, n in enumerate(names)})
