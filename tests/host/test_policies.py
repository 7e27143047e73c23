"""LAG, its hard bound, its baselines, and the cases H1, H2, H3, F3, F6, F7 of the field at the level of the host."""

import random
from collections.abc import Iterable

import numpy as np
import pytest

from serving.config import EngineConfig
from serving.errors import InvalidRequestError
from serving.policies import Fifo, Lag, LeastFirst, Policy, Random, WhenBlocked, make_policy
from serving.request import FinishReason, Request
from serving.scheduler import Scheduler
from serving.waiting_queue import Needs, WaitingQueue, WaitingRequests
from tests.support.host import FakeEngine, admit, check_finished, make_request, make_scheduler

ALL_POLICIES = [Lag(0.5), Lag(0.0), Fifo(), Random(3), LeastFirst()]


def queued(waiting: list[Request]) -> WaitingRequests:
    """The requests as a policy sees them."""
    queue = WaitingQueue(lambda adapter_id: 1)
    for request in waiting:
        queue.add(request, Needs(promised_blocks=1, most_blocks=1, num_tokens=1))
    return queue.snapshot()


def order_with_admissions(policy: Policy, waiting: list[Request], resident: Iterable[str], now_s: float) -> list[str]:
    """Order of admission if every request fits and nothing is evicted."""
    slots = dict.fromkeys(resident, 0)
    order = []
    for request in policy.order(queued(waiting), slots.keys(), lambda: np.ones(len(waiting), bool), now_s):
        order.append(request.request_id)
        slots.update(dict.fromkeys(request.adapters, 0))
    return order


def greedy_by_definition(waiting: list[Request], resident: Iterable[str]) -> list[str]:
    """LAG as DESIGN.md writes it: the least (|L(r) \\ S|, arrival), S growing with each choice."""
    chosen, slots, left = [], set(resident), list(waiting)
    while left:
        best = min(left, key=lambda request: (len(set(request.adapters) - slots), request.arrival_order))
        left.remove(best)
        slots |= set(best.adapters)
        chosen.append(best.request_id)
    return chosen


def numbered(requests: list[Request]) -> list[Request]:
    for i, request in enumerate(requests):
        request.sequence_number = i
    return requests


def test_lag_takes_the_fewest_loads_first_and_counts_what_it_chose():
    waiting = numbered(
        [
            make_request("loads-3", "a", "b", "c"),
            make_request("loads-1", "d"),
            make_request("loads-0-after-1", "d"),
            make_request("resident", "r"),
            make_request("base"),
        ]
    )
    assert order_with_admissions(Lag(10.0), waiting, {"r"}, now_s=0.0) == [
        "resident",
        "base",
        "loads-1",
        "loads-0-after-1",
        "loads-3",
    ]


@pytest.mark.parametrize("num_adapters", [3, 10, 50])
def test_lag_equals_its_definition(rng, num_adapters: int):
    names = [f"a{i}" for i in range(num_adapters)]
    for _ in range(20):
        waiting = numbered(
            [
                make_request(f"r{i}", *map(str, rng.choice(names, rng.integers(0, 4), replace=False)))
                for i in range(int(rng.integers(1, 30)))
            ]
        )
        resident = set(map(str, rng.choice(names, 2, replace=False)))
        assert order_with_admissions(Lag(1.0), waiting, resident, 0.0) == greedy_by_definition(waiting, resident)


def test_lag_counts_anew_when_an_admission_evicts():
    waiting = numbered([make_request("x", "new"), make_request("y", "old"), make_request("z", "old", "new")])
    slots = {"old": 0}
    order = []
    for request in Lag(1.0).order(queued(waiting), slots.keys(), lambda: np.ones(len(waiting), bool), 0.0):
        order.append(request.request_id)
        if request.request_id == "y":
            slots.clear()
            slots["new"] = 0
    assert order == ["y", "x", "z"]


