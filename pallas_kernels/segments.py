"""Token–LoRA pairs sorted by slot: which slots each tile of tokens walks, and with which weights.

A pair is one token sent through one slot with one weight; a segment is the run of pairs of one slot. All pairs
of a step are held densely as the mix matrix `weights[token, projection, slot]` (zero: no pair); sorting them by slot
within a tile of tokens leaves, for each tile, the ascending list of slots that any of its tokens uses. A kernel
walks that list once, so A and B of each active slot are read once per tile and the contributions to a token are
summed in registers, in slot order, whatever order the requests came in.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.pytree import pytree_dataclass, static_field


@pytree_dataclass
class Segments:
    """The sorted segments of one step.

    Attributes:
      weights: [num_tokens, num_gates, num_slots] float32 mix matrix; num_gates is 1 (one weight for all projections
        of a fused group) or the number of projections of the group. Zero where a token does not use a slot.
      slot_ids: [num_tiles, num_slots] int32, ascending ids of the slots used in each tile; entries past
        `num_segments` are unused slots and must not be read.
      num_segments: [num_tiles] int32, segments of each tile; 0 for a tile of base-model or padding tokens.
      tile_size: tokens per tile; num_tiles = ceil(num_tokens / tile_size).
      max_segments: no tile has more segments; None says nothing. Whoever builds the segments promises it: a kernel may
        be made for so many and no more.
    """

    weights: Float[Array, "num_tokens num_gates num_slots"]
    slot_ids: Int[Array, "num_tiles num_slots"]
    num_segments: Int[Array, " num_tiles"]
    tile_size: int = static_field()
    max_segments: int | None = static_field(default=None)

    @property
    def num_gates(self) -> int:
        return self.weights.shape[1]

    @property
    def num_tiles(self) -> int:
        return self.num_segments.shape[0]

    def with_weights(self, weights: Float[Array, "num_tokens num_gates num_slots"]) -> "Segments":
        """The same segments with other weights, e.g. a gate's. Every non-zero must lie in an existing segment."""
        return dataclasses.replace(self, weights=weights)

    def compacted(self, scale: Float[Array, "num_slots num_projections"]) -> "Segments":
        """The same pairs without the segments that add nothing, so that a kernel does not walk them.

        Args:
          scale: [num_slots, num_projections] float32 of each slot; zero where its adapter leaves a projection alone.
        """
        is_used = ((self.weights != 0) & (scale != 0).T[None]).any(1)
        return build_segments(self.weights, tile_size=self.tile_size, is_used=is_used, max_segments=self.max_segments)


def build_segments(
    weights: Float[Array, "num_tokens num_gates num_slots"],
    *,
    tile_size: int,
    is_used: Bool[Array, "num_tokens num_slots"] | None = None,
    max_segments: int | None = None,
) -> Segments:
    """Sorts the pairs of each tile of tokens by slot.

    Args:
      weights: [num_tokens, num_gates, num_slots] float32 mix matrix.
      tile_size: tokens per tile.
      is_used: [num_tokens, num_slots] pairs that may become non-zero later (`Segments.with_weights`); None takes the
        pairs whose weight is not zero.
      max_segments: see `Segments`.

    Returns:
      Segments whose shapes depend on the shapes of `weights` and on `tile_size` only, never on the mixes.
    """
    num_tokens, _, num_slots = weights.shape
    used = (weights != 0).any(1) if is_used is None else is_used
    num_tiles = -(-num_tokens // tile_size)
    used = jnp.pad(used, ((0, num_tiles * tile_size - num_tokens), (0, 0)))
    used = used.reshape(num_tiles, tile_size, num_slots).any(1)
    slot_ids = jnp.argsort(jnp.logical_not(used), axis=1, stable=True).astype(jnp.int32)
    return Segments(
        weights=weights.astype(jnp.float32),
        slot_ids=slot_ids,
        num_segments=used.sum(1, dtype=jnp.int32),
        tile_size=tile_size,
        max_segments=max_segments,
    )
