"""Attention of a decode step from the qkv projection to the heads' outputs: rotation, cache write and attention."""

from pallas_kernels.decode_attention.api import Implementation, decode_attention

__all__ = ["Implementation", "decode_attention"]
