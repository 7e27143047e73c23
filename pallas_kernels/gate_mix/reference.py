"""Plain jnp: this file defines what the op means. One product for the gates of all sets, then a pick by token."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.gate_mix.rules import ALL_EXPERTS, GateRules


def gate_mix(
    x: Float[Array, "num_tokens in_features"],
    gates: Float[Array, "num_layers num_sets num_gates max_experts in_features"],
    set_ids: Int[Array, "num_tokens num_gates"],
    rules: GateRules,
    experts: Int[Array, "num_tokens num_slots"],
    base: Float[Array, "num_tokens num_base_gates num_slots"],
    layer: Int[Array, ""],
) -> Float[Array, "num_tokens num_gates num_slots"]:
    """See `pallas_kernels.gate_mix.gate_mix`."""
    weights = jnp.where((set_ids >= 0)[:, :, None], expert_weights(x, gates[layer], set_ids, rules), 0.0)
    weights = jnp.where((set_ids == ALL_EXPERTS)[:, :, None], 1.0, weights)
    num_slots = experts.shape[1]
    index = jnp.broadcast_to(jnp.maximum(experts, 0)[:, None, :], (*set_ids.shape, num_slots))
    columns = jnp.take_along_axis(weights, index, axis=2)
    return base + jnp.where((experts >= 0)[:, None, :], columns, 0.0)


def expert_weights(
    x: Float[Array, "num_tokens in_features"],
    gates: Float[Array, "num_sets num_gates max_experts in_features"],
    set_ids: Int[Array, "num_tokens num_gates"],
    rules: GateRules,
) -> Float[Array, "num_tokens num_gates max_experts"]:
    """Each token's weights of the experts of its set; of no meaning where the set id is negative.

    Args:
      x: [num_tokens, in_features] what the gates read.
      gates: [num_sets, num_gates, max_experts, in_features] float32 of one layer.
      set_ids, rules: by token, see `gate_mix`.
    """
    num_sets, num_gates, max_experts, in_features = gates.shape
    # For a GPU, XLA would take the layer's slice into the product's kernel and tune one for each layer: a minute.
    gates = lax.optimization_barrier(gates)
    logits = lax.dot_general(
        x.astype(jnp.float32),
        gates.reshape(-1, in_features),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
    ).reshape(-1, num_sets, num_gates, max_experts)
    own = jnp.take_along_axis(logits, jnp.maximum(set_ids, 0)[:, None, :, None], axis=1)[:, 0]
    return mixture_weights(own, rules)


def mixture_weights(
    logits: Float[Array, "num_tokens num_gates max_experts"], rules: GateRules
) -> Float[Array, "num_tokens num_gates max_experts"]:
    """Softmax over the experts of each token's set, then its top-k rule; zero past the set's experts.

    Ties at the border of the top-k go to the expert of the lower index.
    """
    expert = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    exists = expert[None, None, :] < rules.num_experts[:, None, None]
    logits = jnp.where((rules.is_absolute != 0)[:, None, None], jnp.abs(logits), logits)
    probs = jax.nn.softmax(jnp.where(exists, logits, -jnp.inf), axis=-1)
    higher = probs[..., None, :] > probs[..., :, None]
    tied_before = (probs[..., None, :] == probs[..., :, None]) & (expert[None, :] < expert[:, None])[None, None]
    rank = (higher | tied_before).sum(-1, dtype=jnp.int32)
    kept = jnp.where(exists & (rank < rules.top_k[:, None, None]), probs, 0.0)
    total = jnp.where((rules.renormalize != 0)[:, None, None], kept.sum(-1, keepdims=True), 1.0)
    return kept / total
