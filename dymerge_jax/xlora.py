"""X-LoRA: a first pass over the tokens tells a classifier which experts the second pass is to use, token by token.

The first one, the scaling pass, runs the base model (or all experts at one constant weight). The classifier, a small
MLP, turns its last hidden state into weights of the experts, for all layers alike or for each linear layer its own. The
second pass runs with these and gives the answer. A token's weights depend only on tokens up to it, so both passes keep
a KV cache of their own and run each token once: the result is that of running all tokens twice in every step.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dymerge_jax.config import PROJECTIONS, LlamaConfig, ProjectionGroup
from dymerge_jax.gating import GatedSetWeights, experts_by_slot
from dymerge_jax.step_batch import AdapterMix
from pallas_kernels.pytree import pytree_dataclass, static_field


@dataclasses.dataclass(frozen=True)
class XLoraRule:
    """How a classifier's logits become weights, in this order.

    Attributes:
      is_layerwise: each linear layer has weights of its own; else all have the same.
      softmax: over the experts, of logits / temperature; without it the logits are the weights.
      temperature: above 1 evens the weights out.
      top_k: experts that keep a weight, the others get 0 and nothing is divided by the sum; None keeps all.
      softmax_of_kept: a softmax over the weights that are not 0.
      global_weight: multiplies what comes of it, in both passes.
      pass_value: the weight of every expert in the scaling pass, before `softmax_of_kept`.
    """

    is_layerwise: bool = False
    softmax: bool = True
    temperature: float = 1.0
    top_k: int | None = None
    softmax_of_kept: bool = False
    global_weight: float = 1.0
    pass_value: float = 0.0

    def pass_weight(self, num_experts: int) -> float:
        """Weight of each of a set's experts in the scaling pass."""
        if self.pass_value == 0:
            return 0.0
        return self.global_weight * (1 / num_experts if self.softmax_of_kept else self.pass_value)


@dataclasses.dataclass(frozen=True)
class XLoraSetWeights:
    """One X-LoRA set on the host.

    Attributes:
      name: what a request calls the set.
      experts: adapter names (or absolute folder paths) in the order of the classifier's outputs.
      layers: (weight [out_features, in_features], bias [out_features]) float32 of the classifier's linear layers, with
        a ReLU between any two. The last gives num_experts logits, or with `rule.is_layerwise` num_experts for each of
        the `PROJECTIONS` of each layer, those that no expert adapts included.
      rule: what becomes of the logits.
      sites: (layer, projection) that the classifier was trained for, where it has weights for each; None is all. An
        expert that adapts another one is not to be served by it.
    """

    name: str
    experts: tuple[str, ...]
    layers: tuple[tuple[np.ndarray, np.ndarray], ...]
    rule: XLoraRule
    sites: tuple[tuple[int, str], ...] | None = None

    def __post_init__(self) -> None:
        if not self.experts:
            raise ValueError(f"X-LoRA set {self.name!r} names no experts; it needs at least one")
        if twice := sorted({e for e in self.experts if self.experts.count(e) > 1}):
            raise ValueError(f"X-LoRA set {self.name!r} has an expert twice: {', '.join(twice)}; name each once")
        if self.rule.top_k is not None and not 1 <= self.rule.top_k <= self.num_experts:
            raise ValueError(
                f"X-LoRA set {self.name!r} has top_k {self.rule.top_k}; expected 1 to {self.num_experts} experts"
            )

    @property
    def num_experts(self) -> int:
        return len(self.experts)


GatedSet = GatedSetWeights | XLoraSetWeights
"""A gated set on the host: with a gate in each layer, or X-LoRA's classifier."""


@pytree_dataclass
class XLoraClassifier:
    """One set's classifier on the device; see `XLoraSetWeights`.

    Attributes:
      weights, biases: of its linear layers, float32.
      rule: what becomes of the logits.
      num_experts: of the set.
    """

    weights: tuple[Float[Array, "out_features in_features"], ...]
    biases: tuple[Float[Array, " out_features"], ...]
    rule: XLoraRule = static_field()
    num_experts: int = static_field()


