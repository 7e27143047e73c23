"""Adapters read by processes: what comes is what a thread would read, whatever happens to the process."""

import contextlib
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints import peft_adapter
from checkpoints.errors import CheckpointError
from checkpoints.peft_adapter import CONFIG_FILE, WEIGHTS_FILE, load_adapter
from dymerge_jax.config import named_config
from dymerge_jax.lora import content_bytes, slot_contents
from serving import reader_processes
from serving.adapter_reader import CutSettings, SlotMemory, error_fields, error_of
from serving.adapter_store import AdapterContents, AdapterStore
from serving.errors import EngineError
from serving.reader_processes import ReaderProcesses
from tests.support.tiny_checkpoints import write_adapter
from tests.support.waiting import PATIENCE_S, is_running, wait_until

CONFIG = named_config("tiny")
SLOT_RANK = 4
MAX_RANK = 16
ROOT = Path(__file__).parents[2]


def make_store(
    dtype: str = "float32", *, count: int = 0, host_slots: int = 100, is_pinned: bool = False
) -> AdapterStore:
    """A store with `count` processes that have started."""
    store = AdapterStore(
        CONFIG,
        slot_rank=SLOT_RANK,
        dtype=dtype,
        max_rank=MAX_RANK,
        host_bytes=host_slots * content_bytes(CONFIG, SLOT_RANK, dtype),
        is_pinned=is_pinned,
    )
    if count:
        store.start_readers(count)
        wait_until(lambda: readers_of(store).num_started == count)
    return store


def readers_of(store: AdapterStore) -> ReaderProcesses:
    assert store._readers is not None
    return store._readers


@pytest.fixture(scope="module")
def store() -> Iterator[AdapterStore]:
    """With one process, so that every read gets the memory of the one before."""
    store = make_store("bfloat16", count=1)
    yield store
    store.close()


