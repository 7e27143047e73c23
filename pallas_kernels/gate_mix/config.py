"""How the Pallas kernel of gate_mix is cut up, from the shapes alone."""

import dataclasses

from jax.experimental import pallas as pl

MAX_EXPERTS = 128
"""Of one set: the ranks of the top-k are counted in registers, by a comparison of each expert with each."""

# Gates that a program loads at once: 64 KiB, in flight together, are what a multiprocessor needs to wait for the L2
# cache once and not once a line. 32 registers a thread of 16 warps; three such tiles are live (loaded, awaited, sum).
_MAX_TILE = 16384
_MIN_TILE_PER_WARP = 512
_MAX_WARPS = 16

# Programs a token, of all its gates, and the blocks of features that a program reads in the mean at least where several
# share a gate: adding their sums takes about as long as a block. Nothing here depends on the number of tokens, so that
# the sums of a token have one order.
_MAX_PROGRAMS_PER_TOKEN = 4
_MIN_BLOCKS_PER_PROGRAM = 2

# Slots whose expert is looked up at once, times the experts.
_MAX_LOOKUP = 16384


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Block sizes and launch parameters: thought out; others were not measured.

    Attributes:
      padded_experts: rows of a tile of gates, a power of two.
      block_features: its columns, a power of two.
      tail_features: in_features past the last whole block, rounded up to a power of two; 0 without any.
      num_splits: programs that share the features of a token and gate.
      blocks_per_split: blocks that each of them reads; the last at least one, and the tail.
      block_slots: slots written at once, a power of two.
      num_warps: warps per program.
    """

    padded_experts: int
    block_features: int
    tail_features: int
    num_splits: int
    blocks_per_split: int
    block_slots: int
    num_warps: int


def kernel_config(*, max_experts: int, in_features: int, num_gates: int, num_slots: int) -> KernelConfig:
    """Picks the kernel's configuration from static shapes.

    Raises:
      NotImplementedError: If a set has more experts than the kernel can rank.
    """
    if max_experts > MAX_EXPERTS:
        raise NotImplementedError(
            f"a set has {max_experts} experts, but pallas_triton ranks up to {MAX_EXPERTS}; use 'reference'"
        )
    padded_experts = max(2, pl.next_power_of_2(max_experts))
    whole = pl.next_power_of_2(in_features + 1) // 2  # the largest power of two that fits
    block_features = min(whole, _MAX_TILE // padded_experts)
    num_blocks, rest = divmod(in_features, block_features)
    most_splits = max(1, min(_MAX_PROGRAMS_PER_TOKEN // num_gates, -(-num_blocks // _MIN_BLOCKS_PER_PROGRAM)))
    blocks_per_split = -(-num_blocks // most_splits)
    tile = padded_experts * block_features
    return KernelConfig(
        padded_experts=padded_experts,
        block_features=block_features,
        tail_features=pl.next_power_of_2(rest) if rest else 0,
        num_splits=-(-num_blocks // blocks_per_split),
        blocks_per_split=blocks_per_split,
        block_slots=min(pl.next_power_of_2(num_slots), _MAX_LOOKUP // padded_experts),
        num_warps=min(pl.next_power_of_2(-(-tile // _MIN_TILE_PER_WARP)), _MAX_WARPS),
    )
