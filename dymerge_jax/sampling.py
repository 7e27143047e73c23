"""From logits to token ids, on the device: greedy, temperature, top-k, top-p, min-p, with a seed a request."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from pallas_kernels.pytree import pytree_dataclass

NUM_TOP_LOGPROBS = 20
"""Alternatives reported a token when log probabilities are asked for (OpenAI's limit)."""


@pytree_dataclass
class SamplingParams:
    """How to pick the next token of each row.

    Attributes:
      temperature: [num_rows] float32; 0 picks the highest logit.
      top_k: [num_rows] int32, keeps that many of the highest logits; 0 keeps all.
      top_p: [num_rows] float32, keeps the fewest tokens whose probabilities add up to it; 1 keeps all.
      min_p: [num_rows] float32, keeps tokens at least this times as probable as the likeliest; 0 keeps all.
      seeds: [num_rows] uint32.
    """

    temperature: Float[Array, " num_rows"]
    top_k: Int[Array, " num_rows"]
    top_p: Float[Array, " num_rows"]
    min_p: Float[Array, " num_rows"]
    seeds: UInt[Array, " num_rows"]


@pytree_dataclass
class SampledTokens:
    """Attributes:
    tokens: [num_seqs] int32.
    logprobs: [num_seqs] float32 log probability of each token under the model (temperature 1, nothing cut off);
      None unless asked for.
    top_tokens, top_logprobs: [num_seqs, NUM_TOP_LOGPROBS] the likeliest tokens, best first; None unless asked for.
    """

    tokens: Int[Array, " num_seqs"]
    logprobs: Float[Array, " num_seqs"] | None
    top_tokens: Int[Array, "num_seqs num_top"] | None
    top_logprobs: Float[Array, "num_seqs num_top"] | None


def device_seed(seed: int) -> int:
    """Any integer folded to the 32 bits of `SamplingParams.seeds`."""
    return (seed ^ (seed >> 32)) & 0xFFFFFFFF


def _keep(
    scaled: Float[Array, "num_seqs vocab"],
    top_k: Int[Array, " num_seqs"],
    top_p: Float[Array, " num_seqs"],
    min_p: Float[Array, " num_seqs"],
) -> Bool[Array, "num_seqs vocab"]:
    """Which tokens may be drawn: top-k first, then top-p and min-p on what it left. Ties at a border stay."""
    vocab = scaled.shape[1]
    ordered = jnp.sort(scaled, axis=1, descending=True)
    rank = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)[:, None]
    probs = jax.nn.softmax(jnp.where(rank < k, ordered, -jnp.inf), axis=1)
    before = jnp.cumsum(probs, axis=1) - probs
    kept = (rank < k) & (before < top_p[:, None]) & (probs >= min_p[:, None] * probs[:, :1])
    num_kept = jnp.maximum(kept.sum(1, dtype=jnp.int32), 1)  # kept tokens are a prefix of the order
    threshold = jnp.take_along_axis(ordered, num_kept[:, None] - 1, axis=1)
    return scaled >= threshold


def _gumbel(
    seeds: UInt[Array, " num_seqs"], steps: Int[Array, " num_seqs"], vocab: int
) -> Float[Array, "num_seqs vocab"]:
    """Noise that depends on the request's seed and the index of its token only, not on the batch."""

    def row(seed: UInt[Array, ""], step: Int[Array, ""]) -> Float[Array, " vocab"]:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), step), (vocab,), jnp.float32)

    return jax.vmap(row)(seeds, steps)


def pick_tokens(
    logits: Float[Array, "num_seqs vocab"], params: SamplingParams, steps: Int[Array, " num_seqs"]
) -> Int[Array, " num_seqs"]:
    """The next token of each sequence; `params` row i belongs to sequence i.

    Args:
      logits: [num_seqs, vocab] float32.
      params: by sequence.
      steps: [num_seqs] int32, how many tokens were sampled for the sequence before this one.
    """
    greedy = jnp.argmax(logits, axis=1).astype(jnp.int32)
    # Below the highest logit, so that no temperature, however small, takes several tokens to infinity.
    below = logits - logits.max(1, keepdims=True)
    scaled = below / jnp.where(params.temperature > 0, params.temperature, 1.0)[:, None]
    keep = _keep(scaled, params.top_k, params.top_p, params.min_p)
    noisy = jnp.where(keep, scaled + _gumbel(params.seeds, steps, logits.shape[1]), -jnp.inf)
    drawn = jnp.argmax(noisy, axis=1).astype(jnp.int32)
    return jnp.where(params.temperature > 0, drawn, greedy)


@functools.partial(jax.jit, static_argnames=("is_greedy", "with_logprobs"), donate_argnames=("last_tokens",))
def sample_step(
    logits: Float[Array, "num_seqs vocab"],
    last_tokens: Int[Array, " num_rows"],
    rows: Int[Array, " num_seqs"],
    is_sampled: Bool[Array, " num_seqs"],
    params: SamplingParams,
    steps: Int[Array, " num_seqs"],
    *,
    is_greedy: bool,
    with_logprobs: bool,
) -> tuple[SampledTokens, Int[Array, " num_rows"]]:
    """Samples after a step and remembers each row's token on the device.

    Args:
      logits: [num_seqs, vocab] float32.
      last_tokens: [num_rows] int32; donated.
      rows: [num_seqs] int32, row of each sequence.
      is_sampled: [num_seqs] bool; the others (unfinished prefills, padding) leave last_tokens as it is.
      params: by row.
      steps: [num_seqs] int32, see `pick_tokens`.
      is_greedy: every row has temperature 0: no sort, no noise.
      with_logprobs: also return log probabilities.

    Returns:
      The tokens, of no meaning where not `is_sampled`, and the new last_tokens.
    """
    if is_greedy:
        tokens = jnp.argmax(logits, axis=1).astype(jnp.int32)
    else:
        tokens = pick_tokens(logits, jax.tree.map(lambda p: p[rows], params), steps)
    last_tokens = last_tokens.at[jnp.where(is_sampled, rows, last_tokens.shape[0])].set(tokens, mode="drop")
    logprobs = top_tokens = top_logprobs = None
    if with_logprobs:
        all_logprobs = jax.nn.log_softmax(logits, axis=1)
        logprobs = jnp.take_along_axis(all_logprobs, tokens[:, None], axis=1)[:, 0]
        top_logprobs, top_tokens = jax.lax.top_k(all_logprobs, min(NUM_TOP_LOGPROBS, logits.shape[1]))
        top_tokens = top_tokens.astype(jnp.int32)
    return SampledTokens(tokens, logprobs, top_tokens, top_logprobs), last_tokens