@pytree_dataclass
class XLoraArray:
    """All X-LoRA sets on the device. A row that uses set i has the gated set id -2 - i.

    Attributes:
      classifiers: by set.
      pass_weights: [num_sets] float32, weight of each expert in the scaling pass; None if that is 0 in all sets.
      expert_of_slot: [num_sets, num_slots] int32, the expert whose adapter lies in the slot, -1 for none.
    """

    classifiers: tuple[XLoraClassifier, ...]
    pass_weights: Float[Array, " num_sets"] | None
    expert_of_slot: Int[Array, "num_sets num_slots"]


@pytree_dataclass
class XLoraTokens:
    """What the classifiers need to know of the tokens of a step.

    Attributes:
      set_ids: [num_tokens] int32, row of the X-LoRA array; -1 for tokens without an X-LoRA set.
      experts: [num_tokens, num_slots] int32, the token's expert in each slot, -1 for none.
    """

    set_ids: Int[Array, " num_tokens"]
    experts: Int[Array, "num_tokens num_slots"]


@pytree_dataclass
class ExpertWeights:
    """What the classifiers have given the tokens of a step; the same for all layers.

    Attributes:
      weights: [num_tokens, num_sites, max_experts] float32; zero for tokens without an X-LoRA set. num_sites is 1, or
        7 * num_layers where some set is layerwise: each layer's `PROJECTIONS`, layer by layer.
      experts: [num_tokens, num_slots] int32, the token's expert in each slot, -1 for none.
    """

    weights: Float[Array, "num_tokens num_sites max_experts"]
    experts: Int[Array, "num_tokens num_slots"]


def set_id_of_row(index: int) -> int:
    """The gated set id of rows that use the set of this index."""
    return -2 - index


def build_xlora_array(sets: Sequence[XLoraSetWeights], *, num_slots: int) -> XLoraArray | None:
    """Puts the classifiers of all sets on the device; no slot holds an expert yet. None if there are no sets."""
    if not sets:
        return None
    pass_weights = np.asarray([s.rule.pass_weight(s.num_experts) for s in sets], np.float32)
    return XLoraArray(
        classifiers=tuple(
            XLoraClassifier(
                weights=tuple(jnp.asarray(weight, jnp.float32) for weight, _ in s.layers),
                biases=tuple(jnp.asarray(bias, jnp.float32) for _, bias in s.layers),
                rule=s.rule,
                num_experts=s.num_experts,
            )
            for s in sets
        ),
        pass_weights=jnp.asarray(pass_weights) if pass_weights.any() else None,
        expert_of_slot=jnp.full((len(sets), num_slots), -1, jnp.int32),
    )


def place_xlora_experts(
    xlora: XLoraArray, sets: Sequence[XLoraSetWeights], slots_of_adapter: Mapping[str, Sequence[int]]
) -> XLoraArray:
    """Tells the sets which slots hold which experts now; adapters that are not resident have no column."""
    placed = experts_by_slot([s.experts for s in sets], slots_of_adapter, xlora.expert_of_slot.shape[1])
    return dataclasses.replace(xlora, expert_of_slot=placed)


def xlora_tokens(xlora: XLoraArray, gated_set_ids: Int[Array, " num_tokens"]) -> XLoraTokens:
    """Looks up each token's X-LoRA set by the gated set id of its row."""
    set_ids = jnp.where(gated_set_ids <= -2, -2 - gated_set_ids, -1)
    experts = jnp.where((set_ids >= 0)[:, None], xlora.expert_of_slot[jnp.maximum(set_ids, 0)], -1)
    return XLoraTokens(set_ids=set_ids, experts=experts)


