"""generate(batch, adapter_mix): the step in a loop on the device, without a server."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt

from dymerge_jax.gating import GateArray
from dymerge_jax.kv_cache import KVCache, empty_cache
from dymerge_jax.lora import SlotArray
from dymerge_jax.model import Implementations, Llama
from dymerge_jax.sampling import SamplingParams, device_seed, pick_tokens
from dymerge_jax.step import StepInputs, hidden_states
from dymerge_jax.step_batch import AdapterMix, StepBatch
from dymerge_jax.xlora import XLoraArray
from pallas_kernels.pytree import pytree_dataclass

_BLOCK_SIZE = 16


@pytree_dataclass
class Batch:
    """Prompts of one batch, padded on the right.

    Attributes:
      tokens: [num_seqs, prompt_len] int32; what lies past a row's length is ignored.
      lengths: [num_seqs] int32, tokens of each prompt, at least 1.
    """

    tokens: Int[Array, "num_seqs prompt_len"]
    lengths: Int[Array, " num_seqs"]


@pytree_dataclass
class GenerateOutput:
    """Attributes:
    tokens: [num_seqs, max_new_tokens] int32, what was generated; 0 past a row's length.
    lengths: [num_seqs] int32, generated tokens of each row, the end token not counted.
    """

    tokens: Int[Array, "num_seqs max_new_tokens"]
    lengths: Int[Array, " num_seqs"]


@pytree_dataclass
class _DecodeState:
    """Carry of the decode loop.

    Attributes:
      step: [] int32, tokens written so far.
      current: [num_seqs] int32, each row's next token to write and to run.
      lengths: [num_seqs] int32, tokens written, per row.
      is_done: [num_seqs] bool, rows whose current token is an end token, or that ended before.
      tokens: [num_seqs, max_new_tokens] int32.
      cache: keys and values.
    """

    step: Int[Array, ""]
    current: Int[Array, " num_seqs"]
    lengths: Int[Array, " num_seqs"]
    is_done: Bool[Array, " num_seqs"]
    tokens: Int[Array, "num_seqs max_new_tokens"]
    cache: KVCache


def _block_tables(num_seqs: int, max_len: int) -> Int[Array, "num_seqs blocks_per_seq"]:
    """Each row owns its own run of blocks."""
    width = -(-max_len // _BLOCK_SIZE)
    return jnp.arange(num_seqs * width, dtype=jnp.int32).reshape(num_seqs, width)


def _scaling_tables(
    tables: Int[Array, "num_seqs blocks_per_seq"], xlora: XLoraArray | None
) -> Int[Array, "num_seqs blocks_per_seq"] | None:
    """The blocks of X-LoRA's scaling pass, which follow all others."""
    return None if xlora is None else tables + tables.size


def _prefill(
    model: Llama,
    slots: SlotArray,
    gates: GateArray | None,
    mix: AdapterMix,
    batch: Batch,
    tables: Int[Array, "num_seqs blocks_per_seq"],
    implementations: Implementations,
    xlora: XLoraArray | None = None,
    *,
    ends_only: bool = False,
) -> tuple[Float[Array, "num_read hidden"], KVCache]:
    """Runs all prompts as one flat batch, each row at its padded place; returns what `hidden_states` does."""
    num_seqs, prompt_len = batch.tokens.shape
    rows = jnp.arange(num_seqs, dtype=jnp.int32)
    step = StepBatch(
        tokens=batch.tokens.reshape(-1),
        rows=rows,
        seq_starts=rows * prompt_len,
        seq_lens=batch.lengths,
        context_lens=jnp.zeros_like(rows),
        use_last_token=jnp.zeros((num_seqs,), bool),
    )
    dtype = jax.tree.leaves(nnx.state(model))[0].dtype
    num_blocks = tables.size if xlora is None else 2 * tables.size
    cache = empty_cache(model.config, num_blocks=num_blocks, block_size=_BLOCK_SIZE, dtype=dtype)
    scaling = _scaling_tables(tables, xlora)
    inputs = StepInputs(slots, gates, mix, tables, jnp.zeros_like(rows), step, xlora, scaling)
    return hidden_states(model, cache, inputs, implementations, ends_only=ends_only)


@functools.partial(jax.jit, static_argnames=("graph", "implementations"))
def batch_logits(
    graph: nnx.GraphDef[Llama],
    state: nnx.State,
    slots: SlotArray,
    gates: GateArray | None,
    mix: AdapterMix,
    batch: Batch,
    implementations: Implementations = Implementations(),  # noqa: B008 (frozen)
    xlora: XLoraArray | None = None,
) -> Float[Array, "num_seqs prompt_len vocab"]:
    """Logits after every prompt token, float32; of no meaning past a row's length. `xlora` as in `generate_tokens`."""
    model = nnx.merge(graph, state)
    tables = _block_tables(*batch.tokens.shape)
    hidden, _ = _prefill(model, slots, gates, mix, batch, tables, implementations, xlora)
    return model.logits(hidden).reshape(*batch.tokens.shape, -1)


