"""The gates of one site and the slot weights that they give, in one launch."""

from pallas_kernels.gate_mix.api import Implementation, gate_mix
from pallas_kernels.gate_mix.rules import ALL_EXPERTS, NO_GATE, GateRules

__all__ = ["ALL_EXPERTS", "NO_GATE", "GateRules", "Implementation", "gate_mix"]
