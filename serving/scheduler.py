"""Waiting and running requests plus free resources, to the next StepPlan.

The policy (`policies.py`) says in which order waiting requests are tried; this module says what fits: engine rows, KV
blocks, adapter slots, and the token budget of a step.
"""

import dataclasses
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool

from serving.adapter_ids import adapter_name
from serving.adapter_tally import AdapterTally
from serving.block_pool import BlockPool
from serving.errors import InvalidRequestError
from serving.plan import Chunk, Load, StepPlan
from serving.policies import Policy, WhenBlocked
from serving.prefix_cache import PrefixCache
from serving.request import FinishReason, Phase, Request
from serving.slot_cache import SlotCache
from serving.waiting_queue import CountOutside, Needs, WaitingQueue, WaitingRequests, arrival_order


@runtime_checkable
class Staging(Protocol):
    """Where adapters are between the host and their slots."""

    @property
    def staged(self) -> Set[str]:
        """Ids of the adapters that can be copied into slots without waiting: a live view."""
        ...

    @property
    def max_slots(self) -> int:
        """Slots' worth of adapters that can be staged at once."""
        ...


class Scheduler:
    """Plans steps, one ahead of what the host has read.

    The engine's loop, with step k-1 still running on the device:
      1. `plan(now_s)` gives step k; blocks, slots, rows and pins change hands here and nowhere else but in `finish`.
      2. The engine copies `plan.loads`, dispatches the step, and calls `on_dispatched(plan)`. Or it has `plan_ahead`
         count step k and those after it as dispatched, and dispatches them at once; what is said of a step is then true
         of all of them together.
      3. The engine reads the tokens of step k-1: `Request.commit_token` for each request that is not finished, then
         `finish` for those that end. Tokens of finished requests are dropped.

    Who owns what. A request owns its row, its blocks and one pin on each of its adapters from its admission (in
    `plan`) until it finishes or is preempted. Then all of it is released at once, even if a dispatched step still uses
    it: the device runs steps in order, so the next owner's step comes after.

    Shared blocks. At its admission a request becomes one more owner of the blocks that hold what it begins with, if
    there are any (`PrefixCache`), and goes on after them. Blocks can be found once they are full, their step is
    dispatched and the host knows their tokens; a failed step makes all of them unknown. A block is free for others
    when its last owner has released it.

    Two caches. A request with an X-LoRA set has a KV cache for each of its two passes, and so two blocks for the same
    positions, which it gets, shares and gives up together: all that is said of blocks here counts both.

    Preemption. When blocks run out, the running request that arrived last gives up what it owns and waits again, with
    its arrival time, to compute its tokens anew, but for those in blocks that are still there then. Only later arrivals
    are preempted for a request, until there is a block that they alone owned; so the oldest one always advances. A
    token belongs to its request, not to the blocks that it was computed from: what step k-1 sampled for a request that
    plan k preempts is valid and must be committed. As it is committed before plan k+1, and plan k admits nobody once it
    has preempted, no request with a token in flight is ever admitted. `Request.epoch` counts admissions, so a chunk's
    epoch and its request's differ only if this order of calls is broken.

    Running requests. Decode rows come first, by arrival, then prefill chunks by admission, each as long as the budget
    allows. A request that cannot get a block and is the last arrival keeps what it has and is left out of the step.
    One whose tokens, those in flight included, reach its limit is left out until the engine finishes it.

    Admission. A request needs a row, slots for all its adapters at once, at least one token of budget, and blocks.
    Blocks are allocated chunk by chunk, but a request is admitted only if the pool can hold all its known tokens and
    one block more, beside what is promised in the same way to each running one: so admitting does not lead to
    preempting at once. Blocks that it shares with running requests need no room of their own; those that it finds
    without an owner do, as they are free until then. What it shares is looked up only once the policy has chosen it
    and its slots are free: among thousands of waiting requests (`_Fitting`), each is taken to share nothing.

    Adapters that are not at hand. With a staging area, a request is admitted only if each of its adapters is in slots
    or staged; until then others are tried as if it did not fit. A request that lacks more slots than the staging area
    has gets its adapters into slots as they come, before it is admitted. What one step copies into slots is bounded
    while others run: who needs more does not fit into this step.

    Room that is claimed. While a request for which the policy says CLAIM is waiting for slots or adapters (for lack of
    anything else nobody fits: all requests need rows, blocks and budget), its room is: one row; blocks for its tokens
    and one more; its adapters that are in slots, which nobody evicts for others; and as many slots as it lacks or, if
    there are fewer, every slot that is unpinned now or later, until it has enough. A request behind it is admitted
    only if its slots are beyond the claim or all its adapters among the claimant's own (a base request has none); it
    fits, at its greatest length, into the blocks beyond the claim, all of which are promised to it while it runs, and
    a row is left; and its prompt ends within this step, so that from the next step on it takes one token of budget,
    and `max_num_batched_tokens >= max_num_seqs` keeps one for each row. So each admission leaves the claim whole.
    Blocks that a request takes beyond its promise later on are its own alone, and come back when it ends.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        block_pool: BlockPool,
        slot_cache: SlotCache,
        prefix_cache: PrefixCache | None = None,
        num_slots_by_adapter: Callable[[str], int],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        staging: Staging | None = None,
        max_slot_writes: int | None = None,
        two_cache_sets: Set[str] = frozenset(),
    ) -> None:
        """Nothing waits and nothing runs.

        Args:
          policy: order of admission.
          block_pool, slot_cache: used by this scheduler only.
          prefix_cache: over that block pool; None lets no request share blocks.
          num_slots_by_adapter: slots that an adapter needs.
          max_num_seqs: engine rows.
          max_num_batched_tokens: token budget of a step, at least max_num_seqs.
          max_model_len: most tokens of one request, prompt and output together.
          staging: adapters at hand; None: all are.
          max_slot_writes: most slots that a step writes into while others run, unless one request alone needs more;
            None for no limit.
          two_cache_sets: gated sets whose requests have two KV caches, and a block in each for the same positions.
        """
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {max_num_batched_tokens}, expected >= max_num_seqs, which is {max_num_seqs}"
            )
        self.policy = policy
        self.block_pool = block_pool
        self.slot_cache = slot_cache
        self.prefix_cache = prefix_cache
        self.num_slots_by_adapter = num_slots_by_adapter
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.num_preemptions = 0
        self.waiting_tally = AdapterTally()
        self.running_tally = AdapterTally()
        self._staging = staging
        self._max_slot_writes = max_slot_writes
        self._two_cache_sets = two_cache_sets
        self._requests: dict[str, Request] = {}  # waiting and running
        self._waiting = WaitingQueue(num_slots_by_adapter)
        self._running: list[Request] = []  # by admission
        self._free_rows = list(range(max_num_seqs))  # a heap: low rows first
        self._num_added = 0

    @property
    def waiting(self) -> Sequence[Request]:
        """Waiting requests by arrival."""
        return self._waiting.requests

    @property
    def running(self) -> Sequence[Request]:
        """Running requests by admission."""
        return tuple(self._running)

    @property
    def num_waiting(self) -> int:
        """Waiting requests."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Running requests."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """True until every request is finished."""
        return bool(self._requests)

    def check_request(self, request: Request) -> None:
        """Refuses a request that could never run here.

        Raises:
          InvalidRequestError: If the prompt is empty or too long, or needs more slots or blocks than exist.
        """
        if not request.prompt_token_ids:
            raise InvalidRequestError("prompt has no tokens, expected at least one", param="prompt")
        if request.num_prompt_tokens >= self.max_model_len:
            raise InvalidRequestError(
                f"prompt has {request.num_prompt_tokens} tokens, but prompt and output share the limit of "
                f"{self.max_model_len} tokens; shorten the prompt or raise --max-model-len",
                param="prompt",
            )
        num_blocks = self._most_blocks(request)
        if num_blocks > self.block_pool.num_blocks:
            raise InvalidRequestError(
                f"max_tokens is {request.sampling.max_tokens}, which with a prompt of {request.num_prompt_tokens} "
                f"tokens needs {num_blocks} KV blocks of {self.block_pool.block_size} tokens{_in_caches(request)}, but "
                f"there are {self.block_pool.num_blocks}; lower max_tokens or raise --num-blocks",
                param="max_tokens",
            )
        slots_by_adapter = self._num_slots(request)
        num_slots = sum(slots_by_adapter.values())
        if num_slots > self.slot_cache.num_slots:
            raise InvalidRequestError(
                f"adapter_mix needs {num_slots} slots ({_counts_text(slots_by_adapter)}), but the slot array has "
                f"{self.slot_cache.num_slots}; use fewer or smaller adapters or raise --adapter-slots",
                param="adapter_mix",
            )

    def add(self, request: Request) -> None:
        """Lets a new request wait.

        Raises:
          InvalidRequestError: If it could never run here, or its id is in use; nothing has changed then.
        """
        assert request.phase is Phase.WAITING, f"{request} was added before"
        if request.request_id in self._requests:
            raise InvalidRequestError(
                f"request id {request.request_id!r} is in use; give each request its own", param="request_id"
            )
        request.num_caches = 2 if request.mix.gated_set in self._two_cache_sets else 1
        self.check_request(request)
        request.sequence_number = self._num_added
        request.token_limit = self._token_limit(request)
        self._num_added += 1
        self._requests[request.request_id] = request
        self._wait(request)

    def abort(self, request_id: str) -> Request | None:
        """Finishes a request with reason ABORT; returns it, or None if it is unknown or has finished before."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.ABORT)
        return request

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a waiting or running request and releases what it owns, tokens in flight or not."""
        assert self._requests.get(request.request_id) is request, f"{request} is not in the scheduler"
        if request.phase is Phase.RUNNING:
            self._release(request)
        else:
            self._leave_queue(request)
        del self._requests[request.request_id]
        request.phase = Phase.FINISHED
        request.finish_reason = reason

    def has_reached_limit(self, request: Request) -> bool:
        """True if the known tokens have reached max_tokens or the model's limit: it is to finish with LENGTH."""
        return len(request.prompt_token_ids) + len(request.output_token_ids) >= request.token_limit

    def plan(self, now_s: float) -> StepPlan:
        """Chooses what the next step runs, and hands out rows, blocks and slots for it.

        To be called with at most one dispatch whose tokens are not committed, of one step or of several.

        Args:
          now_s: the time, on the clock of `Request.arrival_s`.
        """
        draft = _Draft(budget=self.max_num_batched_tokens)
        for request in self._running_in_order():
            # It may have been preempted for one before it.
            if request.phase is Phase.RUNNING:
                self._plan_chunk(request, draft)
        if self.num_waiting and self._free_rows and not draft.is_short_of_blocks:
            self._admit(draft, now_s)
        return StepPlan(tuple(draft.chunks.values()), tuple(draft.loads), tuple(draft.preempted))

    def plan_ahead(self, plan: StepPlan, num_steps: int, now_s: float) -> list[StepPlan]:
        """The `num_steps` plans after `plan`, if it and they are decode steps and need nothing that others hold.

        A row is left out from where it reaches its limit. All of the plans, `plan` among them, count as dispatched
        then. Else, and while a request waits, lest it wait longer, there are none, and nothing has changed.

        Args:
          plan: the last one of `plan`, not dispatched yet.
          num_steps: at least 1.
          now_s: as for `plan`.
        """
        going_on = self._running_in_order()
        # A step may also have one token alone of a prompt, for want of budget.
        are_decode_rows = all(chunk.samples and chunk.num_tokens == 1 for chunk in plan.chunks)
        if self.num_waiting or not are_decode_rows or len(going_on) != plan.num_seqs:
            return []
        steps = [min(1 + num_steps, r.token_limit - 1 - r.num_computed_tokens) for r in going_on]
        num_blocks = sum(
            max(0, self._blocks_for(request, request.num_computed_tokens + n) - len(request.block_table))
            for request, n in zip(going_on, steps, strict=True)
        )
        if max(steps, default=0) <= num_steps or num_blocks > self.block_pool.num_free:
            return []
        self.on_dispatched(plan)
        plans = []
        for _ in range(num_steps):
            plans.append(self.plan(now_s))
            self.on_dispatched(plans[-1])
        assert all(p.chunks and p.is_decode and not p.loads and not p.preempted for p in plans), "rows have changed"
        return plans

    def wanted_adapters(self, now_s: float, look_ahead: int) -> list[str]:
        """Adapters without slots of waiting requests, in the order in which the policy would take these.

        Args:
          now_s: as for `plan`.
          look_ahead: how many to find, those of the last request included whole; and how many requests to look at.
        """
        resident = self.slot_cache.resident
        if self._waiting.adapters <= resident:
            return []
        waiting = self._waiting.snapshot()
        is_lacking = waiting.count_adapters_outside(resident).values() > 0
        order = self.policy.order(waiting, resident, lambda: is_lacking, now_s)
        wanted: dict[str, None] = {}
        for request in itertools.islice(order, look_ahead):
            wanted |= dict.fromkeys(adapter_id for adapter_id in request.adapters if adapter_id not in resident)
            if len(wanted) >= look_ahead:
                break
        return list(wanted)

    def waiting_for(self, adapter_id: str) -> list[Request]:
        """Waiting requests that use the adapter, by arrival."""
        if adapter_id not in self._waiting.adapters:
            return []
        return [request for request in self.waiting if adapter_id in request.adapters]

    def on_dispatched(self, plan: StepPlan) -> None:
        """Takes note that the device will run `plan`: its tokens count as computed, its samples are in flight."""
        prefix_cache, block_size = self.prefix_cache, self.block_pool.block_size
        for chunk in plan.chunks:
            request = chunk.request
            assert request.epoch == chunk.epoch, f"{request} changed between plan and dispatch"
            assert request.num_computed_tokens == chunk.start, f"{request} does not go on at {chunk.start}"
            num_computed = request.num_computed_tokens = chunk.start + chunk.num_tokens
            request.num_in_flight += chunk.samples
            num_registered = request.num_registered_blocks // request.num_caches * block_size
            if prefix_cache is not None and num_computed >= num_registered + block_size:
                prefix_cache.register(request)

    def fail(self, plan: StepPlan) -> list[Request]:
        """Takes back a plan whose step failed, the KV blocks and the tokens in flight being lost with it.

        Returns:
          The requests that end with reason ERROR: all that run, and those that wait with a token in flight. The
          adapters that the plan was to load are not resident, and no block holds anything; the other waiting requests
          wait on.
        """
        lost = [*self._running, *(request for request in self.waiting if request.num_in_flight > 0)]
        for request in lost:
            self.finish(request, FinishReason.ERROR)
        self.block_pool.forget_contents()
        for load in plan.loads:
            if load.adapter_id in self.slot_cache.resident:
                self.slot_cache.remove(load.adapter_id)
        return lost

    def check_integrity(self) -> None:
        """Checks that rows, blocks and pins are each owned by exactly the running requests that should own them."""
        self.block_pool.check_integrity()
        self.slot_cache.check_integrity()
        self._waiting.check_integrity()
        rows = [-1 if request.row is None else request.row for request in self._running]
        assert sorted([*rows, *self._free_rows]) == list(range(self.max_num_seqs)), f"rows {rows}"
        num_owners = Counter(block_id for request in self._running for block_id in request.block_table)
        assert len(num_owners) + self.block_pool.num_free == self.block_pool.num_blocks, "blocks are lost"
        for block_id, count in num_owners.items():
            assert self.block_pool.num_owners(block_id) == count, f"block {block_id} is in {count} block tables"
        pins = Counter(adapter_id for request in self._running for adapter_id in request.adapters)
        assert pins == self.slot_cache.num_pins, f"running requests use {pins}, pinned {self.slot_cache.num_pins}"
        for request in self._running:
            assert request.phase is Phase.RUNNING, f"{request} is listed as running"
            assert len(request.block_table) % request.num_caches == 0, f"{request} has blocks in one cache only"
            num_covered = self._num_covered(request, request.block_table)
            assert request.num_computed_tokens <= num_covered, f"{request} has blocks for {num_covered} tokens"
            own = request.block_table[request.num_registered_blocks :]
            assert all(num_owners[block_id] == 1 for block_id in own), f"{request} shares a block that it is to write"
        for request in self.waiting:
            assert request.phase is Phase.WAITING, f"{request} is listed as waiting"
            assert request.row is None, f"{request} waits with a row"
            assert not request.block_table, f"{request} waits with blocks"
        assert len(self._requests) == len(self._waiting) + len(self._running), "requests are lost"
        for tally, requests in ((self.waiting_tally, self.waiting), (self.running_tally, self.running)):
            num_users = Counter(adapter_id for request in requests for adapter_id in request.adapters)
            counted = (tally.num_requests, tally.by_adapter())
            assert counted == (len(requests), num_users), f"counted {counted}, there are {len(requests)}: {num_users}"

    def _running_in_order(self) -> list[Request]:
        """Those whose tokens, counting the ones in flight, are below their limit: decode rows, then prefills."""
        decodes, prefills = [], []
        for request in self._running:
            num_uncomputed = request.num_uncomputed_tokens
            if num_uncomputed + request.num_computed_tokens < request.token_limit:
                (decodes if num_uncomputed == 1 else prefills).append(request)
        decodes.sort(key=arrival_order)
        return decodes + prefills

    def _plan_chunk(self, request: Request, draft: "_Draft") -> None:
        """Adds the longest chunk that budget and blocks allow, if there is any."""
        start = request.num_computed_tokens
        num_uncomputed = request.num_uncomputed_tokens
        num_tokens = min(num_uncomputed, draft.budget)
        if start + num_tokens > self._num_covered(request, request.block_table):
            self._grow_block_table(request, start + num_tokens, draft)
            num_tokens = min(num_tokens, self._num_covered(request, request.block_table) - start)
        if num_tokens == 0:
            return
        assert request.row is not None
        draft.add(
            Chunk(
                request=request,
                row=request.row,
                epoch=request.epoch,
                start=start,
                num_tokens=num_tokens,
                samples=num_tokens == num_uncomputed,
            )
        )

    def _grow_block_table(self, request: Request, num_tokens: int, draft: "_Draft") -> None:
        """Gives the request blocks for its first `num_tokens` tokens, or as many as later arrivals can yield."""
        num_missing = self._blocks_for(request, num_tokens) - len(request.block_table)
        while num_missing > self.block_pool.num_free:
            draft.is_short_of_blocks = True
            victim = self._victim(request, draft)
            if victim is None:
                break
            self._preempt(victim, draft)
        num_left = max(0, min(num_missing, self.block_pool.num_free))
        block_ids = self.block_pool.allocate(num_left - num_left % request.num_caches)
        assert block_ids is not None
        request.block_table += block_ids

    def _victim(self, request: Request, draft: "_Draft") -> Request | None:
        """The last arrival among the running requests later than this one, if possible one without a chunk yet."""
        later = [other for other in self._running if other.arrival_order > request.arrival_order]
        return max(later, key=lambda other: (other.request_id not in draft.chunks, other.arrival_order), default=None)

    def _preempt(self, request: Request, draft: "_Draft") -> None:
        draft.drop(request)
        self._release(request)
        request.num_computed_tokens = 0
        self._wait(request)
        self.num_preemptions += 1

    def _admit(self, draft: "_Draft", now_s: float) -> None:
        """Admits waiting requests in the policy's order while anything may fit."""
        room = _Room(
            num_rows=len(self._free_rows),
            num_blocks=self.block_pool.num_free - sum(map(self._promised_blocks, self._running)),
        )
        draft.max_slot_writes = self._max_slot_writes if draft.chunks else None
        waiting = self._waiting.snapshot()
        fitting = _Fitting(waiting, self.slot_cache, room, draft, self._staging)
        order = self.policy.order(waiting, self.slot_cache.resident, fitting, now_s)
        admitted: list[Request] = []
        try:
            self._try_in_order(order, room, draft, admitted, now_s)
        finally:  # only now, as `waiting` is to stay as it is meanwhile
            for request in admitted:
                self._leave_queue(request)
            for adapter_id in room.pinned_by_claims:
                self.slot_cache.unpin(adapter_id)

    def _try_in_order(
        self, order: Iterator[Request], room: "_Room", draft: "_Draft", admitted: list[Request], now_s: float
    ) -> None:
        while draft.budget > 0 and room.num_rows > 0 and room.num_blocks > 0:
            request = next(order, None)
            if request is None:
                return
            shared = self._shared_if_it_fits(request, room, draft.budget)
            if shared is not None and draft.can_write(self._num_slots_missing(request)):
                admitted.append(request)
                request.has_overtaken = room.claimed_by is not None
                room.take(self._promised_blocks(request) - self.block_pool.count_owned(shared))
                self._start(request, shared, draft)
                continue
            if shared is None and room.claimed_by is None:
                self._place_staged(request, draft)
            match self.policy.when_blocked(request, now_s):
                case WhenBlocked.STOP:
                    return
                case WhenBlocked.CLAIM:
                    self._claim(request, room)
                case WhenBlocked.PASS:
                    pass

    def _shared_if_it_fits(self, request: Request, room: "_Room", budget: int) -> list[int] | None:
        """The blocks that the request finds computed, if it can be admitted; None if not. See the class.

        `_Fitting` says the same of all waiting requests at once, as if they found none.
        """
        if not self._is_at_hand(request) or not self._has_slots(request, room):
            return None
        shared = self._find_computed(request)
        num_blocks = self._promised_blocks(request) if room.claimed_by is None else self._most_blocks(request)
        if num_blocks - self.block_pool.count_owned(shared) > room.num_blocks:
            return None
        num_tokens = request.num_uncomputed_tokens - self._num_covered(request, shared)
        return shared if room.claimed_by is None or num_tokens <= budget else None

    def _has_slots(self, request: Request, room: "_Room") -> bool:
        num_slots = self._num_slots(request)
        if room.claimed_by is None or room.claimed_by.issuperset(request.adapters):
            return self.slot_cache.can_hold(num_slots)
        return not room.are_all_slots_claimed and self.slot_cache.can_hold(num_slots, num_kept=room.num_slots_claimed)

    def _claim(self, request: Request, room: "_Room") -> None:
        """Keeps its room for a request that waits for slots or adapters, or to be written; see the class."""
        cache = self.slot_cache
        room.take(self._promised_blocks(request))
        for adapter_id in request.adapters:
            if adapter_id in cache.resident:
                cache.pin(adapter_id)  # until everybody has been tried
                room.pinned_by_claims.append(adapter_id)
        num_left = cache.num_free + cache.num_evictable_slots
        room.claim_slots(request.adapters, self._num_slots_missing(request), num_left)

    def _find_computed(self, request: Request) -> list[int]:
        return [] if self.prefix_cache is None else self.prefix_cache.find(request)

    def _is_at_hand(self, request: Request) -> bool:
        """True if each adapter of the request is in slots or can be copied there without waiting."""
        if self._staging is None:
            return True
        resident, staged = self.slot_cache.resident, self._staging.staged
        return all(adapter_id in resident or adapter_id in staged for adapter_id in request.adapters)

    def _num_slots_missing(self, request: Request) -> int:
        num_slots, resident = self._num_slots(request), self.slot_cache.resident
        return sum(count for adapter_id, count in num_slots.items() if adapter_id not in resident)

    def _place_staged(self, request: Request, draft: "_Draft") -> None:
        """Gives slots to the staged adapters of a request for which the staging area is too small."""
        if self._staging is None or self._num_slots_missing(request) <= self._staging.max_slots:
            return
        cache, staged = self.slot_cache, self._staging.staged
        placed = [adapter_id for adapter_id in request.adapters if adapter_id in cache.resident]
        for adapter_id in placed:
            cache.pin(adapter_id)  # for as long as loads may evict it
        for adapter_id in request.adapters:
            if adapter_id in cache.resident or adapter_id not in staged:
                continue
            num_slots = self.num_slots_by_adapter(adapter_id)
            load = cache.plan_load(adapter_id, num_slots) if draft.can_write(num_slots) else None
            if load is None:
                break
            draft.loads.append(load)
            cache.pin(adapter_id)
            placed.append(adapter_id)
        for adapter_id in placed:
            cache.unpin(adapter_id)

    def _start(self, request: Request, shared: list[int], draft: "_Draft") -> None:
        """Gives a waiting request its row, pins and the blocks that it shares, and plans its first chunk."""
        assert request.num_in_flight == 0, f"{request} is admitted before its tokens in flight were committed"
        missing = [adapter_id for adapter_id in request.adapters if adapter_id not in self.slot_cache.resident]
        for adapter_id in request.adapters:
            if adapter_id not in missing:
                self.slot_cache.pin(adapter_id)  # before any load, which might evict it
        for adapter_id in missing:
            load = self.slot_cache.plan_load(adapter_id, self.num_slots_by_adapter(adapter_id))
            assert load is not None, f"no slots for adapter {adapter_id!r} of {request}"
            self.slot_cache.pin(adapter_id)
            draft.loads.append(load)
        self.block_pool.share(shared)  # before any of them is handed out as free
        request.block_table = shared
        request.num_registered_blocks = len(shared)
        request.num_computed_tokens = self._num_covered(request, shared)
        if request.epoch == 0:
            request.num_cached_tokens = request.num_computed_tokens
        request.row = heapq.heappop(self._free_rows)
        request.phase = Phase.RUNNING
        request.epoch += 1
        self._running.append(request)
        self.running_tally.add(request)
        self._plan_chunk(request, draft)

    def _release(self, request: Request) -> None:
        """Takes row, blocks and pins from a running request."""
        assert request.row is not None
        self._running.remove(request)
        self.running_tally.remove(request)
        heapq.heappush(self._free_rows, request.row)
        request.row = None
        if self.prefix_cache is not None:
            self.prefix_cache.register(request)  # what has become known since its last step was dispatched
        self.block_pool.release(request.block_table)
        request.block_table = []
        request.num_registered_blocks = 0
        request.has_overtaken = False
        for adapter_id in request.adapters:
            self.slot_cache.unpin(adapter_id)

    def _wait(self, request: Request) -> None:
        request.phase = Phase.WAITING
        needs = Needs(self._promised_blocks(request), self._most_blocks(request), request.num_uncomputed_tokens)
        self._waiting.add(request, needs)
        self.waiting_tally.add(request)

    def _leave_queue(self, request: Request) -> None:
        self._waiting.remove(request)
        self.waiting_tally.remove(request)

    def _token_limit(self, request: Request) -> int:
        """Most tokens of the request, prompt and output."""
        return min(len(request.prompt_token_ids) + request.sampling.max_tokens, self.max_model_len)

    def _most_blocks(self, request: Request) -> int:
        """Blocks at its greatest length; the last token ends the request and is never written."""
        return self._blocks_for(request, self._token_limit(request) - 1)

    def _blocks_for(self, request: Request, num_tokens: int) -> int:
        """Blocks that hold so many of the request's tokens, in all its caches."""
        return self.block_pool.blocks_for(num_tokens) * request.num_caches

    def _num_covered(self, request: Request, block_ids: Sequence[int]) -> int:
        """Tokens that these blocks of the request hold in each of its caches."""
        return len(block_ids) // request.num_caches * self.block_pool.block_size

    def _promised_blocks(self, request: Request) -> int:
        """Blocks still to come for its known tokens and one block more, or for its greatest length; see the class."""
        wanted = self._most_blocks(request)
        if not request.has_overtaken:
            one_more = request.num_total_tokens + self.block_pool.block_size
            wanted = min(wanted, self._blocks_for(request, one_more))
        return max(0, wanted - len(request.block_table))

    def _num_slots(self, request: Request) -> dict[str, int]:
        return {adapter_id: self.num_slots_by_adapter(adapter_id) for adapter_id in request.adapters}


