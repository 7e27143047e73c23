"""Who is admitted next: LAG (LoRA-Aware Greedy) and the baselines beside it, one class each.

A policy only orders the waiting requests and says what a request that does not fit means for those behind it;
`scheduler.py` knows what fits, and tells it so that nobody walks over thousands of requests that do not. A new policy
is a new class here and a name in `serving.config` and `make_policy`.
"""

import abc
import bisect
import enum
import itertools
import random
from collections.abc import Callable, Iterator, Set

import numpy as np
from jaxtyping import Bool

from serving.config import EngineConfig
from serving.request import Request
from serving.waiting_queue import CountOutside, WaitingRequests

# Which waiting requests fit as things are; a request that does not will not fit later in the same step either.
Fitting = Callable[[], Bool[np.ndarray, " num_waiting"]]

_LAST = np.int32(np.iinfo(np.int32).max)


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
    def order(self, waiting: WaitingRequests, resident: Set[str], fitting: Fitting, now_s: float) -> Iterator[Request]:
        """Yields waiting requests, each at most once, the next to admit first; the caller stops when nothing more fits.

        It may leave out those that do not fit, if they mean PASS to those behind them.

        Args:
          waiting: the waiting requests by arrival; does not change meanwhile.
          resident: ids of the adapters in slots: a live view, which the caller changes by admitting what is yielded.
          fitting: tells which of them fit, after all admissions so far.
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

    def order(self, waiting: WaitingRequests, resident: Set[str], fitting: Fitting, now_s: float) -> Iterator[Request]:
        # They are by arrival, so the overdue ones come first.
        num_overdue = bisect.bisect_left(waiting.requests, True, key=lambda r: not self._is_overdue(r, now_s))
        yield from itertools.islice(waiting.requests, num_overdue)
        if num_overdue < len(waiting):
            yield from _least_first(waiting, waiting.count_adapters_outside(resident), fitting, start=num_overdue)

    def when_blocked(self, request: Request, now_s: float) -> WhenBlocked:
        if not self._is_overdue(request, now_s):
            return WhenBlocked.PASS
        return WhenBlocked.CLAIM if self.theta_s > 0 else WhenBlocked.STOP

    def _is_overdue(self, request: Request, now_s: float) -> bool:
        return now_s - request.arrival_s >= self.theta_s


class Fifo(Policy):
    """Order of arrival; a request that does not fit holds up all after it."""

    def order(self, waiting: WaitingRequests, resident: Set[str], fitting: Fitting, now_s: float) -> Iterator[Request]:
        yield from waiting.requests

    def when_blocked(self, request: Request, now_s: float) -> WhenBlocked:
        return WhenBlocked.STOP


class Random(Policy):
    """A new random order in each step; the same seed and calls give the same orders."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def order(self, waiting: WaitingRequests, resident: Set[str], fitting: Fitting, now_s: float) -> Iterator[Request]:
        order = np.array(self._rng.sample(range(len(waiting)), len(waiting)))
        is_left = np.ones(len(waiting), bool)
        while (candidates := order[(is_left & fitting())[order]]).size:
            is_left[candidates[0]] = False
            yield waiting.requests[candidates[0]]

    def when_blocked(self, request: Request, now_s: float) -> WhenBlocked:
        return WhenBlocked.PASS


class LeastFirst(Policy):
    """The request with the fewest adapters first, resident or not, then the earliest; large mixes may starve."""

    def order(self, waiting: WaitingRequests, resident: Set[str], fitting: Fitting, now_s: float) -> Iterator[Request]:
        yield from _least_first(waiting, waiting.count_adapters_outside(frozenset()), fitting)

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


def _least_first(
    waiting: WaitingRequests, counts: CountOutside, fitting: Fitting, *, start: int = 0
) -> Iterator[Request]:
    """Yields those from index `start` that fit by (count, arrival), counted anew before each."""
    is_left = np.ones(len(waiting), bool)
    is_left[:start] = False
    while True:
        keys = np.where(is_left & fitting(), counts.values(), _LAST)
        index = int(keys.argmin())  # the first of the least ones: by arrival among equals
        if keys[index] == _LAST:
            return
        is_left[index] = False
        yield waiting.requests[index]
