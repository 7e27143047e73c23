"""What imports of expert families share: the LoRA factors of a file by site and expert, checked before any is read."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.files import SafetensorsReader, TensorInfo
from checkpoints.lora_config import LoraConfig, read_lora_config
from checkpoints.peft_header import BLOCK_OF, Site

Factor = tuple[Site, int, str]
"""(site, expert, "A" or "B")."""

MAX_EXPERTS = 128
"""All of a set's experts lie in slots at once, and the rule of the top k compares each pair of them."""


@dataclasses.dataclass
class FoundFactors:
    """The keys of a file's LoRA factors.

    Attributes:
      keys: by site, expert and side.
      problems: of the keys so far.
    """

    keys: dict[Factor, str]
    problems: list[str]

    def add(self, site: Site, block: str, expert: int, side: str, key: str) -> bool:
        """Takes a key; False if nothing would use it."""
        if BLOCK_OF.get(site[1]) != block:
            return False
        if (site, expert, side) in self.keys:
            self.problems.append(f"{key} and {self.keys[site, expert, side]} are the same tensor by their names")
        self.keys[site, expert, side] = key
        return True

    @property
    def sites(self) -> list[Site]:
        """Every site of which some factor was found."""
        return sorted({site for site, _, _ in self.keys})


def read_count(content: Mapping[str, Any], field: str, most: int, problems: list[str], default: int = 0) -> int:
    """An integer field of a config from 1 to `most`; 0 and a problem if it is none."""
    value = content.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        problems.append(f"{field} is {value!r}; an integer from 1 to {most} was expected")
        return 0
    return value


def read_lora(content: Mapping[str, Any], problems: list[str]) -> LoraConfig | None:
    """Rank and scale, by the rules of plain LoRA."""
    lora, lora_problems = read_lora_config({**content, "peft_type": "LORA"})
    problems += lora_problems
    for field in ("rank_pattern", "alpha_pattern", "layers_to_transform"):
        if content.get(field):
            problems.append(f"{field} is {content[field]!r}; it is not supported in a set of experts")
    return lora


def layer_problems(sites: Iterable[Site]) -> list[str]:
    """Every layer from 0 to the last must have the same projections."""
    by_layer: dict[int, set[str]] = {}
    for layer, projection in sites:
        by_layer.setdefault(layer, set()).add(projection)
    if not by_layer:
        return []
    every = set.union(*by_layer.values())
    missing = [layer for layer in range(len(by_layer)) if layer not in by_layer]
    problems = [f"layers are missing: {', '.join(map(str, missing))}"] if missing else []
    gaps = [
        f"layer {layer} has no {', '.join(sorted(every - p))}" for layer, p in sorted(by_layer.items()) if every - p
    ]
    return problems + ([f"projections are missing: {'; '.join(gaps)}"] if gaps else [])


def factor_problems(
    found: FoundFactors, header: Mapping[str, TensorInfo], experts: Mapping[Site, int], rank: int
) -> list[str]:
    """Compares the factors with the number of experts at each site and with the rank; widths must agree.

    Args:
      found: the keys.
      header: shapes.
      experts: number of experts by site.
      rank: of every expert.
    """
    wanted = {(site, e, side) for site, count in experts.items() for e in range(count) for side in "AB"}
    problems = []
    if missing := sorted(wanted - found.keys.keys()):
        problems.append(f"missing factors: {', '.join(map(factor_name, missing))}")
    if too_many := sorted(found.keys[key] for key in found.keys.keys() - wanted):
        problems.append(f"experts beyond their number: {', '.join(too_many)}")
    misshaped = []
    for site, count in experts.items():
        first = {
            side: next((header[k].shape for e in range(count) if (k := found.keys.get((site, e, side)))), ())
            for side in "AB"
        }
        width = {"A": first["A"][-1:], "B": first["B"][:1]}
        expected = {"A": (rank, *width["A"]), "B": (*width["B"], rank)}
        for expert in range(count):
            for side in "AB":
                key = found.keys.get((site, expert, side))
                if key is not None and header[key].shape != expected[side]:
                    misshaped.append(f"{key} has {header[key].shape}, expected {expected[side]}")
    return problems + ([f"wrong shapes: {'; '.join(misshaped)}"] if misshaped else [])


def factor_name(factor: Factor) -> str:
    """A factor in words."""
    (layer, projection), expert, side = factor
    return f"lora_{side} of expert {expert} in layers.{layer}.{projection}"


def peft_key(site: Site, side: str) -> str:
    """PEFT's name of a factor."""
    layer, projection = site
    return f"base_model.model.model.layers.{layer}.{BLOCK_OF[projection]}.{projection}.lora_{side}.weight"


def read_finite(reader: SafetensorsReader, key: str) -> np.ndarray:
    """Reads a tensor, in the stored dtype.

    Raises:
      CheckpointError: If it holds NaN or infinite values.
    """
    tensor = reader.read(key)
    if not np.isfinite(tensor.astype(np.float32)).all():
        raise CheckpointError(f"{key} holds NaN or infinite weights; nothing was written")
    return tensor
