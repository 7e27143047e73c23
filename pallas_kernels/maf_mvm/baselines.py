"""What others do in place of maf_mvm, as good XLA programs on the same inputs: the bench's competitors.

All of them keep one adapter per slot: `slots.slot_rank` is the adapter's whole rank, so none of them pays for the cells
of our slot array. What an eager engine knows on the host (which adapters the batch uses, and how many) is given to them
as arguments and not timed.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.maf_mvm.api import Implementation, maf_mvm
from pallas_kernels.maf_mvm.reference import add_to_base
from pallas_kernels.maf_mvm.slots import ProjectionSlots
from pallas_kernels.pytree import pytree_dataclass
from pallas_kernels.segments import Segments, build_segments

MAX_COMPOSITES = 32
"""Mixes of one step that `copy_sgmv_of_step` has room for."""

COMPOSITE_MIX_SIZE = 3
"""Slots of a mix that `copy_sgmv_of_step` has room for."""

# Adapters of one iteration of the naive loop: XLA then replays a graph for each iteration, not a kernel at a time.
_NAIVE_UNROLL = 8


@jax.jit
def naive(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens out_features"],
    adapter_ids: Int[Array, " num_active"],
    layer: Int[Array, ""],
) -> Float[Array, "num_tokens out_features"]:
    """A loop over the adapters of the batch: gather A and B, two matmuls, add to y.

    This is the loop of an eager engine (PEFT's mixed batches): one adapter after another, a few launches each, whatever
    their number. Two things are kinder to it than that: the launches are replayed by the device rather than dispatched
    from Python, and the loop's length is known when it is compiled, so that the host never waits for a loop condition.
    All tokens pass through every adapter, with weight zero where a token does not use it: a decode batch fits one tile
    of a matmul, so gathering an adapter's tokens first would only add launches.

    Args:
      adapter_ids: [num_active] slots that any token uses; the weights of all others must be zero.
    """
    num_tokens, rank = x.shape[0], slots.slot_rank

    def add_adapter(i: int | Array, ys: tuple[Array, ...]) -> tuple[Array, ...]:
        # XLA would merge the shrinks of several adapters into one matmul, and a loop is what cannot do that.
        waiting_x, adapter, ys = lax.optimization_barrier((x, adapter_ids[i], ys))
        u = _matmul("ti,ri->tr", waiting_x, slots.a[layer, adapter])
        u = u.reshape(num_tokens, 1, slots.num_projections, rank)
        weights = segments.weights[:, :, adapter]
        v = _weigh(u, weights[:, None], slots.scale[layer, adapter][None]).astype(x.dtype)
        # y stays in the dtype of the model, as an eager `result += ...` has it.
        return tuple(
            y + _matmul("tr,ro->to", v[:, 0, p], _b_of(slots, layer, adapter, columns)).astype(y.dtype)
            for p, (y, columns) in enumerate(zip(ys, slots.column_slices, strict=True))
        )

    num_active = adapter_ids.shape[0]
    ys = tuple(base[:, columns] for columns in slots.column_slices)
    ys = lax.fori_loop(0, num_active, add_adapter, ys, unroll=max(min(_NAIVE_UNROLL, num_active), 1))
    return jnp.concatenate(ys, 1).astype(x.dtype)


@jax.jit
def bmm(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens out_features"],
    adapter_ids: Int[Array, " num_active"],
    layer: Int[Array, ""],
) -> Float[Array, "num_tokens out_features"]:
    """Every token through every adapter of the batch at once, as LoraRetriever does: M o (B A x).

    A and B of the batch's adapters are gathered, then multiplied in one batched matmul each. The mapping matrix M is
    applied between them, on rank rows, rather than on outputs, which would be [num_tokens, num_active, out_features].

    Args:
      adapter_ids: [num_active] slots that any token uses; the weights of all others must be zero.
    """
    u = _matmul("ti,sri->tsr", x, slots.a[layer, adapter_ids])
    u = u.reshape(x.shape[0], adapter_ids.shape[0], slots.num_projections, slots.slot_rank)
    v = _weigh(u, jnp.swapaxes(segments.weights[:, :, adapter_ids], 1, 2), slots.scale[layer, adapter_ids])
    # Gathered for each projection on its own: columns of one gather would be copied once more.
    gather_b = jax.vmap(_b_of, in_axes=(None, None, 0, None))
    deltas = [
        _matmul("tsr,sro->to", v[:, :, p].astype(x.dtype), gather_b(slots, layer, adapter_ids, columns))
        for p, columns in enumerate(slots.column_slices)
    ]
    return add_to_base(base, jnp.concatenate(deltas, 1)).astype(x.dtype)


@pytree_dataclass
class DenseLayer:
    """All adapters of one layer, as matrices that a matmul takes as they are.

    Attributes:
      a: [num_adapters * num_projections * rank, in_features].
      b: for each projection, [num_adapters * rank, width].
      scale: [num_adapters, num_projections] float32.
    """

    a: Float[Array, "rows in_features"]
    b: tuple[Float[Array, "rank_rows _"], ...]
    scale: Float[Array, "num_adapters num_projections"]


def dense_layer(slots: ProjectionSlots, layer: int) -> DenseLayer:
    """One layer of `slots` in the form that `dense` takes."""
    a, b = slots.a[layer], slots.b[layer]
    return DenseLayer(
        a=a.reshape(-1, a.shape[-1]),
        b=tuple(
            b[:, :, columns].reshape(-1, width)
            for columns, width in zip(slots.column_slices, slots.widths, strict=True)
        ),
        scale=slots.scale[layer],
    )


@jax.jit
def dense(
    x: Float[Array, "num_tokens in_features"],
    adapters: DenseLayer,
    segments: Segments,
    base: Float[Array, "num_tokens out_features"],
) -> Float[Array, "num_tokens out_features"]:
    """All tokens through all adapters, used or not: one matmul down, one a projection up, the mix matrix between them.

    Unlike the implementation "dense" of maf_mvm, it takes the adapters that nobody uses to be finite and B to be split
    by projection, and so needs no masked copy of B.
    """
    num_adapters, num_projections = adapters.scale.shape
    u = _matmul("ti,ri->tr", x, adapters.a).reshape(x.shape[0], num_adapters, num_projections, -1)
    v = _weigh(u, jnp.swapaxes(segments.weights, 1, 2), adapters.scale).astype(x.dtype)
    deltas = [_matmul("tr,ro->to", v[:, :, p].reshape(x.shape[0], -1), b) for p, b in enumerate(adapters.b)]
    return add_to_base(base, jnp.concatenate(deltas, 1)).astype(x.dtype)


@pytree_dataclass
class Composites:
    """The distinct mixes of a batch, each to be copied into one adapter of rank mix_size * rank.

    Attributes:
      adapter_ids: [num_composites, mix_size] int32; a shorter mix repeats its first adapter with weight 0.
      weights: [num_composites, mix_size] float32.
      segments: which composite each token uses, over num_composites * mix_size cells: the rank rows of composite c are
        cells c * mix_size and following, one after another, and a token's weight for them is 1.
    """

    adapter_ids: Int[Array, "num_composites mix_size"]
    weights: Float[Array, "num_composites mix_size"]
    segments: Segments


def plan_composites(mixes: Sequence[Sequence[tuple[int, float]]], *, tile_size: int) -> Composites:
    """What a host that merges mixes decides once per batch; requests of equal mix share a composite.

    Args:
      mixes: for each token, its adapters and their weights, the same for all projections; empty for the base model.
      tile_size: tokens per tile of the segments.

    Raises:
      ValueError: If no token has a mix: there is nothing to copy.
    """
    distinct = sorted({tuple(mix) for mix in mixes if mix})
    if not distinct:
        raise ValueError("mixes holds no adapter at all, but a composite needs at least one; give some token a mix")
    mix_size = max(map(len, distinct))
    padded = [[*mix, *[(mix[0][0], 0.0)] * (mix_size - len(mix))] for mix in distinct]
    weights = [[[0.0] * (len(distinct) * mix_size)] for _ in mixes]
    for row, mix in zip(weights, mixes, strict=True):
        if mix:
            first = distinct.index(tuple(mix)) * mix_size
            row[0][first : first + len(mix)] = [1.0] * len(mix)
    return Composites(
        adapter_ids=jnp.asarray([[adapter for adapter, _ in mix] for mix in padded], jnp.int32),
        weights=jnp.asarray([[weight for _, weight in mix] for mix in padded], jnp.float32),
        segments=build_segments(jnp.asarray(weights, jnp.float32), tile_size=tile_size),
    )


@jax.jit
def copy_composites(slots: ProjectionSlots, composites: Composites, layer: Int[Array, ""]) -> ProjectionSlots:
    """Copies the adapters of each mix side by side, the mix's weights folded into A; the copy has one layer."""
    adapters = composites.adapter_ids.reshape(-1)
    factors = composites.weights.reshape(-1, 1) * slots.scale[layer, adapters]
    a = slots.a[layer, adapters]
    rows = a.reshape(a.shape[0], slots.num_projections, slots.slot_rank, -1)
    folded = (factors[:, :, None, None] * rows.astype(jnp.float32)).astype(a.dtype).reshape(a.shape)
    return ProjectionSlots(
        a=folded[None],
        b=slots.b[layer, adapters][None],
        scale=jnp.ones((1, *factors.shape), jnp.float32),
        widths=slots.widths,
    )


def sgmv(
    x: Float[Array, "num_tokens in_features"],
    copied: ProjectionSlots,
    composites: Composites,
    base: Float[Array, "num_tokens out_features"],
    layer: Int[Array, ""],
    *,
    implementation: Implementation | None,
) -> Float[Array, "num_tokens out_features"]:
    """Each token through its one composite: our own kernel, as fast an SGMV as we have."""
    return maf_mvm(x, copied, composites.segments, base, layer=layer, implementation=implementation)


@functools.partial(jax.jit, static_argnames="implementation")
def copy_sgmv(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    composites: Composites,
    base: Float[Array, "num_tokens out_features"],
    layer: Int[Array, ""],
    *,
    implementation: Implementation | None,
) -> Float[Array, "num_tokens out_features"]:
    """Copy+SGMV: merges every mix of the batch into a composite in memory, then one SGMV over the composites."""
    with jax.named_scope("copy"):
        copied = copy_composites(slots, composites, layer)
    return sgmv(x, copied, composites, base, jnp.int32(0), implementation=implementation)


def bmm_of_step(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens out_features"],
    layer: Int[Array, ""],
) -> Float[Array, "num_tokens out_features"]:
    """`bmm` with the signature of `maf_mvm`, in which the adapters of the batch are known on the device only.

    Gathers as many slots as the segments promise at most, or all; all of those must hold finite values.
    """
    num_gathered = slots.num_slots
    if segments.max_segments is not None and segments.num_tiles == 1:
        num_gathered = min(num_gathered, segments.max_segments)
    if num_gathered == slots.num_slots:
        adapter_ids = jnp.arange(num_gathered, dtype=jnp.int32)
    else:
        adapter_ids = segments.slot_ids[0, :num_gathered]  # the used ones first; the others have weight 0
    return bmm(x, slots, segments, base, adapter_ids, layer)


def copy_sgmv_of_step(
    x: Float[Array, "num_tokens in_features"],
    slots: ProjectionSlots,
    segments: Segments,
    base: Float[Array, "num_tokens out_features"],
    layer: Int[Array, ""],
) -> Float[Array, "num_tokens out_features"]:
    """`copy_sgmv` with the signature of `maf_mvm`: the mixes of the step are found on the device.

    For steps of at most MAX_COMPOSITES different mixes of at most COMPOSITE_MIX_SIZE slots each, whatever the tokens;
    of larger ones it drops the rest. Static mixes only. Shapes are fixed: a copy is made for each token, up to
    MAX_COMPOSITES, though tokens of equal mix read one.
    """
    composites = composites_of_step(segments)
    return copy_sgmv(x, slots, composites, base, layer, implementation=None)


def composites_of_step(segments: Segments) -> Composites:
    """The distinct mixes among the tokens of a step, see `copy_sgmv_of_step`; the unused composites have weight 0."""
    weights = segments.weights[:, 0]
    num_tokens, num_slots = weights.shape
    num_composites, mix_size = min(num_tokens, MAX_COMPOSITES), min(num_slots, COMPOSITE_MIX_SIZE)
    first = (weights[:, None] == weights[None]).all(-1).argmax(1)  # [num_tokens] first token of the same mix
    is_first = (first == jnp.arange(num_tokens)) & (weights != 0).any(1)
    composite_ids = (jnp.cumsum(is_first) - 1)[first]
    (chosen,) = jnp.nonzero(is_first, size=num_composites, fill_value=num_tokens)
    mixes = jnp.pad(weights, ((0, 1), (0, 0)))[chosen]
    adapter_ids = lax.top_k(jnp.abs(mixes), mix_size)[1].astype(jnp.int32)
    mix_weights = jnp.take_along_axis(mixes, adapter_ids, axis=1)
    is_member = (composite_ids[:, None] == jnp.arange(num_composites)[None]) & (weights != 0).any(1)[:, None]
    cells = is_member[:, :, None] & (mix_weights != 0)[None]
    return Composites(
        adapter_ids=adapter_ids,
        weights=mix_weights,
        segments=build_segments(
            cells.reshape(num_tokens, 1, num_composites * mix_size).astype(jnp.float32), tile_size=segments.tile_size
        ),
    )


def _matmul(subscripts: str, left: Array, right: Array) -> Array:
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(subscripts, left, right, precision=precision, preferred_element_type=jnp.float32)


def _b_of(
    slots: ProjectionSlots, layer: Int[Array, ""], adapter: Int[Array, ""], columns: slice
) -> Float[Array, "slot_rank width"]:
    """B of one projection of one adapter, in one slice that a matmul may read in place."""
    width = columns.stop - columns.start
    start = (layer, adapter, jnp.int32(0), jnp.int32(columns.start))
    return lax.dynamic_slice(slots.b, start, (1, 1, slots.slot_rank, width))[0, 0]


def _weigh(
    u: Float[Array, "num_tokens num_active num_projections rank"],
    weights: Float[Array, "num_tokens num_active num_gates"],
    scale: Float[Array, "num_active num_projections"],
) -> Float[Array, "num_tokens num_active num_projections rank"]:
    """weight * scale * u where a token uses an adapter, else 0 whatever u is."""
    weights = jnp.broadcast_to(weights, u.shape[:3])[..., None]
    return jnp.where(weights != 0, weights * scale[None, ..., None] * u, 0)
