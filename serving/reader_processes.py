"""Processes beside the engine's that read adapters from disk: `serving.adapter_reader`, seen from the server.

Measured on an H200 with an 8B model, p99 of decode steps while adapters of 42 MB stream in from disk (5.7 ms without):
threads of the engine's process that read, hash and cut them 16 ms; threads that only read the bytes, whose fresh
buffers are 10,000 page faults each under the one lock of the process's memory, 9 ms. Here a thread of the server waits
for a line of an answer, then copies from memory that stays mapped.
"""

import contextlib
import dataclasses
import json
import logging
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, BinaryIO

from serving.adapter_reader import CutSettings, SlotMemory, Slots, error_of
from serving.errors import EngineError

logger = logging.getLogger(__name__)

NUM_PROCESSES = 3  # a mix of three is read at once; each keeps 40 MB, and twice the largest adapter that it has read
READ_LIMIT_S = 60.0  # a thousand times what 42 MB take: the disk is dead, and others' reads wait for the process
_END_LIMIT_S = 1.0  # for a killed process to be gone: one that waits for a dead disk does not go
_START_POLL_S = 0.05  # nobody tells a waiting thread that a process has started
_CLOSE_POLL_S = 0.1  # nor that a process was ended which does not go
_KEPT_BYTES = 1 << 28  # of a process between reads
_MODULE = "serving.adapter_reader"
_IMPORT_ROOT = Path(__file__).resolve().parents[1]  # of this project's packages


