"""Sampling on the device against plain numpy, and its independence of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dymerge_jax.sampling import (
    SampleTargets,
    SamplingParams,
    device_seed,
    greedy_tokens,
    pick_tokens,
    remember,
    sample,
)

VOCAB = 50
NUM_DRAWS = 4000

_pick_tokens = jax.jit(pick_tokens)


def params(n: int, **fields: list) -> SamplingParams:
    values = {"temperature": [1.0] * n, "top_k": [0] * n, "top_p": [1.0] * n, "min_p": [0.0] * n, "seeds": range(n)}
    values |= fields
    return SamplingParams(
        temperature=jnp.asarray(values["temperature"], jnp.float32),
        top_k=jnp.asarray(values["top_k"], jnp.int32),
        top_p=jnp.asarray(values["top_p"], jnp.float32),
        min_p=jnp.asarray(values["min_p"], jnp.float32),
        seeds=jnp.asarray(list(values["seeds"]), jnp.uint32),
    )


def draw(logits: np.ndarray, **fields: float) -> np.ndarray:
    """NUM_DRAWS draws of one row of logits, each with a seed of its own."""
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (NUM_DRAWS, logits.size))
    p = params(NUM_DRAWS, **{k: [v] * NUM_DRAWS for k, v in fields.items()})
    return np.asarray(_pick_tokens(rows, p, jnp.zeros((NUM_DRAWS,), jnp.int32)))


@pytest.fixture
def logits(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=VOCAB).astype(np.float32) * 2


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def test_temperature_zero_takes_the_highest_logit_whatever_the_other_fields(logits) -> None:
    tokens = draw(logits, temperature=0.0, top_k=3, top_p=0.5, min_p=0.1)
    assert (tokens == logits.argmax()).all()


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 2e-38, 1e-45])
def test_a_tiny_temperature_takes_the_highest_logit_and_no_other(logits, temperature) -> None:
    assert set(draw(logits * 10, temperature=temperature)) == {logits.argmax()}


def test_logits_that_are_not_numbers_give_some_token_of_the_vocabulary(logits) -> None:
    """A weight of 1e38 makes such logits; they are the request's own trouble."""
    for bad in (np.nan, np.inf, -np.inf):
        row = logits.copy()
        row[7] = bad
        for rows in (row, np.full_like(row, bad)):
            tokens = draw(rows, top_k=5, top_p=0.9)
            assert ((tokens >= 0) & (tokens < VOCAB)).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_of_the_scaled_logits(logits, temperature) -> None:
    observed = np.bincount(draw(logits, temperature=temperature), minlength=VOCAB) / NUM_DRAWS
    expected = softmax(logits / temperature)
    assert np.abs(observed - expected).max() < 4 * np.sqrt(0.25 / NUM_DRAWS)


def test_top_k_keeps_only_the_k_likeliest(logits) -> None:
    assert set(draw(logits, temperature=5.0, top_k=4)) == set(np.argsort(-logits)[:4])


def test_top_k_above_the_vocabulary_keeps_all(logits) -> None:
    assert len(set(draw(logits, temperature=50.0, top_k=1000))) == VOCAB


def test_top_p_keeps_the_fewest_tokens_that_reach_it(logits) -> None:
    order = np.argsort(-logits)
    reached = np.cumsum(softmax(logits)[order])
    nucleus = set(order[: int(np.searchsorted(reached, 0.6)) + 1])
    assert set(draw(logits, top_p=0.6)) == nucleus


def test_top_p_counts_what_top_k_left() -> None:
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[:4] = np.log([0.4, 0.3, 0.2, 0.1])
    # Of the two likeliest, 0.4/0.7 = 0.57 reaches 0.5 alone; of all four, 0.4 does not.
    assert set(draw(logits, top_k=2, top_p=0.5)) == {0}
    assert set(draw(logits, top_p=0.5)) == {0, 1}


