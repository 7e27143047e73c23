"""Brings adapters from disk to host memory to a staging area on the device, beside the steps of the engine.

    disk --read, check, cut--> host tier --copy--> staging --write_slot, by a step--> slots

The first two arrows are jobs of threads; the third is one in-place update on the device from memory that is there
already, so a step waits neither for the disk nor for a copy from the host. A server's threads have processes do the
work of the first arrow (`serving.reader_processes`), so that it takes nothing of Python's lock either.
"""

import concurrent.futures
import dataclasses
import logging
import threading
from collections.abc import Callable, Container, Sequence, Set

import jax

from serving.adapter_store import AdapterContents, AdapterStore, KnownAdapter

logger = logging.getLogger(__name__)

STAGING_SLOTS = 16  # five mixes of three: copied from the host in the time of two or three decode steps
_NUM_READERS = 4  # one more than there are processes that read for them: it can cut what was made in memory


class InlineExecutor(concurrent.futures.Executor):
    """Runs each job when it is submitted: loads are done when they are asked for, in the same order every time."""

    def submit[**P, T](self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def thread_pools() -> tuple[concurrent.futures.Executor, concurrent.futures.Executor]:
    """Readers and copiers for an `AdapterLoader` beside a server's engine."""
    return (
        concurrent.futures.ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="adapter-read"),
        concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="adapter-copy"),
    )


@dataclasses.dataclass(frozen=True)
class _Job:
    """An adapter on its way to the host or to the device."""

    adapter: KnownAdapter
    future: concurrent.futures.Future[AdapterContents]


