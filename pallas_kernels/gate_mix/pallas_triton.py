"""One Pallas program a token and gate (Triton lowering), several where there are many features; interpreted on a CPU.

A program reads the gates of its token's set out of the whole array: neither the layer nor the set is ever sliced out of
it. It computes the logits, the softmax and the top-k in registers and adds the weights to those of the slots. Where
several programs share a token's features, the one that ends last adds the logits of all in the order of the features,
so that the sums do not depend on who that is, and goes on alone.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.gate_mix.config import KernelConfig, kernel_config
from pallas_kernels.gate_mix.rules import ALL_EXPERTS, GateRules
from pallas_kernels.lent_counters import NONE_ENDED, lent_counters

_WHOLE = pl.BlockSpec(memory_space=pl.ANY)


def gate_mix(
    x: Float[Array, "num_tokens in_features"],
    gates: Float[Array, "num_layers num_sets num_gates max_experts in_features"],
    set_ids: Int[Array, "num_tokens num_gates"],
    rules: GateRules,
    experts: Int[Array, "num_tokens num_slots"],
    base: Float[Array, "num_tokens num_base_gates num_slots"],
    layer: Int[Array, ""],
) -> Float[Array, "num_tokens num_gates num_slots"]:
    """See `pallas_kernels.gate_mix.gate_mix`.

    Raises:
      NotImplementedError: If a set has more experts than the kernel supports.
    """
    config = kernel_config(
        max_experts=gates.shape[3], in_features=x.shape[1], num_gates=gates.shape[2], num_slots=experts.shape[1]
    )
    interpret = jax.default_backend() != "gpu"
    return _launch(x, gates, set_ids, rules, experts, base, layer, config=config, interpret=interpret)


# An inner jit with the layer as an argument: a step of 32 layers lowers the kernel of a site once.
@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _launch(
    x: Float[Array, "num_tokens in_features"],
    gates: Float[Array, "num_layers num_sets num_gates max_experts in_features"],
    set_ids: Int[Array, "num_tokens num_gates"],
    rules: GateRules,
    experts: Int[Array, "num_tokens num_slots"],
    base: Float[Array, "num_tokens num_base_gates num_slots"],
    layer: Int[Array, ""],
    *,
    config: KernelConfig,
    interpret: bool,
) -> Float[Array, "num_tokens num_gates num_slots"]:
    operands = [
        layer[None],
        set_ids,
        rules.num_experts,
        rules.top_k,
        rules.renormalize,
        rules.is_absolute,
        x,
        gates,
        experts,
        base,
    ]
    out_shape = [jax.ShapeDtypeStruct((*set_ids.shape, experts.shape[1]), jnp.float32)]
    if config.num_splits > 1:
        operands.append(lent_counters(set_ids, lowest=ALL_EXPERTS))
        partials = (config.num_splits, *set_ids.shape, config.padded_experts)
        out_shape.append(jax.ShapeDtypeStruct(partials, jnp.float32))
    out, *_ = pl.pallas_call(
        functools.partial(_kernel, config=config, interpret=interpret),
        grid=(*set_ids.shape, config.num_splits),
        in_specs=[_WHOLE] * len(operands),
        out_specs=[_WHOLE] * len(out_shape),
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="gate_mix",
    )(*operands)
    return out


def _kernel(*refs: Any, config: KernelConfig, interpret: bool) -> None:
    """Names the refs that are there with several splits only."""
    if config.num_splits > 1:
        *inputs, counters_ref, out_ref, partial_ref = refs
    else:
        *inputs, out_ref = refs
        counters_ref = partial_ref = None
    _mix(
        *inputs, out_ref=out_ref, counters_ref=counters_ref, partial_ref=partial_ref, config=config, interpret=interpret
    )


def _mix(
    layer_ref: Any,  # [1]
    set_ids_ref: Any,  # [num_tokens, num_gates]
    num_experts_ref: Any,  # [num_tokens], as the next three
    top_k_ref: Any,
    renormalize_ref: Any,
    is_absolute_ref: Any,
    x_ref: Any,  # [num_tokens, in_features]
    gates_ref: Any,  # [num_layers, num_sets, num_gates, max_experts, in_features]
    experts_ref: Any,  # [num_tokens, num_slots]
    base_ref: Any,  # [num_tokens, 1 or num_gates, num_slots]
    *,
    out_ref: Any,  # [num_tokens, num_gates, num_slots]
    counters_ref: Any,  # [num_tokens, num_gates] of `lent_counters`, or None
    partial_ref: Any,  # [num_splits, num_tokens, num_gates, padded_experts] logits of each program, or None
    config: KernelConfig,
    interpret: bool,
) -> None:
    token, gate, split = (pl.program_id(axis) for axis in range(3))
    set_id, layer = set_ids_ref[token, gate], layer_ref[0]
    # Loaded before they are needed: these and the set id wait for memory once.
    num_experts, top_k = num_experts_ref[token], top_k_ref[token]
    renormalize, is_absolute = renormalize_ref[token], is_absolute_ref[token]
    base_gate = jnp.minimum(gate, base_ref.shape[1] - 1)
    slots = _slot_blocks(experts_ref.shape[1], config)
    slot_experts = [plt.load(experts_ref.at[token, ids], mask=is_slot, other=-1) for ids, is_slot in slots]
    bases = [plt.load(base_ref.at[token, base_gate, ids], mask=is_slot, other=0.0) for ids, is_slot in slots]

    expert = jnp.arange(config.padded_experts, dtype=jnp.int32)
    exists = expert < jnp.minimum(num_experts, gates_ref.shape[3])

    def store(weights: Array) -> None:
        for (ids, is_slot), slot_expert, base in zip(slots, slot_experts, bases, strict=True):
            # A look-up in registers: of each row one entry at most is not zero; none for a slot without an expert, -1.
            is_own = slot_expert[:, None] == expert[None, :]
            own = jnp.where(is_own, weights[None, :], 0.0).sum(1)
            plt.store(out_ref.at[token, gate, ids], base + own, mask=is_slot)

    def store_gated(logits: Array) -> None:
        logits = jnp.where(is_absolute != 0, jnp.abs(logits), logits)
        kept = _kept_weights(jnp.where(exists, logits, -jnp.inf), exists, top_k)
        store(kept / jnp.where(renormalize != 0, kept.sum(), 1.0))

    @pl.when((set_id < 0) & (split == 0))
    def _ungated() -> None:
        store(jnp.full(expert.shape, set_id == ALL_EXPERTS, jnp.float32))

    @pl.when(set_id >= 0)
    def _gated() -> None:
        logits = _logits(x_ref, gates_ref, token, (layer, set_id, gate), exists, split, config)
        if config.num_splits == 1:
            store_gated(logits)
            return
        plt.store(partial_ref.at[split, token, gate, expert], logits)
        # All threads' stores come before the count, which releases them and acquires those of the others.
        if not interpret:
            plt.debug_barrier()
        num_ended = plt.atomic_add(counters_ref, (token, gate), jnp.int32(1))

        @pl.when(num_ended == NONE_ENDED + config.num_splits - 1)
        def _add_up() -> None:
            plt.store(counters_ref.at[token, gate], jnp.int32(NONE_ENDED))
            # Volatile: written by other programs of this launch.
            partials = [
                plt.load(partial_ref.at[i, token, gate, expert], volatile=True) for i in range(config.num_splits)
            ]
            store_gated(functools.reduce(jnp.add, partials))


def _slot_blocks(num_slots: int, config: KernelConfig) -> list[tuple[Array, Array]]:
    """The slots in blocks, each with the mask of those that are there."""
    starts = range(0, num_slots, config.block_slots)
    blocks = [start + jnp.arange(config.block_slots, dtype=jnp.int32) for start in starts]
    return [(ids, ids < num_slots) for ids in blocks]


def _logits(
    x_ref: Any,
    gates_ref: Any,
    token: Array,
    gate: tuple[Array, ...],
    exists: Array,
    split: Array,
    config: KernelConfig,
) -> Array:
    """[padded_experts] float32 sums over a split's features, elementwise: a tensor core would round the factors.

    Args:
      x_ref, gates_ref: see `_mix`.
      token: row of x.
      gate: the first three indices into the gates.
      exists: [padded_experts] experts that the set has; nothing else is read.
      split: whose features.
      config: block sizes.
    """
    in_features, block = x_ref.shape[1], config.block_features
    num_blocks = in_features // block
    if config.num_splits == 1:
        first, last, num_tail_columns = 0, num_blocks, in_features % block
    else:
        first = split * config.blocks_per_split
        last = jnp.minimum(first + config.blocks_per_split, num_blocks)
        num_tail_columns = (last == num_blocks).astype(jnp.int32) * (in_features % block)
    rows = jnp.arange(config.padded_experts, dtype=jnp.int32)

    def load(start: Array | int, size: int, num_columns: Array | int | None = None) -> tuple[Array, Array]:
        lanes = jnp.arange(size, dtype=jnp.int32)
        mask = jnp.broadcast_to(exists[:, None], (rows.shape[0], size))
        is_column = None
        if num_columns is not None:
            is_column = lanes < num_columns
            mask &= is_column[None, :]
        columns = start + lanes
        tile = plt.load(gates_ref.at[(*gate, rows[:, None], columns[None, :])], mask=mask, other=0.0)
        return tile, plt.load(x_ref.at[token, columns], mask=is_column, other=None if is_column is None else 0.0)

    def product(tile: Array, x: Array) -> Array:
        return tile * x.astype(jnp.float32)[None, :]

    def add_block(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        total, *loaded = carry
        ahead = load(i * block, block)  # in flight while the block before it is added
        return total + product(*loaded), *ahead

    tail = load(num_blocks * block, config.tail_features, num_tail_columns) if config.tail_features else None
    carry = jnp.zeros((rows.shape[0], block), jnp.float32), *load(first * block, block)
    total, *loaded = lax.fori_loop(first + 1, last, add_block, carry)
    logits = (total + product(*loaded)).sum(1)
    return logits if tail is None else logits + product(*tail).sum(1)


def _kept_weights(logits: Array, exists: Array, top_k: Array) -> Array:
    """[padded_experts] softmax of the logits, zero but for the top_k largest; the lower index wins a tie."""
    powers = jnp.exp(logits - logits.max())
    probs = powers / powers.sum()
    expert = jnp.arange(probs.shape[0], dtype=jnp.int32)
    mine, other = probs[:, None], probs[None, :]
    is_before = (other > mine) | ((other == mine) & (expert[None, :] < expert[:, None]))
    rank = is_before.astype(jnp.int32).sum(1, dtype=jnp.int32)
    return jnp.where(exists & (rank < top_k), probs, 0.0)
