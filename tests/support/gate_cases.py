"""Random gates, tokens and slots for gate_mix, and its formula as a loop over tokens in float64."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gate_mix import ALL_EXPERTS, NO_GATE, GateRules, Implementation, gate_mix

LAYER, NUM_LAYERS = 1, 2

# Compiled, so that cases of one shape share a program.
_gate_mix = jax.jit(gate_mix, static_argnames=("layer", "implementation"))


@dataclasses.dataclass(frozen=True)
class GateCase:
    """Arguments of gate_mix by name, on the host; the attributes of `GateRules` among them."""

    x: Any
    gates: np.ndarray
    set_ids: np.ndarray
    num_experts: np.ndarray
    top_k: np.ndarray
    renormalize: np.ndarray
    is_absolute: np.ndarray
    experts: np.ndarray
    base: np.ndarray

    @property
    def rules(self) -> GateRules:
        """As gate_mix takes them."""
        return GateRules(
            num_experts=jnp.asarray(self.num_experts),
            top_k=jnp.asarray(self.top_k),
            renormalize=jnp.asarray(self.renormalize),
            is_absolute=jnp.asarray(self.is_absolute),
        )

    def run(self, implementation: Implementation | None) -> np.ndarray:
        """What gate_mix gives."""
        arrays = (jnp.asarray(array) for array in (self.x, self.gates, self.set_ids))
        others = (jnp.asarray(array) for array in (self.experts, self.base))
        return np.asarray(_gate_mix(*arrays, self.rules, *others, layer=LAYER, implementation=implementation))

    def rows(self, tokens: slice) -> "GateCase":
        """The same with some of the tokens only."""
        arrays = {k: v if k == "gates" else v[tokens] for k, v in vars(self).items()}
        return GateCase(**arrays)


def random_case(
    rng: np.random.Generator,
    *,
    sets: Sequence[int] = tuple(range(-1, 3)) * 4,
    in_features: int = 100,
    sizes: Sequence[int] = (4, 1, 5),
    num_gates: int = 2,
    num_slots: int = 12,
    dtype: Any = jnp.float32,
    is_base_shared: bool = True,
) -> GateCase:
    """A case whose unreachable memory is NaN: other layers, sets that no token uses, experts that a set lacks.

    Args:
      rng: random numbers.
      sets: of each token; -1 for tokens without one, whose x is NaN. The last of several sets lacks its last gate.
      in_features, num_gates, num_slots: shapes.
      sizes: number of experts of each set. Each set has one random rule, and of several experts two that tie.
      dtype: of x.
      is_base_shared: base has one weight for all gates.
    """
    of_set = {
        "num_experts": np.asarray(sizes),
        "top_k": np.asarray([rng.integers(1, n + 1) for n in sizes]),
        "renormalize": rng.integers(0, 2, len(sizes)),
        "is_absolute": rng.integers(0, 2, len(sizes)),
    }
    ids, num_tokens = np.asarray(sets), len(sets)
    has_gate = np.ones((len(sizes), num_gates), bool)
    has_gate[-1, -1] = len(sizes) == 1
    set_ids = np.where((ids < 0)[:, None], NO_GATE, np.where(has_gate[ids], ids[:, None], ALL_EXPERTS))
    x = rng.normal(size=(num_tokens, in_features))
    x[(set_ids < 0).all(1)] = np.nan
    gates = np.full((NUM_LAYERS, len(sizes), num_gates, max(sizes), in_features), np.nan, np.float32)
    for set_id, gate in {(int(s), gate) for s in ids[ids >= 0] for gate in np.nonzero(has_gate[s])[0]}:
        matrix = rng.normal(size=(sizes[set_id], in_features)) * 2 * in_features**-0.5
        matrix[rng.integers(1, sizes[set_id]) if sizes[set_id] > 1 else 0] = matrix[0]
        gates[LAYER, set_id, gate, : sizes[set_id]] = matrix
    expert_of_slot = np.stack([rng.integers(-1, n, num_slots) for n in sizes])
    return GateCase(
        x=jnp.asarray(x, dtype),
        gates=gates,
        set_ids=set_ids.astype(np.int32),
        **{name: rule[ids].astype(np.int32) for name, rule in of_set.items()},
        experts=np.where((ids < 0)[:, None], -1, expert_of_slot[ids]).astype(np.int32),
        base=rng.normal(size=(num_tokens, 1 if is_base_shared else num_gates, num_slots)).astype(np.float32),
    )


def expected(case: GateCase) -> np.ndarray:
    """The formula, token by token, gate by gate and slot by slot."""
    num_tokens, num_gates = case.set_ids.shape
    num_slots = case.experts.shape[1]
    out = np.zeros((num_tokens, num_gates, num_slots))
    for token in range(num_tokens):
        for gate in range(num_gates):
            weights = _weights(case, token, gate)
            for slot in range(num_slots):
                expert = case.experts[token, slot]
                out[token, gate, slot] = case.base[token, min(gate, case.base.shape[1] - 1), slot]
                out[token, gate, slot] += weights[expert] if expert >= 0 else 0.0
    return out


def _weights(case: GateCase, token: int, gate: int) -> list[float]:
    set_id, num_experts = case.set_ids[token, gate], case.num_experts[token]
    if set_id < 0:
        return [1.0 if set_id == ALL_EXPERTS else 0.0] * num_experts
    products = case.gates[LAYER, set_id, gate, :num_experts].astype(np.float64) * np.asarray(case.x[token], np.float64)
    logits = products.sum(1)  # not a matrix product, whose sums for equal experts may differ in the last bit
    if case.is_absolute[token]:
        logits = np.abs(logits)
    powers = np.exp(logits - logits.max())
    probs = list(powers / powers.sum())
    for expert in sorted(range(num_experts), key=lambda e: (-probs[e], e))[case.top_k[token] :]:
        probs[expert] = 0.0
    total = sum(probs) if case.renormalize[token] else 1.0
    return [p / total for p in probs]


def structs(
    num_tokens: int, in_features: int, num_gates: int, *, num_experts: int = 8, num_slots: int = 64, dtype: Any
) -> tuple[Any, ...]:
    """Shapes and dtypes of gate_mix's arrays, the layer being the last, to compile for."""
    struct = jax.ShapeDtypeStruct
    rule = struct((num_tokens,), jnp.int32)
    return (
        struct((num_tokens, in_features), dtype),
        struct((NUM_LAYERS, 3, num_gates, num_experts, in_features), jnp.float32),
        struct((num_tokens, num_gates), jnp.int32),
        GateRules(rule, rule, rule, rule),  # pyright: ignore[reportArgumentType]
        struct((num_tokens, num_slots), jnp.int32),
        struct((num_tokens, 1, num_slots), jnp.float32),
        struct((), jnp.int32),
    )
