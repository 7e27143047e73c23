"""Scheduler, BlockPool and SlotCache together under random requests, aborts, stops, time and shortage.

The model is the fake engine: it knows every token, KV position and slot, checks each plan against the budget and the
hard bound of LAG, and at the end that each request computed positions 0..n once an epoch, in order.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from serving.policies import Fifo, Lag, LeastFirst, Random
from serving.request import Phase, Request
from tests.support.host import FakeEngine, check_finished, make_request, make_scheduler, with_two_caches

POLICIES = st.sampled_from(["lag", "lag", "theta-0", "fifo", "random", "least-first"])
SLOTS_BY_ADAPTER = {"a": 1, "b": 1, "c": 1, "d": 2, "e": 3}


class SchedulerMachine(RuleBasedStateMachine):
    """Few blocks, rows and slots, so that most steps are short of something."""

    @initialize(
        policy=POLICIES,
        num_blocks=st.integers(8, 20),
        budget=st.sampled_from([4, 4, 5, 7, 12]),
        decode_steps=st.sampled_from([1, 2, 3]),
    )
    def start(self, policy: str, num_blocks: int, budget: int, decode_steps: int) -> None:
        policies = {
            "lag": Lag(0.3),
            "theta-0": Lag(0.0),
            "fifo": Fifo(),
            "random": Random(0),
            "least-first": LeastFirst(),
        }
        scheduler = make_scheduler(
            policy=policies[policy],
            num_blocks=num_blocks,
            block_size=2,
            num_slots=3,
            slots_by_adapter=SLOTS_BY_ADAPTER,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_model_len=16,
        )
        self.engine = FakeEngine(scheduler, decode_steps)
        self.requests: list[Request] = []
        self.now_s = 0.0

    @rule(
        adapters=st.sampled_from(["", "a", "b", "c", "ab", "abc", "d", "ad", "e"]),
        num_prompt=st.integers(1, 12),
        max_tokens=st.integers(1, 12),
        stop_after=st.integers(1, 12),
        wait_s=st.sampled_from([0.0, 0.1, 0.5]),
        family=st.sampled_from(["", "x/", "x/", "y/"]),
        has_two_caches=st.sampled_from([False, False, True]),
    )
    def add(
        self,
        adapters: str,
        num_prompt: int,
        max_tokens: int,
        stop_after: int,
        wait_s: float,
        family: str,
        has_two_caches: bool,
    ) -> None:
        name = f"{family}r{len(self.requests)}"
        if has_two_caches:  # fits twice into the fewest blocks
            num_prompt, max_tokens = -(-num_prompt // 3), -(-max_tokens // 3)
        size = {"num_prompt": num_prompt, "max_tokens": max_tokens}
        # It may have come some time before the engine sees it.
        request = make_request(name, *adapters, arrival_s=self.now_s - wait_s, **size)
        if has_two_caches:
            request = with_two_caches(request)
        self.requests.append(request)
        self.engine.stop_after[name] = stop_after
        self.engine.scheduler.add(request)

    @rule(num_steps=st.integers(1, 4), step_s=st.sampled_from([0.0, 0.05, 0.2]))
    def step(self, num_steps: int, step_s: float) -> None:
        for _ in range(num_steps):
            self.now_s += step_s
            self.engine.step(self.now_s)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        left = [request.request_id for request in self.requests if not request.is_finished]
        if left:
            self.engine.abort(data.draw(st.sampled_from(left)))

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        scheduler = self.engine.scheduler
        scheduler.check_integrity()
        for phase, listed in [(Phase.WAITING, scheduler.waiting), (Phase.RUNNING, scheduler.running)]:
            names = {request.request_id for request in self.requests if request.phase is phase}
            assert names == {request.request_id for request in listed}

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run(self.now_s)
            check_finished(self.engine, self.requests)


SchedulerMachine.TestCase.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=60, stateful_step_count=25
)
TestSchedulerUnderShortage = SchedulerMachine.TestCase


@pytest.mark.parametrize("seed", range(4))
def test_a_random_workload_with_aborts_and_preemptions_runs_to_completion(seed: int):
    draw = random.Random(seed)
    scheduler = make_scheduler(
        policy=[Lag(0.3), Fifo(), Random(seed), LeastFirst()][seed % 4],
        num_blocks=24,
        block_size=4,
        slots_by_adapter=SLOTS_BY_ADAPTER,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_model_len=48,
    )
    engine, requests = FakeEngine(scheduler, decode_steps=1 + seed % 3), []
    for i in range(60):
        adapters = draw.choice(["", "a", "b", "c", "ab", "abc", "d", "ad", "e"])
        size = {"num_prompt": draw.randrange(1, 30), "max_tokens": draw.randrange(1, 30)}
        if i % 4 == 1:
            size = {"num_prompt": draw.randrange(1, 20), "max_tokens": draw.randrange(1, 20)}
        request = make_request(f"r{i}", *adapters, arrival_s=i * 0.05, **size)
        requests.append(with_two_caches(request) if i % 4 == 1 else request)
        engine.stop_after[f"r{i}"] = draw.randrange(1, 40)
        scheduler.add(requests[-1])
        engine.step(i * 0.05)
        if draw.random() < 0.1:
            engine.abort(draw.choice(requests).request_id)
    engine.run(now_s=3.0)
    check_finished(engine, requests)
    assert scheduler.num_preemptions > 0
    assert engine.num_dropped_tokens > 0
    assert (engine.num_planned_ahead > 0) == (engine.decode_steps > 1)
