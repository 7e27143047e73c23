"""Who is admitted next: LAG (LoRA-Aware Greedy) and the baselines beside it, one class each.

A policy only orders the waiting requests and says what a request that does not fit means for those behind it;
`scheduler.py` knows what fits. A new policy is a new class here and a name in `serving.config` and `make_policy`.
"""

import abc
import enum
import heapq
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set

from serving.config import EngineConfig
from serving.request import Request


class WhenBlocked(enum.Enum):
    """What a request that does not fit now means for the requests after it.

    PASS: they are tried as if it were not there. CLAIM: they may take only what it has no use for, see
    `Scheduler`. STOP: none of them is admitted in this step.
    """

    PASS = enum.auto()
    CLAIM = enum.auto()
    STOP = enum.auto()


class Policy(abc.ABC):
    """Order of admission."""

    @abc.abstractmethod
    def order(self, waiting: Sequence[Request], resident: Set[str], now_s: float) -> Iterator[Request]:
        """Yields each waiting request once, the next to admit first; the caller stops when nothing more fits.

        Args:
          waiting: the waiting requests by arrival; does not change meanwhile.
          resident: ids of the adapters in slots: a live view, which the caller changes by admitting what is yielded.
          now_s: the time, on the clock of `Request.arrival_s`.
        """

    @abc.abstractmethod
    def when_blocked(self, request: Request, now_s: float) -> WhenBlocked:
        """What becomes of the requests after `request`, which does not fit."""


class Lag(Policy):
    """LAG: the request with the fewest adapters to load, then the earliest; overdue requests before all others.

    Picks the lexicographically least (|L(r) \\ S|, arrival), L(r) being the adapters of r and S those in slots, which
    each admission changes. Requests that have waited `theta_s` or longer are overdue: they go first, in order of
    arrival, and nothing overtakes them for the room that they need. With theta_s = 0 all are overdue, and the order
    is strict: FIFO.
    """

    def __init__(self, theta_s: float) -> None:
        self.theta_s = theta_s

    def order(self, waiting: Sequence[Request], resident: Set[str], now_s: float) -> Iterator[Request]:
        num_overdue = next((i for i, r in enumerate(waiting) if not self._is_overdue(r, now_s)), len(waiting))
        yield from waiting[:num_overdue]
        yield from _fewest_loads_first(waiting[num_overdue:], resident)

    def when_blocked(self, request: Request, now_s: float) -> WhenBlocked:
        if not self._is_overdue(request, now_s):
            return WhenBlocked.PASS
        return WhenBlocked.CLAIM if self.theta_s > 0 else WhenBlocked.STOP

    def _is_overdue(self, request: Request, now_s: float) -> bool:
        return now_s - request.arrival_s >= self.theta_s


class Fifo(Policy):
    """Order of arrival; a request that does not fit holds up all after it."""

    def order(self, waiting: Sequence[Request], resident: Set[str], now_s: float) -> Iterator[Request]:
        yield from waiting

    def when_blocked(self, request: Request, now_s: float) -> WhenBlocked:
        return WhenBlocked.STOP


class Random(Policy):
    """A new random order in each step; the same seed and calls give the same orders."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def order(self, waiting: Sequence[Request], resident: Set[str], now_s: float) -> Iterator[Request]:
        yield from self._rng.sample(waiting, len(waiting))

    def when_blocked(self, request: Request, now_s: float) -> WhenBlocked:
        return WhenBlocked.PASS


class LeastFirst(Policy):
    """The request with the fewest adapters first, resident or not, then the earliest; large mixes may starve."""

    def order(self, waiting: Sequence[Request], resident: Set[str], now_s: float) -> Iterator[Request]:
        yield from sorted(waiting, key=lambda request: len(request.adapters))  # stable: by arrival among equals

    def when_blocked(self, request: Request, now_s: float) -> WhenBlocked:
        return WhenBlocked.PASS


def make_policy(config: EngineConfig) -> Policy:
    """The policy that `config.scheduler` names."""
    match config.scheduler:
        case "lag":
            return Lag(config.theta_s)
        case "fifo":
            return Fifo()
        case "random":
            return Random(config.scheduler_seed)
        case "least-first":
            return LeastFirst()


def _fewest_loads_first(waiting: Sequence[Request], resident: Set[str]) -> Iterator[Request]:
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
