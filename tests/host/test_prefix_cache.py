"""What the prefix cache takes for equal, and what scheduler and cache do together. (Tokens: tests/end_to_end.)"""

import itertools
import time

import pytest

from serving.block_pool import BlockPool
from serving.plan import StepPlan
from serving.policies import Lag
from serving.prefix_cache import PrefixCache
from serving.request import FinishReason, Mix, Request, SamplingParams
from tests.support.host import FakeEngine, admit, check_finished, make_request, make_scheduler

PROMPT = list(range(100))


def keys(
    mix: Mix, prompt: list[int] | None = None, *, adapters: tuple[str, ...] | None = None, block_size: int = 16
) -> list[bytes]:
    """Keys of a request's full blocks."""
    adapters = mix.adapters if adapters is None else adapters
    request = Request("r", PROMPT if prompt is None else prompt, SamplingParams(), mix, 0.0, adapters)
    cache = PrefixCache(BlockPool(1, block_size))
    cache._extend_keys(request, request.num_prompt_tokens // block_size)
    return request.block_keys


def test_every_difference_of_a_mix_gives_other_keys():
    """Cases G1, G2 and G4: base, one or two adapters, weights, contents under one name, gated sets and experts."""
    variants = [
        keys(Mix()),
        keys(Mix((("a", 1.0),))),
        keys(Mix((("b", 1.0),))),
        keys(Mix((("a", 1.0), ("b", 1.0)))),
        keys(Mix((("a", 0.5), ("b", 1.0)))),
        keys(Mix((("a", 1.0), ("b", 0.5)))),
        keys(Mix((("a", -1.0),))),
        keys(Mix((("a", 1.0 + 2**-52),))),
        keys(Mix((("a@0123", 1.0),))),
        keys(Mix((("a@4567", 1.0),))),
        keys(Mix((("a', 1.0), ('b", 1.0),))),
        keys(Mix(gated_set="a"), adapters=("a@0123", "b")),
        keys(Mix(gated_set="a"), adapters=("a@4567", "b")),
        keys(Mix(gated_set="b"), adapters=("a@0123", "b")),
    ]
    for one, other in itertools.combinations(variants, 2):
        assert not set(one) & set(other)


def test_the_order_of_a_mix_makes_no_difference():
    entries = (("a", 0.5), ("b", 1.0), ("c", -2.0))
    assert keys(Mix(entries)) == keys(Mix(tuple(reversed(entries))))
    assert keys(Mix((*entries, ("d", 0.0)))) == keys(Mix(entries))
    assert keys(Mix(gated_set="g"), adapters=("a", "b")) == keys(Mix(gated_set="g"), adapters=("b", "a"))


@pytest.mark.parametrize("position", [0, 15, 16, 47, 95])
def test_a_token_changes_the_key_of_its_block_and_of_all_after_it(position: int):
    other = list(PROMPT)
    other[position] += 1
    are_equal = [one == two for one, two in zip(keys(Mix()), keys(Mix(), other), strict=True)]
    assert are_equal == [block < position // 16 for block in range(6)]


def test_keys_do_not_depend_on_when_they_were_computed():
    request = Request("r", PROMPT, SamplingParams(), Mix(), 0.0)
    cache = PrefixCache(BlockPool(1, 16))
    for num_blocks in (1, 1, 3, 2, 6):
        cache._extend_keys(request, num_blocks)
    assert request.block_keys == keys(Mix())


def run(engine: FakeEngine, *requests: Request, now_s: float = 0.0) -> None:
    for request in requests:
        engine.scheduler.add(request)
    engine.run(now_s)


@pytest.mark.parametrize(("num_prompt", "num_cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (19, 16)])
def test_a_prompt_that_was_computed_is_shared_but_for_its_last_token(num_prompt: int, num_cached: int):
    engine = FakeEngine(make_scheduler())
    first, second = (make_request("x", "a", num_prompt=num_prompt) for _ in range(2))
    run(engine, first)
    run(engine, second)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, num_cached)


def test_an_answer_is_shared_by_the_request_that_goes_on_from_it():
    """The next turn of a conversation: known output tokens are keyed as prompt tokens are."""
    engine = FakeEngine(make_scheduler())
    first, turn = make_request("ab", num_prompt=6, max_tokens=7), make_request("ba", num_prompt=20)  # the same tokens
    run(engine, first)
    run(engine, turn)
    assert turn.num_cached_tokens == 12, "12 tokens of 13 were computed: the last one ended the request"
    check_finished(engine, [first, turn])


def test_running_requests_share_what_they_begin_with_and_nothing_else():
    scheduler = make_scheduler()
    engine = FakeEngine(scheduler)
    one, two = (make_request(f"x/{i}", "a", num_prompt=20, max_tokens=8) for i in range(2))
    scheduler.add(one)
    engine.step(0.0)
    for request in (two, make_request("x/2", "b", num_prompt=20, max_tokens=8)):
        scheduler.add(request)
    engine.step(0.0)
    assert two.block_table[:2] == one.block_table[:2]
    assert not set(two.block_table[2:]) & set(one.block_table)
    assert two.num_cached_tokens == 8
    assert scheduler.running[2].num_cached_tokens == 0, "it has another mix"
    engine.run()
    assert scheduler.block_pool.num_free == scheduler.block_pool.num_blocks


def test_a_preempted_request_goes_on_from_its_blocks_that_are_still_there():
    scheduler = make_scheduler(num_blocks=7, block_size=4)
    old, young = (make_request(name, num_prompt=8, max_tokens=12, arrival_s=i) for i, name in enumerate("oy"))
    engine = FakeEngine(scheduler)
    run(engine, old, young, now_s=1.0)
    check_finished(engine, [old, young])
    assert scheduler.num_preemptions >= 1
    assert engine.positions["y", 2][0] > 0, "it computed its prompt again"
    assert young.num_cached_tokens == 0, "the client's prompt was not cached"
    assert young.num_output_tokens == 12


def test_an_aborted_prefill_leaves_what_it_has_computed():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    engine = FakeEngine(scheduler)
    scheduler.add(make_request("x", num_prompt=30))
    for _ in range(2):
        engine.step(0.0)
    engine.abort("x")
    assert scheduler.block_pool.num_free == scheduler.block_pool.num_blocks
    again = make_request("x", num_prompt=30)
    run(engine, again)
    assert again.num_cached_tokens == 16


def test_blocks_of_a_failed_step_are_never_found():
    scheduler = make_scheduler()
    first = make_request("x", num_prompt=20)
    scheduler.add(first)
    admit(scheduler)
    assert scheduler.block_pool.num_registered == 5
    scheduler.fail(StepPlan())
    assert first.finish_reason is FinishReason.ERROR
    again = make_request("x", num_prompt=20)
    scheduler.add(again)
    admit(scheduler)
    assert again.num_cached_tokens == 0
    scheduler.check_integrity()


def test_tokens_that_the_host_has_not_read_are_not_shared():
    scheduler = make_scheduler()
    scheduler.add(request := make_request("x", num_prompt=7))
    for _ in range(2):
        scheduler.on_dispatched(scheduler.plan(0.0))
    assert request.num_computed_tokens == 8
    assert scheduler.block_pool.num_registered == 1
    request.commit_token(1)
    scheduler.finish(request, FinishReason.ABORT)
    assert scheduler.block_pool.num_registered == 2


def test_the_prompts_used_last_are_kept():
    engine = FakeEngine(make_scheduler(num_blocks=16, block_size=4))
    for name in "abcbd":  # five blocks each, and one for the answer: three do not fit
        run(engine, make_request(name, num_prompt=20, max_tokens=2))
    hits = []
    for name in "bda":
        run(engine, request := make_request(name, num_prompt=20, max_tokens=2))
        hits.append(request.num_cached_tokens)
    assert hits[:2] == [16, 16]
    assert hits[2] < 16


def test_a_request_that_shares_with_a_running_one_needs_no_blocks_for_that():
    """Overdue or under FIFO, where the scheduler looks at the request itself."""
    for enable_prefix_cache in (False, True):
        scheduler = make_scheduler(policy=Lag(0.0), num_blocks=10, enable_prefix_cache=enable_prefix_cache)
        scheduler.add(make_request("x/1", num_prompt=20, max_tokens=4))
        admit(scheduler)
        scheduler.add(make_request("x/2", num_prompt=20, max_tokens=4))
        assert len(admit(scheduler)) == enable_prefix_cache


def test_disabled_it_shares_nothing():
    engine = FakeEngine(make_scheduler(enable_prefix_cache=False))
    for _ in range(2):
        run(engine, request := make_request("x", num_prompt=20))
        assert request.num_cached_tokens == 0
    assert engine.num_shared_tokens == 0


def test_the_claim_of_an_overdue_request_holds_while_those_who_passed_it_grow():
    scheduler = make_scheduler(num_blocks=16, num_slots=1, max_num_seqs=4, max_model_len=64)
    engine = FakeEngine(scheduler)
    scheduler.add(runs := make_request("runs", "a", num_prompt=4, max_tokens=16))
    engine.step(0.0)
    overdue = make_request("overdue", "b", num_prompt=16, max_tokens=4)
    scheduler.add(overdue)
    for i in range(2):
        scheduler.add(make_request(f"base{i}", num_prompt=4, max_tokens=20, arrival_s=1.0))
    now_s = 1.0
    while not runs.is_finished:
        engine.step(now_s)
    engine.step(now_s)
    assert overdue.row is not None, "those who passed it have its blocks"
    engine.run(now_s)


def test_hashing_a_prompt_of_2048_tokens_is_a_matter_of_microseconds(rng):
    """It happens in a plan. 0.08 ms were measured; the bound is loose, as the machine may be busy."""
    pool = BlockPool(128, 16)
    cache = PrefixCache(pool)
    prompt = rng.integers(0, 128_000, 2048).tolist()
    block_ids = pool.allocate(128)
    assert block_ids is not None
    for block_id, key in zip(block_ids, keys(Mix(), prompt), strict=True):
        pool.register(block_id, key)
    seconds = []
    for _ in range(5):
        request = Request("r", list(prompt), SamplingParams(), Mix(), 0.0)
        start_s = time.thread_time()
        assert cache.find(request) == block_ids[:127]
        seconds.append(time.thread_time() - start_s)
    assert min(seconds) < 1e-3
