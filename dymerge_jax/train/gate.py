"""A gate that is trained over frozen adapters: its float32 matrices, its place in the gate array, and the loss."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dymerge_jax.config import LlamaConfig
from dymerge_jax.gating import GateArray, GatedSetWeights, Granularity, build_gate_array, place_experts
from dymerge_jax.lora import AdapterWeights, SlotArray, empty_slots, slot_contents, write_slot
from dymerge_jax.model import Implementations
from dymerge_jax.train.forward import FrozenModel, TrainBatch, hidden_states, mean_loss
from pallas_kernels.pytree import pytree_dataclass

GateMatrices = dict[str, Array]
"""[num_layers, num_experts, in_features] float32 by site: "layer", or every projection's name."""


def new_gates(config: LlamaConfig, num_experts: int, granularity: Granularity, *, seed: int) -> GateMatrices:
    """Nearly equal weights for all experts: small random matrices, for equal ones would tie in a top-k."""
    rng = np.random.default_rng(seed)
    gates = {}
    for site, width in _sites(config, granularity).items():
        values = rng.normal(size=(config.num_layers, num_experts, width)) * 0.02 * width**-0.5
        gates[site] = jnp.asarray(values, jnp.float32)
    return gates


def gated_set(gates: GateMatrices, like: GatedSetWeights) -> GatedSetWeights:
    """The trained gates on the host, as the gated set that `like` describes."""
    on_host = {site: np.asarray(matrix) for site, matrix in gates.items()}
    by_site = {(layer, site): m[layer] for site, m in on_host.items() for layer in range(m.shape[0])}
    return GatedSetWeights(like.name, like.experts, like.granularity, like.top_k, like.renormalize, by_site)


@pytree_dataclass
class FrozenExperts:
    """The experts, and a gate array that wants its matrices.

    Attributes:
      slots: their slot array.
      gates: one set; its matrices are placeholders.
    """

    slots: SlotArray
    gates: GateArray


def place_in_slots(
    config: LlamaConfig, experts: Mapping[str, AdapterWeights], like: GatedSetWeights, *, slot_rank: int, dtype: str
) -> FrozenExperts:
    """Puts the experts into slots and tells the gates where.

    Args:
      config: the base model.
      experts: adapters by name, as `like` names them.
      like: the gated set; only where it has gates counts of them.
      slot_rank: rank rows of a slot.
      dtype: of the model.
    """
    slots_of: dict[str, range] = {}
    first = 0
    for name, adapter in experts.items():
        slots_of[name] = range(first, first + adapter.num_slots(slot_rank))
        first = slots_of[name].stop
    slots = empty_slots(config, num_slots=first, slot_rank=slot_rank, dtype=dtype)
    for name, adapter in experts.items():
        contents = slot_contents(config, adapter, slot_rank=slot_rank, dtype=dtype)
        for slot_id, content in zip(slots_of[name], contents, strict=True):
            slots = write_slot(slots, slot_id, content)
    gates = build_gate_array(config, [like], num_slots=first)
    assert gates is not None
    return FrozenExperts(slots=slots, gates=place_experts(gates, [like], slots_of))


def gate_array(config: LlamaConfig, gates: GateMatrices, placed: GateArray) -> GateArray:
    """The trained matrices in the form that the model's layers read."""
    layer = projection = None
    if "layer" in gates:
        layer = gates["layer"][:, None]
    else:
        projection = {
            name: jnp.stack([gates[p] for p in group.projections], axis=1)[:, None]
            for name, group in config.groups.items()
        }
    return dataclasses.replace(placed, layer=layer, projection=projection)


def gate_loss(
    gates: GateMatrices,
    frozen: tuple[FrozenModel, FrozenExperts],
    batch: TrainBatch,
    *,
    balance: float = 0.0,
    implementations: Implementations,
    remat: bool,
) -> Float[Array, ""]:
    """Mean cross-entropy of a batch, in nats, with every token's experts weighted by the gates.

    Args:
      gates: what is trained.
      frozen: the model, and the experts in their slots.
      batch: the samples.
      balance: this times `imbalance` is added; above 0 for gates of one a layer only.
      implementations, remat: see `hidden_states`.
    """
    model, experts = frozen
    config = model.merged_ends().config
    static = jnp.zeros((batch.tokens.shape[0], experts.slots.num_slots), jnp.float32)
    array = gate_array(config, gates, experts.gates)
    hidden, usage = hidden_states(
        model, batch, experts.slots, static, array, implementations=implementations, remat=remat
    )
    loss = mean_loss(model, hidden, batch)
    if not balance:
        return loss
    assert usage is not None
    return loss + balance * imbalance(usage)


def imbalance(usage: Float[Array, "num_layers num_experts"]) -> Float[Array, ""]:
    """0 if a batch uses all experts alike in every layer, num_experts - 1 if it uses one alone.

    Args:
      usage: mean weight of each expert; each layer's add up to 1.
    """
    return usage.shape[1] * (usage * usage).sum(1).mean() - 1.0


def _sites(config: LlamaConfig, granularity: Granularity) -> Mapping[str, int]:
    if granularity == "layer":
        return {"layer": config.hidden}
    return {name: group.in_features for group in config.groups.values() for name in group.projections}
