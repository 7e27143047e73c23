"""MAF-MVM: the sorted-segment multi-LoRA product (Mapping-Aware Fused Matrix–Vector Multiplication)."""

from pallas_kernels.maf_mvm.api import ProjectionSlots, maf_mvm

__all__ = ["ProjectionSlots", "maf_mvm"]
