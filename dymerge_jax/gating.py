"""Gated sets: a gate in each layer gives each token its weights over the set's adapters.

All sets live in one padded array, so a batch whose rows use different sets evaluates all its gates at a site in one
call of `gate_mix`: each row gets the weights that its own set's gate gives, added to the row's static ones in the mix
matrix on the device, with no host round trip.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dymerge_jax.config import LlamaConfig, ProjectionGroup
from pallas_kernels.gate_mix import ALL_EXPERTS, NO_GATE, GateRules, gate_mix
from pallas_kernels.gate_mix import Implementation as GateImplementation
from pallas_kernels.gate_mix.reference import expert_weights
from pallas_kernels.pytree import pytree_dataclass

Granularity = Literal["layer", "projection"]


@dataclasses.dataclass(frozen=True)
class GatedSetWeights:
    """One gated set on the host.

    The gate of a site computes softmax(gate @ x) over the set's experts in float32, of |gate @ x| if `is_absolute`;
    with `top_k` only the largest top_k stay, divided by their sum if `renormalize`.

    Attributes:
      name: what a request calls the set.
      experts: adapter names (or absolute folder paths) in the order of the gates' rows.
      granularity: "layer": one gate a layer, fed the input of q, k and v, serves all seven projections;
        "projection": each projection has its own gate, fed that projection's input. In a projection without one, every
        expert has weight 1: an adapter of attention beside experts of the MLP, as LoRAMoE has it, is part of an expert.
      top_k: experts that keep a weight; None keeps all.
      renormalize: whether the kept weights are divided by their sum.
      gates: [num_experts, in_features] float32 by (layer, "layer") or by (layer, projection name); the same projections
        in every layer.
      is_absolute: an expert's logit is the size of the product, whatever its sign (Arrow).
    """

    name: str
    experts: tuple[str, ...]
    granularity: Granularity
    top_k: int | None
    renormalize: bool
    gates: dict[tuple[int, str], np.ndarray]
    is_absolute: bool = False

    def __post_init__(self) -> None:
        if not self.experts:
            raise ValueError(f"gated set {self.name!r} names no experts; it needs at least one")
        if twice := sorted({e for e in self.experts if self.experts.count(e) > 1}):
            raise ValueError(f"gated set {self.name!r} has an expert twice: {', '.join(twice)}; name each once")
        if self.top_k is not None and not 1 <= self.top_k <= len(self.experts):
            raise ValueError(
                f"gated set {self.name!r} has top_k {self.top_k}; expected 1 to {len(self.experts)} experts"
            )

    @property
    def num_experts(self) -> int:
        return len(self.experts)

    @property
    def gated_projections(self) -> frozenset[str]:
        """The projections that have gates of their own."""
        return frozenset(site for _, site in self.gates) - {"layer"}


@pytree_dataclass
class GateArray:
    """The gates of all gated sets on the device, padded to the largest set.

    Attributes:
      layer: [num_layers, num_sets, max_experts, hidden] float32 gates of "layer" granularity; None without such sets.
      projection: by fused group, [num_layers, num_sets, num_projections, max_experts, in_features] float32; None
        without sets of "projection" granularity.
      has_gate: by fused group, [num_sets, num_projections] bool: whether the set has gates for the projection; None
        without sets of "projection" granularity.
      rules: [num_sets] each.
      is_per_projection: [num_sets] bool.
      expert_of_slot: [num_sets, num_slots] int32, the expert whose adapter lies in the slot, -1 for none.
    """

    layer: Float[Array, "num_layers num_sets max_experts hidden"] | None
    projection: dict[str, Float[Array, "num_layers num_sets num_projections max_experts in_features"]] | None
    has_gate: dict[str, Bool[Array, "num_sets num_projections"]] | None
    rules: GateRules
    is_per_projection: Bool[Array, " num_sets"]
    expert_of_slot: Int[Array, "num_sets num_slots"]


def build_gate_array(config: LlamaConfig, sets: Sequence[GatedSetWeights], *, num_slots: int) -> GateArray | None:
    """Pads the gates of all sets into one array; no slot holds an expert yet. None if there are no sets."""
    if not sets:
        return None
    max_experts = max(s.num_experts for s in sets)
    layer = projection = has_gate = None
    if any(s.granularity == "layer" for s in sets):
        layer = np.zeros((config.num_layers, len(sets), max_experts, config.hidden), np.float32)
    if any(s.granularity == "projection" for s in sets):
        projection = {
            name: np.zeros((config.num_layers, len(sets), len(g.projections), max_experts, g.in_features), np.float32)
            for name, g in config.groups.items()
        }
        has_gate = {
            name: jnp.asarray([[p in s.gated_projections for p in g.projections] for s in sets], bool)
            for name, g in config.groups.items()
        }
    places = {p: (name, i) for name, g in config.groups.items() for i, p in enumerate(g.projections)}
    for set_id, gated_set in enumerate(sets):
        for (layer_id, site), gate in gated_set.gates.items():
            if site == "layer":
                assert layer is not None
                layer[layer_id, set_id, : gated_set.num_experts] = gate
            else:
                assert projection is not None
                group, p = places[site]
                projection[group][layer_id, set_id, p, : gated_set.num_experts] = gate
    return GateArray(
        layer=None if layer is None else jnp.asarray(layer),
        projection=None if projection is None else {k: jnp.asarray(v) for k, v in projection.items()},
        has_gate=has_gate,
        rules=GateRules(
            num_experts=jnp.asarray([s.num_experts for s in sets], jnp.int32),
            top_k=jnp.asarray([s.top_k or s.num_experts for s in sets], jnp.int32),
            renormalize=jnp.asarray([s.renormalize for s in sets], jnp.int32),
            is_absolute=jnp.asarray([s.is_absolute for s in sets], jnp.int32),
        ),
        is_per_projection=jnp.asarray([s.granularity == "projection" for s in sets], bool),
        expert_of_slot=jnp.full((len(sets), num_slots), -1, jnp.int32),
    )


def place_experts(
    gates: GateArray, sets: Sequence[GatedSetWeights], slots_of_adapter: Mapping[str, Sequence[int]]
) -> GateArray:
    """Tells the gates which slots hold which experts now; adapters that are not resident have no column."""
    placed = experts_by_slot([s.experts for s in sets], slots_of_adapter, gates.expert_of_slot.shape[1])
    return dataclasses.replace(gates, expert_of_slot=placed)


def experts_by_slot(
    experts: Sequence[Sequence[str]], slots_of_adapter: Mapping[str, Sequence[int]], num_slots: int
) -> Int[Array, "num_sets num_slots"]:
    """[num_sets, num_slots] int32, which of a set's experts lies in each slot, -1 for none."""
    expert_of_slot = np.full((len(experts), num_slots), -1, np.int32)
    for set_id, adapters in enumerate(experts):
        for expert, adapter in enumerate(adapters):
            expert_of_slot[set_id, list(slots_of_adapter.get(adapter, ()))] = expert
    # Not jnp.asarray, which compiles a program for a shape that it has not met: this runs beside requests.
    return jax.device_put(expert_of_slot)


