"""MAF-MVM: the sorted-segment multi-LoRA product (Mapping-Aware Fused Matrix–Vector Multiplication)."""

from pallas_kernels.maf_mvm.api import Implementation, ProjectionSlots, maf_mvm, maf_swiglu, swiglu
from pallas_kernels.maf_mvm.config import token_tile_size

__all__ = ["Implementation", "ProjectionSlots", "maf_mvm", "maf_swiglu", "swiglu", "token_tile_size"]
