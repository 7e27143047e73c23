"""The jitted step: a flat batch of prefill chunks and decode rows goes through the model once.

Shapes are fixed by the bucket (`num_tokens`, `num_seqs`), the number of rows and the slot array; mixes, ranks, names
and lengths are values. A batch with num_tokens == num_seqs is a decode batch: token i belongs to sequence i.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dymerge_jax.attention import AttentionContext
from dymerge_jax.config import LlamaConfig
from dymerge_jax.gating import GateArray, GatedTokens, gated_tokens
from dymerge_jax.kv_cache import KVCache
from dymerge_jax.layers import rope_angles
from dymerge_jax.lora import SlotArray
from dymerge_jax.model import Implementations, Llama, MixContext
from pallas_kernels.maf_mvm import token_tile_size
from pallas_kernels.paged_attention import build_query_tiles, query_tile_size
from pallas_kernels.pytree import pytree_dataclass
from pallas_kernels.segments import Segments, build_segments


@pytree_dataclass
class AdapterMix:
    """The mix of each row, by slot.

    Attributes:
      weights: [num_rows, num_slots] float32 weights of the static mixes; zero where a row does not use a slot.
      gated_set_ids: [num_rows] int32 row of the gate array; -1 for rows without a gated set.
    """

    weights: Float[Array, "num_rows num_slots"]
    gated_set_ids: Int[Array, " num_rows"]


@pytree_dataclass
class StepBatch:
    """One step's work. Sequences that are not used have seq_lens 0.

    Attributes:
      tokens: [num_tokens] int32, new tokens of all sequences; padding between or after them may hold any valid id.
      rows: [num_seqs] int32, each sequence's row of `AdapterMix`, of the block tables and of `last_tokens`.
      seq_starts: [num_seqs] int32, flat index of each sequence's first new token.
      seq_lens: [num_seqs] int32, new tokens of each sequence.
      context_lens: [num_seqs] int32, tokens of each sequence that are in the cache already.
      use_last_token: [num_seqs] bool, the sequence's one new token is the last one sampled for its row: it never
        left the device.
    """

    tokens: Int[Array, " num_tokens"]
    rows: Int[Array, " num_seqs"]
    seq_starts: Int[Array, " num_seqs"]
    seq_lens: Int[Array, " num_seqs"]
    context_lens: Int[Array, " num_seqs"]
    use_last_token: Bool[Array, " num_seqs"]

    @property
    def is_decode(self) -> bool:
        """True for as many tokens as sequences: token i then belongs to sequence i."""
        return self.tokens.shape == self.rows.shape


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
    """

    slots: SlotArray
    gates: GateArray | None
    mix: AdapterMix
    block_tables: Int[Array, "num_rows blocks_per_seq"]
    last_tokens: Int[Array, " num_rows"]
    batch: StepBatch


def empty_batch(num_tokens: int, num_seqs: int) -> StepBatch:
    """A batch without work; under `jax.eval_shape`, the shapes of a bucket."""
    ints = jnp.zeros((num_seqs,), jnp.int32)
    return StepBatch(
        tokens=jnp.zeros((num_tokens,), jnp.int32),
        rows=ints,
        seq_starts=ints,
        seq_lens=ints,
        context_lens=ints,
        use_last_token=jnp.zeros((num_seqs,), bool),
    )


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
    """What every layer of a step needs to know of its tokens.

    Attributes:
      tokens: [num_tokens] int32 token ids.
      attention: where the tokens stand.
      segments: token–LoRA pairs sorted by slot, with the static weights.
      gated: which gate each token uses; None if there are no gated sets.
    """

    tokens: Int[Array, " num_tokens"]
    attention: AttentionContext
    segments: Segments
    gated: GatedTokens | None

    def mix(self, slots: SlotArray, gates: GateArray | None) -> MixContext:
        """The same for the layers, with the adapters and gates that it refers to."""
        return MixContext(slots=slots, segments=self.segments, gates=gates, tokens=self.gated)


def step_context(config: LlamaConfig, inputs: StepInputs, *, num_blocks: int, block_size: int) -> StepContext:
    """Places the tokens of one batch: which sequence, which KV block, which slots.

    Args:
      config: shape of the model.
      inputs: of the step.
      num_blocks, block_size: of the cache.
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
    with jax.named_scope("segments"):
        weights = jnp.where(places.is_real[:, None], mix.weights[token_rows], 0.0)
        is_used = weights != 0
        gated = None
        if gates is not None:
            set_ids = jnp.where(places.is_real, mix.gated_set_ids[token_rows], -1)
            gated = gated_tokens(gates, set_ids)
            is_used = is_used | gated.is_used
        segments = build_segments(weights[:, None, :], tile_size=token_tile_size(tokens.shape[0]), is_used=is_used)
    return StepContext(tokens=tokens, attention=attention, segments=segments, gated=gated)


def hidden_states(
    model: Llama, cache: KVCache, inputs: StepInputs, implementations: Implementations
) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
    """Runs one batch through the layers.

    Returns:
      [num_tokens, hidden] after the final norm, of no meaning for padding, and the cache with the batch's tokens in it.
    """
    context = step_context(model.config, inputs, num_blocks=cache.num_blocks, block_size=cache.block_size)
    mix = context.mix(inputs.slots, inputs.gates)
    return model(context.tokens, cache, context.attention, mix, implementations)


def last_logits(
    model: Llama, hidden: Float[Array, "num_tokens hidden"], batch: StepBatch
) -> Float[Array, "num_seqs vocab"]:
    """Logits after each sequence's last new token."""
    if not batch.is_decode:
        hidden = hidden[jnp.maximum(batch.seq_starts + batch.seq_lens - 1, 0)]
    return model.logits(hidden)


@functools.partial(jax.jit, static_argnames=("graph", "implementations"), donate_argnames=("cache",))
def forward_step(
    graph: nnx.GraphDef[Llama],
    state: nnx.State,
    cache: KVCache,
    inputs: StepInputs,
    implementations: Implementations = Implementations(),  # noqa: B008 (frozen)
) -> tuple[Float[Array, "num_seqs vocab"], KVCache]:
    """One step: returns the logits after each sequence's last new token, and the cache (donated, in place).

    Args:
      graph, state: the split model.
      cache: keys and values of all sequences; donated.
      inputs: what else the step reads.
      implementations: of the ops.

    Returns:
      [num_seqs, vocab] float32 logits, of no meaning for unused sequences, and the cache.
    """
    model = nnx.merge(graph, state)
    hidden, cache = hidden_states(model, cache, inputs, implementations)
    return last_logits(model, hidden, inputs.batch), cache
