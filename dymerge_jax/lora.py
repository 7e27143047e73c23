"""The slot array: A and B of the adapters on the device, by slot; how one adapter gets into it.

A slot holds `slot_rank` rank rows of A and of B for every projection of every layer. An adapter of rank r fills
ceil(r / slot_rank) slots, which share its weight: the sum over rank rows does not care where they lie.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from dymerge_jax.config import LlamaConfig
from pallas_kernels.maf_mvm import ProjectionSlots
from pallas_kernels.pytree import pytree_dataclass


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


@pytree_dataclass
class SlotContent:
    """Content of one slot, on the host or on its way to the device: few arrays, since each costs a transfer.

    Attributes:
      values: [slot_len] A and B of each fused group by name, in the slot array's dtype.
      scales: [num_scales] scale of each fused group by name, float32.
    """

    values: Array | np.ndarray
    scales: Array | np.ndarray

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


@pytree_dataclass
class SlotArray:
    """The adapters on the device.

    Attributes:
      groups: A, B and scale of each fused group ("qkv", "o", "gate_up", "down") for all layers and slots.
    """

    groups: dict[str, ProjectionSlots]

    @property
    def num_slots(self) -> int:
        return self.groups["qkv"].num_slots

    @property
    def slot_rank(self) -> int:
        return self.groups["qkv"].slot_rank


def slot_bytes(config: LlamaConfig, slot_rank: int, dtype: DTypeLike) -> int:
    """Device memory of one slot, in bytes."""
    rows = sum(len(g.projections) * g.in_features + g.out_features for g in config.groups.values())
    return config.num_layers * slot_rank * rows * jnp.dtype(dtype).itemsize


def empty_slots(config: LlamaConfig, *, num_slots: int, slot_rank: int, dtype: DTypeLike) -> SlotArray:
    """A slot array of zeros."""
    if num_slots < 1 or slot_rank < 1:
        raise ValueError(f"got {num_slots} slots of rank {slot_rank}; both must be at least 1")
    lead = (config.num_layers, num_slots)
    groups = {}
    for name, g in config.groups.items():
        p = len(g.projections)
        groups[name] = ProjectionSlots(
            a=jnp.zeros((*lead, p * slot_rank, g.in_features), dtype),
            b=jnp.zeros((*lead, slot_rank, g.out_features), dtype),
            scale=jnp.zeros((*lead, p), jnp.float32),
            widths=g.widths,
        )
    return SlotArray(groups=groups)


def content_bytes(config: LlamaConfig, slot_rank: int, dtype: DTypeLike) -> int:
    """Bytes of one `SlotContent`."""
    num_scales = config.num_layers * sum(len(g.projections) for g in config.groups.values())
    return slot_bytes(config, slot_rank, dtype) + 4 * num_scales


def slot_contents(
    config: LlamaConfig, adapter: AdapterWeights, *, slot_rank: int, dtype: DTypeLike
) -> list[SlotContent]:
    """Cuts an adapter into slots: rank rows [i * slot_rank, (i + 1) * slot_rank) of every projection go to slot i."""
    return [_slot_content(config, adapter, i, slot_rank, dtype) for i in range(adapter.num_slots(slot_rank))]


def empty_content(config: LlamaConfig, *, slot_rank: int, dtype: DTypeLike) -> SlotContent:
    """The content of a slot without an adapter: zeros."""
    return _slot_content(config, AdapterWeights({}, ""), 0, slot_rank, dtype)


def _slot_content(
    config: LlamaConfig, adapter: AdapterWeights, index: int, slot_rank: int, dtype: DTypeLike
) -> SlotContent:
    num_layers, rows = config.num_layers, slice(index * slot_rank, (index + 1) * slot_rank)
    content = SlotContent(
        values=np.zeros(slot_bytes(config, slot_rank, dtype) // jnp.dtype(dtype).itemsize, dtype),
        scales=np.zeros(num_layers * sum(len(g.projections) for g in config.groups.values()), np.float32),
    )
    shapes = {
        name: (
            (num_layers, len(g.projections), slot_rank, g.in_features),
            (num_layers, slot_rank, g.out_features),
            (num_layers, len(g.projections)),
        )
        for name, g in config.groups.items()
    }
    for name, (a, b, scale) in _parts(content, shapes).items():
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
    return content


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copies finite values, rounded to the target's dtype, without holding Python's lock for long.

    numpy holds the lock in every loop over bfloat16, which is not a dtype of its own; over integers of its size it
    does not. An engine may be running beside the load.
    """
    if target.dtype != jnp.bfloat16:
        target[...] = source
    elif source.dtype == jnp.bfloat16:
        target.view(np.uint16)[...] = source.view(np.uint16)
    else:
        bits = np.ascontiguousarray(source, np.float32).view(np.uint32)
        bits = bits + ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)  # to nearest, ties to even
        target.view(np.uint16)[...] = bits >> np.uint32(16)


_Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
"""Shapes of A, B and scale by group, without the slot axis."""


def _parts(content: SlotContent, shapes: _Shapes) -> dict[str, tuple[Any, Any, Any]]:
    """A, B and scale of each group as parts of a content's arrays: views if they are numpy's.

    Args:
      content: one slot's.
      shapes: of the parts.
    """
    parts, start, scale_start = {}, 0, 0
    for name, (a_shape, b_shape, scale_shape) in sorted(shapes.items()):  # jit sorts dictionaries, too
        middle, stop = start + math.prod(a_shape), start + math.prod(a_shape) + math.prod(b_shape)
        scale_stop = scale_start + math.prod(scale_shape)
        parts[name] = (
            content.values[start:middle].reshape(a_shape),
            content.values[middle:stop].reshape(b_shape),
            content.scales[scale_start:scale_stop].reshape(scale_shape),
        )
        start, scale_start = stop, scale_stop
    return parts


def _slot_shapes(slots: SlotArray) -> _Shapes:
    def without_slots(array: Array) -> tuple[int, ...]:
        return (array.shape[0], *array.shape[2:])

    return {name: (without_slots(g.a), without_slots(g.b), without_slots(g.scale)) for name, g in slots.groups.items()}


@functools.partial(jax.jit, donate_argnames="slots")
def _write(slots: SlotArray, slot_id: Int[Array, ""], content: SlotContent) -> SlotArray:
    groups = {}
    for name, (a, b, scale) in _parts(content, _slot_shapes(slots)).items():
        g = slots.groups[name]
        groups[name] = dataclasses.replace(
            g, a=g.a.at[:, slot_id].set(a), b=g.b.at[:, slot_id].set(b), scale=g.scale.at[:, slot_id].set(scale)
        )
    return SlotArray(groups=groups)


def read_slot(slots: SlotArray, slot_id: int) -> SlotContent:
    """What is in a slot, on the host: what `write_slot` put there."""
    parts = [[np.asarray(x[:, slot_id]) for x in (g.a, g.b, g.scale)] for _, g in sorted(slots.groups.items())]
    return SlotContent(
        values=np.concatenate([x.reshape(-1) for a, b, _ in parts for x in (a, b)]),
        scales=np.concatenate([scale.reshape(-1) for _, _, scale in parts]),
    )


def write_slot(slots: SlotArray, slot_id: int, content: SlotContent) -> SlotArray:
    """Puts `content` into one slot: an in-place update of the donated array, never a rebuild.

    Every row of the slot is overwritten, so nothing of its former adapter stays.

    Args:
      slots: the slot array; donated, do not use it afterwards.
      slot_id: which slot.
      content: from `slot_contents`, in the array's dtype; on the device already, or still on the host.

    Returns:
      The updated slot array.
    """
    if not 0 <= slot_id < slots.num_slots:
        raise ValueError(f"slot {slot_id} does not exist; the slot array has {slots.num_slots}")
    return _write(slots, np.int32(slot_id), content)  # numpy's: jnp.int32 would dispatch a program of its own
