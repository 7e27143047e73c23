"""What a plan contains: chunks, budget, admission, preemption, tokens in flight."""

import random

import pytest

from serving.errors import InvalidRequestError
from serving.plan import StepPlan
from serving.policies import Fifo
from serving.request import FinishReason, Phase
from tests.support.host import FakeEngine, admit, admitted, check_finished, make_request, make_scheduler


def step_until_preempted(engine: FakeEngine) -> StepPlan:
    for _ in range(50):
        plan = engine.step(1.0)
        if plan.preempted:
            return plan
    raise AssertionError("no step preempted")


def test_a_long_prompt_is_cut_into_chunks_and_only_the_last_one_samples():
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=2)
    scheduler.add(make_request("r", num_prompt=19))
    chunks = []
    for _ in range(3):
        plan = scheduler.plan(0.0)
        scheduler.on_dispatched(plan)
        chunks += [(chunk.start, chunk.num_tokens, chunk.samples) for chunk in plan.chunks]
    assert chunks == [(0, 8, False), (8, 8, False), (16, 3, True)]


def test_the_next_token_is_planned_before_the_last_one_is_known():
    scheduler = make_scheduler()
    request = make_request("r", num_prompt=4)
    scheduler.add(request)
    scheduler.on_dispatched(scheduler.plan(0.0))
    plan = scheduler.plan(0.0)
    assert [(chunk.start, chunk.num_tokens, chunk.samples) for chunk in plan.chunks] == [(4, 1, True)]
    assert request.num_known_tokens == 4
    assert request.num_in_flight == 1


def test_a_request_bound_to_reach_max_tokens_is_not_planned_again():
    scheduler = make_scheduler()
    request = make_request("r", max_tokens=1)
    scheduler.add(request)
    scheduler.on_dispatched(scheduler.plan(0.0))
    assert scheduler.plan(0.0).is_empty
    assert not scheduler.has_reached_limit(request)
    request.commit_token(7)
    assert scheduler.has_reached_limit(request)
    scheduler.finish(request, FinishReason.LENGTH)
    assert not scheduler.has_work


def test_output_ends_at_the_models_limit():
    engine = FakeEngine(make_scheduler(max_model_len=10))
    request = make_request("r", num_prompt=7, max_tokens=100)
    engine.scheduler.add(request)
    engine.run()
    assert request.num_output_tokens == 3
    assert request.finish_reason is FinishReason.LENGTH
    check_finished(engine, [request])


def test_a_prompt_one_short_of_the_limit_gives_one_token():
    engine = FakeEngine(make_scheduler(max_model_len=10))
    request = make_request("r", num_prompt=9, max_tokens=100)
    engine.scheduler.add(request)
    engine.run()
    assert request.num_output_tokens == 1


def test_the_late_token_of_a_stopped_request_is_dropped():
    engine = FakeEngine(make_scheduler(), stop_after={"r": 2})
    request = make_request("r", max_tokens=10)
    engine.scheduler.add(request)
    engine.run()
    engine.step(0.0)
    assert request.num_output_tokens == 2
    assert request.finish_reason is FinishReason.STOP
    assert engine.num_dropped_tokens == 1


def test_steps_planned_ahead_are_those_that_would_follow_one_by_one():
    traces, numbers = [], []
    for decode_steps in (1, 4):
        engine = FakeEngine(make_scheduler(block_size=4), decode_steps)
        requests = [make_request(name, num_prompt=n, max_tokens=9 + n) for name, n in (("a", 3), ("b", 6), ("c", 1))]
        for request in requests:
            engine.scheduler.add(request)
        engine.run()
        check_finished(engine, requests)
        traces.append([step for step in engine.trace if step != ([], (), [])])
        numbers.append(engine.num_planned_ahead)
    assert traces[0] == traces[1]
    # Of 15 steps, the first is a prefill; then three times four, as the longest request has two left after that.
    assert numbers == [0, 9]


def test_nothing_is_planned_ahead_of_a_request_that_waits():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("runs", max_tokens=20))
    scheduler.on_dispatched(scheduler.plan(0.0))
    scheduler.add(make_request("waits"))
    plan = scheduler.plan(0.0)
    assert plan.is_decode
    assert scheduler.plan_ahead(plan, 3, 0.0) == []
    scheduler.abort("waits")
    assert [p.num_seqs for p in scheduler.plan_ahead(plan, 3, 0.0)] == [1, 1, 1]


