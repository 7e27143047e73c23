"""Counters by which a launch's programs find the last: lent to the kernel, which leaves them as they were."""

import jax.numpy as jnp
from jaxtyping import Array, Int

NONE_ENDED = 0x3A7E_0000
"""What a counter holds before and after a launch; while it runs, the programs that have ended are added."""


def lent_counters(values: Int[Array, "*shape"], *, lowest: int) -> Int[Array, "*shape"]:
    """`NONE_ENDED` everywhere, in memory of its own that no launch has to set first.

    To XLA the array is read only, so all layers of a step share the one that their identical expressions make. With
    `values` compared, XLA does not see that it is a constant, whose memory other operations might share. Where `values`
    are constants of the program it does, and keeps one copy of equal constants: no other is equal to this one. Launches
    that share the array must depend on each other: to XLA nothing else keeps two of them from running at once.

    Args:
      values: int32 that the program computes or is given.
      lowest: none of `values` is below it.
    """
    return jnp.where(values < lowest, 0, NONE_ENDED).astype(jnp.int32)
