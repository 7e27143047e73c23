"""SlotCache next to a list of adapters by last use."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.slot_cache import SlotCache

NUM_SLOTS = 6
SIZES = {"a": 1, "b": 1, "c": 2, "d": 3, "e": 4, "f": 6}
ADAPTERS = st.sampled_from(sorted(SIZES))


class SlotCacheMachine(RuleBasedStateMachine):
    """Loads, pins, unpins and removes at random; the model is a list by last use and a tally of pins."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = SlotCache(NUM_SLOTS)
        self.by_use: list[str] = []  # resident, longest unused first; the place of pinned ones does not matter
        self.num_pins: Counter[str] = Counter()
        self.slots: dict[str, tuple[int, ...]] = {}

    def _room_for(self, adapter_id: str) -> bool:
        return SIZES[adapter_id] <= NUM_SLOTS - sum(SIZES[pinned] for pinned in self.num_pins)

    @rule(adapter_id=ADAPTERS)
    def load(self, adapter_id: str) -> None:
        if adapter_id in self.by_use:
            return
        expected = self._room_for(adapter_id)
        load = self.cache.plan_load(adapter_id, SIZES[adapter_id])
        assert (load is not None) == expected
        if load is None:
            return
        for evicted in load.evicted:
            unpinned = [other for other in self.by_use if other not in self.num_pins]
            assert evicted == unpinned[0]
            self.by_use.remove(evicted)
            del self.slots[evicted]
        in_use = sum(SIZES[other] for other in self.by_use)
        last = SIZES[load.evicted[-1]] if load.evicted else 0
        assert in_use + SIZES[adapter_id] <= NUM_SLOTS
        assert not load.evicted or in_use + last + SIZES[adapter_id] > NUM_SLOTS, "evicted more than needed"
        self.by_use.append(adapter_id)
        self.slots[adapter_id] = load.slot_ids

    @precondition(lambda self: self.by_use)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        adapter_id = data.draw(st.sampled_from(self.by_use))
        self.cache.pin(adapter_id)
        self.num_pins[adapter_id] += 1

    @precondition(lambda self: self.num_pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        adapter_id = data.draw(st.sampled_from(sorted(self.num_pins)))
        self.cache.unpin(adapter_id)
        self.num_pins = +(self.num_pins - Counter([adapter_id]))
        if adapter_id not in self.num_pins:
            self.by_use.remove(adapter_id)
            self.by_use.append(adapter_id)

    @precondition(lambda self: len(self.by_use) > len(self.num_pins))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        adapter_id = data.draw(st.sampled_from([a for a in self.by_use if a not in self.num_pins]))
        self.cache.remove(adapter_id)
        self.by_use.remove(adapter_id)
        del self.slots[adapter_id]

    @rule(adapter_ids=st.sets(ADAPTERS))
    def what_can_be_held_is_what_fits_beside_the_pinned(self, adapter_ids: set[str]) -> None:
        together = set(self.num_pins) | adapter_ids
        fits = sum(SIZES[adapter_id] for adapter_id in together) <= NUM_SLOTS
        assert self.cache.can_hold({adapter_id: SIZES[adapter_id] for adapter_id in adapter_ids}) == fits

    @invariant()
    def books_agree(self) -> None:
        self.cache.check_integrity()
        assert set(self.cache.resident) == set(self.by_use)
        assert self.cache.num_pins == self.num_pins
        assert self.cache.num_free == NUM_SLOTS - sum(SIZES[adapter_id] for adapter_id in self.by_use)
        for adapter_id in SIZES:
            assert self.cache.lookup(adapter_id) == self.slots.get(adapter_id)
            assert self.cache.is_pinned(adapter_id) == (adapter_id in self.num_pins)


SlotCacheMachine.TestCase.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=80, stateful_step_count=30
)
TestSlotCacheAgainstAListByUse = SlotCacheMachine.TestCase


def test_the_adapter_unused_for_longest_is_evicted():
    cache = SlotCache(2)
    for adapter_id in ("a", "b"):
        cache.plan_load(adapter_id, 1)
    cache.pin("a")
    cache.unpin("a")
    load = cache.plan_load("c", 1)
    assert load is not None
    assert load.evicted == ("b",)


def test_a_pinned_adapter_keeps_its_slots():
    cache = SlotCache(2)
    cache.plan_load("a", 2)
    cache.pin("a")
    assert cache.plan_load("b", 1) is None
    assert cache.lookup("a") == (0, 1)


def test_evicting_a_pinned_slot_is_refused():
    cache = SlotCache(1)
    cache.plan_load("a", 1)
    cache.pin("a")
    with pytest.raises(AssertionError, match="'a' is pinned and keeps its slots"):
        cache.remove("a")


def test_a_cache_without_slots_holds_only_the_empty_mix():
    cache = SlotCache(0)
    assert cache.can_hold({})
    assert not cache.can_hold({"a": 1})
    assert cache.plan_load("a", 1) is None


def test_the_books_of_pins_must_balance():
    cache = SlotCache(1)
    with pytest.raises(AssertionError, match="not resident"):
        cache.pin("a")
    cache.plan_load("a", 1)
    with pytest.raises(AssertionError, match="has no pin"):
        cache.unpin("a")
    with pytest.raises(AssertionError, match="resident already"):
        cache.plan_load("a", 1)
