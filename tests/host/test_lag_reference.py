"""Orders and plans are those of the policies written plainly: one request after another, each looked at anew.

The plain policies below leave nobody out, so that the scheduler asks of each waiting request whether it fits; the real
ones ask for all at once (`serving/waiting_queue.py`). That is the same unless requests share blocks, so none does here.
"""

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from serving.policies import Fifo, Fitting, Lag, LeastFirst, Policy, Random, WhenBlocked
from serving.request import FinishReason, Request
from serving.waiting_queue import Needs, WaitingQueue, WaitingRequests
from tests.support.host import FakeEngine, check_finished, make_request, make_scheduler

ADAPTERS = "abcdefgh"
SLOTS_BY_ADAPTER = {"g": 2, "h": 3}


class PlainLag(Policy):
    """LAG over all waiting requests, those that do not fit included."""

    def __init__(self, theta_s: float) -> None:
        self._lag = Lag(theta_s)
        self._theta_s = theta_s

    def order(self, waiting: WaitingRequests, resident: Set[str], fitting: Fitting, now_s: float) -> Iterator[Request]:
        requests = tuple(waiting.requests)
        num_overdue = next((i for i, r in enumerate(requests) if now_s - r.arrival_s < self._theta_s), len(requests))
        yield from requests[:num_overdue]
        yield from plain_fewest_loads_first(requests[num_overdue:], resident)

    def when_blocked(self, request: Request, now_s: float) -> WhenBlocked:
        return self._lag.when_blocked(request, now_s)


