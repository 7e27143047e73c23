"""Rotary embedding of q and k and the write of k and v into the cache, in one launch."""

from pallas_kernels.rope_kv_write.api import Implementation, rope_kv_write

__all__ = ["Implementation", "rope_kv_write"]
