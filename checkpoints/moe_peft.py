"""Imports MoLA and LoRAMoE as MoE-PEFT saves them: each linear layer has a gate of its own and its own experts.

    y = W x + sum_e g_e s B_e A_e x, with g = softmax(gate x) in float32; MoLA keeps the top k and divides by their sum

MoLA has gates in every adapted projection; LoRAMoE in those of the MLP only, beside ordinary LoRA in attention, which
becomes part of the first expert: in a projection without a gate an expert's weight is 1.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import refuse_if
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
from checkpoints.files import TensorInfo, dtype_problems, open_safetensors
from checkpoints.gated_set import save_gated_set
from checkpoints.peft_header import BLOCK_OF, Site
from checkpoints.writing import new_folder, write_adapter

_MODULE = r"\.layers\.(?P<layer>\d{1,6})\.(?P<block>\w+)\.(?P<projection>\w+)"
_FACTOR = r"(?:\.experts\.(?P<expert>\d{1,6}))?\.lora_(?P<side>[AB])\.weight"
_DEFAULT_TOP_K = 2


def import_moe_peft(content: dict[str, Any], weights: Path, target: Path) -> list[str]:
    """Makes a gated set of a MoLA or LoRAMoE folder, an expert at a time in memory.

    Args:
      content: of its adapter_config.json.
      weights: its safetensors file.
      target: folder to make.

    Returns:
      What was made, a line each.

    Raises:
      CheckpointError: If something is wrong; lists every reason.
    """
    family = str(content["peft_type"]).upper()
    problems: list[str] = []
    lora = read_lora(content, problems)
    num_experts = read_count(content, "num_experts", MAX_EXPERTS, problems)
    top_k = None
    if family == "MOLA":
        top_k = read_count(content, "top_k", num_experts or MAX_EXPERTS, problems, default=_DEFAULT_TOP_K)
    with open_safetensors(weights) as reader:
        found, gates, key_problems = _sorted_keys(reader.header, family.lower())
        problems += key_problems + dtype_problems(reader.header)
        if lora is not None and num_experts:
            problems += _site_problems(found, gates, reader.header, family, num_experts, lora.r)
        refuse_if(problems, f"{family} folder {str(weights.parent)!r}")
        assert lora is not None
        names = [f"{target.name}-{expert}" for expert in range(num_experts)]
        with new_folder(target) as folder:
            for expert, name in enumerate(names):
                keys = {(site, side): key for (site, e, side), key in found.keys.items() if e == expert}
                tensors = {peft_key(*where): read_finite(reader, key) for where, key in sorted(keys.items())}
                base = content.get("base_model_name_or_path")
                write_adapter(
                    folder / name, tensors, rank=lora.r, alpha=lora.alpha, use_rslora=lora.use_rslora, base=base
                )
            gate_values = {site: read_finite(reader, key).astype(np.float32) for site, key in sorted(gates.items())}
            save_gated_set(folder, [f"./{n}" for n in names], gate_values, top_k=top_k, renormalize=top_k is not None)
    where = ", ".join(sorted({projection for _, projection in gates}))
    kept = "all experts" if top_k is None else f"top {top_k}, renormalised"
    return [
        f"{target}: {family}, {num_experts} experts of rank {lora.r}, {len(gates)} gates ({where}), {kept}",
        f"serve it with --gated-sets {target} and ask for it by model {target.name!r}",
    ]


def _sorted_keys(header: Mapping[str, TensorInfo], prefix: str) -> tuple[FoundFactors, dict[Site, str], list[str]]:
    """The factors, the gates by site, and what is wrong with the keys. Ordinary LoRA counts to expert 0."""
    factor, gate = re.compile(prefix + _MODULE + _FACTOR), re.compile(prefix + _MODULE + r"\.moe_gate\.weight")
    found, gates, unexpected = FoundFactors({}, []), {}, []
    for key in header:
        if match := factor.fullmatch(key):
            site = (int(match["layer"]), match["projection"])
            is_used = found.add(site, match["block"], int(match["expert"] or 0), match["side"], key)
        elif match := gate.fullmatch(key):
            site = (int(match["layer"]), match["projection"])
            is_used = BLOCK_OF.get(site[1]) == match["block"] and gates.setdefault(site, key) == key
        else:
            is_used = False
        if not is_used:
            unexpected.append(key)
    problems = found.problems
    if unexpected:
        problems.append(
            f"unexpected tensors, which nothing would use: {', '.join(sorted(unexpected))}; expected "
            f"{prefix}.layers.<layer>.<block>.<projection>.moe_gate.weight and .experts.<expert>.lora_A.weight, lora_B"
        )
    return found, gates, problems


def _site_problems(
    found: FoundFactors,
    gates: Mapping[Site, str],
    header: Mapping[str, TensorInfo],
    family: str,
    num_experts: int,
    rank: int,
) -> list[str]:
    is_expert = {site for (site, _, _), key in found.keys.items() if ".experts." in key}
    experts = {site: num_experts if site in is_expert or site in gates else 1 for site in (*found.sites, *gates)}
    problems = layer_problems(found.sites) + layer_problems(gates)
    if not gates:
        problems.append("there is no gate (moe_gate.weight)")
    if ungated := sorted(is_expert - gates.keys()):
        problems.append(f"experts without a gate: {', '.join(map(_site_name, ungated))}")
    plain = {site for (site, _, _), key in found.keys.items() if ".experts." not in key}
    if misplaced := sorted(plain if family == "MOLA" else plain & gates.keys()):
        problems.append(f"ordinary LoRA where experts were expected: {', '.join(map(_site_name, misplaced))}")
    problems += factor_problems(found, header, experts, rank)
    misshaped = []
    for site, key in sorted(gates.items()):
        a_key = found.keys.get((site, 0, "A"))
        expected = (num_experts, *(() if a_key is None else header[a_key].shape[1:]))
        if a_key is not None and header[key].shape != expected:
            misshaped.append(f"{key} has {header[key].shape}, expected {expected}")
    return problems + ([f"wrong gates: {'; '.join(misshaped)}"] if misshaped else [])


def _site_name(site: Site) -> str:
    return f"layers.{site[0]}.{site[1]}"
