"""The jitted step: a flat batch of prefill chunks and decode rows goes through the model once.

Shapes are fixed by the bucket (`num_tokens`, `num_seqs`), the number of rows and the slot array; mixes, ranks, names
and lengths are values. A batch with num_tokens == num_seqs is a decode batch: token i belongs to sequence i.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dymerge_jax.attention import AttentionContext
from dymerge_jax.config import LlamaConfig
from dymerge_jax.gating import GateArray, GatedTokens, gated_tokens
from dymerge_jax.kv_cache import KVCache
from dymerge_jax.layers import rope_angles
from dymerge_jax.lora import SlotArray
from dymerge_jax.model import Implementations, Llama, MixContext, SequenceEnds
from dymerge_jax.sampling import SampledTokens, SampleTargets, greedy_tokens, remember, sample
from dymerge_jax.step_batch import AdapterMix, StepBatch, unpack_batch, unpack_rows, unpack_targets
from dymerge_jax.xlora import ExpertWeights, XLoraArray, XLoraTokens, expert_weights, scaling_mix, xlora_tokens
from pallas_kernels.maf_mvm import token_tile_size
from pallas_kernels.paged_attention import build_query_tiles, query_tile_size
from pallas_kernels.pytree import pytree_dataclass
from pallas_kernels.segments import Segments, build_segments


@pytree_dataclass
class StepInputs:
    """What a step reads besides the weights and the cache.

    Attributes:
      slots: adapters on the device.
      gates: gates of the gated sets; None without any.
      mix: mixes by row.
      block_tables: [num_rows, blocks_per_seq] int32, block ids of each row's sequence; entries past its last block may
        hold anything.
      last_tokens: [num_rows] int32, token last sampled for each row.
      batch: the work.
      xlora: X-LoRA sets; with them the step begins with a scaling pass over the tokens of their rows. None for a step
        of whose rows none uses one.
      scaling_tables: as `block_tables`, of the KV cache of that pass, which lies in other blocks; None without `xlora`.
    """

    slots: SlotArray
    gates: GateArray | None
    mix: AdapterMix
    block_tables: Int[Array, "num_rows blocks_per_seq"]
    last_tokens: Int[Array, " num_rows"]
    batch: StepBatch
    xlora: XLoraArray | None = None
    scaling_tables: Int[Array, "num_rows blocks_per_seq"] | None = None


@pytree_dataclass
class _TokenPlaces:
    """Attributes:
    seq_ids: [num_tokens] int32, sequence of each token; 0 for padding.
    positions: [num_tokens] int32, position in its sequence; 0 for padding.
    is_real: [num_tokens] bool, False for padding.
    """

    seq_ids: Int[Array, " num_tokens"]
    positions: Int[Array, " num_tokens"]
    is_real: Bool[Array, " num_tokens"]


def _token_places(batch: StepBatch) -> _TokenPlaces:
    if batch.is_decode:
        is_real = batch.seq_lens > 0
        seq_ids = jnp.arange(batch.rows.shape[0], dtype=jnp.int32)
        return _TokenPlaces(seq_ids=seq_ids, positions=jnp.where(is_real, batch.context_lens, 0), is_real=is_real)
    index = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)[:, None]
    starts, lens = batch.seq_starts[None, :], batch.seq_lens[None, :]
    is_member = (index >= starts) & (index < starts + lens)
    seq_ids = jnp.argmax(is_member, axis=1).astype(jnp.int32)
    is_real = is_member.any(1)
    positions = batch.context_lens[seq_ids] + index[:, 0] - batch.seq_starts[seq_ids]
    return _TokenPlaces(seq_ids=seq_ids, positions=jnp.where(is_real, positions, 0), is_real=is_real)


@pytree_dataclass
class StepContext:
    """What the layers of a step need to know of its tokens.

    Attributes:
      tokens: [num_tokens] int32 token ids.
      attention: where the tokens stand.
      segments: token–LoRA pairs sorted by slot, with the static weights; None for a step without adapters.
      gated: which gate each token uses; None if there are no gated sets.
      xlora: which X-LoRA set each token uses; None for a step or a pass without them.
    """

    tokens: Int[Array, " num_tokens"]
    attention: AttentionContext
    segments: Segments | None
    gated: GatedTokens | None
    xlora: XLoraTokens | None = None

    def mix(self, slots: SlotArray, gates: GateArray | None, experts: ExpertWeights | None = None) -> MixContext:
        """The same for the layers, with the adapters, gates and X-LoRA weights that it refers to."""
        return MixContext(slots=slots, segments=self.segments, gates=gates, tokens=self.gated, expert_weights=experts)


def step_context(
    config: LlamaConfig, inputs: StepInputs, *, num_blocks: int, block_size: int, max_slots: int | None = None
) -> StepContext:
    """Places the tokens of one batch: which sequence, which KV block, which slots.

    Args:
      config: shape of the model.
      inputs: of the step.
      num_blocks, block_size: of the cache.
      max_slots: the rows use no more slots than that together; 0 if all are on the base model, None says nothing.
    """
    batch, mix, gates = inputs.batch, inputs.mix, inputs.gates
    places = _token_places(batch)
    token_rows = batch.rows[places.seq_ids]
    tokens = jnp.where(batch.use_last_token[places.seq_ids], inputs.last_tokens[token_rows], batch.tokens)

    with jax.named_scope("attention_context"):
        seq_tables = inputs.block_tables[batch.rows]
        block_ids = seq_tables[places.seq_ids, places.positions // block_size]
        cos, sin = rope_angles(places.positions, config.head_dim, config.rope)
        attention = AttentionContext(
            cos=cos,
            sin=sin,
            block_ids=jnp.where(places.is_real, block_ids, num_blocks),
            offsets=places.positions % block_size,
            block_tables=seq_tables,
            tiles=build_query_tiles(
                batch.seq_starts,
                batch.seq_lens,
                batch.context_lens,
                num_tokens=batch.tokens.shape[0],
                tile_size=query_tile_size(batch.tokens.shape[0], batch.rows.shape[0]),
            ),
        )
    if max_slots == 0:
        return StepContext(tokens=tokens, attention=attention, segments=None, gated=None)
    with jax.named_scope("segments"):
        weights = jnp.where(places.is_real[:, None], mix.weights[token_rows], 0.0)
        is_used = weights != 0
        gated = xlora = None
        set_ids = jnp.where(places.is_real, mix.gated_set_ids[token_rows], -1)
        if gates is not None:
            gated = gated_tokens(gates, set_ids)
            is_used = is_used | gated.is_used
        if inputs.xlora is not None:
            xlora = xlora_tokens(inputs.xlora, set_ids)
            is_used = is_used | (xlora.experts >= 0)
        segments = build_segments(
            weights[:, None, :],
            tile_size=token_tile_size(tokens.shape[0]),
            is_used=is_used,
            max_segments=max_slots,
        )
    return StepContext(tokens=tokens, attention=attention, segments=segments, gated=gated, xlora=xlora)


def scaling_inputs(inputs: StepInputs) -> tuple[StepInputs, int | None]:
    """The scaling pass of a step with X-LoRA sets, as a step without them.

    Returns:
      Its inputs, in which rows without such a set have nothing to do; and what it is to be given as `max_slots`.
    """
    xlora, tables, batch = inputs.xlora, inputs.scaling_tables, inputs.batch
    assert xlora is not None, "a step without X-LoRA sets has no scaling pass"
    assert tables is not None, "a scaling pass needs a KV cache of its own"
    has_set = inputs.mix.gated_set_ids[batch.rows] <= -2
    first = StepInputs(
        slots=inputs.slots,
        gates=None,
        mix=scaling_mix(xlora, inputs.mix),
        block_tables=tables,
        last_tokens=inputs.last_tokens,
        batch=dataclasses.replace(batch, seq_lens=jnp.where(has_set, batch.seq_lens, 0)),
    )
    return first, 0 if xlora.pass_weights is None else None


def hidden_states(
    model: Llama,
    cache: KVCache,
    inputs: StepInputs,
    implementations: Implementations,
    *,
    max_slots: int | None = None,
    ends_only: bool = False,
) -> tuple[Float[Array, "num_read hidden"], KVCache]:
    """Runs one batch through the layers, twice if its program is for X-LoRA sets.

    Args:
      model, cache, inputs, implementations, max_slots: of the step.
      ends_only: only each sequence's last new token is read: of the last layer the others get keys and values alone.

    Returns:
      [num_tokens, hidden] after the final norm, or [num_seqs, hidden] with `ends_only`; of no meaning for padding and
      unused sequences. And the cache with the batch's tokens in it.
    """
    sizes = {"num_blocks": cache.num_blocks, "block_size": cache.block_size, "max_slots": max_slots}
    context = step_context(model.config, inputs, **sizes)
    experts = None
    if inputs.xlora is not None:
        assert context.xlora is not None, "a program without adapters cannot serve X-LoRA sets"
        with jax.named_scope("scaling_pass"):
            first, max_first_slots = scaling_inputs(inputs)
            hidden, cache = hidden_states(model, cache, first, implementations, max_slots=max_first_slots)
            experts = expert_weights(model.config, inputs.xlora, context.xlora, hidden)
    mix, ends = context.mix(inputs.slots, inputs.gates, experts), None
    if ends_only and not inputs.batch.is_decode:
        with jax.named_scope("ends"):
            index = last_new_tokens(inputs.batch)
            end = step_context(model.config, dataclasses.replace(inputs, batch=ends_batch(inputs.batch)), **sizes)
            end_experts = jax.tree.map(lambda array: array[index], experts)
            ends = SequenceEnds(index, end.attention.tiles, end.mix(inputs.slots, inputs.gates, end_experts))
    return model(context.tokens, cache, context.attention, mix, implementations, ends)


def last_new_tokens(batch: StepBatch) -> Int[Array, " num_seqs"]:
    """Flat index of each sequence's last new token; any for unused sequences."""
    return jnp.maximum(batch.seq_starts + batch.seq_lens - 1, 0)