@pytree_dataclass
class GatedTokens:
    """What the gates need to know of the tokens of a step; the same for all layers.

    Attributes:
      layer_set_ids: [num_tokens, 1] int32, the token's set if that has one gate a layer, else `NO_GATE`.
      projection_set_ids: by fused group, [num_tokens, num_projections] int32, the token's set if that has a gate for
        the projection, `ALL_EXPERTS` if it has gates for others only, else `NO_GATE`; None without sets of "projection"
        granularity.
      rules: [num_tokens] each, of the token's set; any rule for tokens without one.
      experts: [num_tokens, num_slots] int32, the token's expert in each slot, -1 for none.
    """

    layer_set_ids: Int[Array, "num_tokens 1"]
    projection_set_ids: dict[str, Int[Array, "num_tokens num_projections"]] | None
    rules: GateRules
    experts: Int[Array, "num_tokens num_slots"]

    @property
    def is_used(self) -> Bool[Array, "num_tokens num_slots"]:
        """Slots to which a gate of the token may give a weight."""
        return self.experts >= 0


def gated_tokens(gates: GateArray, set_ids: Int[Array, " num_tokens"]) -> GatedTokens:
    """Looks up each token's set; a negative id marks a token without one."""
    is_gated = set_ids >= 0
    ids = jnp.maximum(set_ids, 0)
    is_per_projection = gates.is_per_projection[ids]

    def of_group(has_gate: Bool[Array, "num_sets num_projections"]) -> Int[Array, "num_tokens num_projections"]:
        sources = jnp.where(has_gate[ids], ids[:, None], ALL_EXPERTS)
        return jnp.where((is_gated & is_per_projection)[:, None], sources, NO_GATE)

    return GatedTokens(
        layer_set_ids=jnp.where(is_gated & ~is_per_projection, ids, NO_GATE)[:, None],
        projection_set_ids=gates.has_gate and {name: of_group(has_gate) for name, has_gate in gates.has_gate.items()},
        rules=jax.tree.map(lambda rule: rule[ids], gates.rules),
        experts=jnp.where(is_gated[:, None], gates.expert_of_slot[ids], -1),
    )


