"""Waiting requests by arrival, kept so that a plan looks at all of them at once in numpy instead of one by one.

Ten thousand requests of three adapters are 30,000 small integers: counting for each the adapters that it would have to
load takes 25 microseconds, however many requests use an adapter that came or went.
"""

import array
import bisect
import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence, Set

import numpy as np
from jaxtyping import Int32

from serving.request import Request

_NO_ADAPTER = 0  # fills the columns of requests with fewer adapters than others; weighs nothing


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a request needs besides a row and slots; does not change while it waits.

    Attributes:
      promised_blocks: KV blocks that its admission promises it.
      most_blocks: KV blocks at its greatest length.
      num_tokens: tokens to compute before it can sample.
    """

    promised_blocks: int
    most_blocks: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, eq=False)
class WaitingRequests:
    """Those that wait at one moment, by arrival, and what they need; for use until the queue changes.

    Attributes:
      requests: the requests.
      promised_blocks, most_blocks, num_tokens: [num_waiting] `Needs` of each.
      adapter_columns: [mix_size, num_waiting] numbers of the adapters of each request, then _NO_ADAPTER.
      adapter_numbers: number of each adapter in use.
      slots_by_number: [num_numbers] slots that each adapter needs; 0 for _NO_ADAPTER.
    """

    requests: Sequence[Request]
    promised_blocks: Int32[np.ndarray, " num_waiting"]
    most_blocks: Int32[np.ndarray, " num_waiting"]
    num_tokens: Int32[np.ndarray, " num_waiting"]
    adapter_columns: Int32[np.ndarray, "mix_size num_waiting"]
    adapter_numbers: Mapping[str, int]
    slots_by_number: Int32[np.ndarray, " num_numbers"]

    def __len__(self) -> int:
        return len(self.requests)

    def count_adapters_outside(self, inside: Set[str]) -> "CountOutside":
        """Adapters of each request that are not in `inside`, a set that may change."""
        weights = np.ones_like(self.slots_by_number)
        weights[_NO_ADAPTER] = 0
        return CountOutside(self, inside, weights)

    def count_slots_outside(self, inside: Set[str]) -> "CountOutside":
        """Slots that each request needs for its adapters not in `inside`, a set that may change."""
        return CountOutside(self, inside, self.slots_by_number)


class CountOutside:
    """Weight of the adapters of each waiting request outside a set, which is read anew each time."""

    def __init__(self, waiting: WaitingRequests, inside: Set[str], weights: Int32[np.ndarray, " num_numbers"]) -> None:
        self._waiting = waiting
        self._inside = inside
        self._weights = weights
        self._weights_outside = weights.copy()
        self._counted: Set[str] = set()
        self._values: Int32[np.ndarray, " num_waiting"] | None = None

    def values(self) -> Int32[np.ndarray, " num_waiting"]:
        """The counts now."""
        changed = self._counted ^ self._inside
        if self._values is None or changed:
            for adapter_id in changed:
                number = self._waiting.adapter_numbers.get(adapter_id)
                if number is not None:  # somebody who waits uses it
                    self._weights_outside[number] = 0 if adapter_id in self._inside else self._weights[number]
            self._counted = set(self._inside)
            self._values = self._weights_outside.take(self._waiting.adapter_columns).sum(axis=0, dtype=np.int32)
        return self._values


class WaitingQueue:
    """The waiting requests by arrival, and their needs and adapters as columns of integers.

    Columns are `array.array`: adding or removing a request moves memory, and numpy reads a copy of a few microseconds.
    Adapters have numbers from the first waiting request that uses them to the last; free numbers are used again.
    """

    def __init__(self, num_slots_by_adapter: Callable[[str], int]) -> None:
        """Nothing waits.

        Args:
          num_slots_by_adapter: slots that an adapter needs; asked when the first request waits for it.
        """
        self._num_slots_by_adapter = num_slots_by_adapter
        self._requests: list[Request] = []
        self._snapshot: tuple[Request, ...] | None = ()
        self._promised_blocks, self._most_blocks, self._num_tokens = (
            array.array("i"),
            array.array("i"),
            array.array("i"),
        )
        self._adapter_columns: list[array.array[int]] = []
        self._column_users: list[int] = []  # requests with an adapter in each column; never increases along the list
        self._numbers: dict[str, int] = {}
        self._slots_by_number = array.array("i", [0])
        self._users_by_number = [0]
        self._free_numbers: list[int] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> tuple[Request, ...]:
        """The requests by arrival."""
        if self._snapshot is None:
            self._snapshot = tuple(self._requests)
        return self._snapshot

    @property
    def adapters(self) -> Set[str]:
        """Ids of the adapters that waiting requests use."""
        return self._numbers.keys()

    def snapshot(self) -> WaitingRequests:
        """The requests and what they need, as they are now."""
        columns = np.empty((len(self._adapter_columns), len(self)), np.int32)
        for i, column in enumerate(self._adapter_columns):
            columns[i] = column
        return WaitingRequests(
            requests=self._requests,  # the list itself: a copy touches every request's reference count
            promised_blocks=np.array(self._promised_blocks, np.int32),
            most_blocks=np.array(self._most_blocks, np.int32),
            num_tokens=np.array(self._num_tokens, np.int32),
            adapter_columns=columns,
            adapter_numbers=self._numbers,
            slots_by_number=np.array(self._slots_by_number, np.int32),
        )

    def add(self, request: Request, needs: Needs) -> None:
        """Puts a request at its place by arrival."""
        new = [adapter_id for adapter_id in request.adapters if adapter_id not in self._numbers]
        num_slots = {adapter_id: self._num_slots_by_adapter(adapter_id) for adapter_id in new}
        for adapter_id in request.adapters:
            self._take_number(adapter_id, num_slots)
        index = self._bisect(request)
        self._requests.insert(index, request)
        self._promised_blocks.insert(index, needs.promised_blocks)
        self._most_blocks.insert(index, needs.most_blocks)
        self._num_tokens.insert(index, needs.num_tokens)
        while len(self._adapter_columns) < len(request.adapters):
            self._adapter_columns.append(array.array("i", [_NO_ADAPTER]) * (len(self._requests) - 1))
            self._column_users.append(0)
        for i, column in enumerate(self._adapter_columns):
            is_used = i < len(request.adapters)
            column.insert(index, self._numbers[request.adapters[i]] if is_used else _NO_ADAPTER)
            self._column_users[i] += is_used
        self._snapshot = None

    def remove(self, request: Request) -> None:
        """Takes out a request, which no longer waits."""
        index = self._bisect(request)
        assert self._requests[index] is request, f"{request} is not waiting"
        for column in (self._requests, self._promised_blocks, self._most_blocks, self._num_tokens):
            del column[index]
        for i, column in enumerate(self._adapter_columns):
            del column[index]
            self._column_users[i] -= i < len(request.adapters)
        while self._column_users and self._column_users[-1] == 0:
            self._column_users.pop()
            self._adapter_columns.pop()
        for adapter_id in request.adapters:
            self._release_number(adapter_id)
        self._snapshot = None

    def check_integrity(self) -> None:
        """Checks the order, and that the columns tell the adapters of each request."""
        assert self._requests == sorted(self._requests, key=arrival_order), "waiting requests are not by arrival"
        names = {number: adapter_id for adapter_id, number in self._numbers.items()}
        for index, request in enumerate(self._requests):
            numbers = [column[index] for column in self._adapter_columns]
            adapters = tuple(names[number] for number in numbers if number != _NO_ADAPTER)
            assert adapters == request.adapters, f"{request} uses {request.adapters}, its columns say {adapters}"
        lengths = [len(column) for column in (self._promised_blocks, self._most_blocks, self._num_tokens)]
        assert set(lengths) == {len(self)}, f"{len(self)} requests, columns of {lengths}"
        used = set(self._numbers.values())
        assert used == {adapter for column in self._adapter_columns for adapter in column} - {_NO_ADAPTER}
        assert used.isdisjoint(self._free_numbers), "a number is both free and in use"
        assert len(used) + len(self._free_numbers) + 1 == len(self._slots_by_number), "numbers are lost"

    def _bisect(self, request: Request) -> int:
        return bisect.bisect_left(self._requests, arrival_order(request), key=arrival_order)

    def _take_number(self, adapter_id: str, num_slots: Mapping[str, int]) -> None:
        """Counts one more user of the adapter; the first one's gives it a number."""
        if adapter_id not in self._numbers:
            if not self._free_numbers:
                self._free_numbers.append(len(self._users_by_number))
                self._users_by_number.append(0)
                self._slots_by_number.append(0)
            number = self._numbers[adapter_id] = self._free_numbers.pop()
            self._slots_by_number[number] = num_slots[adapter_id]
        self._users_by_number[self._numbers[adapter_id]] += 1

    def _release_number(self, adapter_id: str) -> None:
        number = self._numbers[adapter_id]
        self._users_by_number[number] -= 1
        if self._users_by_number[number] == 0:
            del self._numbers[adapter_id]
            self._free_numbers.append(number)


# `Request.arrival_order` without Python's calls
arrival_order: Callable[[Request], tuple[float, int]] = operator.attrgetter("arrival_s", "sequence_number")
