"""From logits to token ids, on the device: greedy, temperature, top-k, top-p, min-p, with a seed a request."""

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
class SampleTargets:
    """For whom a step samples.

    Attributes:
      rows: [num_seqs] int32, row of each sequence.
      is_sampled: [num_seqs] bool; False for unfinished prefills and padding, which sample nothing.
      steps: [num_seqs] int32, how many tokens were sampled for the sequence before.
    """

    rows: Int[Array, " num_seqs"]
    is_sampled: Bool[Array, " num_seqs"]
    steps: Int[Array, " num_seqs"]


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
    greedy = greedy_tokens(logits)
    # Below the highest logit, so that no temperature, however small, takes several tokens to infinity.
    below = logits - logits.max(1, keepdims=True)
    scaled = below / jnp.where(params.temperature > 0, params.temperature, 1.0)[:, None]
    keep = _keep(scaled, params.top_k, params.top_p, params.min_p)
    noisy = jnp.where(keep, scaled + _gumbel(params.seeds, steps, logits.shape[1]), -jnp.inf)
    drawn = jnp.argmax(noisy, axis=1).astype(jnp.int32)
    return jnp.where(params.temperature > 0, drawn, greedy)


def greedy_tokens(logits: Float[Array, "num_seqs vocab"]) -> Int[Array, " num_seqs"]:
    """The likeliest token of each sequence; the lowest id of equals."""
    with jax.named_scope("greedy"):
        return jnp.argmax(logits, axis=1).astype(jnp.int32)


def remember(
    last_tokens: Int[Array, " num_rows"], targets: SampleTargets, tokens: Int[Array, " num_seqs"]
) -> Int[Array, " num_rows"]:
    """`last_tokens` with the tokens of the sequences that sample at their rows."""
    rows = jnp.where(targets.is_sampled, targets.rows, last_tokens.shape[0])
    return last_tokens.at[rows].set(tokens, mode="drop")


def sample(
    logits: Float[Array, "num_seqs vocab"],
    params: SamplingParams,
    targets: SampleTargets,
    *,
    with_logprobs: bool,
) -> SampledTokens:
    """Picks the tokens of a step.

    Args:
      logits: [num_seqs, vocab] float32.
      params: by row.
      targets: for whom.
      with_logprobs: also return log probabilities.

    Returns:
      The tokens, of no meaning where not `targets.is_sampled`.
    """
    tokens = pick_tokens(logits, jax.tree.map(lambda p: p[targets.rows], params), targets.steps)
    if not with_logprobs:
        return SampledTokens(tokens, None, None, None)
    all_logprobs = jax.nn.log_softmax(logits, axis=1)
    logprobs = jnp.take_along_axis(all_logprobs, tokens[:, None], axis=1)[:, 0]
    top_logprobs, top_tokens = jax.lax.top_k(all_logprobs, min(NUM_TOP_LOGPROBS, logits.shape[1]))
    return SampledTokens(tokens, logprobs, top_tokens.astype(jnp.int32), top_logprobs)
