"""Grouped-query attention over a block table, for prefill chunks and decode rows of one flat batch."""

from pallas_kernels.paged_attention.api import QueryTiles, build_query_tiles, paged_attention

__all__ = ["QueryTiles", "build_query_tiles", "paged_attention"]