@dataclasses.dataclass
class _Draft:
    """A plan in the making: what is left of the budget, and what is chosen so far."""

    budget: int
    chunks: dict[str, Chunk] = dataclasses.field(default_factory=dict)
    loads: list[Load] = dataclasses.field(default_factory=list)
    preempted: list[Request] = dataclasses.field(default_factory=list)
    is_short_of_blocks: bool = False
    max_slot_writes: int | None = None

    @property
    def num_writes_left(self) -> int | None:
        """Slots that the step may still write into; None for any number."""
        if self.max_slot_writes is None or not self.loads:
            return None
        return self.max_slot_writes - sum(len(load.slot_ids) for load in self.loads)

    def can_write(self, num_slots: int) -> bool:
        """True if the step may write into so many slots more."""
        num_left = self.num_writes_left
        return num_slots == 0 or num_left is None or num_slots <= num_left

    def add(self, chunk: Chunk) -> None:
        self.chunks[chunk.request.request_id] = chunk
        self.budget -= chunk.num_tokens

    def drop(self, request: Request) -> None:
        """Takes back the chunk of a request that is preempted, if it has one; the step runs with less."""
        self.preempted.append(request)
        self.chunks.pop(request.request_id, None)


@dataclasses.dataclass
class _Room:
    """What is left for admission beside what is promised to running requests and claimed by overdue ones.

    Attributes:
      num_rows, num_blocks: rows and blocks left.
      claimed_by: adapters common to all claimants, which others may pin too; None if nobody claims anything.
      num_slots_claimed: slots that claimants lack and that are there.
      are_all_slots_claimed: a claimant lacks more than are there.
      pinned_by_claims: adapters of claimants that are in slots, a pin for each claimant.
    """

    num_rows: int
    num_blocks: int
    claimed_by: frozenset[str] | None = None
    num_slots_claimed: int = 0
    are_all_slots_claimed: bool = False
    pinned_by_claims: list[str] = dataclasses.field(default_factory=list)

    def take(self, num_blocks: int) -> None:
        self.num_rows -= 1
        self.num_blocks -= num_blocks

    def claim_slots(self, adapters: Iterable[str], num_missing: int, num_left: int) -> None:
        """Claims the slots that adapters lack, of those that nobody pins."""
        adapters = frozenset(adapters)
        self.claimed_by = adapters if self.claimed_by is None else self.claimed_by & adapters
        if self.num_slots_claimed + num_missing <= num_left:
            self.num_slots_claimed += num_missing
        else:
            self.are_all_slots_claimed = True


