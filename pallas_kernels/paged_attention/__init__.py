"""Grouped-query attention over a block table, for prefill chunks and decode rows of one flat batch."""

from pallas_kernels.paged_attention.api import QueryTiles, build_query_tiles, paged_attention
from pallas_kernels.paged_attention.config import query_tile_size

__all__ = ["QueryTiles", "build_query_tiles", "paged_attention", "query_tile_size"]
