"""The public op: checks shapes, picks an implementation, calls it."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gate_mix import reference
from pallas_kernels.gate_mix.config import MAX_EXPERTS
from pallas_kernels.gate_mix.rules import GateRules

Implementation = Literal["reference", "pallas_triton"]

MAX_PICKED_TOKENS = 64
"""A decode step of 32 rows is 0.17 ms faster with the kernel than with XLA's product, with a gate for each linear layer
0.67 ms (8B shape, H200); more tokens want the gates read once for many of them."""


def gate_mix(
    x: Float[Array, "num_tokens in_features"],
    gates: Float[Array, "num_layers num_sets num_gates max_experts in_features"],
    set_ids: Int[Array, "num_tokens num_gates"],
    rules: GateRules,
    experts: Int[Array, "num_tokens num_slots"],
    base: Float[Array, "num_tokens num_base_gates num_slots"],
    *,
    layer: int | Int[Array, ""],
    implementation: Implementation | None = None,
) -> Float[Array, "num_tokens num_gates num_slots"]:
    """Adds to the weights of each token's slots what the gates of the token's set give to the experts in them.

    Semantics: y[t, g, s] = base[t, g or 0, s] + (w[t, g, experts[t, s]] if experts[t, s] >= 0 else 0); w[t, g] are the
    top_k largest, ties going to the lower index, of the softmax over the set's experts e of gates[layer, set_ids[t, g],
    g, e] @ x[t] or of its absolute value, over their sum if the set's rule says so; 0 for the other experts.

    All products are float32. A token's result does not depend on the other tokens; x[t] may be anything, NaN included,
    where no gate reads it, and so may the gates of sets that no token uses and those past a set's experts.

    Args:
      x: [num_tokens, in_features] what the gates read, bfloat16 or float32.
      gates: [num_layers, num_sets, num_gates, max_experts, in_features] float32.
      set_ids: [num_tokens, num_gates] int32, the set whose gate counts, `NO_GATE` or `ALL_EXPERTS` (w = 1).
      rules: [num_tokens] each, those of the token's set; any where no gate reads the token.
      experts: [num_tokens, num_slots] int32, the expert whose adapter lies in the slot, -1 for none.
      base: [num_tokens, 1 or num_gates, num_slots] float32.
      layer: of `gates`, a Python int or an int32 scalar.
      implementation: "reference" (differentiable) or "pallas_triton" (one launch, no gradient; it reads the gates anew
        for each token). None picks the kernel on a GPU for up to `MAX_PICKED_TOKENS` tokens, if it supports the shapes.

    Returns:
      [num_tokens, num_gates, num_slots] float32.

    Raises:
      ValueError: If shapes disagree, or a Python `layer` is out of range.
      TypeError: If a dtype is not supported.
      NotImplementedError: If the named implementation does not support the shapes.
    """
    _check_shapes(x, gates, set_ids, rules, experts, base)
    _check_dtypes(x, gates, set_ids, rules, experts, base)
    if isinstance(layer, int) and not 0 <= layer < gates.shape[0]:
        raise ValueError(f"layer is {layer}; expected 0 to {gates.shape[0] - 1}, for gates has {gates.shape[0]} layers")
    args = x, gates, set_ids, rules, experts, base, jnp.asarray(layer, jnp.int32)
    match implementation or _pick(x.shape[0], gates.shape[3]):
        case "reference":
            return reference.gate_mix(*args)
        case "pallas_triton":
            from pallas_kernels.gate_mix import pallas_triton  # the GPU backend is imported where it is used only

            return pallas_triton.gate_mix(*args)
        case unknown:
            raise ValueError(f"implementation {unknown!r} is unknown; expected 'reference' or 'pallas_triton'")


def _pick(num_tokens: int, max_experts: int) -> Implementation:
    is_kernel = jax.default_backend() == "gpu" and num_tokens <= MAX_PICKED_TOKENS and max_experts <= MAX_EXPERTS
    return "pallas_triton" if is_kernel else "reference"


def _check_shapes(x: Array, gates: Array, set_ids: Array, rules: GateRules, experts: Array, base: Array) -> None:
    shapes = f"x has shape {x.shape}, gates {gates.shape}, set_ids {set_ids.shape}, experts {experts.shape} and base "
    shapes += f"{base.shape}"
    if x.ndim != 2 or gates.ndim != 5 or experts.ndim != 2 or base.ndim != 3 or 0 in gates.shape:
        raise ValueError(
            f"{shapes}; expected [num_tokens, in_features], [num_layers, num_sets, num_gates, max_experts, "
            "in_features] without an axis of length 0, [num_tokens, num_gates], [num_tokens, num_slots] and "
            "[num_tokens, 1 or num_gates, num_slots]"
        )
    num_tokens, num_gates = x.shape[0], gates.shape[2]
    if gates.shape[4] != x.shape[1] or set_ids.shape != (num_tokens, num_gates) or experts.shape[0] != num_tokens:
        raise ValueError(f"{shapes}; expected the in_features, num_tokens and num_gates of all to agree")
    if base.shape not in {(num_tokens, n, experts.shape[1]) for n in (1, num_gates)}:
        raise ValueError(f"{shapes}; expected base [num_tokens, 1 or num_gates, num_slots] of the others' sizes")
    for name in ("num_experts", "top_k", "renormalize", "is_absolute"):
        if getattr(rules, name).shape != (num_tokens,):
            raise ValueError(f"rules.{name} has shape {getattr(rules, name).shape}; expected ({num_tokens},) as x")


def _check_dtypes(x: Array, gates: Array, set_ids: Array, rules: GateRules, experts: Array, base: Array) -> None:
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"x is {x.dtype}; expected float32 or bfloat16")
    if gates.dtype != jnp.float32 or base.dtype != jnp.float32:
        raise TypeError(f"gates is {gates.dtype} and base {base.dtype}; expected float32")
    integers = {"set_ids": set_ids, "experts": experts, **{f"rules.{k}": v for k, v in vars(rules).items()}}
    if wrong := [f"{name} {array.dtype}" for name, array in integers.items() if array.dtype != jnp.int32]:
        raise TypeError(f"{', '.join(wrong)}: expected int32")