class _Fitting:
    """Which waiting requests can be admitted, as `Scheduler._shared_if_it_fits` says it of one that shares no blocks.

    In the course of a step, rows, blocks, budget, unpinned slots and what may be written only decrease and claims only
    grow: who does not fit now does not fit later in the step, but for who needs no more to be written, as another has
    had its adapters written. Adapters pinned by an admission save the same slots for those who use them as they take
    from all.
    """

    def __init__(
        self, waiting: WaitingRequests, slot_cache: SlotCache, room: _Room, draft: _Draft, staging: Staging | None
    ) -> None:
        self._waiting = waiting
        self._slot_cache = slot_cache
        self._room = room
        self._draft = draft
        self._staging = staging
        self._at_hand: set[str] = set()  # adapters in slots or staged
        self._not_at_hand = waiting.count_adapters_outside(self._at_hand)
        self._slots_to_pin: CountOutside | None = None  # counted when first asked for, as is the next
        self._slots_to_write: CountOutside | None = None
        self._most_slots_to_pin = 0
        self._most_slots: int | None = None  # of any request

    def __call__(self) -> Bool[np.ndarray, " num_waiting"]:
        """[num_waiting] as things are now."""
        waiting, slot_cache, room = self._waiting, self._slot_cache, self._room
        if self._slots_to_pin is None:
            self._slots_to_pin = waiting.count_slots_outside(slot_cache.pinned)
            self._most_slots_to_pin = self._slots_to_pin.values().max(initial=0)
        fits = (waiting.promised_blocks if room.claimed_by is None else waiting.most_blocks) <= room.num_blocks
        num_slots = slot_cache.num_free + slot_cache.num_evictable_slots
        if num_slots < self._most_slots_to_pin:  # else nobody lacks slots; admissions only lower what others need
            fits &= self._slots_to_pin.values() <= num_slots
        if self._staging is not None:
            fits &= self._is_at_hand(self._staging)
        if (num_writes_left := self._draft.num_writes_left) is not None:
            if self._slots_to_write is None:
                self._slots_to_write = waiting.count_slots_outside(slot_cache.resident)
            num_slots_to_write = self._slots_to_write.values()
            fits &= (num_slots_to_write == 0) | (num_slots_to_write <= num_writes_left)
        if room.claimed_by is None:
            return fits
        has_slots = waiting.count_adapters_outside(room.claimed_by).values() == 0
        if not room.are_all_slots_claimed:
            has_slots |= self._slots_to_pin.values() <= num_slots - room.num_slots_claimed
        return fits & has_slots & (waiting.num_tokens <= self._draft.budget)

    def _is_at_hand(self, staging: Staging) -> Bool[np.ndarray, " num_waiting"]:
        """[num_waiting] True also for those too large to be staged at once, of which something can be placed."""
        waiting, resident = self._waiting, self._slot_cache.resident
        self._at_hand.clear()
        self._at_hand.update(resident, staging.staged)
        num_not_at_hand = self._not_at_hand.values()
        if self._most_slots is None:
            self._most_slots = int(waiting.count_slots_outside(frozenset()).values().max(initial=0))
        if self._most_slots <= staging.max_slots:
            return num_not_at_hand == 0
        is_too_large = waiting.count_slots_outside(resident).values() > staging.max_slots
        is_staged_in_part = num_not_at_hand < waiting.count_adapters_outside(resident).values()
        return (num_not_at_hand == 0) | (is_too_large & is_staged_in_part)


def _in_caches(request: Request) -> str:
    return f" ({request.num_caches} KV caches)" if request.num_caches > 1 else ""


def _counts_text(num_slots: dict[str, int]) -> str:
    return ", ".join(f"{adapter_name(adapter_id)}: {count}" for adapter_id, count in num_slots.items())
