"""An adapter on the host: its tensors as read, and how they are cut into slots. Plain numpy: this needs no jax.

A slot holds `slot_rank` rank rows of A and of B for every projection of every layer. An adapter of rank r fills
ceil(r / slot_rank) slots, which share its weight: the sum over rank rows does not care where they lie.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from dymerge_jax.config import LlamaConfig


@dataclasses.dataclass(frozen=True)
class ProjectionWeights:
    """One LoRA-adapted projection of one layer, as read from a file, on the host.

    Attributes:
      a: [rank, in_features], float32, float16 or bfloat16.
      b: [out_features, rank], same dtypes.
      scale: alpha / rank, or alpha / sqrt(rank) with rslora.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclasses.dataclass(frozen=True)
class AdapterWeights:
    """One adapter on the host: its adapted projections, shapes checked against the model.

    Attributes:
      projections: by (layer, Hugging Face projection name such as "q_proj"); what is absent is not adapted.
      content_hash: hex digest of what the adapter was read from; equal for equal files, whatever the adapter's name.
    """

    projections: dict[tuple[int, str], ProjectionWeights]
    content_hash: str

    @functools.cached_property  # every step asks
    def rank(self) -> int:
        """The largest rank of any projection."""
        return max(p.rank for p in self.projections.values())

    def num_slots(self, slot_rank: int) -> int:
        """Slots of `slot_rank` rank rows this adapter fills."""
        return -(-self.rank // slot_rank)

    @property
    def num_bytes(self) -> int:
        return sum(p.a.nbytes + p.b.nbytes for p in self.projections.values())


def content_shape(config: LlamaConfig, slot_rank: int) -> tuple[int, int]:
    """Number of values of one slot, A and B of every projection, and number of its scales."""
    rows = sum(len(g.projections) * g.in_features + g.out_features for g in config.groups.values())
    num_scales = config.num_layers * sum(len(g.projections) for g in config.groups.values())
    return config.num_layers * slot_rank * rows, num_scales


def slot_bytes(config: LlamaConfig, slot_rank: int, dtype: DTypeLike) -> int:
    """Device memory of one slot, in bytes."""
    return content_shape(config, slot_rank)[0] * np.dtype(dtype).itemsize


def content_bytes(config: LlamaConfig, slot_rank: int, dtype: DTypeLike) -> int:
    """Bytes of the values and scales of one slot."""
    return slot_bytes(config, slot_rank, dtype) + 4 * content_shape(config, slot_rank)[1]


def fill_slot(
    config: LlamaConfig, adapter: AdapterWeights, index: int, *, slot_rank: int, values: np.ndarray, scales: np.ndarray
) -> None:
    """Cuts one slot of an adapter: rank rows [index * slot_rank, (index + 1) * slot_rank) of every projection.

    Args:
      config: the model that it adapts.
      adapter: as read.
      index: which of its slots.
      slot_rank: rank rows of a slot.
      values: [slot_len] in the slot array's dtype, zeros; gets A and B of each fused group by name.
      scales: [num_scales] float32, zeros; gets the scale of each fused group by name.
    """
    num_layers, rows = config.num_layers, slice(index * slot_rank, (index + 1) * slot_rank)
    shapes = {
        name: (
            (num_layers, len(g.projections), slot_rank, g.in_features),
            (num_layers, slot_rank, g.out_features),
            (num_layers, len(g.projections)),
        )
        for name, g in config.groups.items()
    }
    for name, (a, b, scale) in slot_parts(values, scales, shapes).items():
        g = config.groups[name]
        starts = np.concatenate([[0], np.cumsum(g.widths)])
        for layer in range(num_layers):
            for p, projection in enumerate(g.projections):
                w = adapter.projections.get((layer, projection))
                if w is None or w.a[rows].shape[0] == 0:
                    continue
                n = w.a[rows].shape[0]
                _copy(w.a[rows], a[layer, p, :n])
                _copy(w.b[:, rows].T, b[layer, :n, starts[p] : starts[p + 1]])
                scale[layer, p] = w.scale


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copies finite values, rounded to the target's dtype, without holding Python's lock for long.

    numpy holds the lock in every loop over bfloat16, which is not a dtype of its own; over integers of its size it
    does not. An engine may be running beside the load.
    """
    if target.dtype != ml_dtypes.bfloat16:
        target[...] = source
    elif source.dtype == ml_dtypes.bfloat16:
        target.view(np.uint16)[...] = source.view(np.uint16)
    else:
        bits = np.ascontiguousarray(source, np.float32).view(np.uint32)
        bits = bits + ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)  # to nearest, ties to even
        target.view(np.uint16)[...] = bits >> np.uint32(16)


PartShapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
"""Shapes of A, B and scale by group, without the slot axis."""


def slot_parts(values: Any, scales: Any, shapes: PartShapes) -> dict[str, tuple[Any, Any, Any]]:
    """A, B and scale of each group as parts of the arrays of one slot: views if they are numpy's.

    Args:
      values: [slot_len] A and B, of numpy or jax.
      scales: [num_scales] likewise.
      shapes: of the parts.
    """
    parts, start, scale_start = {}, 0, 0
    for name, (a_shape, b_shape, scale_shape) in sorted(shapes.items()):  # jit sorts dictionaries, too
        middle, stop = start + math.prod(a_shape), start + math.prod(a_shape) + math.prod(b_shape)
        scale_stop = scale_start + math.prod(scale_shape)
        parts[name] = (
            values[start:middle].reshape(a_shape),
            values[middle:stop].reshape(b_shape),
            scales[scale_start:scale_stop].reshape(scale_shape),
        )
        start, scale_start = stop, scale_stop
    return parts