@functools.partial(jax.jit, static_argnames=("graph", "implementations", "max_targets"))
def batch_losses(
    graph: nnx.GraphDef[Llama],
    state: nnx.State,
    slots: SlotArray,
    gates: GateArray | None,
    mix: AdapterMix,
    batch: Batch,
    prompt_lengths: Int[Array, " num_seqs"],
    *,
    max_targets: int,
    implementations: Implementations = Implementations(),  # noqa: B008 (frozen)
) -> Float[Array, "num_seqs max_targets"]:
    """Cross entropy of every token behind a row's prompt, in nats, float32; 0 past a row's length.

    Logits are made where a target is predicted only: those of all positions would be larger than the model.
    """
    model = nnx.merge(graph, state)
    num_seqs, max_len = batch.tokens.shape
    hidden, _ = _prefill(model, slots, gates, mix, batch, _block_tables(num_seqs, max_len), implementations)
    positions = prompt_lengths[:, None] + jnp.arange(max_targets, dtype=jnp.int32)[None, :]
    is_target = positions < batch.lengths[:, None]
    positions = jnp.where(is_target, positions, 1)
    rows = jnp.arange(num_seqs, dtype=jnp.int32)[:, None]
    logits = model.logits(hidden.reshape(num_seqs, max_len, -1)[rows, positions - 1].reshape(-1, hidden.shape[1]))
    targets = batch.tokens[rows, positions].reshape(-1, 1)
    losses = jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, targets, axis=1)[:, 0]
    return jnp.where(is_target, losses.reshape(is_target.shape), 0.0)


@functools.partial(jax.jit, static_argnames=("graph", "implementations", "max_new_tokens", "stop_ids"))
def generate_tokens(
    graph: nnx.GraphDef[Llama],
    state: nnx.State,
    slots: SlotArray,
    gates: GateArray | None,
    mix: AdapterMix,
    batch: Batch,
    sampling: SamplingParams | None,
    *,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    implementations: Implementations = Implementations(),  # noqa: B008 (frozen)
    xlora: XLoraArray | None = None,
) -> GenerateOutput:
    """Prefills the batch, then decodes all rows together until each met a stop id or has max_new_tokens.

    Args:
      graph, state: the split model.
      slots, gates: adapters and gates on the device.
      mix: by row of the batch.
      batch: prompts.
      sampling: by row; None is greedy.
      max_new_tokens: width of the output.
      stop_ids: token ids that end a row.
      implementations: of the ops.
      xlora: X-LoRA sets on the device; None if no row uses one.
    """
    model = nnx.merge(graph, state)
    num_seqs, prompt_len = batch.tokens.shape
    rows = jnp.arange(num_seqs, dtype=jnp.int32)
    tables = _block_tables(num_seqs, prompt_len + max_new_tokens)
    last, cache = _prefill(model, slots, gates, mix, batch, tables, implementations, xlora, ends_only=True)
    scaling = _scaling_tables(tables, xlora)

    def pick(hidden: Float[Array, "num_seqs hidden"], step: Int[Array, ""]) -> Int[Array, " num_seqs"]:
        logits = model.logits(hidden)
        if sampling is None:
            return jnp.argmax(logits, axis=1).astype(jnp.int32)
        return pick_tokens(logits, sampling, jnp.broadcast_to(step, (num_seqs,)))

    def is_stop(tokens: Int[Array, " num_seqs"]) -> Bool[Array, " num_seqs"]:
        return (tokens[:, None] == jnp.asarray(stop_ids, jnp.int32)[None, :]).any(1)

    def decode(s: _DecodeState) -> _DecodeState:
        is_live = jnp.logical_not(s.is_done)
        work = StepBatch(
            tokens=s.current,
            rows=rows,
            seq_starts=rows,
            seq_lens=is_live.astype(jnp.int32),
            context_lens=batch.lengths + s.step,
            use_last_token=jnp.zeros((num_seqs,), bool),
        )
        inputs = StepInputs(slots, gates, mix, tables, s.current, work, xlora, scaling)
        hidden, cache = hidden_states(model, s.cache, inputs, implementations)
        following = pick(hidden, s.step + 1)
        return _DecodeState(
            step=s.step + 1,
            current=following,
            lengths=s.lengths + is_live.astype(jnp.int32),
            is_done=s.is_done | is_stop(following),
            tokens=s.tokens.at[:, s.step].set(jnp.where(is_live, s.current, 0)),
            cache=cache,
        )

    def goes_on(s: _DecodeState) -> Bool[Array, ""]:
        return (s.step < max_new_tokens) & jnp.logical_not(s.is_done.all())

    first = pick(last, jnp.int32(0))
    start = _DecodeState(
        step=jnp.int32(0),
        current=first,
        lengths=jnp.zeros((num_seqs,), jnp.int32),
        is_done=is_stop(first),
        tokens=jnp.zeros((num_seqs, max_new_tokens), jnp.int32),
        cache=cache,
    )
    end = jax.lax.while_loop(goes_on, decode, start)
    return GenerateOutput(tokens=end.tokens, lengths=end.lengths)


def uniform_sampling(
    num_seqs: int, *, temperature: float, top_k: int, top_p: float, min_p: float, seed: Int[Array, ""] | int
) -> SamplingParams:
    """The same parameters for every row; row i draws from seed + i."""
    first_seed = device_seed(seed) if isinstance(seed, int) else seed
    seeds: UInt[Array, " num_seqs"] = jnp.asarray(first_seed, jnp.uint32) + jnp.arange(num_seqs, dtype=jnp.uint32)
    return SamplingParams(
        temperature=jnp.full((num_seqs,), temperature, jnp.float32),
        top_k=jnp.full((num_seqs,), min(top_k, jnp.iinfo(jnp.int32).max), jnp.int32),
        top_p=jnp.full((num_seqs,), top_p, jnp.float32),
        min_p=jnp.full((num_seqs,), min_p, jnp.float32),
        seeds=seeds,
    )
