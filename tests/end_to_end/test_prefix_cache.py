"""Answers from shared KV blocks are those of a cold engine, whatever was asked, preempted, cancelled or evicted before.

Law 5 and cases G on the real engine, which test_laws.py has in short; what the cache takes for equal is in tests/host.
"""

import random

import pytest

from dymerge_jax.lora import AdapterWeights
from dymerge_jax.model import SplitModel
from serving.batch import Bucket, Buckets
from serving.engine import Engine
from serving.request import RequestOutput
from tests.support.engines import generate, make_engine, make_request, run_to_end, token_ids
from tests.support.tiny_models import random_adapter, random_gated_set, tiny_model

pytestmark = pytest.mark.slow

PROMPT = [(3 * i) % 251 for i in range(100)]
A, B, OLD, NEW = "a@0a", "b@0b", "c@01", "c@02"  # the last two are of one name: c was replaced
SETS = {"soft": [A, B], "sparse": [A, B], "other": [A, NEW]}


@pytest.fixture(scope="module")
def split() -> SplitModel:
    return tiny_model(vocab=257)


@pytest.fixture(scope="module")
def adapters(split: SplitModel) -> dict[str, AdapterWeights]:
    return {name: random_adapter(split.config, rank=4, seed=i) for i, name in enumerate([A, B, OLD, NEW])}


@pytest.fixture(scope="module")
def engine(split: SplitModel, adapters: dict[str, AdapterWeights]) -> Engine:
    """Room for one prompt of 100 tokens and a little more."""
    gated_sets = [
        random_gated_set(
            split.config, name, experts, granularity="layer", top_k=None if name == "soft" else 1, renormalize=True,
            seed=3,
        )
        for name, experts in SETS.items()
    ]  # fmt: skip
    buckets = Buckets((Bucket(4, 4),), (Bucket(64, 4),))
    return make_engine(
        split, adapters, gated_sets, buckets=buckets, num_blocks=40, max_model_len=128, max_num_batched_tokens=64
    )


def cold(engine: Engine, prompt: list[int], mix: dict[str, float] | str, **sampling: int) -> list[int]:
    engine.forget_prefixes()
    return generate(engine, prompt, mix, **sampling)


def warm(engine: Engine, prompt: list[int], mix: dict[str, float] | str, **sampling: int) -> tuple[list[int], int]:
    """Tokens of an answer, and how many of its prompt were not computed."""
    engine.add_request(request := make_request(engine, "warm", prompt, mix, **sampling))
    return token_ids(run_to_end(engine)["warm"]), request.num_cached_tokens


@pytest.mark.parametrize(
    "mixes",
    [
        [{}, {A: 1.0}, {B: 1.0}, {}],
        [{A: 1.0}, {B: 1.0}, {A: 1.0, B: 1.0}, {}],
        [{A: 1.0}, {A: 0.25}, {A: -1.0}, {A: 1.0}],
        [{OLD: 1.0}, {NEW: 1.0}, {OLD: 1.0}],
        ["soft", "sparse", "other", {A: 1.0, B: 1.0}, "soft"],
    ],
    ids=["g1", "g4", "weights", "g2-replaced", "gated"],
)
def test_the_same_prompt_is_answered_for_each_mix_as_if_it_were_the_first(
    engine: Engine, mixes: list[dict[str, float] | str]
) -> None:
    answers = [cold(engine, PROMPT[:60], mix) for mix in mixes]
    assert len({tuple(answer) for answer in answers}) == len({str(mix) for mix in mixes}), "they must differ"
    engine.forget_prefixes()
    asked: list[str] = []
    for mix, answer in zip(mixes, answers, strict=True):
        tokens, num_cached = warm(engine, PROMPT[:60], mix)
        assert tokens == answer, mix
        if str(mix) not in asked:
            assert num_cached == 0, f"{mix} was never asked before"
        asked.append(str(mix))
    assert warm(engine, PROMPT[:60], mixes[-1]) == (answers[-1], 56)


def test_g1_a_prompt_of_100_tokens_is_not_computed_twice_and_answered_alike(engine: Engine) -> None:
    answers = [cold(engine, PROMPT, mix) for mix in ({}, {A: 1.0})]
    assert answers[0] != answers[1]
    assert warm(engine, PROMPT, {A: 1.0}) == (answers[1], 96)
    assert warm(engine, PROMPT, {}) == (answers[0], 0)
    assert warm(engine, PROMPT, {}) == (answers[0], 96)


