"""The paged KV cache on the device."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dymerge_jax.config import LlamaConfig
from pallas_kernels.pytree import pytree_dataclass

LayerKV = Float[Array, "num_blocks 2 num_kv_heads block_size head_dim"]
"""Keys (index 0) and values (index 1) of one layer, by block."""


@pytree_dataclass
class KVCache:
    """All layers' cached keys and values; donated to every step and updated in place.

    Attributes:
      layers: one [num_blocks, 2, num_kv_heads, block_size, head_dim] array a layer.
    """

    layers: tuple[LayerKV, ...]

    @property
    def num_blocks(self) -> int:
        return self.layers[0].shape[0]

    @property
    def block_size(self) -> int:
        return self.layers[0].shape[3]


def empty_cache(config: LlamaConfig, *, num_blocks: int, block_size: int, dtype: DTypeLike) -> KVCache:
    """A cache of zeros."""
    shape = (num_blocks, 2, config.num_kv_heads, block_size, config.head_dim)
    return KVCache(layers=tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)))


def block_bytes(config: LlamaConfig, *, block_size: int, dtype: DTypeLike) -> int:
    """Device memory of one block over all layers, in bytes."""
    return config.num_layers * 2 * config.kv_width * block_size * jnp.dtype(dtype).itemsize