def test_lag_counts_the_load_of_an_adapter_that_an_admission_evicts():
    waiting = numbered([make_request("base"), make_request("evicted", "old"), make_request("loaded", "new")])
    slots = {"old": 0}
    order = []
    for request in Lag(1.0).order(queued(waiting), slots.keys(), lambda: np.ones(len(waiting), bool), 0.0):
        order.append(request.request_id)
        if request.request_id == "base":
            slots.clear()
            slots["new"] = 0
    assert order == ["base", "loaded", "evicted"]


def test_overdue_requests_go_first_in_order_of_arrival():
    waiting = numbered(
        [
            make_request("old-3", "a", "b", "c", arrival_s=0.0),
            make_request("old-1", "a", arrival_s=0.1),
            make_request("new-1", "x", arrival_s=0.9),
            make_request("new-base", arrival_s=1.0),
        ]
    )
    assert order_with_admissions(Lag(0.5), waiting, (), now_s=1.0) == ["old-3", "old-1", "new-base", "new-1"]


def test_least_first_counts_adapters_whether_resident_or_not():
    waiting = numbered([make_request("two", "a", "b"), make_request("one", "c"), make_request("base")])
    assert order_with_admissions(LeastFirst(), waiting, {"a", "b"}, 0.0) == ["base", "one", "two"]


