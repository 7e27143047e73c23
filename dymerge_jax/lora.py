"""The slot array: A and B of the adapters on the device, by slot; how one adapter gets into it.

What an adapter is on the host, and how it is cut into slots, is in `dymerge_jax.adapter_weights`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from dymerge_jax.adapter_weights import (
    AdapterWeights,
    PartShapes,
    ProjectionWeights,
    content_bytes,
    content_shape,
    fill_slot,
    slot_bytes,
    slot_parts,
)
from dymerge_jax.config import LlamaConfig
from pallas_kernels.maf_mvm import ProjectionSlots
from pallas_kernels.pytree import pytree_dataclass

__all__ = [
    "AdapterWeights",
    "ProjectionWeights",
    "SlotArray",
    "SlotContent",
    "content_bytes",
    "empty_content",
    "empty_slots",
    "read_slot",
    "slot_bytes",
    "slot_contents",
    "write_slot",
]


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


def slot_contents(
    config: LlamaConfig, adapter: AdapterWeights, *, slot_rank: int, dtype: DTypeLike
) -> list[SlotContent]:
    """Cuts an adapter into slots: rank rows [i * slot_rank, (i + 1) * slot_rank) of every projection go to slot i."""
    return [_slot_content(config, adapter, i, slot_rank, dtype) for i in range(adapter.num_slots(slot_rank))]


def _slot_content(
    config: LlamaConfig, adapter: AdapterWeights, index: int, slot_rank: int, dtype: DTypeLike
) -> SlotContent:
    slot_len, num_scales = content_shape(config, slot_rank)
    values, scales = np.zeros(slot_len, dtype), np.zeros(num_scales, np.float32)
    fill_slot(config, adapter, index, slot_rank=slot_rank, values=values, scales=scales)
    return SlotContent(values, scales)


def empty_content(config: LlamaConfig, *, slot_rank: int, dtype: DTypeLike) -> SlotContent:
    """The content of a slot without an adapter: zeros."""
    return _slot_content(config, AdapterWeights({}, ""), 0, slot_rank, dtype)


def _slot_shapes(slots: SlotArray) -> PartShapes:
    def without_slots(array: Array) -> tuple[int, ...]:
        return (array.shape[0], *array.shape[2:])

    return {name: (without_slots(g.a), without_slots(g.b), without_slots(g.scale)) for name, g in slots.groups.items()}


@functools.partial(jax.jit, donate_argnames="slots")
def _write(slots: SlotArray, slot_id: Int[Array, ""], content: SlotContent) -> SlotArray:
    groups = {}
    for name, (a, b, scale) in slot_parts(content.values, content.scales, _slot_shapes(slots)).items():
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