def ends_batch(batch: StepBatch) -> StepBatch:
    """Each sequence's last new token, as a decode step of its own."""
    return StepBatch(
        tokens=batch.tokens[last_new_tokens(batch)],
        rows=batch.rows,
        seq_starts=jnp.arange(batch.rows.shape[0], dtype=jnp.int32),
        seq_lens=jnp.minimum(batch.seq_lens, 1),
        context_lens=batch.context_lens + jnp.maximum(batch.seq_lens - 1, 0),
        use_last_token=batch.use_last_token,
    )


Weights = tuple[Array | jax.ShapeDtypeStruct, ...]
"""All arrays of a module, or their shapes to compile for."""


@dataclasses.dataclass(frozen=True)
class ModelStructure[M: nnx.Module]:
    """The static half of a module whose other half is a plain tuple of arrays.

    JAX takes such a tuple apart in C++ (6 µs for 200 arrays) and an nnx.State in Python (130 µs), with every call.
    """

    graph: nnx.GraphDef[M]
    state: Any  # a PyTreeDef, hashable

    def merge(self, weights: Weights) -> M:
        """The module."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.state, weights))


def split_weights[M: nnx.Module](graph: nnx.GraphDef[M], state: nnx.State) -> tuple[ModelStructure[M], Weights]:
    """A split module as a static structure and a tuple of arrays."""
    weights, treedef = jax.tree.flatten(state)
    return ModelStructure(graph, treedef), tuple(weights)


@pytree_dataclass
class StepTables:
    """What a step reads besides the weights, the cache and its batch.

    Attributes:
      slots: adapters on the device.
      gates: gates of the gated sets; None without any.
      rows: [num_rows, num_slots + 6] int32, see `PackedRows`.
      block_tables: [num_rows, blocks_per_seq] int32, see `StepInputs`; may lie on the host.
      xlora, scaling_tables: see `StepInputs`.
    """

    slots: SlotArray
    gates: GateArray | None
    rows: Int[Array, "num_rows row_len"]
    block_tables: Int[Array | np.ndarray, "num_rows blocks_per_seq"]
    xlora: XLoraArray | None = None
    scaling_tables: Int[Array | np.ndarray, "num_rows blocks_per_seq"] | None = None

    def inputs(self, batch: StepBatch, last_tokens: Int[Array, " num_rows"]) -> StepInputs:
        """The same with a batch."""
        mix, _ = unpack_rows(self.rows)
        tables, scaling_tables = jax.tree.map(jnp.asarray, (self.block_tables, self.scaling_tables))
        return StepInputs(self.slots, self.gates, mix, tables, last_tokens, batch, self.xlora, scaling_tables)


@pytree_dataclass
class StepResult:
    """What takes the place of a donated argument comes first.

    JAX gives the memory of a donated argument to the first result of its shape. Were `tokens` before `last_tokens`, it
    would go to them, the step would copy last_tokens, and what reads them in its CUDA graph would be set anew with
    every step.

    Attributes:
      last_tokens: [num_rows] int32, with the greedy tokens of the sequences that sample.
      cache: with the batch's keys and values.
      logits: [num_seqs, vocab] float32 after each sequence's last new token, of no meaning for unused sequences.
      tokens: [num_seqs] int32, their greedy tokens.
    """

    last_tokens: Int[Array, " num_rows"]
    cache: KVCache
    logits: Float[Array, "num_seqs vocab"]
    tokens: Int[Array, " num_seqs"]


@functools.partial(
    jax.jit,
    static_argnames=("structure", "num_seqs", "max_slots", "implementations"),
    donate_argnames=("cache", "last_tokens"),
)
def forward_step(
    structure: ModelStructure[Llama],
    weights: Weights,
    cache: KVCache,
    last_tokens: Int[Array, " num_rows"],
    tables: StepTables,
    batch: Int[Array, " packed_len"],
    *,
    num_seqs: int,
    max_slots: int | None = None,
    implementations: Implementations = Implementations(),  # noqa: B008 (frozen)
) -> StepResult:
    """One step, greedy: all that a step needs if none of its rows draws or wants log probabilities.

    Args:
      structure, weights: the split model.
      cache: keys and values of all sequences; donated, updated in place.
      last_tokens: [num_rows] int32, token last sampled for each row; donated.
      tables: what else the step reads.
      batch: [num_tokens + 7 * num_seqs] int32, see `PackedBatch`.
      num_seqs: sequences of the batch.
      max_slots: a program for rows that use no more slots than that together does less for them. None is for any
        number. Rows on the base model get the same from all, to the bit where `lora_linear` takes one launch.
      implementations: of the ops.
    """
    return _step(structure.merge(weights), cache, last_tokens, tables, batch, num_seqs, max_slots, implementations)


def _step(
    model: Llama,
    cache: KVCache,
    last_tokens: Int[Array, " num_rows"],
    tables: StepTables,
    batch: Int[Array, " packed_len"],
    num_seqs: int,
    max_slots: int | None,
    implementations: Implementations,
) -> StepResult:
    work, targets = unpack_batch(batch, num_seqs)
    inputs = tables.inputs(work, last_tokens)
    hidden, cache = hidden_states(model, cache, inputs, implementations, max_slots=max_slots, ends_only=True)
    last_tokens, logits, tokens = finish_step(model, hidden, last_tokens, targets)
    return StepResult(last_tokens, cache, logits, tokens)


@pytree_dataclass
class StepsResult:
    """Attributes, in the order that `StepResult` explains:
    last_tokens, cache: after the last step.
    tokens: [num_steps, num_seqs] int32, the greedy tokens of each step.
    """

    last_tokens: Int[Array, " num_rows"]
    cache: KVCache
    tokens: Int[Array, "num_steps num_seqs"]


@functools.partial(
    jax.jit,
    static_argnames=("structure", "num_seqs", "max_slots", "implementations"),
    donate_argnames=("cache", "last_tokens"),
)
def forward_steps(
    structure: ModelStructure[Llama],
    weights: Weights,
    cache: KVCache,
    last_tokens: Int[Array, " num_rows"],
    tables: StepTables,
    batches: Int[Array, "num_steps packed_len"],
    *,
    num_seqs: int,
    max_slots: int | None = None,
    implementations: Implementations = Implementations(),  # noqa: B008 (frozen)
) -> StepsResult:
    """What as many calls of `forward_step` do one after another, for the host's work of one.

    Args:
      structure, weights, cache, last_tokens, num_seqs, max_slots, implementations: see `forward_step`.
      tables: what the steps read besides, the blocks of the last one included.
      batches: [num_steps, num_tokens + 7 * num_seqs] int32, the steps' batches in order.
    """
    model = structure.merge(weights)

    def step(i: Array, done: StepsResult) -> StepsResult:
        result = _step(
            model, done.cache, done.last_tokens, tables, batches[i], num_seqs, max_slots, implementations
        )  # fmt: skip
        return StepsResult(result.last_tokens, result.cache, done.tokens.at[i].set(result.tokens))

    tokens = jnp.zeros((batches.shape[0], num_seqs), jnp.int32)
    return jax.lax.fori_loop(0, batches.shape[0], step, StepsResult(last_tokens, cache, tokens))


def finish_step(
    model: Llama,
    hidden: Float[Array, "num_seqs hidden"],
    last_tokens: Int[Array, " num_rows"],
    targets: SampleTargets,
) -> tuple[Int[Array, " num_rows"], Float[Array, "num_seqs vocab"], Int[Array, " num_seqs"]]:
    """What comes after each sequence's final norm: last_tokens with the greedy tokens, logits, and those tokens."""
    logits = model.logits(hidden)
    tokens = greedy_tokens(logits)
    return remember(last_tokens, targets, tokens), logits, tokens


@functools.partial(jax.jit, static_argnames="with_logprobs", donate_argnames="last_tokens")
def sample_step(
    logits: Float[Array, "num_seqs vocab"],
    last_tokens: Int[Array, " num_rows"],
    rows: Int[Array, "num_rows row_len"],
    seqs: Int[Array, "num_fields num_seqs"],
    *,
    with_logprobs: bool,
) -> tuple[Int[Array, " num_rows"], SampledTokens]:
    """Follows a step in which some row draws or wants log probabilities; replaces the step's greedy tokens.

    Args:
      logits: [num_seqs, vocab] float32 of the step.
      last_tokens: [num_rows] int32 of the step; donated.
      rows: [num_rows, num_slots + 6] int32, see `PackedRows`.
      seqs: [7, num_seqs] int32 of the step's `PackedBatch`.
      with_logprobs: also return log probabilities.

    Returns:
      The new last_tokens, in the memory of the old, and the tokens, of no meaning for sequences that do not sample.
    """
    targets = unpack_targets(seqs)
    _, params = unpack_rows(rows)
    sampled = sample(logits, params, targets, with_logprobs=with_logprobs)
    return remember(last_tokens, targets, sampled.tokens), sampled
