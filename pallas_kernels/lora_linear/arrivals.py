"""The counters by which the programs of one launch wait for each other."""

import jax.numpy as jnp
from jaxtyping import Array, Int

ARRIVALS_PER_SITE = 1024
"""Cells of one site: one for the whole and one for each block of rank rows; 4 KB to clear, once a step."""


def new_arrivals(num_sites: int) -> Int[Array, "num_sites cells"]:
    """Zeros. One array a step, handed from site to site; each site counts in its own row."""
    return jnp.zeros((num_sites, ARRIVALS_PER_SITE), jnp.int32)