def layer_weights(
    gates: GateArray, tokens: GatedTokens, layer: int | Int[Array, ""], x: Float[Array, "num_tokens hidden"]
) -> Float[Array, "num_tokens 1 max_experts"] | None:
    """Weights of the experts by the gates of "layer" granularity, from the input of q, k and v; None without such sets.

    Of no meaning for tokens without such a set.
    """
    if gates.layer is None:
        return None
    return expert_weights(x, gates.layer[layer][:, None], tokens.layer_set_ids, tokens.rules)


def add_layer_gates(
    base: Float[Array, "num_tokens num_gates num_slots"],
    gates: GateArray,
    tokens: GatedTokens,
    layer: int | Int[Array, ""],
    x: Float[Array, "num_tokens hidden"],
    *,
    implementation: GateImplementation | None = None,
) -> Float[Array, "num_tokens num_gates num_slots"]:
    """A mix matrix plus what the gates of "layer" granularity give; the same matrix without such sets.

    Args:
      base: [num_tokens, 1, num_slots] float32 weights that do not come from gates.
      gates, tokens, layer: whose gates, for which tokens, where.
      x: input of q, k and v.
      implementation: of `gate_mix`.
    """
    if gates.layer is None:
        return base
    return gate_mix(
        x,
        gates.layer[:, :, None],
        tokens.layer_set_ids,
        tokens.rules,
        tokens.experts,
        base,
        layer=layer,
        implementation=implementation,
    )


def add_projection_gates(
    base: Float[Array, "num_tokens num_base_gates num_slots"],
    gates: GateArray,
    tokens: GatedTokens,
    layer: int | Int[Array, ""],
    group: ProjectionGroup,
    x: Float[Array, "num_tokens in_features"],
    *,
    implementation: GateImplementation | None = None,
) -> Float[Array, "num_tokens num_gates num_slots"]:
    """A mix matrix plus what the gates of one fused group give; the same matrix without sets of that granularity.

    Args:
      base: [num_tokens, 1, num_slots] float32 weights that do not come from gates of projections.
      gates, tokens, layer, group: whose gates, for which tokens, where.
      x: input of the group's projections.
      implementation: of `gate_mix`.

    Returns:
      [num_tokens, num_gates, num_slots] float32; num_gates is that of `base` or the number of projections.
    """
    if gates.projection is None:
        return base
    assert tokens.projection_set_ids is not None
    return gate_mix(
        x,
        gates.projection[group.name],
        tokens.projection_set_ids[group.name],
        tokens.rules,
        tokens.experts,
        base,
        layer=layer,
        implementation=implementation,
    )