def test_random_is_repeatable_by_its_seed_and_is_not_order_of_arrival():
    waiting = numbered([make_request(f"r{i}") for i in range(20)])
    first, again, other = (order_with_admissions(Random(seed), waiting, (), 0.0) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert sorted(first) == sorted(request.request_id for request in waiting)
    assert first != [request.request_id for request in waiting]


@pytest.mark.parametrize(
    ("name", "cls"), [("lag", Lag), ("fifo", Fifo), ("random", Random), ("least-first", LeastFirst)]
)
def test_every_scheduler_name_makes_its_policy(name, cls: type[Policy]):
    assert isinstance(make_policy(EngineConfig(scheduler=name)), cls)


@pytest.mark.parametrize("policy", ALL_POLICIES, ids=lambda policy: type(policy).__name__)
def test_every_policy_finishes_a_mixed_load(policy: Policy):
    engine, requests = _mixed_load(policy, seed=5)
    engine.run(now_s=3.0)
    check_finished(engine, requests)


def _mixed_load(policy: Policy, seed: int) -> tuple[FakeEngine, list[Request]]:
    draw = random.Random(seed)
    engine = FakeEngine(make_scheduler(policy=policy, num_blocks=20, num_slots=3, max_num_batched_tokens=10))
    requests = []
    for i in range(40):
        adapters = draw.sample("abcde", draw.randrange(4))
        requests.append(make_request(f"r{i}", *adapters, num_prompt=draw.randrange(1, 18), arrival_s=i * 0.05))
        engine.scheduler.add(requests[-1])
        engine.step(i * 0.05)
    return engine, requests


@pytest.mark.parametrize("policy", [Lag(0.0), Fifo()], ids=["theta 0", "fifo"])
def test_h2_theta_zero_admits_in_order_of_arrival_whatever_is_resident(policy: Policy):
    scheduler = make_scheduler(policy=policy, num_slots=1, max_num_seqs=3)
    order = []
    for i, adapters in enumerate([("a",), ("b",), ("a",), (), ("b",), ("a",)]):
        scheduler.add(make_request(f"r{i}", *adapters, arrival_s=float(i)))
    while scheduler.has_work:
        order += admit(scheduler, now_s=5.0)
        scheduler.finish(scheduler.running[0], FinishReason.STOP)
    assert order == [f"r{i}" for i in range(6)]


def test_a_request_is_overdue_as_soon_as_it_has_waited_theta():
    request = make_request("r", arrival_s=1.0)
    assert Lag(0.0).when_blocked(request, now_s=1.0) is WhenBlocked.STOP
    assert Lag(0.5).when_blocked(request, now_s=1.5) is WhenBlocked.CLAIM
    assert Lag(0.5).when_blocked(request, now_s=1.25) is WhenBlocked.PASS


def test_h1_an_endless_stream_on_one_adapter_does_not_starve_another():
    scheduler = make_scheduler(num_slots=1, max_num_seqs=4, policy=Lag(theta_s=0.5))
    engine = FakeEngine(scheduler)
    step_s, max_tokens = 0.05, 8
    lone = make_request("lone", "b", arrival_s=0.2)
    started_s = None
    for i in range(60):
        now_s = i * step_s
        scheduler.add(make_request(f"stream-{i}", "a", max_tokens=max_tokens, arrival_s=now_s))
        if i == 4:
            scheduler.add(lone)
        engine.step(now_s)
        if started_s is None and lone.row is not None:
            started_s = now_s
    assert started_s is not None
    drain_s = (max_tokens + 2) * step_s  # those who ran when it became overdue end first: one slot
    assert started_s - lone.arrival_s <= 0.5 + drain_s


def _scheduler_with_full_slots(
    policy: Policy, *, max_num_seqs: int = 16, num_blocks: int = 200, max_num_batched_tokens: int = 200
) -> Scheduler:
    """Seven requests run on L1..L4, which fill all four slots."""
    scheduler = make_scheduler(
        policy=policy,
        num_slots=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
    )
    for i, adapter_id in enumerate(["L1", "L2", "L3", "L4", "L1", "L2", "L3"]):
        scheduler.add(make_request(f"R{i + 1}", adapter_id, max_tokens=30))
    assert len(admit(scheduler)) == 7
    return scheduler


def test_h3_requests_that_cannot_get_slots_do_not_block_the_base_and_resident_adapters():
    scheduler = _scheduler_with_full_slots(Lag(0.5))
    for i in range(8, 12):
        scheduler.add(make_request(f"R{i}", "L5"))
    for i in (12, 13):
        scheduler.add(make_request(f"R{i}"))
    for i, adapter_id in [(14, "L1"), (15, "L2"), (16, "L4")]:
        scheduler.add(make_request(f"R{i}", adapter_id))
    assert admit(scheduler, now_s=0.1) == ["R12", "R13", "R14", "R15", "R16"]
    assert [request.request_id for request in scheduler.waiting] == ["R8", "R9", "R10", "R11"]


def test_h3_an_overdue_request_lets_the_base_pass_but_keeps_the_slots_it_waits_for():
    scheduler = _scheduler_with_full_slots(Lag(0.5))
    scheduler.add(make_request("overdue", "L5", arrival_s=0.0))
    scheduler.add(make_request("base", arrival_s=0.5))
    scheduler.add(make_request("prolongs-a-pin", "L1", arrival_s=0.5))
    assert admit(scheduler, now_s=0.6) == ["base"]
    for request in list(scheduler.running):
        if request.adapters in [("L1",)]:
            scheduler.finish(request, FinishReason.STOP)
    assert admit(scheduler, now_s=0.7) == ["overdue"]
    assert admit(scheduler, now_s=0.7) == []  # L1 needs a slot again, and all four are pinned


def test_an_overdue_request_lets_pass_who_uses_only_its_own_adapters():
    scheduler = _scheduler_with_full_slots(Lag(0.5))
    scheduler.add(make_request("overdue", "L1", "L5", arrival_s=0.0))
    scheduler.add(make_request("same-adapter", "L1", arrival_s=0.5))
    assert admit(scheduler, now_s=0.6) == ["same-adapter"]


def test_an_overdue_request_keeps_a_row():
    scheduler = _scheduler_with_full_slots(Lag(0.5), max_num_seqs=8)
    scheduler.add(make_request("overdue", "L5", arrival_s=0.0))
    scheduler.add(make_request("base", arrival_s=0.5))
    assert admit(scheduler, now_s=0.6) == []


def test_an_overdue_request_keeps_its_blocks_from_the_full_length_of_those_who_pass():
    running, promised, claimed, short = 7 * 2, 7 * 1, 14, 2  # blocks in use, one more each, 50 tokens and one more
    scheduler = _scheduler_with_full_slots(Lag(0.5), num_blocks=running + promised + claimed + short)
    scheduler.add(make_request("overdue", "L5", num_prompt=50, max_tokens=10, arrival_s=0.0))
    scheduler.add(make_request("grows-too-long", max_tokens=6, arrival_s=0.5))
    scheduler.add(make_request("short", max_tokens=5, arrival_s=0.5))
    assert admit(scheduler, now_s=0.6) == ["short"]


def test_an_overdue_request_is_not_passed_by_a_prompt_that_outlasts_the_step():
    scheduler = _scheduler_with_full_slots(Lag(0.5), max_num_batched_tokens=28)
    scheduler.add(make_request("overdue", "L5", arrival_s=0.0))
    scheduler.add(make_request("long", num_prompt=22, arrival_s=0.5))
    scheduler.add(make_request("short", num_prompt=21, arrival_s=0.5))  # 28 less one token for each of seven rows
    assert admit(scheduler, now_s=0.6) == ["short"]


def _start_of_a_blocked_request(seed: int, *, others_pass: bool) -> int:
    """Step in which a request that waits for slots starts; base requests keep coming once it is overdue, or not."""
    draw = random.Random(seed)
    engine = FakeEngine(make_scheduler(num_slots=2, max_num_seqs=5, num_blocks=30, max_num_batched_tokens=40))
    for i, adapter_id in enumerate("aabb"):
        engine.scheduler.add(make_request(f"first-{i}", adapter_id, max_tokens=draw.randrange(10, 25)))
    engine.step(0.0)
    blocked = make_request("blocked", *draw.sample("cd", draw.randrange(1, 3)), num_prompt=9)
    engine.scheduler.add(blocked)
    for step in range(1, 200):
        if others_pass:
            adapters = draw.sample("abcd", draw.randrange(3))
            size = {"num_prompt": draw.randrange(1, 20), "max_tokens": draw.randrange(1, 20)}
            engine.scheduler.add(make_request(f"later-{step}", *adapters, arrival_s=1.0, **size))
        engine.step(1.0)
        if blocked.row is not None:
            return step
    raise AssertionError("the blocked request never started")


@pytest.mark.parametrize("seed", range(8))
def test_those_who_pass_an_overdue_request_do_not_delay_it(seed: int):
    assert _start_of_a_blocked_request(seed, others_pass=True) == _start_of_a_blocked_request(seed, others_pass=False)


def test_f3_more_adapters_in_a_round_than_slots_is_no_error():
    draw = random.Random(0)
    engine = FakeEngine(make_scheduler(num_slots=2))
    requests = []
    for i, adapters in enumerate([("a",), ("b",), (), ("a", "b"), ("b", "c")] * 50):
        requests.append(make_request(f"r{i}", *adapters, arrival_s=i * 0.01, max_tokens=draw.randrange(1, 6)))
        engine.scheduler.add(requests[-1])
        engine.step(i * 0.01)
        if draw.random() < 0.3:
            engine.abort(draw.choice(requests).request_id)
    engine.run(now_s=2.5)
    check_finished(engine, requests)


def test_f6_one_slot_serves_every_registered_adapter_in_turn_and_mixed():
    engine = FakeEngine(make_scheduler(num_slots=1))
    requests = []
    for i, adapter_id in enumerate("abcd"):
        requests.append(make_request(f"serial-{i}", adapter_id))
        engine.scheduler.add(requests[-1])
        engine.run()
    for i, adapter_id in enumerate("abcdabcd"):
        requests.append(make_request(f"mixed-{i}", adapter_id))
        engine.scheduler.add(requests[-1])
    engine.run()
    check_finished(engine, requests)


def test_f7_a_mix_of_more_slots_than_exist_is_refused_at_once():
    scheduler = make_scheduler(num_slots=2, slots_by_adapter={"b": 2})
    message = r"needs 3 slots \(b: 2, c: 1\), but the slot array has 2; .* --adapter-slots"
    with pytest.raises(InvalidRequestError, match=message) as error:
        scheduler.add(make_request("r", "b", "c"))
    assert error.value.status == 400
    assert error.value.param == "adapter_mix"
    assert not scheduler.has_work
    scheduler.add(make_request("fits", "a", "c"))
    assert admit(scheduler) == ["fits"]