def test_the_order_of_a_mix_does_not_matter_to_what_is_shared(engine: Engine) -> None:
    answer = cold(engine, PROMPT, {A: 0.5, B: 1.0})
    assert warm(engine, PROMPT, {B: 1.0, A: 0.5}) == (answer, 96)


def test_a_prompt_that_leaves_another_midway_shares_its_blocks_up_to_there(engine: Engine) -> None:
    other = PROMPT[:50] + [7] * 20
    answer = cold(engine, other, {A: 1.0})
    cold(engine, PROMPT, {A: 1.0})
    assert warm(engine, other, {A: 1.0}) == (answer, 48)


def test_the_next_turn_of_a_conversation_shares_the_answer_before_it(engine: Engine) -> None:
    first = cold(engine, PROMPT[:30], {A: 1.0}, max_tokens=20)
    turn = PROMPT[:30] + first + [3, 1, 4]
    answer = cold(engine, turn, {A: 1.0})
    cold(engine, PROMPT[:30], {A: 1.0}, max_tokens=20)
    assert warm(engine, turn, {A: 1.0}) == (answer, 48)


def test_a_preempted_request_finds_its_blocks_and_gives_the_same_answer(engine: Engine) -> None:
    mixes: list[dict[str, float]] = [{A: 1.0}, {B: 1.0}, {}]
    answers = [cold(engine, PROMPT[i : i + 44], mix, max_tokens=30) for i, mix in enumerate(mixes)]
    engine.forget_prefixes()
    num_preemptions = engine.scheduler.num_preemptions
    found = []
    for i, mix in enumerate(mixes):
        engine.add_request(make_request(engine, f"r{i}", PROMPT[i : i + 44], mix, max_tokens=30))
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_work:
        before = set(engine.scheduler.running)
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        found += [r.num_registered_blocks for r in engine.scheduler.running if r not in before and r.epoch > 1]
    assert engine.scheduler.num_preemptions > num_preemptions
    assert max(found) > 0
    assert [token_ids(outputs[f"r{i}"]) for i in range(3)] == answers


@pytest.mark.parametrize("num_steps", range(7))
def test_what_a_cancelled_request_leaves_is_right(engine: Engine, num_steps: int) -> None:
    """Queued, in prefill, in decode, with a token in flight: the next one goes on from there."""
    answer = cold(engine, PROMPT, {B: 1.0})
    engine.forget_prefixes()
    engine.add_request(make_request(engine, "gone", PROMPT, {B: 1.0}, max_tokens=20))
    for _ in range(num_steps):
        engine.step()
    engine.abort("gone")
    engine.check_integrity()
    assert engine.scheduler.block_pool.num_free == 40
    assert not engine.slot_cache.pinned
    tokens, num_cached = warm(engine, PROMPT, {B: 1.0})
    assert tokens == answer
    assert num_cached == (0 if num_steps == 0 else 64 if num_steps == 1 else 96)


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_under_pressure_get_the_tokens_of_a_cold_engine(engine: Engine, seed: int) -> None:
    """Conversations of three mixes that grow, split and vanish, in a pool that holds about two of them."""
    draw = random.Random(seed)
    mixes: list[dict[str, float] | str] = [{}, {A: 1.0}, {OLD: 0.5, B: 1.0}, {NEW: 0.5, B: 1.0}, "soft"]
    asked, outputs = [], {}
    num_cached, num_preemptions = 0, engine.scheduler.num_preemptions
    for i in range(40):
        prompt = PROMPT[: draw.randrange(1, 60)] + [draw.randrange(3) for _ in range(draw.randrange(8))]
        size = {"max_tokens": draw.randrange(1, 30)}
        request = make_request(engine, f"r{i}", prompt, draw.choice(mixes), **size)
        asked.append((request, request.mix.gated_set or dict(request.mix.entries), prompt, size))
        engine.add_request(request)
        for _ in range(draw.randrange(4)):
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
            engine.check_integrity()
        if draw.random() < 0.2:
            engine.abort(draw.choice(asked)[0].request_id)
    for request_id, rest in run_to_end(engine).items():
        outputs.setdefault(request_id, []).extend(rest)
    for request, mix, prompt, size in asked:
        num_cached += request.num_cached_tokens
        tokens = [t for output in outputs.get(request.request_id, []) for t in output.token_ids]
        assert tokens == cold(engine, prompt, mix, **size)[: len(tokens)], request
    assert num_cached > 100
    assert engine.scheduler.num_preemptions > num_preemptions
