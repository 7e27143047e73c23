"""The slot array of one group of fused projections."""

import itertools

from jaxtyping import Array, Float

from pallas_kernels.pytree import pytree_dataclass, static_field


@pytree_dataclass
class ProjectionSlots:
    """A and B of one group of fused projections (such as q, k and v, which share their input), by layer and slot.

    All layers lie in one array, so that a step has few arguments and one adapter is written by one in-place update.
    Rank rows of one slot lie projection after projection in `a`; in `b` the columns of the projections lie side by
    side. Rows that an adapter does not fill are zero; a slot that was never written may hold anything, NaN included.

    Attributes:
      a: [num_layers, num_slots, num_projections * slot_rank, in_features].
      b: [num_layers, num_slots, slot_rank, sum(widths)], same dtype as `a`.
      scale: [num_layers, num_slots, num_projections] float32, alpha/r (or alpha/sqrt(r)) of the adapter in the slot.
      widths: out_features of each projection.
    """

    a: Float[Array, "num_layers num_slots rows in_features"]
    b: Float[Array, "num_layers num_slots slot_rank out_features"]
    scale: Float[Array, "num_layers num_slots num_projections"]
    widths: tuple[int, ...] = static_field()

    @property
    def num_projections(self) -> int:
        return len(self.widths)

    @property
    def slot_rank(self) -> int:
        return self.b.shape[2]

    @property
    def num_slots(self) -> int:
        return self.b.shape[1]

    @property
    def num_layers(self) -> int:
        return self.b.shape[0]

    @property
    def column_slices(self) -> tuple[slice, ...]:
        """Columns of each projection in `b` and in the output."""
        ends = itertools.accumulate(self.widths)
        return tuple(slice(end - width, end) for end, width in zip(ends, self.widths, strict=True))