def scaling_mix(xlora: XLoraArray, mix: AdapterMix) -> AdapterMix:
    """The mix of each row in the scaling pass, a static one; of no meaning for rows without an X-LoRA set."""
    weights = jnp.zeros_like(mix.weights)
    if xlora.pass_weights is not None:
        rows = xlora_tokens(xlora, mix.gated_set_ids)
        constant = xlora.pass_weights[jnp.maximum(rows.set_ids, 0)]
        weights = jnp.where(rows.experts >= 0, constant[:, None], 0.0)
    return AdapterMix(weights=weights, gated_set_ids=jnp.full_like(mix.gated_set_ids, -1))


def expert_weights(
    config: LlamaConfig, xlora: XLoraArray, tokens: XLoraTokens, hidden: Float[Array, "num_tokens hidden"]
) -> ExpertWeights:
    """Runs the classifiers of all sets on all tokens and keeps for each token what its own gives.

    Args:
      config: shape of the model.
      xlora: the sets.
      tokens: which set each token uses.
      hidden: [num_tokens, hidden] after the final norm of the scaling pass.
    """
    is_layerwise = any(c.rule.is_layerwise for c in xlora.classifiers)
    num_sites = config.num_layers * len(PROJECTIONS) if is_layerwise else 1
    max_experts = max(c.num_experts for c in xlora.classifiers)
    total = jnp.zeros((hidden.shape[0], num_sites, max_experts), jnp.float32)
    for set_id, classifier in enumerate(xlora.classifiers):
        weights = _set_weights(classifier, hidden)
        weights = jnp.pad(weights, ((0, 0), (0, 0), (0, max_experts - classifier.num_experts)))
        total = jnp.where((tokens.set_ids == set_id)[:, None, None], weights, total)
    return ExpertWeights(weights=total, experts=tokens.experts)


def _set_weights(
    classifier: XLoraClassifier, hidden: Float[Array, "num_tokens hidden"]
) -> Float[Array, "num_tokens num_sites num_experts"]:
    """One set's weights for every token; num_sites is 1 unless the set is layerwise."""
    rule, x = classifier.rule, hidden.astype(jnp.float32)
    for i, (weight, bias) in enumerate(zip(classifier.weights, classifier.biases, strict=True)):
        x = jax.nn.relu(x) if i else x
        x = jnp.einsum("ti,oi->to", x, weight, precision=jax.lax.Precision.HIGHEST) + bias[None]
    weights = x.reshape(x.shape[0], -1, classifier.num_experts)
    if rule.softmax:
        weights = jax.nn.softmax(weights / rule.temperature, axis=-1)
    if rule.top_k is not None and rule.top_k < classifier.num_experts:
        _, kept = jax.lax.top_k(weights, rule.top_k)
        expert = jnp.arange(classifier.num_experts, dtype=jnp.int32)
        weights = jnp.where((kept[..., None] == expert[None, None, None]).any(-2), weights, 0.0)
    if rule.softmax_of_kept:
        is_kept = weights != 0
        weights = jnp.where(is_kept, jax.nn.softmax(jnp.where(is_kept, weights, -jnp.inf), axis=-1), 0.0)
    return weights * rule.global_weight


def xlora_columns(
    experts: ExpertWeights, layer: int | Int[Array, ""], group: ProjectionGroup
) -> Float[Array, "num_tokens num_gates num_slots"]:
    """X-LoRA's part of the mix matrix of one fused group: zero for tokens without an X-LoRA set.

    Returns:
      [num_tokens, num_gates, num_slots] float32; num_gates is 1 unless some set is layerwise.
    """
    weights = experts.weights
    if weights.shape[1] > 1:
        first = PROJECTIONS.index(group.projections[0])  # a group's projections follow each other there
        start = layer * len(PROJECTIONS) + first
        weights = jax.lax.dynamic_slice_in_dim(weights, start, len(group.projections), axis=1)
    index = jnp.maximum(experts.experts, 0)[:, None, :]
    columns = jnp.take_along_axis(weights, jnp.broadcast_to(index, (*weights.shape[:2], index.shape[2])), axis=2)
    return jnp.where(experts.experts[:, None, :] >= 0, columns, 0.0)