class PlainRandom(Policy):
    """A random order of all waiting requests."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def order(self, waiting: WaitingRequests, resident: Set[str], fitting: Fitting, now_s: float) -> Iterator[Request]:
        yield from self._rng.sample(tuple(waiting.requests), len(waiting))

    def when_blocked(self, request: Request, now_s: float) -> WhenBlocked:
        return WhenBlocked.PASS


class PlainLeastFirst(Policy):
    """All waiting requests by (adapters, arrival)."""

    def order(self, waiting: WaitingRequests, resident: Set[str], fitting: Fitting, now_s: float) -> Iterator[Request]:
        yield from sorted(waiting.requests, key=lambda request: len(request.adapters))

    def when_blocked(self, request: Request, now_s: float) -> WhenBlocked:
        return WhenBlocked.PASS


def plain_fewest_loads_first(waiting: Sequence[Request], resident: Set[str]) -> Iterator[Request]:
    """Yields by (adapters that are not resident, arrival), counted anew whenever `resident` changes.

    A heap with outdated entries left in it: an entry counts only if it still tells the request's number of loads.
    """
    users: defaultdict[str, list[int]] = defaultdict(list)
    num_loads: dict[int, int] = {}  # by index into `waiting`, of those not yet yielded
    for index, request in enumerate(waiting):
        num_loads[index] = sum(adapter_id not in resident for adapter_id in request.adapters)
        for adapter_id in request.adapters:
            users[adapter_id].append(index)
    heap = [(loads, index) for index, loads in num_loads.items()]
    heapq.heapify(heap)
    counted = set(resident)
    while heap:
        loads, index = heapq.heappop(heap)
        if num_loads.get(index) != loads:
            continue
        del num_loads[index]
        yield waiting[index]
        for adapter_id in counted ^ resident:
            for user in users[adapter_id]:
                if user in num_loads:
                    num_loads[user] += -1 if adapter_id in resident else 1
                    heapq.heappush(heap, (num_loads[user], user))
        counted = set(resident)


def policies(name: str, theta_s: float) -> tuple[Policy, Policy]:
    """The real policy and the plain one."""
    match name:
        case "lag":
            return Lag(theta_s), PlainLag(theta_s)
        case "random":
            return Random(1), PlainRandom(1)
        case "least-first":
            return LeastFirst(), PlainLeastFirst()
    return Fifo(), Fifo()


class Twins:
    """Two engines that are told the same, one with the real policy, one with the plain one."""

    def __init__(self, name: str, theta_s: float, **sizes: int) -> None:
        self.engines = [
            FakeEngine(
                make_scheduler(policy=policy, slots_by_adapter=SLOTS_BY_ADAPTER, enable_prefix_cache=False, **sizes)
            )
            for policy in policies(name, theta_s)
        ]
        self.requests: list[tuple[Request, Request]] = []

    def add(self, adapters: Sequence[str], *, num_prompt: int, max_tokens: int, arrival_s: float, stops: int) -> None:
        name = f"r{len(self.requests)}"
        size = {"num_prompt": num_prompt, "max_tokens": max_tokens}
        real, plain = (make_request(name, *adapters, arrival_s=arrival_s, **size) for _ in self.engines)
        for engine, request in zip(self.engines, (real, plain), strict=True):
            engine.stop_after[name] = stops
            engine.scheduler.add(request)
        self.requests.append((real, plain))

    def step(self, now_s: float) -> None:
        for engine in self.engines:
            engine.step(now_s)
        self.compare()

    def abort(self, request_id: str) -> None:
        for engine in self.engines:
            engine.abort(request_id)

    def evict(self, adapter_id: str) -> None:
        """As after a failed copy: the adapter leaves its slots outside any plan."""
        for engine in self.engines:
            engine.scheduler.slot_cache.remove(adapter_id)

    def compare(self) -> None:
        real, plain = self.engines
        assert real.trace[-1:] == plain.trace[-1:]
        assert [r.request_id for r in real.scheduler.waiting] == [r.request_id for r in plain.scheduler.waiting]
        assert list(real.scheduler.slot_cache.resident) == list(plain.scheduler.slot_cache.resident)

    def finish(self, now_s: float) -> None:
        for engine, requests in zip(self.engines, zip(*self.requests, strict=True), strict=bool(self.requests)):
            engine.run(now_s)
            check_finished(engine, list(requests))
        assert self.engines[0].trace == self.engines[1].trace


class TwinsMachine(RuleBasedStateMachine):
    """Random arrivals, late ones included, steps, aborts and evictions, with little of everything."""

    @initialize(
        name=st.sampled_from(["lag", "lag", "lag", "random", "least-first", "fifo"]),
        theta_s=st.sampled_from([0.0, 0.1, 0.3, 0.3, 10.0]),
        num_blocks=st.integers(8, 24),
        num_slots=st.integers(3, 5),
        budget=st.integers(4, 16),
    )
    def start(self, name: str, theta_s: float, num_blocks: int, num_slots: int, budget: int) -> None:
        sizes = {"num_blocks": num_blocks, "block_size": 2, "num_slots": num_slots, "max_num_batched_tokens": budget}
        self.twins = Twins(name, theta_s, **sizes, max_num_seqs=4, max_model_len=16)
        self.now_s = 0.0

    @rule(
        mixes=st.lists(st.sets(st.sampled_from(ADAPTERS), max_size=2), min_size=1, max_size=4),
        num_prompt=st.integers(1, 12),
        max_tokens=st.integers(1, 12),
        stops=st.integers(1, 12),
        wait_s=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
    )
    def add(self, mixes: list[set[str]], num_prompt: int, max_tokens: int, stops: int, wait_s: float) -> None:
        for mix in mixes:
            adapters = sorted(mix - {"h"}) if len(mix) > 1 else sorted(mix)  # each alone fits into three slots
            arrival_s = self.now_s - wait_s
            self.twins.add(adapters, num_prompt=num_prompt, max_tokens=max_tokens, arrival_s=arrival_s, stops=stops)

    @rule(num_steps=st.integers(1, 4), step_s=st.sampled_from([0.0, 0.05, 0.2]))
    def step(self, num_steps: int, step_s: float) -> None:
        for _ in range(num_steps):
            self.now_s += step_s
            self.twins.step(self.now_s)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        left = [real.request_id for real, _ in self.twins.requests if not real.is_finished]
        if left:
            self.twins.abort(data.draw(st.sampled_from(left)))

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        slot_cache = self.twins.engines[0].scheduler.slot_cache
        unpinned = [adapter_id for adapter_id in slot_cache.resident if not slot_cache.is_pinned(adapter_id)]
        if unpinned:
            self.twins.evict(data.draw(st.sampled_from(unpinned)))

    @invariant()
    def both_are_alike(self) -> None:
        if hasattr(self, "twins"):
            self.twins.compare()

    def teardown(self) -> None:
        if hasattr(self, "twins"):
            self.twins.finish(self.now_s)


TwinsMachine.TestCase.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=40, stateful_step_count=20
)
TestPlansAreThoseOfThePlainPolicies = TwinsMachine.TestCase


@pytest.mark.parametrize(
    ("name", "theta_s"), [("lag", 0.2), ("lag", 1.0), ("lag", 5.0), ("random", 1.0), ("least-first", 1.0)]
)
def test_plans_of_a_long_queue_are_those_of_the_plain_policies(name: str, theta_s: float):
    draw = random.Random(f"{name} {theta_s}")
    twins = Twins(name, theta_s, num_blocks=60, num_slots=8, max_num_seqs=8, max_num_batched_tokens=40)
    names = [f"a{i}" for i in range(30)]
    for i in range(120):
        mix = set(draw.choices(names, weights=[1 / (rank + 1) for rank in range(30)], k=draw.randrange(4)))
        size = {"num_prompt": draw.choice([2, 9, 40]), "max_tokens": draw.randrange(1, 20)}
        twins.add(sorted(mix), arrival_s=i * 0.03 - draw.choice([0, 0, 1]), stops=draw.randrange(1, 30), **size)
        if i % 4 == 0:
            twins.step(i * 0.03)
        if draw.random() < 0.05:
            twins.abort(draw.choice(twins.requests)[0].request_id)
    twins.finish(3.6)


def test_preempted_requests_return_to_their_place_in_the_order():
    draw = random.Random(2)
    twins = Twins("lag", 2.0, num_blocks=24, num_slots=4, max_num_seqs=6, max_num_batched_tokens=16, max_model_len=48)
    for i in range(60):
        size = {"num_prompt": draw.randrange(1, 30), "max_tokens": draw.randrange(1, 30)}
        twins.add(draw.sample("abcde", draw.randrange(3)), arrival_s=i * 0.05, stops=draw.randrange(1, 40), **size)
        twins.step(i * 0.05)
    twins.finish(3.0)
    assert twins.engines[0].scheduler.num_preemptions > 0


@settings(derandomize=True, database=None, deadline=None, max_examples=100)
@given(
    mixes=st.lists(st.sets(st.sampled_from(ADAPTERS), max_size=5), max_size=12),
    resident=st.sets(st.sampled_from(ADAPTERS)),
    changes=st.lists(st.sets(st.sampled_from(ADAPTERS))),
)
def test_counts_follow_adapters_that_come_and_go(mixes: list[set[str]], resident: set[str], changes: list[set[str]]):
    queue = WaitingQueue(lambda adapter_id: SLOTS_BY_ADAPTER.get(adapter_id, 1))
    for i, mix in enumerate(mixes):
        queue.add(make_request(f"r{i}", *sorted(mix), arrival_s=float(i)), Needs(1, 1, 1))
    live = set(resident)
    waiting = queue.snapshot()
    adapters, slots = waiting.count_adapters_outside(live), waiting.count_slots_outside(live)
    for change in [set(), *changes]:
        live ^= change
        assert adapters.values().tolist() == [len(mix - live) for mix in mixes]
        assert slots.values().tolist() == [sum(SLOTS_BY_ADAPTER.get(a, 1) for a in mix - live) for mix in mixes]


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(st.data())
def test_the_queue_keeps_needs_and_adapters_with_their_requests(data: st.DataObject):
    queue = WaitingQueue(lambda adapter_id: SLOTS_BY_ADAPTER.get(adapter_id, 1))
    needs: dict[Request, Needs] = {}
    for i in range(data.draw(st.integers(1, 25))):
        if needs and data.draw(st.booleans()):
            request = data.draw(st.sampled_from(sorted(needs, key=lambda r: r.arrival_order)))
            del needs[request]
            queue.remove(request)
        else:
            mix = data.draw(st.sets(st.sampled_from(ADAPTERS), max_size=6))
            request = make_request(f"r{i}", *sorted(mix), arrival_s=data.draw(st.integers(0, 5)) / 2)
            request.sequence_number = i
            needs[request] = Needs(*data.draw(st.tuples(*[st.integers(0, 99)] * 3)))
            queue.add(request, needs[request])
        queue.check_integrity()
        by_arrival = sorted(needs, key=lambda r: r.arrival_order)
        waiting = queue.snapshot()
        assert queue.requests == tuple(by_arrival)
        assert list(waiting.requests) == by_arrival
        columns = zip(waiting.promised_blocks, waiting.most_blocks, waiting.num_tokens, strict=True)
        assert [Needs(*map(int, column)) for column in columns] == [needs[r] for r in by_arrival]
        assert set(waiting.adapter_numbers) == {a for r in by_arrival for a in r.adapters}
        assert len(waiting.adapter_columns) == max((len(r.adapters) for r in by_arrival), default=0)


def test_a_queue_that_cannot_tell_the_slots_of_an_adapter_stays_as_it_was():
    def num_slots(adapter_id: str) -> int:
        if adapter_id == "unknown":
            raise KeyError(adapter_id)
        return 1

    queue = WaitingQueue(num_slots)
    with pytest.raises(KeyError, match="unknown"):
        queue.add(make_request("r", "a", "unknown"), Needs(1, 1, 1))
    queue.check_integrity()
    assert len(queue) == 0


@pytest.mark.parametrize(
    ("num_slots", "num_blocks", "budget"), [(1, 64, 32), (4, 8, 32), (4, 64, 9)], ids=["slots", "blocks", "budget"]
)
def test_a_plan_asks_of_few_requests_whether_they_fit(
    num_slots: int, num_blocks: int, budget: int, monkeypatch: pytest.MonkeyPatch
):
    scheduler = make_scheduler(
        policy=Lag(10.0), max_num_seqs=8, num_slots=num_slots, num_blocks=num_blocks, max_num_batched_tokens=budget
    )
    scheduler.add(make_request("runs", "a", num_prompt=8, max_tokens=8))
    scheduler.on_dispatched(scheduler.plan(0.0))
    scheduler.running[0].commit_token(0)
    for i in range(500):
        scheduler.add(make_request(f"r{i}", f"b{i % 100}", num_prompt=20 if num_blocks == 8 else 4))
    asked: Counter[str] = Counter()
    ask = scheduler._shared_if_it_fits

    def counted_ask(request: Request, *args: object) -> list[int] | None:
        asked[request.request_id] += 1
        return ask(request, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(scheduler, "_shared_if_it_fits", counted_ask)
    plan = scheduler.plan(0.0)
    assert sum(asked.values()) <= len(plan.chunks)


@pytest.mark.parametrize("enable_prefix_cache", [False, True])
def test_what_fits_is_what_the_scheduler_says_of_each_request_alone(
    enable_prefix_cache: bool, monkeypatch: pytest.MonkeyPatch
):
    """The mask that policies are given and the scheduler agree at each admission; one that shares may fit all the
    same."""
    compared = 0
    order = Lag.order

    def checked_order(
        self: Lag, waiting: WaitingRequests, resident: Set[str], fitting: Fitting, now_s: float
    ) -> Iterator[Request]:
        nonlocal compared
        for request in order(self, waiting, resident, fitting, now_s):
            room, draft = fitting._room, fitting._draft  # pyright: ignore[reportFunctionMemberAccess]
            left = [i for i, other in enumerate(waiting.requests) if other.row is None]
            one_by_one = [
                scheduler._shared_if_it_fits(waiting.requests[i], room, draft.budget) is not None for i in left
            ]
            at_once = fitting()[np.array(left, int)].tolist()
            if enable_prefix_cache:
                assert all(alone >= mask for alone, mask in zip(one_by_one, at_once, strict=True))
            else:
                assert one_by_one == at_once
            compared += 1
            yield request

    monkeypatch.setattr(Lag, "order", checked_order)
    draw = random.Random(4)
    scheduler = make_scheduler(
        policy=Lag(0.5), num_blocks=40, num_slots=4, max_num_seqs=8, max_num_batched_tokens=40,
        enable_prefix_cache=enable_prefix_cache,
    )  # fmt: skip
    for i in range(60):
        mix = draw.sample("abcdef", draw.randrange(4))
        scheduler.add(make_request(f"x/r{i}", *mix, num_prompt=draw.randrange(1, 30), arrival_s=i * 0.05))
        plan = scheduler.plan(i * 0.05)
        scheduler.on_dispatched(plan)
        for chunk in plan.chunks:
            if chunk.samples:
                scheduler.finish(chunk.request, FinishReason.STOP)
    assert compared > 50
