"""The residual sum and the RMSNorm after it, in one launch."""

from pallas_kernels.add_rms_norm.api import Implementation, add_rms_norm

__all__ = ["Implementation", "add_rms_norm"]
