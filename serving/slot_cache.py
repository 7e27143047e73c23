"""BAM (Base Adapter Manager), first form: which adapter holds which slots of the device's adapter array.

Original A and B of each adapter are cached once, however many mixes use it. An adapter of several slots gets and loses
all of them together. This class only keeps the books: `scheduler.py` decides what to load, `adapter_store.py` copies.
"""

import heapq
from collections.abc import Mapping, Set

from serving.plan import Load


class SlotCache:
    """Slots by adapter, with pins, and eviction of the adapter whose last use is longest ago.

    Ownership: a resident adapter owns its slots from `plan_load` until it is evicted or removed. Each running request
    pins each adapter of its mix once and unpins it when it ends; a pinned adapter keeps its slots. Slots may change
    hands while a dispatched step still reads them: the copy into them is ordered after that step on the device.
    """

    def __init__(self, num_slots: int) -> None:
        """All slots are free.

        Args:
          num_slots: slots, with ids 0..num_slots-1; 0 for a server without adapters.
        """
        if num_slots < 0:
            raise ValueError(f"num_slots is {num_slots}, expected >= 0")
        self.num_slots = num_slots
        self._free = list(range(num_slots))  # a heap: lowest ids first keep the used slots together
        self._slots: dict[str, tuple[int, ...]] = {}
        self._num_pins: dict[str, int] = {}  # adapters with at least one pin
        self._unpinned: dict[str, None] = {}  # resident adapters without a pin, longest unused first
        self._num_evictable_slots = 0

    @property
    def resident(self) -> Set[str]:
        """Ids of the adapters that hold slots: a live view, which follows loads and evictions."""
        return self._slots.keys()

    @property
    def pinned(self) -> Set[str]:
        """Ids of the adapters with at least one pin: a live view, which follows pins and unpins."""
        return self._num_pins.keys()

    @property
    def num_free(self) -> int:
        """Slots that no adapter holds."""
        return len(self._free)

    @property
    def num_evictable_slots(self) -> int:
        """Slots of resident adapters without a pin."""
        return self._num_evictable_slots

    @property
    def num_pinned_slots(self) -> int:
        """Slots of resident adapters with a pin."""
        return self.num_slots - len(self._free) - self._num_evictable_slots

    @property
    def num_pins(self) -> Mapping[str, int]:
        """Pins of each pinned adapter."""
        return dict(self._num_pins)

    def lookup(self, adapter_id: str) -> tuple[int, ...] | None:
        """The slots of an adapter in order of its rank rows, or None if it is not resident."""
        return self._slots.get(adapter_id)

    def is_pinned(self, adapter_id: str) -> bool:
        """True if a running request uses the adapter."""
        return adapter_id in self._num_pins

    def can_hold(self, num_slots_needed: Mapping[str, int], *, num_kept: int = 0) -> bool:
        """True if all these adapters can be resident at once without evicting a pinned one.

        Args:
          num_slots_needed: slots of each adapter that a request uses.
          num_kept: slots that are to be left, free or evictable.
        """
        missing = sum(needed for adapter_id, needed in num_slots_needed.items() if adapter_id not in self._slots)
        own = sum(len(self._slots[adapter_id]) for adapter_id in num_slots_needed if adapter_id in self._unpinned)
        return missing <= self.num_free + self.num_evictable_slots - own - num_kept

    def plan_load(self, adapter_id: str, num_slots_needed: int) -> Load | None:
        """Gives slots to an adapter that has none, evicting unpinned adapters, longest unused first.

        The books change at once: the caller must have the load carried out, or `remove` the adapter. The new adapter
        is not pinned.

        Returns:
          What to copy, and which adapters lost their slots; None (and nothing changes) if pinned adapters leave
          fewer than `num_slots_needed` slots.
        """
        assert adapter_id not in self._slots, f"adapter {adapter_id!r} is resident already"
        assert num_slots_needed >= 1, f"adapter {adapter_id!r} needs {num_slots_needed} slots"
        if num_slots_needed > self.num_free + self.num_evictable_slots:
            return None
        evicted = []
        while self.num_free < num_slots_needed:
            evicted.append(next(iter(self._unpinned)))
            self.remove(evicted[-1])
        slot_ids = tuple(heapq.heappop(self._free) for _ in range(num_slots_needed))
        self._slots[adapter_id] = slot_ids
        self._add_unpinned(adapter_id)
        return Load(adapter_id=adapter_id, slot_ids=slot_ids, evicted=tuple(evicted))

    def pin(self, adapter_id: str) -> None:
        """Keeps a resident adapter in its slots until the matching `unpin`."""
        assert adapter_id in self._slots, f"adapter {adapter_id!r} is pinned, but not resident"
        if adapter_id in self._unpinned:
            self._drop_unpinned(adapter_id)
        self._num_pins[adapter_id] = self._num_pins.get(adapter_id, 0) + 1

    def unpin(self, adapter_id: str) -> None:
        """Takes back one pin; without pins, the adapter stays resident until its slots are needed."""
        assert adapter_id in self._num_pins, f"adapter {adapter_id!r} is unpinned, but has no pin"
        self._num_pins[adapter_id] -= 1
        if self._num_pins[adapter_id] == 0:
            del self._num_pins[adapter_id]
            self._add_unpinned(adapter_id)

    def remove(self, adapter_id: str) -> None:
        """Frees the slots of a resident adapter without pins."""
        assert adapter_id not in self._num_pins, f"adapter {adapter_id!r} is pinned and keeps its slots"
        assert adapter_id in self._slots, f"adapter {adapter_id!r} is removed, but not resident"
        self._drop_unpinned(adapter_id)
        for slot_id in self._slots.pop(adapter_id):
            heapq.heappush(self._free, slot_id)

    def check_integrity(self) -> None:
        """Checks that owned + free = total, that no slot has two owners, and that pins are of resident adapters."""
        held = [slot_id for slot_ids in self._slots.values() for slot_id in slot_ids]
        assert sorted(held + self._free) == list(range(self.num_slots)), f"held {held}, free {self._free}"
        assert all(num_pins > 0 for num_pins in self._num_pins.values()), f"pins without owner: {self._num_pins}"
        pinned, unpinned = set(self._num_pins), set(self._unpinned)
        assert not pinned & unpinned, f"both pinned and evictable: {pinned & unpinned}"
        assert pinned | unpinned == set(self._slots), f"resident {sorted(self._slots)}, tracked {pinned | unpinned}"
        evictable = sum(len(self._slots[adapter_id]) for adapter_id in self._unpinned)
        assert evictable == self._num_evictable_slots, f"evictable {evictable}, counted {self._num_evictable_slots}"

    def _add_unpinned(self, adapter_id: str) -> None:
        self._unpinned[adapter_id] = None
        self._num_evictable_slots += len(self._slots[adapter_id])

    def _drop_unpinned(self, adapter_id: str) -> None:
        del self._unpinned[adapter_id]
        self._num_evictable_slots -= len(self._slots[adapter_id])
