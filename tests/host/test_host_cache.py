"""The host tier: bytes, order, and who may be dropped."""

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import serving.host_cache
from serving.host_cache import HostCache, default_host_bytes


def filled(max_bytes: int, **num_bytes: int) -> HostCache[str]:
    cache: HostCache[str] = HostCache(max_bytes)
    for name, size in num_bytes.items():
        assert cache.reserve(name, size)
        cache.fill(name, name.upper())
    return cache


def test_the_adapter_unused_for_longest_leaves_first():
    cache = filled(30, a=10, b=10, c=10)
    assert cache.get("a") == "A"
    assert cache.reserve("d", 15)
    assert list(cache.resident) == ["a"]
    assert (cache.num_bytes, "d" in cache, cache.get("d")) == (25, False, None)


def test_what_is_to_be_kept_and_what_is_being_read_stays():
    cache = filled(30, a=10, b=10)
    assert cache.reserve("reading", 10)
    assert not cache.reserve("d", 20, keep={"a"})
    assert list(cache.resident) == ["a", "b"]
    assert cache.reserve("d", 10, keep={"a"})
    assert list(cache.resident) == ["a"]
    assert not cache.reserve("d", 10)  # it has its room


def test_a_read_that_failed_gives_its_room_back():
    cache = filled(30, a=10)
    assert cache.reserve("b", 20)
    cache.cancel("b")
    assert cache.num_bytes == 10
    cache.remove("b")
    cache.remove("a")
    assert cache.num_bytes == 0


def test_what_is_larger_than_the_bound_has_no_room_and_drops_nothing():
    cache = filled(30, a=10)
    assert not cache.reserve("b", 31)
    assert "a" in cache
    with pytest.raises(ValueError, match="max_bytes is -1"):
        HostCache(-1)


def test_the_default_is_a_quarter_of_what_the_container_allows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(serving.host_cache, "_CGROUP_LIMIT", limit)
    whole = default_host_bytes()
    assert whole > 1 << 26
    limit.write_text("max\n")
    assert default_host_bytes() == whole
    limit.write_text("4000\n")
    assert default_host_bytes() == 1000


class HostCacheMachine(RuleBasedStateMachine):
    """The cache next to two dictionaries."""

    names = st.sampled_from("abcdef")

    def __init__(self) -> None:
        super().__init__()
        self.cache: HostCache[str] = HostCache(20)
        self.here: dict[str, int] = {}
        self.read: dict[str, int] = {}

    @rule(name=names, size=st.integers(1, 12), keep=st.sets(names))
    def reserve(self, name: str, size: int, keep: set[str]) -> None:
        before = dict(self.here)
        is_known = name in self.here or name in self.read
        kept = sum(size for other, size in self.here.items() if other in keep)
        fits = kept + sum(self.read.values()) + size <= 20
        assert self.cache.reserve(name, size, keep=keep) == (fits and not is_known)
        self.here = {other: size for other, size in before.items() if other in self.cache}
        if not fits or is_known:
            assert self.here == before
            return
        assert keep & before.keys() <= self.here.keys()
        gone = [other for other in before if other not in self.here]
        assert gone == [other for other in before if other not in keep][: len(gone)]
        self.read[name] = size

    @rule(name=names, succeeds=st.booleans())
    def end(self, name: str, succeeds: bool) -> None:
        if name in self.read:
            size = self.read.pop(name)
            if succeeds:
                self.cache.fill(name, name)
                # At the place of its reservation: what came here since was reserved or used later.
                order = list(self.cache.resident)
                self.here = {other: (self.here | {name: size})[other] for other in order}
            else:
                self.cache.cancel(name)

    @rule(name=names)
    def get(self, name: str) -> None:
        assert self.cache.get(name) == (name if name in self.here else None)
        if name in self.here:
            self.here[name] = self.here.pop(name)

    @rule(name=names)
    def remove(self, name: str) -> None:
        self.cache.remove(name)
        self.here.pop(name, None)

    @invariant()
    def bytes_add_up(self) -> None:
        self.cache.check_integrity()
        assert list(self.cache.resident) == list(self.here)
        assert self.cache.num_bytes == sum(self.here.values()) + sum(self.read.values())


HostCacheMachine.TestCase.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=60, stateful_step_count=30
)
TestHostCache = HostCacheMachine.TestCase
