"""Random problems for the bench: the adapters of one site in every storage that a competitor wants, and batches."""

import dataclasses
import functools
import random
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.maf_mvm.baselines import Composites, DenseLayer, copy_composites, dense_layer, plan_composites
from pallas_kernels.maf_mvm.config import token_tile_size
from pallas_kernels.maf_mvm.slots import ProjectionSlots
from pallas_kernels.pytree import pytree_dataclass, static_field
from pallas_kernels.segments import Segments, build_segments

Mixes = Literal["distinct", "one", "zipf"]

# How the adapters lie in memory. slots: the engine's slot array, cells of slot_rank rank rows; adapters: one adapter a
# cell; layers: the same, but each layer in arrays of its own, since XLA copies a slice before it multiplies by it;
# composites: each mix of the batch copied side by side, beforehand.
Storage = Literal["slots", "layers", "adapters", "composites"]

# Ops of one iteration of a timed loop, which XLA replays as one graph. Each has arrays of its own and takes the loop's
# counter as the layer: an index computed for each op would be a kernel more for each op.
UNROLL = 8


@dataclasses.dataclass(frozen=True)
class Problem:
    """One site at one rank.

    Attributes:
      num_adapters: adapters in the arrays, whether a batch uses them or not.
      rank: of every adapter; slot_rank: rank rows of a cell of the slot array.
      mix_size: adapters of each token in distinct and zipf mixes.
      cold_bytes: A and B that one walk over all layers reads for the smallest batch; more than the L2 cache holds.
      has_projection: whether to make base projections as well.
    """

    in_features: int
    widths: tuple[int, ...]
    num_adapters: int
    rank: int
    slot_rank: int
    mixes: Mixes
    mix_size: int
    dtype: str
    cold_bytes: int
    has_projection: bool

    @property
    def out_features(self) -> int:
        return sum(self.widths)

    @property
    def adapter_bytes(self) -> int:
        """A and B of one adapter in one layer, without padding."""
        rank_row = len(self.widths) * self.in_features + self.out_features
        return self.rank * rank_row * jnp.dtype(self.dtype).itemsize

    @property
    def slots_per_adapter(self) -> int:
        return -(-self.rank // self.slot_rank)

    def cold_layers(self, num_adapters: int) -> int:
        """Layers of each of UNROLL arrays, so that `num_adapters` of all of them fill `cold_bytes`."""
        return -(-self.cold_bytes // (UNROLL * num_adapters * self.adapter_bytes))


@pytree_dataclass
class Site:
    """The arrays that all batches share.

    Attributes:
      slots, adapters, layers: the same adapters in the storage of that name; UNROLL arrays each.
      projections: base projections [in_features, out_features], walked in turn; empty if not wanted.
    """

    slots: tuple[ProjectionSlots, ...]
    adapters: tuple[ProjectionSlots, ...]
    layers: tuple[DenseLayer, ...]
    projections: tuple[Float[Array, "in_features out_features"], ...]
    problem: Problem = static_field()


@pytree_dataclass
class Batch:
    """One decode batch.

    Attributes:
      x: activations; base: output of the base projections.
      slot_segments: segments over the slot array; adapter_segments: over the adapters.
      adapter_ids: adapters of the batch, ascending.
      composites: its distinct mixes; copied: these in memory, UNROLL arrays.
    """

    x: Float[Array, "batch in_features"]
    base: Float[Array, "batch out_features"]
    slot_segments: Segments
    adapter_segments: Segments
    adapter_ids: Int[Array, " num_active"]
    composites: Composites
    copied: tuple[ProjectionSlots, ...]

    @property
    def size(self) -> int:
        return self.x.shape[0]


def make_site(problem: Problem) -> Site:
    """Random A, B of order 1/sqrt(width); every layer holds the same, for they are there to be read, not to differ."""
    one = _random_layer(problem)
    num_layers = problem.cold_layers(1 if problem.mixes == "one" else problem.mix_size)
    adapters = _repeat(one, num_layers)
    is_same = problem.rank == problem.slot_rank
    return Site(
        problem=problem,
        slots=adapters if is_same else _repeat(_to_slots(one, problem), num_layers),
        adapters=adapters,
        layers=jax.jit(lambda slots: tuple(dense_layer(s, 0) for s in slots))(adapters),
        projections=_random_projections(problem) if problem.has_projection else (),
    )


def make_batch(site: Site, batch: int) -> Batch:
    """Random tokens of random mixes; see `random_mixes`."""
    problem = site.problem
    mixes = random_mixes(problem, batch)
    rows = [[dict(mix).get(adapter, 0.0) for adapter in range(problem.num_adapters)] for mix in mixes]
    tile_size = token_tile_size(batch)

    @jax.jit
    def segments(weights: Array) -> tuple[Segments, Segments]:
        in_slots = jnp.repeat(weights, problem.slots_per_adapter, axis=2)
        return build_segments(in_slots, tile_size=tile_size), build_segments(weights, tile_size=tile_size)

    slot_segments, adapter_segments = segments(jnp.asarray(rows, jnp.float32)[:, None])
    composites = plan_composites(mixes, tile_size=tile_size)
    copied = copy_composites(site.adapters[0], composites, jnp.int32(0))
    keys = jax.random.split(jax.random.key(batch))
    return Batch(
        x=jax.random.normal(keys[0], (batch, problem.in_features), problem.dtype),
        base=jax.random.normal(keys[1], (batch, problem.out_features), problem.dtype),
        slot_segments=slot_segments,
        adapter_segments=adapter_segments,
        adapter_ids=jnp.asarray(sorted({adapter for mix in mixes for adapter, _ in mix}), jnp.int32),
        composites=composites,
        copied=_repeat(copied, problem.cold_layers(composites.adapter_ids.size)),
    )


def random_mixes(problem: Problem, batch: int) -> list[list[tuple[int, float]]]:
    """Adapters and weights of each token, the same for each call.

    distinct: each token takes the next `mix_size` adapters, round about; one: all take adapter 0; zipf: `mix_size`
    different ones, drawn with popularity 1/rank.
    """
    rng = random.Random(batch)
    rows = []
    for token in range(batch):
        match problem.mixes:
            case "distinct":
                used = [(token * problem.mix_size + i) % problem.num_adapters for i in range(problem.mix_size)]
            case "one":
                used = [0]
            case "zipf":
                # The largest of u^(1/popularity) are a weighted draw without replacement.
                keys = [(rng.random() ** (i + 1), i) for i in range(problem.num_adapters)]
                used = [i for _, i in sorted(keys, reverse=True)[: problem.mix_size]]
        rows.append([(adapter, 0.4 if problem.mixes == "one" else rng.uniform(0.2, 0.5)) for adapter in sorted(used)])
    return rows


def _random_layer(problem: Problem) -> ProjectionSlots:
    rows, num_projections = len(problem.widths) * problem.rank, len(problem.widths)

    @jax.jit
    def make(key: Array) -> tuple[Array, Array, Array]:
        keys = jax.random.split(key, 3)
        a = jax.random.normal(keys[0], (1, problem.num_adapters, rows, problem.in_features), problem.dtype)
        b = jax.random.normal(keys[1], (1, problem.num_adapters, problem.rank, problem.out_features), problem.dtype)
        scale = jax.random.uniform(keys[2], (1, problem.num_adapters, num_projections), minval=0.5)
        return a * jnp.asarray(problem.in_features**-0.5, a.dtype), b * jnp.asarray(problem.rank**-0.5, b.dtype), scale

    a, b, scale = make(jax.random.key(problem.rank))
    return ProjectionSlots(a=a, b=b, scale=scale, widths=problem.widths)


@functools.partial(jax.jit, static_argnums=1)
def _repeat(one: ProjectionSlots, num_layers: int) -> tuple[ProjectionSlots, ...]:
    """UNROLL arrays of `num_layers` times the one layer of `one`."""
    many = jax.tree.map(lambda array: jnp.repeat(array, num_layers, 0, total_repeat_length=num_layers), one)
    return (many,) * UNROLL


def _random_projections(problem: Problem) -> tuple[Array, ...]:
    """Two or more base projections, so that one is out of the cache when its turn comes again."""
    shape = problem.in_features, problem.out_features
    size = shape[0] * shape[1] * jnp.dtype(problem.dtype).itemsize
    # A divisor of the unrolled loop, so that each op's projection is known when it is compiled.
    count = next((n for n in (2, 4) if n * size >= problem.cold_bytes), UNROLL)
    make = jax.jit(
        lambda key: jax.random.normal(key, shape, problem.dtype) * jnp.asarray(shape[0] ** -0.5, problem.dtype)
    )
    return tuple(make(key) for key in jax.random.split(jax.random.key(0), count))


def _to_slots(adapters: ProjectionSlots, problem: Problem) -> ProjectionSlots:
    """The same adapters in cells of `slot_rank` rank rows: several cells for one adapter, or one padded with zeros."""
    num_layers, num_adapters, rank, _ = adapters.b.shape
    num_projections, slot_rank, cells = adapters.num_projections, problem.slot_rank, problem.slots_per_adapter
    padding = (0, cells * slot_rank - rank)

    @jax.jit
    def convert(a: Array, b: Array, scale: Array) -> tuple[Array, Array, Array]:
        a = a.reshape(num_layers, num_adapters, num_projections, rank, -1)
        a = jnp.pad(a, ((0, 0), (0, 0), (0, 0), padding, (0, 0)))
        a = a.reshape(num_layers, num_adapters, num_projections, cells, slot_rank, -1)
        a = jnp.moveaxis(a, 3, 2).reshape(num_layers, num_adapters * cells, num_projections * slot_rank, -1)
        b = jnp.pad(b, ((0, 0), (0, 0), padding, (0, 0)))
        b = b.reshape(num_layers, num_adapters * cells, slot_rank, -1)
        return a, b, jnp.repeat(scale, cells, axis=1)

    a, b, scale = convert(adapters.a, adapters.b, adapters.scale)
    return ProjectionSlots(a=a, b=b, scale=scale, widths=adapters.widths)
