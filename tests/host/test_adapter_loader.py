"""The loader alone, and beside a scheduler under shortage of everything: slots, staging, host memory, luck."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dymerge_jax.config import named_config
from dymerge_jax.lora import AdapterWeights, ProjectionWeights, content_bytes
from serving.adapter_loader import AdapterLoader
from serving.adapter_store import AdapterContents, AdapterStore, StoredAdapter
from serving.plan import StepPlan
from serving.policies import Fifo, Lag, LeastFirst, Random
from serving.request import FinishReason, Phase, Request
from tests.support.host import FakeEngine, admit, check_finished, make_request, make_scheduler
from tests.support.manual_executor import ManualExecutor

CONFIG = named_config("tiny")
SLOT_BYTES = content_bytes(CONFIG, 1, np.float32)
SLOTS = {"a": 1, "b": 1, "c": 1, "d": 2, "e": 3}


def make_store(host_slots: int, slots: dict[str, int] = SLOTS) -> AdapterStore:
    """Adapters in memory, of slots of rank 1."""
    store = AdapterStore(CONFIG, slot_rank=1, dtype=np.float32, host_bytes=host_slots * SLOT_BYTES)
    for value, (name, rank) in enumerate(slots.items(), start=1):
        a, b = (np.full(shape, value, np.float32) for shape in ((rank, CONFIG.hidden), (CONFIG.hidden, rank)))
        weights = AdapterWeights({(0, "o_proj"): ProjectionWeights(a, b, 1.0)}, name)
        store.add(StoredAdapter(name, None, weights))
    return store


class Jobs:
    """A loader whose jobs a test ends; copies stay on the host."""

    def __init__(self, store: AdapterStore, staging_slots: int) -> None:
        self.reads, self.copies = ManualExecutor(), ManualExecutor()
        self.loader = AdapterLoader(
            store, staging_slots=staging_slots, readers=self.reads, copiers=self.copies, copy=same
        )

    def settle(self, wanted: Sequence[str]) -> None:
        """Ends every job until there is none left."""
        self.loader.update(wanted)
        while self.reads or self.copies:
            self.reads.run_all()
            self.copies.run_all()
            assert not self.loader.collect()
            self.loader.update(wanted)


def same(contents: AdapterContents) -> AdapterContents:
    return contents


def test_adapters_are_staged_in_the_order_wanted_and_read_ahead_as_far_as_the_host_holds() -> None:
    store = make_store(host_slots=6)
    jobs = Jobs(store, staging_slots=3)
    jobs.settle(["d", "a", "e", "b"])
    assert list(jobs.loader.staged) == ["d", "a"]
    assert set(store.host.resident) == {"d", "a", "e"}  # b would need a place that one wanted before has
    assert jobs.loader.staged_bytes == 3 * SLOT_BYTES
    jobs.loader.check_integrity()


def test_a_staged_adapter_makes_room_for_a_wanted_one_only_if_it_is_not_wanted() -> None:
    jobs = Jobs(make_store(host_slots=8), staging_slots=3)
    jobs.settle(["a", "b", "c"])
    jobs.settle(["d", "a"])
    assert set(jobs.loader.staged) == {"a", "d"}
    jobs.settle([])
    assert set(jobs.loader.staged) == {"a", "d"}


def test_a_host_tier_of_one_adapter_serves_a_mix_of_three() -> None:
    store = make_store(host_slots=1, slots=dict.fromkeys("abc", 1))
    jobs = Jobs(store, staging_slots=4)
    jobs.settle(["a", "b", "c"])
    assert set(jobs.loader.staged) == {"a", "b", "c"}
    assert store.host.num_bytes == SLOT_BYTES


def test_what_the_host_has_is_not_read_again() -> None:
    jobs = Jobs(make_store(host_slots=8), staging_slots=2)
    for _ in range(3):
        jobs.settle(["a"])
        jobs.loader.take("a")
    assert jobs.loader.num_reads == 1


def test_a_dropped_adapter_leaves_nothing_behind_and_can_be_wanted_again_at_any_time() -> None:
    store = make_store(host_slots=2, slots={"a": 1})
    jobs = Jobs(store, staging_slots=2)
    loader = jobs.loader
    loader.update(["a"])
    loader.drop("a")  # while it is read
    jobs.reads.run()
    assert not loader.collect()
    assert (store.host.num_bytes, loader.num_loading) == (0, 0)
    loader.update(["a"])
    loader.drop("a")
    loader.update(["a"])  # wanted again before the read has ended
    jobs.reads.run()
    loader.collect()
    loader.update(["a"])
    loader.drop("a")  # while it is copied
    jobs.copies.run()
    loader.collect()
    assert not loader.staged
    assert loader.staged_bytes == 0
    jobs.settle(["a"])
    assert set(loader.staged) == {"a"}


def test_a_failure_of_the_folder_of_before_is_none_of_an_adapter_added_anew() -> None:
    store = make_store(host_slots=1, slots={"other": 1})
    jobs = Jobs(store, staging_slots=4)
    weights = store.known("other").weights
    assert weights is not None
    adapter_id = store.add(StoredAdapter("a", Path("before"), weights))
    jobs.loader.update([adapter_id])
    store.add(StoredAdapter("a", Path("now"), weights))
    jobs.reads.run(error=OSError("gone"))
    assert jobs.loader.collect() == {}
    jobs.loader.update([adapter_id])
    jobs.reads.run(error=OSError("gone, too"))
    assert jobs.loader.collect() == {adapter_id: "adapter 'a' could not be read: gone, too"}


def test_a_failure_is_told_once_and_the_adapter_can_be_tried_again() -> None:
    jobs = Jobs(make_store(host_slots=8), staging_slots=2)
    jobs.loader.update(["a", "b"])
    jobs.reads.run(0, OSError("gone"))
    jobs.reads.run_all()
    assert jobs.loader.collect() == {"a": "adapter 'a' could not be read: gone"}
    assert not jobs.loader.collect()
    jobs.loader.update(["a", "b"])
    jobs.copies.run(0, RuntimeError("full"))
    assert jobs.loader.collect() == {"b": "adapter 'b' could not be copied to the device: full"}
    jobs.settle(["a", "b"])
    assert set(jobs.loader.staged) == {"a", "b"}


POLICIES = {
    "lag": lambda: Lag(0.3),
    "theta-0": lambda: Lag(0.0),
    "fifo": Fifo,
    "random": lambda: Random(0),
    "least-first": LeastFirst,
}


class TierMachine(RuleBasedStateMachine):
    """Scheduler and loader as the engine drives them; the fake device knows every token, KV position and slot."""

    @initialize(
        policy=st.sampled_from(["lag", "theta-0", "fifo", "random", "least-first"]),
        host_slots=st.integers(3, 6),
        staging_slots=st.integers(1, 3),
        num_slots=st.integers(3, 8),
        max_slot_writes=st.sampled_from([None, 1, 3]),
    )
    def start(
        self, policy: str, host_slots: int, staging_slots: int, num_slots: int, max_slot_writes: int | None
    ) -> None:
        self.store = make_store(host_slots)
        self.jobs = Jobs(self.store, staging_slots)
        scheduler = make_scheduler(
            policy=POLICIES[policy](),
            num_blocks=16,
            block_size=2,
            num_slots=num_slots,
            slots_by_adapter=SLOTS,
            max_num_batched_tokens=8,
            max_model_len=16,
            staging=self.jobs.loader,
            max_slot_writes=max_slot_writes,
        )
        self.engine = FakeEngine(scheduler)
        self.requests: list[Request] = []
        self.now_s = 0.0
        self.failed: set[str] = set()

    @rule(
        adapters=st.sampled_from(["", "a", "b", "c", "ab", "abc", "d", "ad", "e", "de", "abcd", "abcde"]),
        num_prompt=st.integers(1, 8),
        max_tokens=st.integers(1, 8),
    )
    def add(self, adapters: str, num_prompt: int, max_tokens: int) -> None:
        request = make_request(
            f"r{len(self.requests)}", *adapters, num_prompt=num_prompt, max_tokens=max_tokens, arrival_s=self.now_s
        )
        if sum(SLOTS[name] for name in adapters) <= self.engine.scheduler.slot_cache.num_slots:
            self.requests.append(request)
            self.engine.scheduler.add(request)

    @rule(num_steps=st.integers(1, 3), step_s=st.sampled_from([0.0, 0.05, 0.2]))
    def step(self, num_steps: int, step_s: float) -> None:
        for _ in range(num_steps):
            self.now_s += step_s
            self.one_step()

    @rule(index=st.integers(0, 5), fails=st.sampled_from([False, False, False, True]), copies=st.booleans())
    def end_job(self, index: int, fails: bool, copies: bool) -> None:
        executor = self.jobs.copies if copies else self.jobs.reads
        if len(executor):
            executor.run(index % len(executor), OSError("bad luck") if fails else None)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        left = [request.request_id for request in self.requests if not request.is_finished]
        if left:
            self.engine.abort(data.draw(st.sampled_from(left)))

    def one_step(self) -> StepPlan:
        scheduler, loader = self.engine.scheduler, self.jobs.loader
        for adapter_id in loader.collect():
            for request in scheduler.waiting_for(adapter_id):
                scheduler.finish(request, FinishReason.ERROR)
                self.engine.finished.append(request)
                self.failed.add(request.request_id)
        plan = self.engine.step(self.now_s)
        for load in plan.loads:
            assert len(loader.take(load.adapter_id)) == len(load.slot_ids)
        loader.update(scheduler.wanted_adapters(self.now_s, 4), in_use=scheduler.slot_cache.pinned)
        return plan

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "engine"):
            self.jobs.loader.check_integrity()
            self.store.check_integrity()
            self.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.scheduler
        for _ in range(1000):
            if not scheduler.has_work:
                break
            self.jobs.reads.run_all()
            self.jobs.copies.run_all()
            self.now_s += 0.05
            self.one_step()
            self.books_add_up()
        assert not scheduler.has_work, f"never admitted: {scheduler.waiting}"
        check_finished(self.engine, self.requests)
        errors = {request.request_id for request in self.requests if request.finish_reason is FinishReason.ERROR}
        assert errors == self.failed
        assert all(request.phase is Phase.FINISHED for request in self.requests)


TierMachine.TestCase.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=40, stateful_step_count=25
)
TestTiersUnderShortage = TierMachine.TestCase


class Staging:
    """A staging area that a test fills."""

    def __init__(self, staged: Iterable[str], max_slots: int) -> None:
        self._staged = dict.fromkeys(staged)
        self.max_slots = max_slots

    @property
    def staged(self):
        return self._staged.keys()


def admitted_with(staged: str, requests: Sequence[Request], now_s: float = 0.0, **sizes) -> list[str]:
    scheduler = make_scheduler(staging=Staging(staged, 8), **sizes)
    for request in requests:
        scheduler.add(request)
    return [chunk.request.request_id for chunk in scheduler.plan(now_s).chunks]


def test_requests_whose_adapters_are_not_at_hand_do_not_hold_up_others() -> None:
    requests = [make_request("r0", "a", "b"), make_request("r1", "b"), make_request("r2"), make_request("r3", "a")]
    assert admitted_with("a", requests) == ["r2", "r3"]


def test_one_that_is_overdue_and_not_at_hand_claims_its_room_and_not_more() -> None:
    requests = [make_request("r0", "a"), make_request("r1", "b"), make_request("r2", "c"), make_request("r3")]
    assert admitted_with("bc", requests, now_s=1.0, num_slots=1) == ["r3"]
    requests = [make_request("r0", "a"), make_request("r1", "b"), make_request("r2", "c"), make_request("r3")]
    assert admitted_with("bc", requests, now_s=1.0, num_slots=2) == ["r1", "r3"]


@pytest.mark.parametrize("num_slots", [3, 4])
def test_who_passes_an_overdue_request_does_not_evict_its_adapters(num_slots: int) -> None:
    """It waits for an adapter that is not at hand, and of three slots for one that is pinned, too."""
    scheduler = make_scheduler(num_slots=num_slots, staging=Staging("abxy", 8))
    for name in "ayx":  # of which a has been unused for longest
        scheduler.add(make_request(name, name, max_tokens=20))
        scheduler.on_dispatched(scheduler.plan(0.0))
    scheduler.abort("a")
    scheduler.abort("y")
    scheduler.add(make_request("overdue", "a", "b", "c"))
    scheduler.add(make_request("passes", "b", arrival_s=0.1))
    assert admit(scheduler, now_s=1.0) == ["passes"]
    assert scheduler.slot_cache.resident == {"a", "b", "x"} | ({"y"} if num_slots == 4 else set())
    scheduler.check_integrity()


def test_who_needs_nothing_written_does_not_wait_for_one_that_does_not_fit_into_the_step() -> None:
    scheduler = make_scheduler(num_slots=8, max_num_seqs=8, staging=Staging("abcd", 8), max_slot_writes=2)
    scheduler.add(make_request("running", "d", max_tokens=20))
    scheduler.on_dispatched(scheduler.plan(0.0))
    for i, adapters in enumerate(["ab", "c", "", "d", "a"]):
        scheduler.add(make_request(f"r{i}", *adapters))
    assert admit(scheduler, now_s=1.0) == ["r0", "r2", "r3", "r4"]
    scheduler.check_integrity()


def test_slots_written_beside_running_requests_are_bounded_but_never_below_one_request() -> None:
    staging = Staging("abcdef", 8)
    scheduler = make_scheduler(num_slots=8, max_num_seqs=8, staging=staging, max_slot_writes=2)
    scheduler.add(make_request("running", max_tokens=20))
    scheduler.on_dispatched(scheduler.plan(0.0))
    for i, adapters in enumerate(["abc", "d", "e", "f"]):
        scheduler.add(make_request(f"r{i}", *adapters, arrival_s=i))
    loaded = []
    for _ in range(3):
        for request in scheduler.running:
            if request.num_in_flight:
                request.commit_token(0)
        plan = scheduler.plan(3.0)
        scheduler.on_dispatched(plan)
        loaded.append([load.adapter_id for load in plan.loads])
    assert loaded == [["a", "b", "c"], ["d", "e"], ["f"]]


@pytest.mark.parametrize("policy", [Lag(0.5), Fifo(), Random(0), LeastFirst()], ids=lambda p: type(p).__name__)
def test_the_adapters_wanted_come_in_the_order_of_the_policy(policy) -> None:
    scheduler = make_scheduler(policy=policy, staging=Staging("", 8))
    assert scheduler.wanted_adapters(0.0, 9) == []
    for i, adapters in enumerate(["abc", "cd", "", "e"]):
        scheduler.add(make_request(f"r{i}", *adapters, arrival_s=i / 10))
    wanted = scheduler.wanted_adapters(0.4, 9)
    assert set(wanted) == set("abcde")
    expected = {"Lag": "ecdab", "LeastFirst": "ecdab", "Fifo": "abcde"}.get(type(policy).__name__)
    assert expected is None or "".join(wanted) == expected
    if isinstance(policy, Lag):
        assert "".join(scheduler.wanted_adapters(0.55, 9)) == "abcecd"[:3] + "ed"
        assert scheduler.wanted_adapters(0.4, 2) == ["e", "c", "d"]