def test_a_prompts_single_token_is_no_decode_row_to_plan_ahead():
    """With no more budget than rows, prompts go on by what decode rows leave."""
    engine = FakeEngine(make_scheduler(max_num_seqs=3, max_num_batched_tokens=3), decode_steps=4)
    lengths = [("a", 1, 5), ("b", 1, 30), ("prompt", 30, 30)]
    requests = [make_request(name, num_prompt=n, max_tokens=most) for name, n, most in lengths]
    for request in requests:
        engine.scheduler.add(request)
    engine.run()
    check_finished(engine, requests)
    assert engine.num_planned_ahead > 0


def test_nothing_is_planned_ahead_that_could_preempt_or_would_run_nothing():
    for num_blocks, max_tokens, is_possible in ((4, 12, True), (3, 9, False), (4, 4, False)):
        scheduler = make_scheduler(num_blocks=num_blocks, block_size=4)
        request = make_request("r", num_prompt=4, max_tokens=max_tokens)
        scheduler.add(request)
        scheduler.on_dispatched(scheduler.plan(0.0))
        if not is_possible and max_tokens == 9:
            scheduler.block_pool.allocate(1)
        plan = scheduler.plan(0.0)
        before = repr(request)
        plans = scheduler.plan_ahead(plan, 5, 0.0)
        assert [p.chunks[0].start for p in plans] == ([5, 6, 7, 8, 9] if is_possible else [])
        assert (repr(request) == before) != is_possible


def test_decode_rows_come_before_prefill_chunks_and_those_before_admissions():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("decode", num_prompt=4))
    admit(scheduler)
    scheduler.add(make_request("prefill", num_prompt=10))
    admit(scheduler)
    scheduler.add(make_request("new", num_prompt=10))
    plan = scheduler.plan(0.0)
    assert [(c.request.request_id, c.num_tokens) for c in plan.chunks] == [("decode", 1), ("prefill", 3), ("new", 4)]
    assert plan.num_tokens == 8
    assert not plan.is_decode


def test_a_step_of_single_tokens_is_a_decode_step():
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add(make_request(name))
    admit(scheduler)
    plan = scheduler.plan(0.0)
    assert plan.is_decode
    assert plan.num_seqs == 3


def test_prompts_that_wait_are_prefilled_in_one_step_as_far_as_the_budget_goes():
    scheduler = make_scheduler(max_num_batched_tokens=20, max_num_seqs=4)
    scheduler.add(make_request("decode", num_prompt=4))
    admit(scheduler)
    for name in "abc":
        scheduler.add(make_request(name, num_prompt=8))
    plan = scheduler.plan(0.0)
    assert [(c.request.request_id, c.num_tokens) for c in plan.chunks] == [("decode", 1), ("a", 8), ("b", 8), ("c", 3)]


def test_no_decode_row_is_left_out_for_a_prefill_of_any_length():
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=4, num_blocks=64, max_model_len=200)
    engine = FakeEngine(scheduler)
    decodes = [make_request(name, num_prompt=1, max_tokens=60) for name in "abc"]
    for request in decodes:
        scheduler.add(request)
    engine.step(0.0)
    scheduler.add(make_request("long", num_prompt=40, arrival_s=-1.0))
    for _ in range(40):
        plan = engine.step(1.0)
        assert {c.request.request_id: c.num_tokens for c in plan.chunks} == {"a": 1, "b": 1, "c": 1, "long": 1}


