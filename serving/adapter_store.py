"""Which adapters there are, where each can be read again, and what of them is in host memory."""

import dataclasses
import logging
from collections.abc import Container, Iterable, Sequence, Set
from pathlib import Path

import jax
import numpy as np
from jax.typing import DTypeLike

from checkpoints.peft_adapter import load_adapter, load_again
from dymerge_jax.config import LlamaConfig
from dymerge_jax.lora import AdapterWeights, SlotContent, content_bytes, slot_contents
from serving.adapter_ids import adapter_id, adapter_name
from serving.adapter_reader import CutSettings, Slots
from serving.errors import UnknownModelError
from serving.host_cache import HostCache, default_host_bytes
from serving.reader_processes import NUM_PROCESSES, AdapterSummary, ReaderProcesses

__all__ = ["AdapterContents", "AdapterStore", "KnownAdapter", "StoredAdapter", "adapter_id", "adapter_name"]

logger = logging.getLogger(__name__)

AdapterContents = Sequence[SlotContent]
"""An adapter cut into slots, in the slot array's dtype."""

_PINNED = "pinned_host"  # jax's name for host memory that the device copies from without help of the processor


@dataclasses.dataclass(frozen=True)
class StoredAdapter:
    """One adapter as it was read.

    Attributes:
      name: what a request calls it.
      root: the folder it came from; None for one made in memory, which nobody can replace: its id is its name.
      weights: its tensors, as read; of one that a process has read, what is known of them.
      contents: cut into slots; if empty, for one made in memory, it is cut when it is needed.
    """

    name: str
    root: Path | None
    weights: AdapterWeights | AdapterSummary
    contents: AdapterContents = ()

    @property
    def id(self) -> str:
        return self.name if self.root is None else adapter_id(self.name, self.content_hash)

    @property
    def content_hash(self) -> str:
        return self.weights.content_hash

    @property
    def num_slots(self) -> int:
        """Slots of the engine that read it."""
        return len(self.contents)

    @property
    def num_bytes(self) -> int:
        """Host memory of the contents."""
        return sum(content.num_bytes for content in self.contents)


@dataclasses.dataclass(frozen=True)
class KnownAdapter:
    """What is known of an adapter whether or not its contents are in memory.

    Attributes:
      id, name, content_hash: see `StoredAdapter`.
      root: where it is read again; None for one made in memory.
      weights: of one made in memory; None with a folder.
      num_slots: slots that it fills.
      num_bytes: host memory of its contents.
    """

    id: str
    name: str
    content_hash: str
    root: Path | None
    weights: AdapterWeights | None
    num_slots: int
    num_bytes: int


