"""Gated sets: a gate in each layer gives each token its weights over the set's adapters."""

import dataclasses
from typing import Literal

import numpy as np

Granularity = Literal["layer", "projection"]


@dataclasses.dataclass(frozen=True)
class GatedSetWeights:
    """One gated set on the host.

    The gate of a site computes softmax(gate @ x) over the set's experts in float32; with `top_k` only the largest
    top_k stay, divided by their sum if `renormalize`.

    Attributes:
      name: what a request calls the set.
      experts: adapter names (or absolute folder paths) in the order of the gates' rows.
      granularity: "layer": one gate a layer, fed the input of q, k and v, serves all seven projections;
        "projection": each projection has its own gate, fed that projection's input.
      top_k: experts that keep a weight; None keeps all.
      renormalize: whether the kept weights are divided by their sum.
      gates: [num_experts, in_features] float32 by (layer, "layer") or by (layer, projection name).
    """

    name: str
    experts: tuple[str, ...]
    granularity: Granularity
    top_k: int | None
    renormalize: bool
    gates: dict[tuple[int, str], np.ndarray]

    def __post_init__(self) -> None:
        if not self.experts:
            raise ValueError(f"gated set {self.name!r} names no experts; it needs at least one")
        if self.top_k is not None and not 1 <= self.top_k <= len(self.experts):
            raise ValueError(f"gated set {self.name!r} has top_k {self.top_k}; expected 1 to {len(self.experts)} experts")

    @property
    def num_experts(self) -> int:
        return len(self.experts)