class AdapterLoader:
    """Adapters on their way to the slots. One thread calls it; its jobs touch nothing of it.

    Ownership: an adapter owns room in the staging area from the start of its copy until `take`, `drop` or, if it is not
    wanted any more, until a wanted one needs the room. In the host tier it owns its bytes from the start of its read.
    """

    def __init__(
        self,
        store: AdapterStore,
        *,
        staging_slots: int = STAGING_SLOTS,
        readers: concurrent.futures.Executor | None = None,
        copiers: concurrent.futures.Executor | None = None,
        copy: Callable[[AdapterContents], AdapterContents] | None = None,
    ) -> None:
        """Nothing is staged.

        Args:
          store: what can be loaded, and the host tier.
          staging_slots: size of the staging area in slots; an adapter that has more gets what it needs.
          readers, copiers: run the jobs: two, so that a copy of a millisecond never queues behind a read of fifty.
            None runs each when it begins: `update` returns when all is done that it began.
          copy: from the host to the device; None is `to_device`.
        """
        self._store = store
        self._staging_slots = staging_slots
        self._readers = InlineExecutor() if readers is None else readers
        self._copiers = InlineExecutor() if copiers is None else copiers
        self._to_device = copy or to_device
        self._reads: dict[str, _Job] = {}
        self._copies: dict[str, _Job] = {}
        self._staged: dict[str, AdapterContents] = {}  # longest there first
        self._dropped: set[str] = set()  # whose job goes on, but for nobody
        self._failures: dict[str, str] = {}
        self._news = threading.Event()  # a job has ended since the last `update`
        self._listener: Callable[[], None] | None = None
        self.num_reads = 0

    def close(self) -> None:
        """Begins no more jobs, and lets those that run end for nobody; may be called twice."""
        for pool in (self._readers, self._copiers):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def staged(self) -> Set[str]:
        """Ids of the adapters that can be written into slots at once: a live view."""
        return self._staged.keys()

    @property
    def max_slots(self) -> int:
        """Slots of the staging area."""
        return max(self._staging_slots, self._store.most_slots)

    @property
    def num_loading(self) -> int:
        """Adapters being read or copied."""
        return len(self._reads.keys() | self._copies.keys())

    @property
    def staged_bytes(self) -> int:
        """Device memory of the staging area in use, in bytes."""
        jobs = (job.adapter.num_bytes for job in self._copies.values())
        return sum(content.num_bytes for contents in self._staged.values() for content in contents) + sum(jobs)

    @property
    def is_waiting(self) -> bool:
        """True while jobs run of which none has ended since the last `collect`."""
        return bool(self._reads or self._copies) and not self._news.is_set()

    def wait(self, timeout_s: float) -> None:
        """Waits until a job ends, if one runs."""
        if self._reads or self._copies:
            self._news.wait(timeout_s)

    def on_news(self, listener: Callable[[], None]) -> None:
        """Has `listener` called, by whatever thread, whenever a job has ended."""
        self._listener = listener

    def collect(self) -> dict[str, str]:
        """Takes what has been loaded; to be called before a step is planned.

        Returns:
          Why adapters could not be loaded, by id, since the last call; each may be tried again.
        """
        self._news.clear()
        self._take_results()
        failures, self._failures = self._failures, {}
        return failures

    def update(self, wanted: Sequence[str], in_use: Container[str] = ()) -> None:
        """Begins to load what is wanted; to be called after a step was planned, which has used what it could.

        Args:
          wanted: adapters that are not in slots, the most urgent first. As many as the staging area holds are staged;
            the others are read to the host as far as there is room.
          in_use: adapters of running requests, which leave the host tier after others.
        """
        self._dropped.difference_update(wanted)
        while self._submit(wanted, in_use):
            pass

    def take(self, adapter_id: str) -> AdapterContents:
        """The staged contents of an adapter, which leave the staging area."""
        return self._staged.pop(adapter_id)

    def drop(self, adapter_id: str) -> None:
        """Forgets an adapter, staged or on its way."""
        self._staged.pop(adapter_id, None)
        self._failures.pop(adapter_id, None)
        if adapter_id in self._reads or adapter_id in self._copies:
            self._dropped.add(adapter_id)

    def drop_staged(self) -> None:
        """Empties the staging area, e.g. because the device has failed."""
        self._staged.clear()
        self._dropped |= self._copies.keys()

    @property
    def copying(self) -> Set[str]:
        """Ids of the adapters whose host contents are being copied to the device."""
        return self._copies.keys()

    def check_integrity(self) -> None:
        """Checks that the staging area is within its bound, and that each adapter is there once."""
        assert not self._staged.keys() & self._copies.keys(), "an adapter is staged and being copied"
        assert self._num_slots <= self.max_slots, f"{self._num_slots} slots are staged of {self.max_slots}"
        assert self._dropped <= self._reads.keys() | self._copies.keys(), f"dropped, but not loading: {self._dropped}"
        for adapter_id, contents in self._staged.items():
            expected = self._store.known(adapter_id).num_bytes
            assert sum(content.num_bytes for content in contents) == expected, f"{adapter_id!r} is staged in part"

    @property
    def _num_slots(self) -> int:
        copying = sum(job.adapter.num_slots for job in self._copies.values())
        return sum(map(len, self._staged.values())) + copying

    def _submit(self, wanted: Sequence[str], in_use: Container[str]) -> bool:
        """Begins what there is room for; True if some of it is done already, so that more may be begun."""
        num_slots_left = self.max_slots
        to_stage: list[str] = []
        for adapter_id in wanted:
            num_slots_left -= self._store.num_slots(adapter_id)
            if num_slots_left < 0:
                break
            to_stage.append(adapter_id)
        for index, adapter_id in enumerate(wanted):
            if adapter_id in self._staged or adapter_id in self._copies or adapter_id in self._failures:
                continue
            if adapter_id not in self._store.host:
                self._read(adapter_id, wanted, in_use, before=to_stage[:index] if index < len(to_stage) else None)
            elif index < len(to_stage) and self._free_staging(self._store.num_slots(adapter_id), to_stage):
                self._copy(adapter_id)
        return self._take_results()

    def _read(
        self, adapter_id: str, wanted: Sequence[str], in_use: Container[str], before: Sequence[str] | None
    ) -> None:
        """Reads an adapter to the host if it has room there.

        Args:
          adapter_id: what to read.
          wanted, in_use: see `update`; what is neither leaves the host first.
          before: adapters more urgent than this one, which is to be staged; None if it is not yet to be staged. If
            nothing else can leave the host, others than these do that are not being copied.
        """
        if adapter_id in self._reads:
            return
        adapter, host = self._store.known(adapter_id), self._store.host
        others = [i for i in host.resident if i in wanted or i in in_use]
        has_room = host.reserve(adapter_id, adapter.num_bytes, keep={*others, *self._copies})
        if not has_room and before is not None:
            urgent = [i for i in before if i not in self._staged]
            has_room = host.reserve(adapter_id, adapter.num_bytes, keep={*urgent, *self._copies})
        if has_room:
            self.num_reads += 1
            self._reads[adapter_id] = self._begin(adapter, self._readers, self._store.read_again, adapter)

    def _copy(self, adapter_id: str) -> None:
        contents = self._store.host.get(adapter_id)
        assert contents is not None
        adapter = self._store.known(adapter_id)
        self._copies[adapter_id] = self._begin(adapter, self._copiers, self._to_device, contents)

    def _begin[**P](
        self,
        adapter: KnownAdapter,
        pool: concurrent.futures.Executor,
        function: Callable[P, AdapterContents],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> _Job:
        future = pool.submit(function, *args, **kwargs)
        future.add_done_callback(self._tell)
        return _Job(adapter, future)

    def _tell(self, _: object) -> None:
        self._news.set()
        if self._listener is not None:
            self._listener()

    def _free_staging(self, num_slots: int, to_stage: Sequence[str]) -> bool:
        """Makes room in the staging area by dropping what is not to be staged, longest there first."""
        for adapter_id in [i for i in self._staged if i not in to_stage]:
            if self._num_slots + num_slots <= self.max_slots:
                break
            del self._staged[adapter_id]
        return self._num_slots + num_slots <= self.max_slots

    def _take_results(self) -> bool:
        """Takes the results of jobs that have ended; True if there were any."""
        reads = [job for job in self._reads.values() if job.future.done()]
        copies = [job for job in self._copies.values() if job.future.done()]
        for job in reads:
            del self._reads[job.adapter.id]
            self._end(job, self._store.host.fill, "read")
            if job.adapter.id not in self._store.host:
                self._store.host.cancel(job.adapter.id)
        for job in copies:
            del self._copies[job.adapter.id]
            self._end(job, self._staged.__setitem__, "copied to the device")
        return bool(reads or copies)

    def _end(self, job: _Job, keep: Callable[[str, AdapterContents], None], what: str) -> None:
        """Keeps what a job has made, or why it failed, unless nobody wants the adapter any more."""
        adapter = job.adapter
        if adapter.id in self._dropped:
            self._dropped.discard(adapter.id)
            return
        if (error := job.future.exception()) is not None:
            if self._store.known(adapter.id) is not adapter:  # it was added from another folder meanwhile: try there
                return
            logger.warning("adapter %r could not be %s: %s", adapter.name, what, error)
            self._failures[adapter.id] = f"adapter {adapter.name!r} could not be {what}: {error}"
            return
        keep(adapter.id, job.future.result())


def to_device(contents: AdapterContents) -> AdapterContents:
    """Copies contents to the device and waits until they are there, which only a thread beside the engine's may do."""
    values, place = contents[0].values, None
    if isinstance(values, jax.Array):  # in pinned memory
        (device,) = values.devices()
        place = jax.sharding.SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
    return jax.block_until_ready(jax.device_put(contents, place))
