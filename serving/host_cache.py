"""BAM's host tier: contents of adapters in host memory, bounded in bytes."""

import dataclasses
import os
from collections.abc import Collection, Container
from pathlib import Path

_HOST_SHARE = 4  # a quarter of the machine's memory
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container; "max" or absent without one


def default_host_bytes() -> int:
    """A quarter of the memory that this process may have."""
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    return (min(num_bytes, int(limit)) if limit.isdigit() else num_bytes) // _HOST_SHARE


@dataclasses.dataclass
class _Entry[T]:
    num_bytes: int
    contents: T | None  # None while they are being read


class HostCache[T]:
    """Contents by adapter; the one whose last use is longest ago goes first.

    Ownership: an adapter owns its bytes from `reserve` until it is evicted, `cancel`led or `remove`d. What is being
    read is never evicted. Dropped contents live on for as long as a copy to the device reads them, which the caller
    sees to by `keep`.
    """

    def __init__(self, max_bytes: int) -> None:
        """Holds nothing.

        Args:
          max_bytes: most bytes of all adapters together, those being read included.
        """
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}, expected >= 0")
        self.max_bytes = max_bytes
        self._entries: dict[str, _Entry[T]] = {}  # longest unused first
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all adapters that are here or being read."""
        return self._num_bytes

    @property
    def resident(self) -> Collection[str]:
        """Ids of the adapters whose contents are here, longest unused first."""
        return [adapter_id for adapter_id, entry in self._entries.items() if entry.contents is not None]

    def __contains__(self, adapter_id: str) -> bool:
        entry = self._entries.get(adapter_id)
        return entry is not None and entry.contents is not None

    def get(self, adapter_id: str) -> T | None:
        """The contents, if they are here; counts as a use."""
        if adapter_id not in self:
            return None
        entry = self._entries[adapter_id] = self._entries.pop(adapter_id)
        return entry.contents

    def reserve(self, adapter_id: str, num_bytes: int, *, keep: Container[str] = ()) -> bool:
        """Makes room for an adapter that is to be read, evicting others than those to keep.

        Returns:
          False, and nothing changes, if those to keep and those being read leave too little, or if the adapter has its
          room already.
        """
        if adapter_id in self._entries:
            return False
        evictable = [i for i, entry in self._entries.items() if entry.contents is not None and i not in keep]
        num_missing = self._num_bytes + num_bytes - self.max_bytes
        evicted = []
        while num_missing > 0 and evictable:
            evicted.append(evictable.pop(0))
            num_missing -= self._entries[evicted[-1]].num_bytes
        if num_missing > 0:
            return False
        for other in evicted:
            self.remove(other)
        self._entries[adapter_id] = _Entry(num_bytes, None)
        self._num_bytes += num_bytes
        return True

    def fill(self, adapter_id: str, contents: T) -> None:
        """Takes the contents that were reserved for."""
        entry = self._entries[adapter_id]
        assert entry.contents is None, f"adapter {adapter_id!r} is here already"
        entry.contents = contents

    def cancel(self, adapter_id: str) -> None:
        """Gives back the room of an adapter that could not be read."""
        assert adapter_id not in self, f"adapter {adapter_id!r} is here"
        self._num_bytes -= self._entries.pop(adapter_id).num_bytes

    def remove(self, adapter_id: str) -> None:
        """Drops the contents of an adapter, if they are here."""
        if adapter_id in self:
            self._num_bytes -= self._entries.pop(adapter_id).num_bytes

    def check_integrity(self) -> None:
        """Checks that the bytes add up and stay within the bound."""
        total = sum(entry.num_bytes for entry in self._entries.values())
        assert total == self._num_bytes, f"entries have {total} bytes, counted {self._num_bytes}"
        assert total <= self.max_bytes, f"entries have {total} bytes, the bound is {self.max_bytes}"