@pytest.fixture
def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once called, a read in this process fails: processes must do it."""

    def refuse() -> None:
        monkeypatch.setattr("serving.adapter_store.load_adapter", lambda *_, **__: 1 / 0)
        monkeypatch.setattr("serving.adapter_store.load_again", lambda *_, **__: 1 / 0)

    return refuse


def write(folder: Path, rank: int = 6, seed: int = 1, **kwargs) -> Path:
    return write_adapter(folder, CONFIG, rank=rank, alpha=2.5 * rank, seed=seed, **kwargs)


def expected_contents(folder: Path, dtype: str) -> AdapterContents:
    return slot_contents(CONFIG, load_adapter(folder, CONFIG), slot_rank=SLOT_RANK, dtype=dtype)


def assert_equal_bits(actual: AdapterContents, expected: AdapterContents) -> None:
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert np.asarray(ours.values).tobytes() == np.asarray(theirs.values).tobytes()
        assert np.asarray(ours.scales).tobytes() == np.asarray(theirs.scales).tobytes()
        assert ours.values.dtype == theirs.values.dtype


def test_contents_are_those_of_a_read_in_this_process_bit_for_bit(store, tmp_path: Path, refuse_threads) -> None:
    """Four slots, one and two in turn through one memory, where every adapter must leave nothing for the next."""
    cases = [
        {"rank": 16, "dtype": "float32"},
        {"rank": 3, "dtype": "float16", "modules": ["k_proj", "down_proj"]},
        {"rank": 8, "dtype": "bfloat16"},
        {"rank": 9, "dtype": "float32", "layers": [1]},
        {"rank": 2, "dtype": "bfloat16", "modules": ["o_proj"], "rank_pattern": {"o_proj": 5}},
    ]
    folders = [write(tmp_path / str(i), seed=i, **case) for i, case in enumerate(cases)]
    expected = [expected_contents(folder, "bfloat16") for folder in folders]
    hashes = [load_adapter(folder, CONFIG).content_hash for folder in folders]
    refuse_threads()
    adapters = [store.read(str(i), folder) for i, folder in enumerate(folders)]
    again = [store.read_again(store.known(store.add(adapter))) for adapter in reversed(adapters)][::-1]
    assert [adapter.content_hash for adapter in adapters] == hashes
    assert [adapter.num_slots for adapter in adapters] == [4, 1, 2, 3, 2]
    for adapter, contents, wanted in zip(adapters, again, expected, strict=True):
        assert_equal_bits(adapter.contents, wanted)
        assert_equal_bits(contents, wanted)


@pytest.mark.parametrize("is_pinned", [False, True])
def test_contents_stay_what_they_are_when_their_process_reads_another(tmp_path: Path, is_pinned: bool) -> None:
    """jax takes numpy's memory for its own on a CPU if it can: the process's must not be taken."""
    store = make_store(count=1, is_pinned=is_pinned)
    folders = [write(tmp_path / name, rank=4, seed=i) for i, name in enumerate("ab")]
    first, second = (store.read(folder.name, folder).contents for folder in folders)
    assert isinstance(first[0].values, jax.Array) == is_pinned
    assert_equal_bits(first, expected_contents(folders[0], "float32"))
    assert_equal_bits(second, expected_contents(folders[1], "float32"))
    store.close()


def error_in(read: Callable[[], object]) -> tuple[type[BaseException], str]:
    with pytest.raises((ValueError, OSError)) as raised:
        read()
    return raised.type, str(raised.value)


def write_larger_than_memory(folder: Path) -> None:
    """A whole adapter of 4 TB, of which the disk has but the header: only its rank is too large."""
    rank = 1 << 33
    num_bytes = 4 * rank * CONFIG.hidden
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": [rank, CONFIG.hidden], "B": [CONFIG.hidden, rank]}
    entries = {
        key.format(side): {"dtype": "F32", "shape": shape, "data_offsets": [i * num_bytes, (i + 1) * num_bytes]}
        for i, (side, shape) in enumerate(shapes.items())
    }
    header = json.dumps(entries).encode()
    (folder / WEIGHTS_FILE).write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(folder / WEIGHTS_FILE, 8 + len(header) + 2 * num_bytes)
    fields = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(fields | {"r": rank}))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no folder": lambda folder: folder.rename(folder.with_name("moved")),
    "no weights": lambda folder: (folder / "adapter_model.safetensors").unlink(),
    "truncated": lambda folder: os.truncate(folder / "adapter_model.safetensors", 1000),
    "no JSON": lambda folder: (folder / "adapter_config.json").write_text("{"),
    "other weights": lambda folder: write(folder, seed=5),
    "too large": lambda folder: write(folder, rank=MAX_RANK + 1),
    "not finite": lambda folder: write(folder, extra_tensors=NAN_TENSOR),
    "larger than memory": write_larger_than_memory,
    "too large for the host": lambda folder: write(folder, rank=16),
}
NAN_TENSOR = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.full((6, CONFIG.hidden), np.nan, np.float32)
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_errors_are_those_of_a_read_in_this_process(store, tmp_path: Path, damage: str, refuse_threads) -> None:
    plain = make_store("bfloat16", host_slots=3)
    store.host.max_bytes, limit = plain.host.max_bytes, store.host.max_bytes
    folder = write(tmp_path / "a")
    known = [each.known(each.add(each.read("a", folder))) for each in (plain, store)]
    DAMAGES[damage](folder)
    expected = [error_in(lambda: plain.read_again(known[0]))]
    if damage != "other weights":
        expected.append(error_in(lambda: plain.read("a", folder)))
    refuse_threads()
    actual = [error_in(lambda: store.read_again(known[1]))]
    if damage != "other weights":
        actual.append(error_in(lambda: store.read("a", folder)))
    store.host.max_bytes = limit
    assert actual == expected
    assert issubclass(expected[0][0], CheckpointError)


def test_an_error_of_the_system_keeps_its_kind_and_its_text() -> None:
    for error in (PermissionError(13, "Permission denied", "a/b"), IsADirectoryError(21, "Is a directory", "a")):
        again = error_of(error_fields(error))
        assert (type(again), str(again)) == (type(error), str(error))
    assert str(error_of(error_fields(MemoryError("no room")))) == "MemoryError: no room"
    assert str(error_of(error_fields(OSError("cannot map the file")))) == "OSError: cannot map the file"


def test_weights_that_change_between_their_check_and_their_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = write(tmp_path / "a"), write(tmp_path / "b", layers=[1])
    check = peft_adapter._checked_projections

    def check_then_change(*args):
        sites = check(*args)
        (folder / WEIGHTS_FILE).write_bytes((other / WEIGHTS_FILE).read_bytes())
        return sites

    monkeypatch.setattr(peft_adapter, "_checked_projections", check_then_change)
    with pytest.raises(CheckpointError, match="has changed while it was read; try again"):
        load_adapter(folder, CONFIG)


def test_what_a_process_logs_is_logged_here(store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path / "a")
    (folder / "tokenizer.json").write_text("{}")
    with caplog.at_level(logging.INFO):
        store.read("a", folder)
        store.read("a", write(tmp_path / "b"))
    assert caplog.record_tuples == [
        (
            "checkpoints.peft_adapter",
            logging.INFO,
            f"adapter {folder} brings a tokenizer; the base model's is used instead",
        )
    ]


def test_memory_grows_and_views_of_before_stay_valid() -> None:
    settings = CutSettings(CONFIG, SLOT_RANK, "float32", None)
    assert CutSettings.from_json(settings.to_json()) == settings
    with reader_processes._memory_file() as file:
        ours, theirs = SlotMemory(file, settings), SlotMemory(file, settings)
        ((values, scales),) = ours.slots(1)
        values[:], scales[:] = 1, 2
        grown = theirs.slots(3)
        for i, (values_there, scales_there) in enumerate(grown[1:]):
            values_there[:], scales_there[:] = 10 + i, 20 + i
        assert [float(slot[0].min()) for slot in ours.slots(3)] == [1, 10, 11]
        assert [float(slot[1].max()) for slot in ours.slots(3)] == [2, 20, 21]
        grown[0][0][:] = 3
        assert values.min() == values.max() == 3


def test_two_reads_at_once_have_a_process_each_and_an_idle_one_that_was_killed_is_replaced(
    tmp_path: Path, refuse_threads
) -> None:
    store = make_store(count=2)
    readers = readers_of(store)
    folders = [write(tmp_path / name, seed=i) for i, name in enumerate("ab")]
    expected = [expected_contents(folder, "float32") for folder in folders]
    refuse_threads()
    barrier = threading.Barrier(2, timeout=PATIENCE_S)  # both are read before either is copied
    copied = store._copied

    def take(slots):
        barrier.wait()
        return copied(slots)

    store._copied = take  # type: ignore[method-assign]

    def read_both() -> None:
        contents: dict[int, AdapterContents] = {}

        def read(index: int) -> None:
            contents[index] = store.read("x", folders[index]).contents

        threads = [threading.Thread(target=read, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(2):
            assert_equal_bits(contents[i], expected[i])

    for _ in range(5):
        read_both()
    before = readers.pids
    for pid in before:
        os.kill(pid, signal.SIGINT)  # a Ctrl-C, which is not for them
    read_both()
    assert readers.pids == before
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: not is_running(before[0]))
    wait_until(lambda: readers.num_started == 2 and before[0] not in readers.pids)
    read_both()
    store.close()
    assert not any(map(is_running, [*before, *readers.pids]))


def test_a_process_killed_while_it_reads_costs_nothing_and_two_cost_this_read(
    tmp_path: Path, refuse_threads, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(count=2)
    readers = readers_of(store)
    folder = write(tmp_path / "a")
    expected = expected_contents(folder, "float32")
    refuse_threads()

    def read_while(stopped: list[int]) -> list[object]:
        """The result of a read during which the processes `stopped` are killed as soon as they are asked."""
        results: list[object] = []

        def read() -> None:
            try:
                results.append(store.read("a", folder))
            except Exception as error:
                results.append(error)

        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        thread = threading.Thread(target=read)
        thread.start()
        killed: set[int] = set()

        def kill_asked() -> bool:
            for process in list(readers._busy):
                if process.pid in stopped and process.pid not in killed:
                    killed.add(process.pid)
                    os.kill(process.pid, signal.SIGKILL)
            return len(killed) == len(stopped)

        wait_until(kill_asked)
        thread.join()
        return results

    (adapter,) = read_while([readers._free[-1].pid])
    assert_equal_bits(adapter.contents, expected)  # type: ignore[attr-defined]
    assert f"the process that read adapter folder {folder} has ended: signal 9" in caplog.text
    wait_until(lambda: readers.num_started == 2)
    (error,) = read_while(readers.pids)
    assert isinstance(error, EngineError)
    assert str(error).startswith(f"two processes have ended while they read {str(folder)!r}")
    wait_until(lambda: readers.num_started == 2)
    assert_equal_bits(store.read("a", folder).contents, expected)
    store.close()


def test_a_read_that_is_interrupted_leaves_no_answer_for_the_next(store, tmp_path: Path, monkeypatch) -> None:
    folders = [write(tmp_path / name, seed=i) for i, name in enumerate("ab")]
    readers = readers_of(store)
    (process,) = readers._free

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "take_answer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.read("a", folders[0])
    wait_until(lambda: readers.num_started == 1)
    assert_equal_bits(store.read("b", folders[1]).contents, expected_contents(folders[1], "bfloat16"))
    assert readers.pids != [process.pid]


@pytest.mark.parametrize("reason", ["no program", "no module"])
def test_without_processes_threads_read_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    if reason == "no program":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    else:
        monkeypatch.setattr("serving.reader_processes._MODULE", "serving.no_such_module")
    store = make_store()
    store.start_readers(2)
    wait_until(lambda: readers_of(store).num_started == 0 and not readers_of(store).pids)
    folder = write(tmp_path / "a")
    assert_equal_bits(store.read("a", folder).contents, expected_contents(folder, "float32"))
    (line,) = [record.getMessage() for record in caplog.records]
    detail = "No such file" if reason == "no program" else "exit status 1"
    assert line.startswith("a process to read adapters did not start (")
    assert detail in line
    store.close()


def test_reads_go_on_in_threads_while_no_process_has_started_and_after_close(tmp_path: Path) -> None:
    store = make_store()
    store.start_readers(1)
    (pid,) = readers_of(store).pids
    os.kill(pid, signal.SIGSTOP)
    folder = write(tmp_path / "a")
    expected = expected_contents(folder, "float32")
    assert_equal_bits(store.read("a", folder).contents, expected)
    assert readers_of(store).num_started == 0
    store.close()
    store.close()
    assert not is_running(pid)
    assert_equal_bits(store.read("a", folder).contents, expected)


def test_closing_does_not_wait_for_a_read_which_a_thread_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = make_store(count=1)
    (pid,) = readers_of(store).pids
    folder = write(tmp_path / "a")
    os.kill(pid, signal.SIGSTOP)
    contents: list[AdapterContents] = []
    thread = threading.Thread(target=lambda: contents.append(store.read("a", folder).contents))
    thread.start()
    wait_until(lambda: readers_of(store)._busy)
    store.close()
    assert not is_running(pid)
    thread.join()
    assert_equal_bits(contents[0], expected_contents(folder, "float32"))
    assert not readers_of(store).num_started
    assert not caplog.records


def read_adapter(readers: ReaderProcesses, folder: Path) -> object:
    """What a read returns or raises."""
    try:
        return readers.read(folder, None, 100, lambda summary, _: summary.rank)
    except EngineError as error:
        return error


@contextlib.contextmanager
def started_readers(count: int, read_limit_s: float) -> Iterator[ReaderProcesses]:
    settings = CutSettings(CONFIG, SLOT_RANK, "float32", MAX_RANK)
    readers = ReaderProcesses(settings, count, read_limit_s=read_limit_s)
    wait_until(lambda: readers.num_started == count)
    yield readers
    readers.close()


def test_a_read_that_takes_too_long_costs_its_process_and_is_not_tried_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    with started_readers(2, read_limit_s=0.2) as readers:
        stopped = readers.pids
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        error = read_adapter(readers, folder)
        assert isinstance(error, EngineError)
        assert str(error).startswith(f"adapter folder {str(folder)!r} was not read within 0.2 s; does its disk answer?")
        assert sum(map(is_running, stopped)) == 1
        assert len(set(readers.pids) - set(stopped)) == 1


def make_stuck(readers: ReaderProcesses, monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[bytes]:
    """Stops the one process as a dead disk does: it does not answer, and is not gone when it is killed."""
    monkeypatch.setattr(reader_processes, "_END_LIMIT_S", 0.1)
    (process,) = readers._all
    monkeypatch.setattr(process._popen, "kill", lambda: None)
    os.kill(process.pid, signal.SIGSTOP)
    return process._popen


def remove_stuck(popen: subprocess.Popen[bytes]) -> None:
    os.kill(popen.pid, signal.SIGKILL)
    popen.wait()
    assert popen.stdout is not None
    popen.stdout.close()


def test_closing_does_not_wait_for_a_process_that_does_not_go_nor_does_its_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "a")
    results: list[object] = []
    with started_readers(1, read_limit_s=PATIENCE_S) as readers:
        popen = make_stuck(readers, monkeypatch)
        thread = threading.Thread(target=lambda: results.append(read_adapter(readers, folder)), daemon=True)
        thread.start()
        wait_until(lambda: readers._busy)
        start_s = time.monotonic()
        readers.close()
        thread.join(PATIENCE_S / 2)
        assert time.monotonic() - start_s < PATIENCE_S / 2
    (error,) = results
    assert isinstance(error, EngineError)
    assert str(error) == f"the server was closed while it read adapter folder {str(folder)!r}"
    remove_stuck(popen)


def test_a_process_that_does_not_go_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "a")
    with started_readers(1, read_limit_s=0.2) as readers:
        popen = make_stuck(readers, monkeypatch)
        assert "was not read within 0.2 s" in str(read_adapter(readers, folder))
        assert is_running(popen.pid)
        assert popen.pid not in readers.pids
        wait_until(lambda: readers.num_started == 1)
    remove_stuck(popen)


def test_a_process_that_starts_while_all_others_read_is_used_at_once(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", rank=6)
    with started_readers(1, read_limit_s=PATIENCE_S) as readers:
        os.kill(readers.pids[0], signal.SIGSTOP)
        stuck_read = threading.Thread(target=lambda: read_adapter(readers, folder))
        stuck_read.start()
        wait_until(lambda: readers._busy)
        with readers._changed:
            readers._start()
        start_s = time.monotonic()
        assert read_adapter(readers, folder) == 6
        assert time.monotonic() - start_s < PATIENCE_S / 2
        readers.close()
        stuck_read.join()


def test_a_store_that_nobody_closes_takes_its_processes_with_it() -> None:
    store = make_store()
    store.start_readers(2)
    pids = readers_of(store).pids
    assert all(map(is_running, pids))
    del store
    gc.collect()
    assert not any(map(is_running, pids))


PARENT = """
import sys, time
from dymerge_jax.config import named_config
from serving.adapter_reader import CutSettings
from serving.reader_processes import ReaderProcesses
readers = ReaderProcesses(CutSettings(named_config("tiny"), 4, "float32", None), 3)
while sys.argv[1] == "started" and readers.num_started < 3:
    time.sleep(0.01)
print(*readers.pids, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("state", ["starting", "started"])
def test_no_process_outlives_a_server_that_is_killed(state: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, state], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        assert all(map(is_running, pids))
        parent.kill()
        wait_until(lambda: not any(map(is_running, pids)))
        assert parent.stderr.read() == b""  # not of the processes either, which write there too