class AdapterStore:
    """The adapters of one engine by id. One thread calls it, but `read` and `read_again`, which change nothing.

    Attributes:
      host: BAM's host tier.
      most_slots: slots of the largest adapter that there has been.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        slot_rank: int,
        dtype: DTypeLike,
        max_rank: int | None = None,
        host_bytes: int | None = None,
        is_pinned: bool | None = None,
    ) -> None:
        """Knows no adapter.

        Args:
          config: shape of the model they adapt.
          slot_rank: rank rows of a slot.
          dtype: of the device's slot array.
          max_rank: largest rank that the slot array holds; None for no limit.
          host_bytes: bound of the host tier; None takes a quarter of the machine's memory.
          is_pinned: keep contents in pinned memory; None does where there is a device to copy to.
        """
        self._config = config
        self._slot_rank = slot_rank
        self._dtype = dtype
        self._max_rank = max_rank
        self._bytes_per_slot = content_bytes(config, slot_rank, dtype)
        self._pinned = _pinned_memory() if is_pinned or (is_pinned is None and jax.default_backend() != "cpu") else None
        self.host: HostCache[AdapterContents] = HostCache(default_host_bytes() if host_bytes is None else host_bytes)
        self.most_slots = 0
        self._known: dict[str, KnownAdapter] = {}
        self._retired: set[str] = set()  # known for the requests that have them, but not for new ones
        self._readers: ReaderProcesses | None = None

    def start_readers(self, count: int = NUM_PROCESSES) -> None:
        """Has `count` processes read adapters as soon as they have started; `close` ends them."""
        if self._readers is None:
            settings = CutSettings(self._config, self._slot_rank, np.dtype(self._dtype).name, self._max_rank)
            self._readers = ReaderProcesses(settings, count)

    def close(self) -> None:
        """Ends the processes of `start_readers`, if there are any; may be called twice."""
        if self._readers is not None:
            self._readers.close()

    # Called by any thread

    def read(self, name: str, folder: Path) -> StoredAdapter:
        """Reads an adapter and cuts it into slots.

        Raises:
          CheckpointError: If it cannot be read or does not fit the model.
          ValueError: If it is larger than the host tier.
        """

        def take(summary: AdapterSummary, slots: Slots) -> StoredAdapter:
            self._check_fits(name, summary)
            return StoredAdapter(name, folder, summary, self._copied(slots))

        adapter = None
        if self._readers is not None:
            adapter = self._readers.read(folder, None, self.host.max_bytes // self._bytes_per_slot, take)
        if adapter is not None:
            return adapter
        weights = load_adapter(folder, self._config, max_rank=self._max_rank)
        self._check_fits(name, weights)
        return StoredAdapter(name, folder, weights, self._cut(weights))

    def from_memory(self, name: str, weights: AdapterWeights) -> StoredAdapter:
        """An adapter that comes from no folder, cut into slots.

        Raises:
          ValueError: If it is larger than the host tier.
        """
        self._check_fits(name, weights)
        return StoredAdapter(name, None, weights, self._cut(weights))

    def read_again(self, adapter: KnownAdapter) -> AdapterContents:
        """The contents of an adapter that host memory has dropped, or never had.

        Raises:
          CheckpointError: If it cannot be read any more, or is another one now.
        """
        if adapter.weights is not None:
            return self._cut(adapter.weights)
        assert adapter.root is not None
        contents = None
        if self._readers is not None:
            contents = self._readers.read(
                adapter.root, adapter.content_hash, adapter.num_slots, lambda _, slots: self._copied(slots)
            )
        return contents or self._cut(
            load_again(adapter.root, self._config, adapter.content_hash, max_rank=self._max_rank)
        )

    def _cut(self, weights: AdapterWeights) -> AdapterContents:
        contents = slot_contents(self._config, weights, slot_rank=self._slot_rank, dtype=self._dtype)
        return self.to_host(contents)

    def _copied(self, slots: Slots) -> AdapterContents:
        """Contents that share no memory with the slots of a process, where the device copies from fastest."""
        is_cpu = jax.default_backend() == "cpu"  # there, jax may use numpy's memory instead of copying it
        if not is_cpu and (pinned := self._in_pinned_memory([SlotContent(*slot) for slot in slots])) is not None:
            return pinned
        copies = [SlotContent(_copy(values), _copy(scales)) for values, scales in slots]
        return self.to_host(copies) if is_cpu else copies

    def to_host(self, contents: AdapterContents) -> AdapterContents:
        """Contents where the device copies from fastest."""
        return self._in_pinned_memory(contents) or contents

    def _in_pinned_memory(self, contents: AdapterContents) -> AdapterContents | None:
        """Contents copied to pinned memory; None where there is none, or none left."""
        if self._pinned is None:
            return None
        try:
            return jax.block_until_ready(jax.device_put(contents, self._pinned))
        except jax.errors.JaxRuntimeError as error:
            logger.warning("adapters stay in memory that is not pinned: %s", str(error).partition("\n")[0])
            return None

    # Called by the engine's thread

    def add(self, adapter: StoredAdapter, *, keep: Container[str] = ()) -> str:
        """Makes an adapter known, and keeps its contents as far as the host tier allows.

        Args:
          adapter: as read; if its id is known already, it is not retired any more, and is read again from where this
            one came from: the folder of before may be gone.
          keep: adapters whose contents may not be dropped for it.

        Returns:
          Its id.

        Raises:
          ValueError: If it is larger than the host tier, or another one made in memory has its name.
        """
        known = self._known.get(adapter.id)
        if known is not None and known.weights is not adapter.weights and adapter.root is None:
            raise ValueError(
                f"two adapters are named {adapter.name!r}: {known.root} and {adapter.root}; name one with name=folder"
            )
        self._retired.discard(adapter.id)
        if known is not None and adapter.root is not None:
            self._known[adapter.id] = dataclasses.replace(known, root=adapter.root)
        if known is None:
            weights = adapter.weights
            self._check_fits(adapter.name, weights)
            num_slots = weights.num_slots(self._slot_rank)
            assert adapter.root is not None or isinstance(weights, AdapterWeights)
            known = self._known[adapter.id] = KnownAdapter(
                id=adapter.id,
                name=adapter.name,
                content_hash=adapter.content_hash,
                root=adapter.root,
                weights=weights if isinstance(weights, AdapterWeights) and adapter.root is None else None,
                num_slots=num_slots,
                num_bytes=num_slots * self._bytes_per_slot,
            )
            self.most_slots = max(self.most_slots, num_slots)
            if adapter.contents and self.host.reserve(known.id, known.num_bytes, keep=keep):
                self.host.fill(known.id, adapter.contents)
        return known.id

    def retire(self, adapter_id: str) -> None:
        """No new request may use the adapter; it stays known until `forget`."""
        self.known(adapter_id)
        self._retired.add(adapter_id)

    def forget(self, adapter_id: str) -> None:
        """Drops all that is known of a retired adapter."""
        self._retired.remove(adapter_id)
        self.host.remove(adapter_id)
        del self._known[adapter_id]

    @property
    def adapters(self) -> Iterable[KnownAdapter]:
        """All adapters that requests may use, in the order they were added."""
        return [adapter for adapter in self._known.values() if adapter.id not in self._retired]

    @property
    def retired(self) -> Set[str]:
        """Ids of the adapters that only requests of before may use: a live view."""
        return self._retired

    def __contains__(self, adapter_id: str) -> bool:
        """True if new requests may use the adapter."""
        return adapter_id in self._known and adapter_id not in self._retired

    def known(self, adapter_id: str) -> KnownAdapter:
        """What is known of an adapter, retired or not.

        Raises:
          UnknownModelError: If there is no such adapter.
        """
        if adapter_id not in self._known:
            raise not_loaded(adapter_id)
        return self._known[adapter_id]

    def num_slots(self, adapter_id: str) -> int:
        """Slots the adapter fills.

        Raises:
          UnknownModelError: If there is no such adapter.
        """
        return self.known(adapter_id).num_slots

    def id_of(self, name: str) -> str | None:
        """Id of the adapter that requests mean by `name` now: the one added last."""
        return next((adapter.id for adapter in reversed(list(self.adapters)) if adapter.name == name), None)

    def check_integrity(self) -> None:
        """Checks that host memory holds known adapters only, each with its own bytes."""
        self.host.check_integrity()
        assert self._retired <= self._known.keys(), f"retired, but not known: {self._retired - self._known.keys()}"
        unknown = set(self.host.resident) - self._known.keys()
        assert not unknown, f"host memory holds adapters that are not known: {unknown}"

    def _check_fits(self, name: str, weights: AdapterWeights | AdapterSummary) -> None:
        num_bytes = weights.num_slots(self._slot_rank) * self._bytes_per_slot
        if num_bytes > self.host.max_bytes:
            raise ValueError(
                f"adapter {name!r} takes {num_bytes} bytes of host memory, but --adapter-host-bytes is "
                f"{self.host.max_bytes}; raise it to {num_bytes} or more"
            )


def not_loaded(adapter_id: str) -> UnknownModelError:
    """The error of a request for an adapter that is not there, or not any more."""
    return UnknownModelError(f"The adapter {adapter_name(adapter_id)!r} is not loaded.", param="adapter_mix")


def _copy(array: np.ndarray) -> np.ndarray:
    """A copy, made as bytes: numpy would hold Python's lock to copy a dtype that is not its own."""
    return array.view(np.uint8).copy().view(array.dtype)


def _pinned_memory() -> jax.sharding.Sharding | None:
    device = jax.local_devices()[0]
    if _PINNED not in (memory.kind for memory in device.addressable_memories()):
        return None
    return jax.sharding.SingleDeviceSharding(device, memory_kind=_PINNED)
