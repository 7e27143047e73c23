"""An adapter that is trained: its float32 factors, its place in the slot array, and the loss."""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dymerge_jax.config import PROJECTIONS, LlamaConfig
from dymerge_jax.lora import AdapterWeights, ProjectionWeights, SlotArray, empty_slots, slot_contents, write_slot
from dymerge_jax.model import Implementations
from dymerge_jax.train.forward import FrozenModel, TrainBatch, hidden_states, mean_loss
from pallas_kernels.maf_mvm import ProjectionSlots
from pallas_kernels.pytree import pytree_dataclass, static_field

Factors = dict[str, dict[str, Array]]
"""By projection: "a" [num_layers, rank, in_features] and "b" [num_layers, rank, out_features], float32."""


def new_factors(config: LlamaConfig, projections: Sequence[str], *, rank: int, seed: int) -> Factors:
    """A uniform in ±1 / sqrt(in_features), as PEFT begins, and B zero: the adapter changes nothing yet.

    Drawn by numpy, so that a seed means the same on every backend.
    """
    rng = np.random.default_rng(seed)
    factors: Factors = {}
    for name, (in_features, out_features) in _shapes(config).items():
        if name in projections:
            bound = 1 / math.sqrt(in_features)
            a = rng.uniform(-bound, bound, (config.num_layers, rank, in_features)).astype(np.float32)
            b = jnp.zeros((config.num_layers, rank, out_features), jnp.float32)
            factors[name] = {"a": jnp.asarray(a), "b": b}
    return factors


def adapter_weights(factors: Factors, *, scale: float) -> AdapterWeights:
    """The trained adapter on the host."""
    projections = {}
    for name in PROJECTIONS:
        if name in factors:
            a, b = (np.asarray(factors[name][side]) for side in ("a", "b"))
            for layer in range(a.shape[0]):
                projections[layer, name] = ProjectionWeights(a=a[layer], b=b[layer].T, scale=scale)
    return AdapterWeights(projections, content_hash="")


@pytree_dataclass
class FrozenMates:
    """The adapters that are active beside the trained one and stay as they are.

    Attributes:
      slots: their slot array, of the trained adapter's rank; None without mates.
      mate_of_slot: which mate each slot belongs to.
    """

    slots: SlotArray | None
    mate_of_slot: tuple[int, ...] = static_field(default=())


def place_mates(
    config: LlamaConfig, mates: Sequence[AdapterWeights], *, slot_rank: int, dtype: DTypeLike
) -> FrozenMates:
    """Puts the mates into as many slots as they need."""
    mate_of_slot = tuple(i for i, mate in enumerate(mates) for _ in range(mate.num_slots(slot_rank)))
    if not mate_of_slot:
        return FrozenMates(slots=None)
    slots = empty_slots(config, num_slots=len(mate_of_slot), slot_rank=slot_rank, dtype=dtype)
    contents = (c for mate in mates for c in slot_contents(config, mate, slot_rank=slot_rank, dtype=dtype))
    for slot_id, content in enumerate(contents):
        slots = write_slot(slots, slot_id, content)
    return FrozenMates(slots=slots, mate_of_slot=mate_of_slot)


def trained_slots(
    config: LlamaConfig, factors: Factors, mates: FrozenMates, *, scale: float, dtype: DTypeLike
) -> SlotArray:
    """The slot array of a step: the trained adapter in slot 0, in the model's dtype as it is served, then the mates."""
    groups = {}
    for group_name, group in config.groups.items():
        rank = next(iter(factors.values()))["a"].shape[1]
        a, b = [], []
        for name, width in zip(group.projections, group.widths, strict=True):
            own = factors.get(name)
            a.append(jnp.zeros((config.num_layers, rank, group.in_features)) if own is None else own["a"])
            b.append(jnp.zeros((config.num_layers, rank, width)) if own is None else own["b"])
        own_slot = ProjectionSlots(
            a=jnp.concatenate(a, axis=1)[:, None].astype(dtype),
            b=jnp.concatenate(b, axis=2)[:, None].astype(dtype),
            scale=jnp.full((config.num_layers, 1, len(group.projections)), scale, jnp.float32),
            widths=group.widths,
        )
        if mates.slots is None:
            groups[group_name] = own_slot
        else:
            others = mates.slots.groups[group_name]
            groups[group_name] = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), own_slot, others)
    return SlotArray(groups=groups)


def slot_weights(batch: TrainBatch, mates: FrozenMates) -> Float[Array, "num_seqs num_slots"]:
    """Weight 1 for the trained adapter, and those of the batch for the mates."""
    own = jnp.ones((batch.tokens.shape[0], 1), jnp.float32)
    return jnp.concatenate([own, *(batch.mate_weights[:, i, None] for i in mates.mate_of_slot)], axis=1)


def adapter_loss(
    factors: Factors,
    frozen: tuple[FrozenModel, FrozenMates],
    batch: TrainBatch,
    *,
    scale: float,
    implementations: Implementations,
    remat: bool,
) -> Float[Array, ""]:
    """Mean cross-entropy of a batch, in nats, with the adapter and its mates active."""
    model, mates = frozen
    config, dtype = model.merged_ends().config, model.ends[0].dtype
    slots = trained_slots(config, factors, mates, scale=scale, dtype=dtype)
    hidden, _ = hidden_states(
        model, batch, slots, slot_weights(batch, mates), None, implementations=implementations, remat=remat
    )
    return mean_loss(model, hidden, batch)


def parse_targets(text: str) -> tuple[str, ...]:
    """Projections by a comma-separated list, or "all-linear", "attention" or "mlp", in the model's order.

    Raises:
      ValueError: If a name is unknown.
    """
    named = {"all-linear": PROJECTIONS, "attention": PROJECTIONS[:4], "mlp": PROJECTIONS[4:]}
    chosen: set[str] = set()
    for name in (part.strip() for part in text.split(",")):
        if name not in named and name not in PROJECTIONS:
            raise ValueError(
                f"target {name!r} is unknown; expected {', '.join(named)}, or projections of {', '.join(PROJECTIONS)}"
            )
        chosen |= {*named.get(name, (name,))}
    return tuple(name for name in PROJECTIONS if name in chosen)


def _shapes(config: LlamaConfig) -> Mapping[str, tuple[int, int]]:
    """in_features and out_features by projection, in the model's order."""
    return {
        name: (group.in_features, width)
        for group in config.groups.values()
        for name, width in zip(group.projections, group.widths, strict=True)
    }