def test_a_full_engine_admits_nobody_and_gives_freed_rows_to_others():
    scheduler = make_scheduler(max_num_seqs=2)
    requests = [make_request(name) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    assert admit(scheduler) == ["a", "b"]
    assert admit(scheduler) == []
    row = requests[0].row
    scheduler.finish(requests[0], FinishReason.STOP)
    assert requests[0].row is None
    assert admit(scheduler) == ["c"]
    assert requests[2].row == row


def test_admission_leaves_blocks_for_those_who_run():
    scheduler = make_scheduler(num_blocks=6, block_size=4, max_num_seqs=4)
    scheduler.add(make_request("a", num_prompt=8, max_tokens=8))
    scheduler.add(make_request("b", num_prompt=8, max_tokens=8))
    assert admit(scheduler) == ["a", "b"]
    scheduler.add(make_request("c", num_prompt=1))
    assert admit(scheduler) == []


def test_the_last_arrival_is_preempted_and_waits_with_its_arrival_time():
    scheduler = make_scheduler(num_blocks=6, block_size=4)
    engine = FakeEngine(scheduler)
    requests = [make_request(name, num_prompt=8, max_tokens=12, arrival_s=i) for i, name in enumerate("ab")]
    for request in requests:
        scheduler.add(request)
    plan = step_until_preempted(engine)
    assert plan.preempted == (requests[1],)
    assert requests[1].phase is Phase.WAITING
    assert requests[1].arrival_s == 1
    assert requests[1].num_computed_tokens == 0
    assert not requests[1].block_table
    engine.run(now_s=1.0)
    check_finished(engine, requests)
    assert requests[0].epoch == 1
    assert requests[1].epoch == 2
    assert scheduler.num_preemptions == 1


def test_of_several_later_arrivals_the_last_gives_way():
    engine = FakeEngine(make_scheduler(num_blocks=9, block_size=4))
    requests = [make_request(name, num_prompt=8, max_tokens=12, arrival_s=i) for i, name in enumerate("abc")]
    for request in reversed(requests):
        engine.scheduler.add(request)
    assert step_until_preempted(engine).preempted == (requests[2],)
    engine.run(now_s=1.0)
    check_finished(engine, requests)


def test_a_token_in_flight_survives_the_preemption_of_its_request():
    scheduler = make_scheduler(num_blocks=6, block_size=4)
    old, young = (make_request(name, num_prompt=8, max_tokens=12, arrival_s=i) for i, name in enumerate(["o", "y"]))
    engine = FakeEngine(scheduler)
    scheduler.add(old)
    scheduler.add(young)
    num_output = 0
    while scheduler.num_preemptions == 0:
        num_output = young.num_output_tokens
        engine.step(1.0)
    assert engine.num_kept_after_preemption == 1, "the token sampled before the preemption was lost"
    assert young.num_output_tokens == num_output + 1
    assert young.num_in_flight == 0
    engine.run(now_s=1.0)
    check_finished(engine, [old, young])


@pytest.mark.parametrize("stop_after", range(1, 12))
def test_a_request_may_find_its_stop_token_around_its_preemption(stop_after: int):
    scheduler = make_scheduler(num_blocks=6, block_size=4)
    engine = FakeEngine(scheduler, stop_after={"y": stop_after})
    old, young = (make_request(name, num_prompt=8, max_tokens=12, arrival_s=i) for i, name in enumerate(["o", "y"]))
    scheduler.add(old)
    scheduler.add(young)
    engine.run(now_s=1.0)
    check_finished(engine, [old, young])


def test_the_oldest_request_is_never_preempted(rng):
    scheduler = make_scheduler(num_blocks=10, block_size=2, max_num_seqs=4, max_model_len=21, max_num_batched_tokens=6)
    engine = FakeEngine(scheduler)
    requests = [
        make_request(f"r{i}", num_prompt=int(rng.integers(1, 8)), max_tokens=14, arrival_s=float(i)) for i in range(8)
    ]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        oldest = min(scheduler.running, key=lambda request: request.arrival_order, default=None)
        plan = engine.step(10.0)
        assert oldest not in plan.preempted
    assert scheduler.num_preemptions > 0
    check_finished(engine, requests)


def test_a_chosen_request_gives_up_its_chunk_when_an_older_prefill_needs_its_blocks():
    scheduler = make_scheduler(num_blocks=13, block_size=4, max_num_batched_tokens=4)
    engine = FakeEngine(scheduler)
    old = make_request("old", num_prompt=40, max_tokens=4, arrival_s=0.0)
    young = make_request("young", num_prompt=3, max_tokens=30, arrival_s=1.0)  # but the first to be admitted
    scheduler.add(young)
    engine.step(1.0)
    scheduler.add(old)
    plan = step_until_preempted(engine)
    assert plan.preempted == (young,)
    assert len(engine.positions["young", 1]) % 4 > 0, "it had room for its next token, so it had been chosen"
    assert [chunk.request for chunk in plan.chunks] == [old]
    engine.run(now_s=1.0)
    check_finished(engine, [old, young])


def test_a_step_that_is_short_of_blocks_admits_nobody():
    def run(num_steps: int | None) -> tuple[int, list[str]]:
        """Steps until one preempts; a request that would fit comes before the step number `num_steps`."""
        scheduler = make_scheduler(num_blocks=6, block_size=4)
        for i, name in enumerate(["old", "young"]):
            scheduler.add(make_request(name, num_prompt=8, max_tokens=12, arrival_s=float(i)))
        engine = FakeEngine(scheduler)
        for step in range(100):
            if step == num_steps:
                scheduler.add(make_request("tiny", num_prompt=1, max_tokens=1, arrival_s=0.5))
            plan = engine.step(1.0)
            if plan.preempted:
                return step, [chunk.request.request_id for chunk in plan.chunks]
        raise AssertionError("no step preempted")

    num_steps, _ = run(None)
    assert run(num_steps) == (num_steps, ["old"])


def test_a_failed_step_ends_those_who_ran_and_leaves_no_adapter_that_was_not_loaded():
    scheduler = make_scheduler(max_num_seqs=2)
    requests = [make_request(name, *adapters) for name, adapters in [("one", "a"), ("two", "bc"), ("three", "b")]]
    scheduler.add(requests[0])
    admit(scheduler)
    for request in requests[1:]:
        scheduler.add(request)
    plan = scheduler.plan(0.0)
    assert plan.loads
    lost = scheduler.fail(plan)
    assert requests[0] in lost
    assert len(lost) == 2
    assert {request.finish_reason for request in lost} == {FinishReason.ERROR}
    assert set(scheduler.slot_cache.resident) == {"a"}
    scheduler.check_integrity()
    assert len(admit(scheduler)) == 1


def test_a_failed_step_ends_a_preempted_request_whose_token_it_lost():
    scheduler = make_scheduler(num_blocks=6, block_size=4)
    old, young = (make_request(name, num_prompt=8, max_tokens=12, arrival_s=i) for i, name in enumerate(["o", "y"]))
    scheduler.add(old)
    scheduler.add(young)
    scheduler.add(make_request("waiting", num_prompt=8, arrival_s=2.0))
    plan = scheduler.plan(3.0)
    while not plan.preempted:
        scheduler.on_dispatched(plan)
        for request in (old, young):
            if request.num_in_flight > 1:
                request.commit_token(0)
        plan = scheduler.plan(3.0)
    assert young.num_in_flight == 1
    assert scheduler.fail(plan) == [old, young]
    assert admit(scheduler, now_s=3.0) == ["waiting"]


@pytest.mark.parametrize("num_steps", range(4))
def test_an_aborted_request_gives_back_everything_in_every_phase(num_steps: int):
    scheduler = make_scheduler(max_num_batched_tokens=4)
    engine = FakeEngine(scheduler)
    request = make_request("r", "a", "b", num_prompt=7)
    scheduler.add(request)
    for _ in range(num_steps):
        engine.step(0.0)
    engine.abort("r")
    engine.step(0.0)
    assert request.finish_reason is FinishReason.ABORT
    check_finished(engine, [request])
    assert not scheduler.has_work


@pytest.mark.parametrize("num_steps", range(4))
def test_a_preempted_request_may_be_aborted(num_steps: int):
    scheduler = make_scheduler(num_blocks=6, block_size=4)
    old, young = (make_request(name, "a", num_prompt=8, max_tokens=12, arrival_s=i) for i, name in enumerate("oy"))
    engine = FakeEngine(scheduler)
    for request in (old, young):
        scheduler.add(request)
    step_until_preempted(engine)
    assert young.phase is Phase.WAITING
    for _ in range(num_steps):
        engine.step(1.0)
    engine.abort("y")
    scheduler.check_integrity()
    assert scheduler.slot_cache.num_pins == {"a": 1}
    engine.run(now_s=1.0)
    check_finished(engine, [old, young])


def test_a_preempted_request_may_be_aborted_before_its_token_is_read():
    scheduler = make_scheduler(num_blocks=6, block_size=4)
    old, young = (make_request(name, num_prompt=8, max_tokens=12, arrival_s=i) for i, name in enumerate("oy"))
    for request in (old, young):
        scheduler.add(request)
    while not (plan := scheduler.plan(1.0)).preempted:
        scheduler.on_dispatched(plan)
        for request in (old, young):
            if request.num_in_flight > 1:
                request.commit_token(0)
    assert young.num_in_flight == 1
    scheduler.abort("y")
    scheduler.check_integrity()
    assert scheduler.num_waiting == 0
    assert young.finish_reason is FinishReason.ABORT


def test_aborting_an_unknown_request_does_nothing():
    assert make_scheduler().abort("nobody") is None


def test_adapters_are_pinned_while_a_request_runs_and_stay_resident_after():
    scheduler = make_scheduler()
    request = make_request("r", "a", "b")
    scheduler.add(request)
    plan = scheduler.plan(0.0)
    scheduler.on_dispatched(plan)
    assert [load.adapter_id for load in plan.loads] == ["a", "b"]
    assert scheduler.slot_cache.num_pins == {"a": 1, "b": 1}
    scheduler.finish(request, FinishReason.STOP)
    assert scheduler.slot_cache.num_pins == {}
    assert set(scheduler.slot_cache.resident) == {"a", "b"}


def test_loading_for_a_request_never_evicts_its_own_resident_adapter():
    scheduler = make_scheduler(num_slots=2)
    for name, adapters in [("first", ["a"]), ("second", ["b"])]:
        request = make_request(name, *adapters)
        scheduler.add(request)
        admit(scheduler)
        scheduler.finish(request, FinishReason.STOP)
    scheduler.add(make_request("third", "c", "a"))  # a is the one unused for longest
    plan = scheduler.plan(0.0)
    assert [(load.adapter_id, load.evicted) for load in plan.loads] == [("c", ("b",))]


def test_adapters_of_several_slots_are_admitted_all_or_nothing():
    scheduler = make_scheduler(num_slots=4, slots_by_adapter={"big": 3, "wide": 2})
    first = make_request("first", "big")
    scheduler.add(first)
    scheduler.add(make_request("second", "small", "wide"))
    assert admit(scheduler) == ["first"]
    assert set(scheduler.slot_cache.resident) == {"big"}
    scheduler.finish(first, FinishReason.STOP)
    assert admit(scheduler) == ["second"]
    assert set(scheduler.slot_cache.resident) == {"small", "wide"}


def test_the_same_input_gives_the_same_plans(rng):
    seed = int(rng.integers(2**32))
    assert _random_run(seed) == _random_run(seed)


def _random_run(seed: int) -> list[object]:
    draw = random.Random(seed)
    scheduler = make_scheduler(num_blocks=16, num_slots=3, max_num_batched_tokens=12)
    engine = FakeEngine(scheduler)
    for i in range(30):
        adapters = draw.sample("abcdef", draw.randrange(4))
        scheduler.add(
            make_request(f"r{i}", *adapters, num_prompt=draw.randrange(1, 20), max_tokens=draw.randrange(1, 9))
        )
        engine.step(i * 0.1)
    engine.run(3.0)
    return engine.trace


@pytest.mark.parametrize(
    ("request_args", "param", "message"),
    [
        ({"num_prompt": 0}, "prompt", "no tokens"),
        ({"num_prompt": 64}, "prompt", "prompt has 64 tokens, .* limit of 64 tokens; shorten"),
        ({"num_prompt": 4, "max_tokens": 60}, "max_tokens", "needs 16 KV blocks of 4 tokens, but there are 8; lower"),
    ],
)
def test_a_request_that_could_never_run_is_refused_at_once(request_args: dict[str, int], param: str, message: str):
    scheduler = make_scheduler(num_blocks=8)
    with pytest.raises(InvalidRequestError, match=message) as error:
        scheduler.add(make_request("r", **request_args))
    assert error.value.param == param
    assert not scheduler.has_work


def test_an_id_in_use_is_refused():
    scheduler = make_scheduler(policy=Fifo())
    scheduler.add(make_request("r"))
    with pytest.raises(InvalidRequestError, match="'r' is in use"):
        scheduler.add(make_request("r"))
    assert scheduler.num_waiting == 1


def test_an_id_may_be_used_again_when_its_request_is_finished():
    engine = FakeEngine(make_scheduler())
    for _ in range(2):
        engine.scheduler.add(make_request("r"))
        engine.run()
    assert len(engine.finished) == 2


def test_admitted_names_only_new_requests():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    admit(scheduler)
    scheduler.add(make_request("b"))
    assert admitted(scheduler.plan(0.0), {"a"}) == ["b"]