@dataclasses.dataclass(frozen=True)
class AdapterSummary:
    """What is known of weights that another process has read.

    Attributes:
      content_hash: see `AdapterWeights`.
      rank: the largest rank of any projection.
    """

    content_hash: str
    rank: int

    def num_slots(self, slot_rank: int) -> int:
        """Slots of `slot_rank` rank rows that the adapter fills."""
        return -(-self.rank // slot_rank)


class ReaderProcesses:
    """Reads adapters in processes; any thread may call it.

    Ownership: a thread that reads has a process, and the slots in its memory, until it has copied them.
    """

    def __init__(
        self, settings: CutSettings, count: int = NUM_PROCESSES, *, read_limit_s: float = READ_LIMIT_S
    ) -> None:
        """Starts the processes, and does not wait for them.

        Args:
          settings: what they cut for.
          count: how many.
          read_limit_s: how long a process may read an adapter, in seconds.
        """
        self._settings = settings
        self._read_limit_s = read_limit_s
        self._changed = threading.Condition()
        self._starting: list[_Process] = []  # these five are guarded by the condition
        self._free: list[_Process] = []
        self._busy: set[_Process] = set()
        self._has_warned = False
        self._all: set[_Process] = set()
        self._close = weakref.finalize(self, _end, self._all)
        for _ in range(count):
            self._start()

    def read[T](
        self, folder: Path, content_hash: str | None, max_slots: int, take: Callable[[AdapterSummary, Slots], T]
    ) -> T | None:
        """Reads an adapter in a process.

        Args:
          folder: of the adapter.
          content_hash: of one that was read before, whose tensors are not checked again; None checks everything.
          max_slots: an adapter that needs more is not cut.
          take: gets what was read and its slots, or none if it needs too many; what it returns must share no memory
            with them.

        Returns:
          What `take` returns; None if no process can read now: because none has started yet, or could be.

        Raises:
          CheckpointError, OSError: As `load_adapter` and `load_again` do.
          EngineError: If one process after another ends while it reads this adapter, or one takes too long.
        """
        request = {"folder": str(folder), "content_hash": content_hash, "max_slots": max_slots}
        for _ in range(2):
            process = self._acquire()
            if process is None:
                return None
            try:
                answer = process.ask(request)
                if answer is not None:
                    return _taken(answer, process.memory, self._settings.slot_rank, max_slots, take)
                self._refuse_unanswered(process, folder)
                if self._close.alive:
                    logger.warning("the process that read adapter folder %s has ended: %s", folder, process.ending)
            finally:
                self._release(process)
        raise EngineError(
            f"two processes have ended while they read {str(folder)!r}; is the machine out of memory? Try again later"
        )

    def _refuse_unanswered(self, process: "_Process", folder: Path) -> None:
        """Raises if the disk does not answer: another process, or a thread of the server, would wait for it too."""
        if process.is_late:
            raise EngineError(
                f"adapter folder {str(folder)!r} was not read within {self._read_limit_s:g} s; "
                "does its disk answer? Try again when it does"
            )
        if process.is_stuck:
            raise EngineError(f"the server was closed while it read adapter folder {str(folder)!r}")

    @property
    def num_started(self) -> int:
        """Processes that can read, those that do included."""
        with self._changed:
            self._take_started()
            return len(self._free) + len(self._busy)

    @property
    def pids(self) -> list[int]:
        """Of the processes that run, started or not."""
        with self._changed:
            return [process.pid for process in self._all]

    def close(self) -> None:
        """Ends the processes, whatever they do; may be called twice. Later reads return None.

        It waits a second at most for each process that a dead disk keeps.
        """
        with self._changed:
            self._starting.clear()
            self._free.clear()
            self._close()
            self._changed.notify_all()

    def _acquire(self) -> "_Process | None":
        with self._changed:
            while True:
                self._take_started()
                if self._free:
                    process = self._free.pop()
                    self._busy.add(process)
                    return process
                if not self._busy:
                    return None
                self._changed.wait(_START_POLL_S if self._starting else None)

    def _release(self, process: "_Process") -> None:
        with self._changed:
            self._busy.remove(process)
            if self._close.alive and process.has_ended:
                self._replace(process)
            elif self._close.alive:
                self._free.append(process)
            self._changed.notify_all()

    def _take_started(self) -> None:
        """Takes those that have started, and replaces those that have ended since they were used."""
        for process in [p for p in self._free if p.has_ended]:
            logger.warning("a process that reads adapters has ended: %s", process.ending)
            self._free.remove(process)
            self._replace(process)
        for process in [p for p in self._starting if p.has_news]:
            self._starting.remove(process)
            if process.take_answer() is not None:
                self._free.append(process)
            else:  # the next one would not start either
                self._warn(process.ending)
                self._forget(process)

    def _start(self) -> None:
        try:
            process = _Process(self._settings, self._read_limit_s)
        except OSError as error:
            self._warn(str(error))
        else:
            self._all.add(process)
            self._starting.append(process)

    def _replace(self, process: "_Process") -> None:
        self._forget(process)
        self._start()

    def _forget(self, process: "_Process") -> None:
        process.end()
        self._all.remove(process)

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            logger.warning("a process to read adapters did not start (%s); threads read where there is none", reason)
        self._has_warned = True


class _Process:
    """One process that has read nothing yet.

    Attributes:
      memory: where it puts slots.
      is_late: it was ended because an answer took too long.
      is_stuck: it was ended, but runs until the disk that it waits for answers.
    """

    def __init__(self, settings: CutSettings, limit_s: float) -> None:
        """Starts it.

        Args:
          settings: what it cuts for.
          limit_s: how long an answer may take, in seconds.

        Raises:
          OSError: If it cannot be started.
        """
        self.is_late = False
        self.is_stuck = False
        self._is_ended = False  # by `end`
        self._limit_s = limit_s
        self._file = _memory_file()
        self.memory = SlotMemory(self._file, settings)
        descriptor = self._file.fileno()
        try:
            self._popen = subprocess.Popen(
                # -P: a file of the working directory must not be taken for a module
                [sys.executable, "-P", "-m", _MODULE, settings.to_json(), str(descriptor)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(descriptor,),
                env=_environment(),
                process_group=0,  # a Ctrl-C in the server's terminal would come before it can ignore it
            )
        except OSError:
            self._file.close()
            raise
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._requests: IO[bytes] = self._popen.stdin
        self._answers: IO[bytes] = self._popen.stdout
        self._news = select.poll()
        self._news.register(self._answers, select.POLLIN)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def has_ended(self) -> bool:
        return self._is_ended or self._popen.poll() is not None

    @property
    def ending(self) -> str:
        """How a process that has ended did so."""
        status = self._popen.returncode
        return f"signal {-status}" if status is not None and status < 0 else f"exit status {status}"

    @property
    def has_news(self) -> bool:
        """True if `take_answer` would not wait."""
        return self._has_news_within(0)

    def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Sends a request and waits for the answer; None if the process has ended, or was because it is late."""
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
            return self.take_answer()
        except (OSError, ValueError):  # the pipe is broken, or closed by `end`
            self.end()
            return None
        except BaseException:  # e.g. a Ctrl-C: the answer that comes would be taken for that of the next request
            self.end()
            raise

    def take_answer(self) -> dict[str, Any] | None:
        """Waits for the next answer; None if the process has ended, or was because it is late."""
        deadline = time.monotonic() + self._limit_s
        while not self._has_news_within(min(_CLOSE_POLL_S, self._limit_s)):
            if self.is_stuck or self._answers.closed:  # by another thread's `end`
                return None
            if time.monotonic() > deadline:
                self.is_late = True
                self.end()
                return None
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            self.end()
            return None
        return json.loads(line)

    def _has_news_within(self, timeout_s: float) -> bool:
        return bool(self._news.poll(1000 * timeout_s))

    def end(self) -> None:
        """Kills it, for it has nothing to lose, and frees what it had here; may be called twice, by any thread."""
        if self._is_ended:
            return
        self._is_ended = True
        self._popen.kill()
        try:
            self._popen.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.is_stuck = True
        with contextlib.suppress(OSError):  # what it was to read is still in the buffer
            self._requests.close()
        if not self.is_stuck:  # another thread may be in `readline`, with its lock, or poll the descriptor
            self._answers.close()
        self._file.close()


def _taken[T](
    answer: dict[str, Any],
    memory: SlotMemory,
    slot_rank: int,
    max_slots: int,
    take: Callable[[AdapterSummary, Slots], T],
) -> T:
    """What `take` makes of an answer; raises what the process has raised."""
    for name, level, message in answer["log"]:
        logging.getLogger(name).log(level, "%s", message)
    if "error" in answer:
        raise error_of(answer["error"])
    summary = AdapterSummary(answer["content_hash"], answer["rank"])
    num_slots = summary.num_slots(slot_rank)
    return take(summary, memory.slots(num_slots) if num_slots <= max_slots else [])


def _end(processes: Iterable[_Process]) -> None:
    for process in tuple(processes):
        process.end()


def _memory_file() -> BinaryIO:
    """An empty file that no folder holds, in memory where the system has such: not bounded by /dev/shm."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("adapter-slots"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _environment() -> dict[str, str]:
    """This process's, with the packages from where they are here, and what makes reads cheap."""
    paths = [str(_IMPORT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OPENBLAS_NUM_THREADS": "1",  # nothing is multiplied
        # glibc's: the memory of one read is kept for the next, not taken anew page by page (42 MB: 35 ms, not 52)
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(_KEPT_BYTES),
    }