def test_min_p_drops_what_is_less_likely_than_its_share_of_the_likeliest(logits) -> None:
    probs = softmax(logits)
    assert set(draw(logits, min_p=0.2)) == set(np.flatnonzero(probs >= 0.2 * probs.max()))


def test_a_row_draws_the_same_token_whatever_its_batch(rng) -> None:
    logits = jnp.asarray(rng.normal(size=(NUM_DRAWS, VOCAB)), jnp.float32)
    steps = jnp.arange(NUM_DRAWS, dtype=jnp.int32)
    together = np.asarray(_pick_tokens(logits, params(NUM_DRAWS), steps))
    moved = np.roll(np.arange(NUM_DRAWS), 1)
    again = _pick_tokens(logits[moved], params(NUM_DRAWS, seeds=moved.tolist()), steps[moved])
    np.testing.assert_array_equal(np.asarray(again), together[moved])
    alone = _pick_tokens(logits[7:8], params(1, seeds=[7]), steps[7:8])
    assert int(alone[0]) == together[7]


def test_the_same_seed_draws_anew_at_every_step() -> None:
    rows = jnp.zeros((NUM_DRAWS, VOCAB), jnp.float32)
    tokens = np.asarray(
        _pick_tokens(rows, params(NUM_DRAWS, seeds=[7] * NUM_DRAWS), jnp.arange(NUM_DRAWS, dtype=jnp.int32))
    )
    assert len(set(tokens[:40])) > 15


def targets(rows: list[int], is_sampled: list[bool]) -> SampleTargets:
    return SampleTargets(jnp.asarray(rows, jnp.int32), jnp.asarray(is_sampled), jnp.zeros((len(rows),), jnp.int32))


def test_only_sampled_sequences_change_the_last_tokens(rng) -> None:
    logits = jnp.asarray(rng.normal(size=(3, VOCAB)), jnp.float32)
    tokens = greedy_tokens(logits)
    best = np.asarray(logits).argmax(1)
    np.testing.assert_array_equal(np.asarray(tokens), best)
    last = remember(jnp.asarray([-1, -2, -3, -4], jnp.int32), targets([2, 0, 0], [True, True, False]), tokens)
    np.testing.assert_array_equal(np.asarray(last), [best[1], -2, best[0], -4])


def test_sequences_sample_by_the_parameters_of_their_rows(rng) -> None:
    logits = jnp.asarray(rng.normal(size=(3, VOCAB)), jnp.float32)
    by_row = params(4, temperature=[1.0, 0.0, 0.0, 0.0])
    tokens = sample(logits, by_row, targets([2, 0, 3], [True] * 3), with_logprobs=False).tokens
    best = np.asarray(logits).argmax(1)
    drawn = _pick_tokens(logits[1:2], params(1), jnp.zeros((1,), jnp.int32))
    assert np.asarray(tokens).tolist() == [best[0], int(drawn[0]), best[2]]


def test_logprobs_are_those_of_the_unscaled_model(rng) -> None:
    logits = rng.normal(size=(2, VOCAB)).astype(np.float32)
    sampled = sample(
        jnp.asarray(logits),
        params(2, temperature=[0.3, 0.0], top_k=[2, 0]),
        targets([0, 1], [True, True]),
        with_logprobs=True,
    )
    want = np.log(np.stack([softmax(row) for row in logits]))
    tokens = np.asarray(sampled.tokens)
    np.testing.assert_allclose(np.asarray(sampled.logprobs), want[[0, 1], tokens], atol=1e-5)
    np.testing.assert_array_equal(np.asarray(sampled.top_tokens)[:, 0], logits.argmax(1))
    np.testing.assert_allclose(np.asarray(sampled.top_logprobs), -np.sort(-want, axis=1)[:, :20], atol=1e-5)


def test_seeds_that_differ_above_32_bits_are_told_apart() -> None:
    seeds = {device_seed(5 + (i << 32)) for i in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**32 for seed in (*seeds, device_seed(-1), device_seed(2**63 - 1)))
