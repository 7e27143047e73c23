"""Schedulers and requests for the tests of `serving`, and an engine whose device is a few dictionaries."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from serving.block_pool import BlockPool
from serving.plan import Chunk, StepPlan
from serving.policies import Lag, Policy, WhenBlocked
from serving.prefix_cache import PrefixCache
from serving.request import FinishReason, Mix, Request, SamplingParams
from serving.scheduler import Scheduler
from serving.slot_cache import SlotCache

FAMILY_LEN = 9  # tokens that the requests of a family begin with
XLORA = "xlora"
"""The gated set whose requests have two KV caches."""


def make_request(
    request_id: str, *adapters: str, num_prompt: int = 4, max_tokens: int = 4, arrival_s: float = 0.0
) -> Request:
    """A request with weight 1 on each adapter, whose tokens are those of `expected_token`."""
    return Request(
        request_id=request_id,
        prompt_token_ids=[expected_token(request_id, position) for position in range(num_prompt)],
        sampling=SamplingParams(max_tokens=max_tokens),
        mix=Mix(tuple((adapter_id, 1.0) for adapter_id in adapters)),
        adapters=adapters,
        arrival_s=arrival_s,
    )


def with_two_caches(request: Request) -> Request:
    """The same request with an X-LoRA set of its adapters; not added to a scheduler yet."""
    return dataclasses.replace(request, mix=Mix(gated_set=XLORA))


def make_scheduler(
    *,
    policy: Policy | None = None,
    num_blocks: int = 64,
    block_size: int = 4,
    num_slots: int = 4,
    slots_by_adapter: Mapping[str, int] | None = None,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 64,
    enable_prefix_cache: bool = True,
    staging: Any = None,
    max_slot_writes: int | None = None,
) -> Scheduler:
    """A small scheduler; adapters need one slot unless `slots_by_adapter` says otherwise."""
    block_pool = BlockPool(num_blocks, block_size)
    return Scheduler(
        policy=policy or Lag(theta_s=0.5),
        block_pool=block_pool,
        slot_cache=SlotCache(num_slots),
        prefix_cache=PrefixCache(block_pool) if enable_prefix_cache else None,
        num_slots_by_adapter=lambda adapter_id: (slots_by_adapter or {}).get(adapter_id, 1),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        staging=staging,
        max_slot_writes=max_slot_writes,
        two_cache_sets={XLORA},
    )


def expected_token(request_id: str, position: int) -> int:
    """The token that the fake model has at a position of a request.

    Requests "f/1" and "f/2" of a family have the first FAMILY_LEN tokens in common.
    """
    name = request_id.partition("/")[0] if position < FAMILY_LEN else request_id
    return sum(name.encode()) * 31 + position


def expected_kv(request: Request, position: int, cache: int) -> tuple[object, ...]:
    """What a position's keys and values depend on: mix, cache, place and all tokens up to it, which the first one and
    this one tell."""
    return (
        request.mix,
        cache,
        position,
        expected_token(request.request_id, 0),
        expected_token(request.request_id, position),
    )


def admitted(plan: StepPlan, running_before: set[str]) -> list[str]:
    """Ids of the requests that a plan admits, in order."""
    return [chunk.request.request_id for chunk in plan.chunks if chunk.request.request_id not in running_before]


def admit(scheduler: Scheduler, now_s: float = 0.0) -> list[str]:
    """Plans and dispatches one step; ids of the requests it admits, in order."""
    running_before = {request.request_id for request in scheduler.running}
    plan = scheduler.plan(now_s)
    scheduler.on_dispatched(plan)
    return admitted(plan, running_before)


@dataclasses.dataclass
class FakeEngine:
    """The engine's loop, one step ahead of what it reads, over a device that checks what it is given.

    The device keeps what each KV position and each slot holds, and works at dispatch: as on the real one, steps run
    in the order of dispatch.

    Attributes:
      decode_steps: steps that it dispatches at once where the scheduler can plan ahead.
      stop_after: output tokens after which a request "finds its stop token"; requests not listed go on to the limit.
      positions: positions computed for each request and epoch, in order.
      num_shared_tokens: positions that admitted requests found computed.
      trace: what each step ran, for comparing two runs.
    """

    scheduler: Scheduler
    decode_steps: int = 1
    stop_after: dict[str, int] = dataclasses.field(default_factory=dict)
    positions: dict[tuple[str, int], list[int]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    trace: list[object] = dataclasses.field(default_factory=list)
    finished: list[Request] = dataclasses.field(default_factory=list)
    num_dropped_tokens: int = 0
    num_kept_after_preemption: int = 0
    num_shared_tokens: int = 0
    num_planned_ahead: int = 0
    _previous: Sequence[StepPlan] = ()
    _kv: dict[tuple[int, int], tuple[object, ...]] = dataclasses.field(default_factory=dict)
    _slots: dict[int, tuple[str, int]] = dataclasses.field(default_factory=dict)
    _last_token: dict[int, tuple[str, int, int]] = dataclasses.field(default_factory=dict)

    def step(self, now_s: float) -> StepPlan:
        """One turn of the loop: plan, dispatch, then read the tokens of the step before."""
        waiting = self.scheduler.waiting
        plan = self.scheduler.plan(now_s)
        self._check_plan(plan)
        self._check_nothing_overtakes(plan, waiting, now_s)
        for load in plan.loads:
            self._slots.update({slot_id: (load.adapter_id, part) for part, slot_id in enumerate(load.slot_ids)})
        later = self.scheduler.plan_ahead(plan, self.decode_steps - 1, now_s) if self.decode_steps > 1 else []
        if not later:
            self.scheduler.on_dispatched(plan)
        self.num_planned_ahead += len(later)
        plans = [plan, *later]
        for dispatched in plans:
            self._check_plan(dispatched)
            for chunk in dispatched.chunks:
                self._run(chunk)
        self.scheduler.check_integrity()
        for previous in self._previous:
            self._commit(previous)
        self.scheduler.check_integrity()
        self._previous = plans
        self.trace += [
            (
                [(c.request.request_id, c.row, c.epoch, c.start, c.num_tokens, c.samples) for c in dispatched.chunks],
                dispatched.loads,
                [request.request_id for request in dispatched.preempted],
            )
            for dispatched in plans
        ]
        return plan

    def run(self, now_s: float = 0.0, *, step_s: float = 0.01, max_steps: int = 2000) -> float:
        """Steps until every request is finished; the time after."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return now_s
            is_waiting_for_tokens = any(chunk.samples for previous in self._previous for chunk in previous.chunks)
            plan = self.step(now_s)
            assert plan.chunks or is_waiting_for_tokens, f"nothing runs, waiting: {self.scheduler.waiting}"
            now_s += step_s
        raise AssertionError(f"work is left after {max_steps} steps: {self.scheduler.waiting} {self.scheduler.running}")

    def abort(self, request_id: str) -> None:
        """The client has gone."""
        request = self.scheduler.abort(request_id)
        if request is not None:
            self.finished.append(request)

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert plan.num_seqs <= self.scheduler.max_num_seqs
        assert len({chunk.request.request_id for chunk in plan.chunks}) == plan.num_seqs
        assert len({chunk.row for chunk in plan.chunks}) == plan.num_seqs
        num_owners = Counter(block_id for chunk in plan.chunks for block_id in chunk.request.block_table)
        for chunk in plan.chunks:
            first = chunk.start // self.scheduler.block_pool.block_size
            written = chunk.request.block_table[first * chunk.request.num_caches :]
            assert all(num_owners[block_id] == 1 for block_id in written), "a block that is written is shared"

    def _check_nothing_overtakes(self, plan: StepPlan, waiting: Sequence[Request], now_s: float) -> None:
        """The hard bound: who is admitted past a request that may not be overtaken leaves it all that it needs."""
        scheduler, policy = self.scheduler, self.scheduler.policy
        chunks = [chunk for chunk in plan.chunks if chunk.request in waiting]
        for request in waiting:
            when_blocked = policy.when_blocked(request, now_s)
            past = [chunk for chunk in chunks if chunk.request.arrival_order > request.arrival_order]
            if request.row is not None or when_blocked is WhenBlocked.PASS or not past:
                continue
            assert when_blocked is WhenBlocked.CLAIM, f"{past} overtook {request}"
            are_own = all(set(chunk.request.adapters) <= set(request.adapters) for chunk in past)
            assert are_own or scheduler.slot_cache.can_hold(scheduler._num_slots(request)), "took slots"
            assert all(chunk.samples for chunk in past), "took the budget of later steps"
            assert scheduler.num_running < scheduler.max_num_seqs, "took the last row"
            passing = [chunk.request for chunk in past]
            blocks_to_come = sum(
                scheduler._most_blocks(other) - len(other.block_table)
                if other in passing
                else scheduler._promised_blocks(other)
                for other in scheduler.running
            )
            assert scheduler.block_pool.num_free - blocks_to_come >= scheduler._promised_blocks(request), "took blocks"

    def _run(self, chunk: Chunk) -> None:
        """Writes the chunk's tokens, then reads everything that attention and the adapters of the chunk read."""
        request = chunk.request
        request_id = request.request_id
        positions = self.positions[request_id, chunk.epoch]
        if not positions:
            self.num_shared_tokens += chunk.start
        positions += range(chunk.start, chunk.stop)
        for position in range(chunk.start, chunk.stop):
            if position < request.num_known_tokens:
                token_id = request.token_id(position)
            else:
                owner, at, token_id = self._last_token[chunk.row]
                assert (owner, at) == (request_id, position), "the token on the device is another one"
            assert token_id == expected_token(request_id, position)
            for cache in range(request.num_caches):
                self._kv[self._place(request, position, cache)] = expected_kv(request, position, cache)
        for position in range(chunk.stop):
            for cache in range(request.num_caches):
                assert self._kv[self._place(request, position, cache)] == expected_kv(request, position, cache)
        for adapter_id in request.adapters:
            slot_ids = self.scheduler.slot_cache.lookup(adapter_id)
            assert slot_ids is not None, f"adapter {adapter_id} is not resident"
            assert [self._slots[slot_id] for slot_id in slot_ids] == [(adapter_id, i) for i in range(len(slot_ids))]
        if chunk.samples:
            self._last_token[chunk.row] = (request_id, chunk.stop, expected_token(request_id, chunk.stop))

    def _place(self, request: Request, position: int, cache: int) -> tuple[int, int]:
        """Block and offset."""
        block_size = self.scheduler.block_pool.block_size
        return request.block_table[position // block_size * request.num_caches + cache], position % block_size

    def _commit(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            request = chunk.request
            if not chunk.samples:
                continue
            if request.is_finished:
                self.num_dropped_tokens += 1
                continue
            assert chunk.epoch == request.epoch
            assert chunk.stop == request.num_known_tokens, "tokens are read out of order"
            self.num_kept_after_preemption += request.row is None
            request.commit_token(expected_token(request.request_id, chunk.stop))
            if request.num_output_tokens == self.stop_after.get(request.request_id):
                self._finish(request, FinishReason.STOP)
            elif self.scheduler.has_reached_limit(request):
                self._finish(request, FinishReason.LENGTH)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request, reason)
        self.finished.append(request)


def check_finished(engine: FakeEngine, requests: list[Request]) -> None:
    """Checks that each request got exactly its own tokens, those that it did not find computed each computed once an
    epoch, in order; nothing is left."""
    assert sorted(request.request_id for request in engine.finished) == sorted(r.request_id for r in requests)
    limit = engine.scheduler.max_model_len
    for request in requests:
        num_prompt = request.num_prompt_tokens
        assert request.output_token_ids == [
            expected_token(request.request_id, num_prompt + i) for i in range(request.num_output_tokens)
        ]
        longest = min(request.sampling.max_tokens, limit - num_prompt)
        wanted = min(engine.stop_after.get(request.request_id, longest), longest)
        assert request.num_output_tokens <= wanted
        if request.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR):
            assert request.num_output_tokens == wanted
        for epoch in range(1, request.epoch + 1):
            positions = engine.positions[request.request_id, epoch]
            first = positions[0] if positions else 0
            assert first % engine.scheduler.block_pool.block_size == 0, f"{request} epoch {epoch} starts at {first}"
            assert positions == list(range(first, first + len(positions))), f"{request} epoch {epoch}: {positions}"
            assert first + len(positions) <= num_prompt + longest - 1, "positions past the limit were computed"
    scheduler = engine.scheduler
    scheduler.check_integrity()
    assert scheduler.block_pool.num_free == scheduler.block_pool.num_blocks
    assert not scheduler.slot_cache.num_pins
