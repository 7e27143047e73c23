"""LAG's hard bound, and that no room stays unused, for random requests under any arrivals.

A request waits at most θ and then the time that its own room takes to free. Its own room is a row, its blocks and its
slots, as `Scheduler` claims them. The time it takes to free, exactly: the steps until it would start if, from the
moment it is overdue on, nobody came and nobody behind it were there; those ahead of it and those that run go on. That
is the bound where the budget gives every running request a chunk as long as its prompt, and blocks suffice for all.
Where they do not, those who pass may shorten the chunks of others, but a bound stays that no later arrival has a part
in: every step, the oldest request in the engine advances by a token.
"""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.policies import Lag, LeastFirst, Policy, Random
from serving.request import Request
from serving.scheduler import Scheduler
from tests.support.host import FakeEngine, make_request, make_scheduler

STEP_S = 0.1
THETA_S = 0.35
SLOTS_BY_ADAPTER = {"a": 1, "b": 1, "c": 1, "d": 2, "e": 1}
NUM_SLOTS = 3

FAST = settings(derandomize=True, database=None, deadline=None, max_examples=12)
THOROUGH = settings(derandomize=True, database=None, deadline=None, max_examples=100)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request to come: the adapters it uses, its prompt, its output, and whether one more comes in the same step."""

    adapters: str
    num_prompt: int
    max_tokens: int
    is_with_next: bool


arrivals = st.builds(
    Arrival,
    adapters=st.sampled_from(["", "a", "b", "c", "ab", "bc", "abc", "d", "ad", "e", "ce"]),
    num_prompt=st.integers(1, 10),
    max_tokens=st.integers(1, 10),
    is_with_next=st.booleans(),
)


class Stream:
    """An engine in which requests arrive, those of the list over and over."""

    def __init__(self, scheduler: Scheduler, incoming: list[Arrival]) -> None:
        self.engine = FakeEngine(scheduler)
        self.requests: list[Request] = []
        self.step = 0
        self._incoming = incoming

    @property
    def now_s(self) -> float:
        return self.step * STEP_S

    def arrive(self) -> None:
        while True:
            arrival = self._incoming[len(self.requests) % len(self._incoming)]
            size = {"num_prompt": arrival.num_prompt, "max_tokens": arrival.max_tokens}
            name = f"r{len(self.requests)}"
            self.requests.append(make_request(name, *arrival.adapters, arrival_s=self.now_s, **size))
            self.engine.scheduler.add(self.requests[-1])
            if not arrival.is_with_next or len(self.requests) % len(self._incoming) == 0:
                return

    def advance(self) -> None:
        self.engine.step(self.now_s)
        self.step += 1

    def run_until_overdue(self, index: int) -> Request:
        """Lets requests arrive and steps run, until the request of this number is overdue or has started."""
        while True:
            self.arrive()
            if len(self.requests) > index:
                request = self.requests[index]
                if request.epoch > 0 or self.now_s - request.arrival_s >= THETA_S:
                    return request
            self.advance()

    def start_of(self, request: Request, *, arrive: bool, most_steps: int) -> int:
        """Steps from now on until the request is admitted, while others arrive or not."""
        first = self.step
        while request.epoch == 0:
            assert self.step - first <= most_steps, f"{request} has not started after {most_steps} steps"
            self.advance()
            if arrive and request.epoch == 0:
                self.arrive()
        return self.step - first


def ample_scheduler(max_num_seqs: int = 4) -> Scheduler:
    """Rows and slots are scarce; budget and blocks are not."""
    return make_scheduler(
        policy=Lag(THETA_S), num_slots=NUM_SLOTS, slots_by_adapter=SLOTS_BY_ADAPTER,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=400, num_blocks=4000, max_model_len=32,
    )  # fmt: skip


def scarce_scheduler(policy: Policy) -> Scheduler:
    """Everything is scarce."""
    return make_scheduler(
        policy=policy, num_slots=NUM_SLOTS, slots_by_adapter=SLOTS_BY_ADAPTER, max_num_seqs=4,
        max_num_batched_tokens=8, num_blocks=14, block_size=2, max_model_len=20,
    )  # fmt: skip


def check_that_later_arrivals_do_not_delay(incoming: list[Arrival], index: int) -> int:
    """Steps that the request waits once it is overdue; the same with and without those behind it."""
    alone = Stream(ample_scheduler(), incoming)
    request = alone.run_until_overdue(index)
    for other in list(alone.engine.scheduler.waiting):
        if other.arrival_order > request.arrival_order:
            alone.engine.abort(other.request_id)
    expected = alone.start_of(request, arrive=False, most_steps=500)
    stream = Stream(ample_scheduler(), incoming)
    request = stream.run_until_overdue(index)
    assert stream.start_of(request, arrive=True, most_steps=expected) <= expected
    return expected


@FAST
@given(st.lists(arrivals, min_size=1, max_size=8), st.integers(2, 20))
def test_an_overdue_request_starts_as_if_nobody_had_come_after_it(incoming: list[Arrival], index: int):
    check_that_later_arrivals_do_not_delay(incoming, index)


@pytest.mark.slow
@THOROUGH
@given(st.lists(arrivals, min_size=1, max_size=12), st.integers(2, 40))
def test_an_overdue_request_starts_as_if_nobody_had_come_after_it_thorough(incoming: list[Arrival], index: int):
    check_that_later_arrivals_do_not_delay(incoming, index)


def test_the_bound_is_put_to_the_test():
    """In the stream of case H1, which would starve it, the lone request waits for slots, overdue, for some steps."""
    stream = [Arrival("abc", 2, 6, False)] * 6 + [Arrival("e", 2, 2, False)]
    assert check_that_later_arrivals_do_not_delay(stream, 6) >= 2


@pytest.mark.slow
@THOROUGH
@given(st.lists(arrivals, min_size=1, max_size=12), st.integers(2, 20))
def test_whatever_arrives_an_overdue_request_starts_in_a_time_that_is_known_when_it_is_overdue(
    incoming: list[Arrival], index: int
):
    stream = Stream(scarce_scheduler(Lag(THETA_S)), incoming)
    request = stream.run_until_overdue(index)
    there = [other for other in stream.requests if not other.is_finished]
    # Each of them, once it is the oldest, has its end within as many steps as it has tokens, and two to notice.
    bound = sum(other.num_prompt_tokens + other.sampling.max_tokens + 2 for other in there)
    stream.start_of(request, arrive=True, most_steps=bound)


def unused_room(scheduler: Scheduler, budget: int) -> list[Request]:
    """Waiting requests that a row, slots, blocks and budget are left for; computed from who runs."""
    pinned = {adapter_id for running in scheduler.running for adapter_id in running.adapters}
    slots_left = NUM_SLOTS - sum(SLOTS_BY_ADAPTER[adapter_id] for adapter_id in pinned)
    blocks_left = scheduler.block_pool.num_free - sum(map(scheduler._promised_blocks, scheduler.running))
    if scheduler.num_running == scheduler.max_num_seqs or budget == 0 or blocks_left <= 0:
        return []
    return [
        request
        for request in scheduler.waiting
        if sum(SLOTS_BY_ADAPTER[adapter_id] for adapter_id in set(request.adapters) - pinned) <= slots_left
        and scheduler._promised_blocks(request) <= blocks_left
    ]


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(Lag(math.inf), id="lag"),
        pytest.param(Random(0), id="random", marks=pytest.mark.slow),
        pytest.param(LeastFirst(), id="least-first", marks=pytest.mark.slow),
    ],
)
def test_no_request_waits_while_there_is_room_for_it(policy: Policy):
    """Nobody queues behind one that cannot run: not the base, nor who uses resident adapters, nor anyone who fits."""

    @FAST
    @given(st.lists(arrivals, min_size=1, max_size=8))
    def check(incoming: list[Arrival]) -> None:
        stream = Stream(scarce_scheduler(policy), incoming)
        scheduler = stream.engine.scheduler
        for _ in range(25):
            stream.arrive()
            plan = stream.engine.step(stream.now_s)
            stream.step += 1
            if not plan.preempted:  # a step that is short of blocks admits nobody
                # The tokens of the step before are read by now: whoever ended with them has made new room.
                ended = [r for r in stream.engine.finished if r.epoch > 0]
                stream.engine.finished.clear()
                if not ended:
                    left = scheduler.max_num_batched_tokens - plan.num_tokens
                    assert not unused_room(scheduler, left), f"{scheduler.waiting} beside {scheduler.running}"

    check()


@FAST
@given(st.lists(arrivals, min_size=1, max_size=8))
def test_base_requests_wait_for_rows_only_even_behind_overdue_ones(incoming: list[Arrival]):
    stream = Stream(ample_scheduler(max_num_seqs=24), incoming)
    scheduler = stream.engine.scheduler
    for _ in range(15):
        stream.arrive()
        plan = scheduler.plan(stream.now_s)  # FakeEngine.step would read tokens, too, which makes new room
        claimants = [r for r in scheduler.waiting if stream.now_s - r.arrival_s >= THETA_S]
        rows_left = scheduler.max_num_seqs - scheduler.num_running - len(claimants)
        assert rows_left <= 0 or all(r.adapters for r in scheduler.waiting), f"{scheduler.waiting}, {rows_left} rows"
        scheduler.on_dispatched(plan)
        for previous in stream.engine._previous:
            stream.engine._commit(previous)
        stream.engine._previous = [plan]
        stream.step += 1
