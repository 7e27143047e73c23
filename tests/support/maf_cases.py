"""Inputs of the op maf_mvm: who uses which slots, and arrays around it."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.maf_mvm import ProjectionSlots, token_tile_size
from pallas_kernels.pytree import pytree_dataclass
from pallas_kernels.segments import Segments, build_segments

Mixes = Literal["identical", "distinct", "uniform", "zipf", "skewed"]
ALL_MIXES: tuple[Mixes, ...] = ("identical", "distinct", "uniform", "zipf", "skewed")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Shapes of one call."""

    num_tokens: int = 7
    num_slots: int = 6
    slot_rank: int = 8
    in_features: int = 64
    widths: tuple[int, ...] = (64, 32, 32)
    num_layers: int = 2
    num_gates: int = 1
    tile_size: int | None = None
    dtype: DTypeLike = jnp.float32


@pytree_dataclass
class Case:
    """Arguments of one call of maf_mvm."""

    x: Array
    slots: ProjectionSlots
    segments: Segments
    base: Array


def mix_matrix(
    rng: np.random.Generator, mixes: Mixes, num_tokens: int, num_slots: int, num_gates: int = 1, mix_size: int = 2
) -> np.ndarray:
    """[num_tokens, num_gates, num_slots] float32 weights in ±[0.2, 1].

    identical: every token uses the same slots; distinct: token t uses slot t alone; uniform: `mix_size` slots each, at
    random; zipf: at random with popularity 1/rank; skewed: all use slot 0, every fourth token one more.
    """
    weights = rng.uniform(0.2, 1, (num_tokens, num_gates, num_slots)) * rng.choice([-1, 1], (num_tokens, 1, num_slots))
    is_used = np.zeros((num_tokens, num_slots), bool)
    popularity = 1 / np.arange(1, num_slots + 1)
    for t in range(num_tokens):
        match mixes:
            case "identical":
                used = np.arange(mix_size)
            case "distinct":
                used = np.array([t % num_slots])
            case "uniform":
                used = rng.choice(num_slots, mix_size, replace=False)
            case "zipf":
                used = rng.choice(num_slots, mix_size, replace=False, p=popularity / popularity.sum())
            case "skewed":
                used = np.array([0] if t % 4 else [0, num_slots - 1])
        is_used[t, used] = True
    return np.where(is_used[:, None], weights, 0).astype(np.float32)


def make_case(rng: np.random.Generator, problem: Problem, weights: np.ndarray | None = None) -> Case:
    """Random arrays of order 1 for `problem`; slots that no weight touches hold NaN. By default uniform mixes."""
    p = problem
    if weights is None:
        weights = mix_matrix(rng, "uniform", p.num_tokens, p.num_slots, p.num_gates)
    rows, out_features = len(p.widths) * p.slot_rank, sum(p.widths)

    def normal(*shape: int, size: float) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) * np.float32(size)

    a = normal(p.num_layers, p.num_slots, rows, p.in_features, size=p.in_features**-0.5)
    b = normal(p.num_layers, p.num_slots, p.slot_rank, out_features, size=p.slot_rank**-0.5)
    scale = rng.uniform(0.25, 1, (p.num_layers, p.num_slots, len(p.widths))).astype(np.float32)
    unused = ~(weights != 0).any((0, 1))
    for array in (a, b, scale):
        array[:, unused] = np.nan
    return Case(
        x=jnp.asarray(normal(p.num_tokens, p.in_features, size=1), p.dtype),
        slots=ProjectionSlots(
            a=jnp.asarray(a, p.dtype), b=jnp.asarray(b, p.dtype), scale=jnp.asarray(scale), widths=p.widths
        ),
        segments=build_segments(jnp.asarray(weights), tile_size=p.tile_size or token_tile_size(p.num_tokens)),
        base=jnp.asarray(normal(p.num_tokens, out_features, size=1), p.dtype),
    )
