"""The slot array: A and B of the adapters on the device, by slot; how one adapter gets into it.

A slot holds `slot_rank` rank rows of A and of B for every projection of every layer. An adapter of rank r fills
ceil(r / slot_rank) slots, which share its weight: the sum over rank rows does not care where they lie.
"""

import dataclasses
import functools

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
      content_hash: hex digest of the adapter's tensors and scales; equal for equal adapters, whatever their names.
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


@dataclasses.dataclass(frozen=True)
class SlotGroup:
    """Content of one slot for one fused group, on the host; layouts as in `ProjectionSlots` without the slot axis.

    Attributes:
      a: [num_layers, num_projections * slot_rank, in_features].
      b: [num_layers, slot_rank, out_features].
      scale: [num_layers, num_projections] float32.
    """

    a: np.ndarray
    b: np.ndarray
    scale: np.ndarray


SlotContent = dict[str, SlotGroup]
"""Content of one slot by group name."""


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
    rows = slice(index * slot_rank, (index + 1) * slot_rank)
    content = {}
    for name, g in config.groups.items():
        a = np.zeros((config.num_layers, len(g.projections), slot_rank, g.in_features), dtype)
        b = np.zeros((config.num_layers, slot_rank, g.out_features), dtype)
        scale = np.zeros((config.num_layers, len(g.projections)), np.float32)
        starts = np.concatenate([[0], np.cumsum(g.widths)])
        for layer in range(config.num_layers):
            for p, projection in enumerate(g.projections):
                w = adapter.projections.get((layer, projection))
                if w is None or w.a[rows].shape[0] == 0:
                    continue
                n = w.a[rows].shape[0]
                a[layer, p, :n] = w.a[rows]
                b[layer, :n, starts[p] : starts[p + 1]] = w.b[:, rows].T
                scale[layer, p] = w.scale
        content[name] = SlotGroup(a.reshape(config.num_layers, -1, g.in_features), b, scale)
    return content


@functools.partial(jax.jit, donate_argnames="slots")
def _write(slots: SlotArray, slot_id: Int[Array, ""], content: dict[str, tuple[Array, Array, Array]]) -> SlotArray:
    groups = {}
    for name, (a, b, scale) in content.items():
        g = slots.groups[name]
        groups[name] = dataclasses.replace(
            g, a=g.a.at[:, slot_id].set(a), b=g.b.at[:, slot_id].set(b), scale=g.scale.at[:, slot_id].set(scale)
        )
    return SlotArray(groups=groups)


def write_slot(slots: SlotArray, slot_id: int, content: SlotContent) -> SlotArray:
    """Puts `content` into one slot: an in-place update of the donated array, never a rebuild.

    Every row of the slot is overwritten, so nothing of its former adapter stays.

    Args:
      slots: the slot array; donated, do not use it afterwards.
      slot_id: which slot.
      content: from `slot_contents`, in the array's dtype.

    Returns:
      The updated slot array.
    """
    if not 0 <= slot_id < slots.num_slots:
        raise ValueError(f"slot {slot_id} does not exist; the slot array has {slots.num_slots}")
    return _write(slots, jnp.int32(slot_id), {k: (g.a, g.b, g.scale) for k, g in content.items()})
