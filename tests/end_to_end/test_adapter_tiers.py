"""BAM on the real engine: disk, host, staging and slots; adapters that come, go and fail while requests run."""

import gc
import random
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from checkpoints.errors import CheckpointError
from dymerge_jax.gating import GatedSetWeights
from dymerge_jax.lora import content_bytes
from dymerge_jax.model import SplitModel
from serving.adapter_store import AdapterContents, AdapterStore, KnownAdapter, StoredAdapter, adapter_name
from serving.config import EngineConfig
from serving.engine import Engine
from serving.errors import InvalidRequestError, UnknownModelError
from serving.reader_processes import NUM_PROCESSES
from serving.request import FinishReason, Mix, Request, RequestOutput, SamplingParams
from tests.support.engines import run_to_end, token_ids
from tests.support.manual_executor import ManualExecutor
from tests.support.tiny_checkpoints import write_adapter
from tests.support.tiny_models import random_adapter, random_gated_set, tiny_model
from tests.support.waiting import is_running, wait_until

PROMPT = [5, 9, 2, 40, 7]
SLOT_RANK = 4
EXPERTS = ("expert-0", "expert-1")


@pytest.fixture(scope="module")
def split() -> SplitModel:
    return tiny_model(vocab=257)


@pytest.fixture
def folders(split: SplitModel, tmp_path: Path) -> dict[str, Path]:
    """Adapters of two slots each on disk, and one of three."""
    ranks = {"a": 8, "b": 8, "c": 7, "d": 6, "e": 9}
    return {
        name: write_adapter(tmp_path / name, split.config, rank=rank, alpha=2 * rank, seed=i)
        for i, (name, rank) in enumerate(ranks.items())
    }


def bytes_of(split: SplitModel, num_slots: int) -> int:
    return num_slots * content_bytes(split.config, SLOT_RANK, split.dtype)


def make_engine(
    split: SplitModel, *, host_slots: int = 100, in_background: bool = False, is_pinned: bool = False
) -> Engine:
    """Four slots, and a gated set of two adapters in memory: what other tests' tight engines have compiled fits."""
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 4, "num_blocks": 24}
    config = EngineConfig(adapter_slots=4, slot_rank=SLOT_RANK, max_model_len=48, **sizes)
    store = AdapterStore(
        split.config,
        slot_rank=SLOT_RANK,
        dtype=split.dtype,
        max_rank=16,
        host_bytes=bytes_of(split, host_slots),
        is_pinned=is_pinned,
    )
    for name in EXPERTS:
        store.add(StoredAdapter(name, None, random_adapter(split.config, rank=4, seed=8)))
    engine = Engine(split, None, store, [gated_set_of(split, EXPERTS)], config, loads_in_background=in_background)
    engine.compile(progress=False)
    return engine


def gated_set_of(split: SplitModel, experts: Sequence[str]) -> GatedSetWeights:
    sizes: dict[str, Any] = {"granularity": "layer", "top_k": 1, "renormalize": True, "seed": 3}
    return random_gated_set(split.config, "moe", experts, **sizes)


def add(engine: Engine, name: str, folder: Path) -> str:
    return engine.add_adapter(engine.read_adapter(name, folder))


def request_of(request_id: str, mix: Mapping[str, float], **sampling: Any) -> Request:
    """Of a mix of ids."""
    given = Mix(tuple(mix.items()))
    params = SamplingParams(**({"max_tokens": 6, "ignore_eos": True} | sampling))
    return Request(request_id, list(PROMPT), params, given, 0.0, given.adapters)


def answer(engine: Engine, mix: Mapping[str, float], **sampling: Any) -> list[int]:
    engine.add_request(request_of("alone", mix, **sampling))
    return token_ids(run_to_end(engine)["alone"])


def shown(engine: Engine, *gauges: str) -> list[float]:
    """What /metrics says."""
    lines = dict(line.rsplit(" ", 1) for line in engine.metrics.render().decode().splitlines() if line[0] != "#")
    return [float(lines[f"dymerge_{gauge}"]) for gauge in gauges]


def test_an_adapter_is_known_by_name_and_content_and_its_tier_is_told(split, folders) -> None:
    engine = make_engine(split, host_slots=4)
    adapter = engine.read_adapter("a@v1", folders["a"])
    assert (adapter.name, adapter.root, adapter.num_slots) == ("a@v1", folders["a"], 2)
    assert adapter.num_bytes == bytes_of(split, 2)
    assert adapter.id == f"a@v1@{adapter.content_hash[:16]}"
    assert adapter_name(adapter.id) == "a@v1"
    with pytest.raises(UnknownModelError, match="'a@v1' is not loaded"):
        engine.adapter_status(adapter.id)
    assert engine.add_adapter(adapter) == engine.add_adapter(adapter) == adapter.id
    assert engine.adapter_status(adapter.id) == "host"
    others = [add(engine, name, folders[name]) for name in "bc"]
    assert [engine.adapter_status(i) for i in (adapter.id, *others)] == ["disk", "host", "host"]
    answer(engine, {adapter.id: 1.0})
    assert [engine.adapter_status(i) for i in (adapter.id, *others)] == ["slots", "disk", "host"]
    assert engine.loader.num_reads == 1


def test_f5_a_host_tier_below_one_adapter_refuses_it_with_both_numbers_and_the_flag(split, folders) -> None:
    engine = make_engine(split, host_slots=1)
    with pytest.raises(
        ValueError, match=rf"'a' takes {bytes_of(split, 2)} .*--adapter-host-bytes is {bytes_of(split, 1)}"
    ):
        engine.read_adapter("a", folders["a"])
    with pytest.raises(CheckpointError, match=r"rank 17 is above the limit of 16; raise --adapter-slots"):
        engine.read_adapter("big", write_adapter(folders["a"].parent / "big", split.config, rank=17, alpha=1, seed=0))
    assert [adapter.name for adapter in engine.store.adapters] == list(EXPERTS)


def test_f6_more_adapters_than_slots_and_than_host_memory_all_serve_right(split, folders) -> None:
    """Case F1 too: e fills three of four slots, the others two."""
    roomy, tight = make_engine(split), make_engine(split, host_slots=3)
    ids = [add(roomy, name, folder) for name, folder in folders.items()]
    assert ids == [add(tight, name, folder) for name, folder in folders.items()]
    mixes: list[dict[str, float]] = [
        {},
        *({i: 1.0} for i in ids),
        {ids[0]: 0.5, ids[1]: 0.5},
        {ids[2]: 1, ids[3]: -0.5},
    ]
    wanted = [answer(roomy, mix) for mix in mixes]
    assert len({tuple(tokens) for tokens in wanted}) == len(mixes)
    assert [answer(tight, mix) for mix in mixes] == wanted
    for i, mix in enumerate(mixes):
        tight.add_request(request_of(str(i), mix))
    outputs = run_to_end(tight)
    assert [token_ids(outputs[str(i)]) for i in range(len(mixes))] == wanted
    assert roomy.loader.num_reads == 0  # case E3: each file was read once, when it was added


def test_adapters_in_pinned_memory_give_the_same_answers_and_compile_nothing(split, folders) -> None:
    """As on a GPU; jax has such a memory on a CPU, too."""
    plain, pinned = make_engine(split), make_engine(split, is_pinned=True, host_slots=5)
    ids = [add(engine, name, folders[name]) for engine in (plain, pinned) for name in "abc"][:3]
    contents = pinned.store.host.get(ids[2])
    assert contents is not None
    assert isinstance(contents[0].values, jax.Array)
    assert contents[0].values.sharding.memory_kind == "pinned_host"
    for i in ids * 2:
        assert answer(pinned, {i: 1.0}) == answer(plain, {i: 1.0})
    assert pinned.loader.num_reads == 6  # three in turn through room for two: each is read again


def test_a_mix_larger_than_the_staging_area_comes_in_parts(split, folders, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = make_engine(split)
    monkeypatch.setattr("serving.engine.STAGING_SLOTS", 1)  # raised to two by the first adapter of two
    small = make_engine(split)
    for engine in (roomy, small):
        ids = [add(engine, name, folders[name]) for name in "abcd"]
    assert small.loader.max_slots == 2
    mixes = [{ids[0]: 1.0, ids[1]: 0.5}, {ids[2]: 1.0, ids[3]: 0.5}]
    assert [answer(small, mix) for mix in mixes] == [answer(roomy, mix) for mix in mixes]
    small.add_request(request_of("base", {}, max_tokens=12))
    for i, mix in enumerate(mixes * 2):
        small.add_request(request_of(str(i), mix))
    outputs = run_to_end(small)
    assert [token_ids(outputs[str(i)]) for i in range(4)] == [answer(roomy, mix) for mix in mixes] * 2


def test_f7_a_mix_of_more_slots_than_there_are_is_refused_at_once(split, folders) -> None:
    engine = make_engine(split)
    ids = [add(engine, name, folders[name]) for name in "abc"]
    with pytest.raises(InvalidRequestError, match=r"needs 6 slots \(a: 2, b: 2, c: 2\), but the slot array has 4"):
        engine.add_request(request_of("r", dict.fromkeys(ids, 1.0)))
    assert not engine.has_work


def test_e6_a_replaced_adapter_is_another_one_and_requests_keep_what_they_began_with(split, folders) -> None:
    engine = make_engine(split)
    old = add(engine, "a", folders["a"])
    wanted = {old: answer(engine, {old: 1.0}, max_tokens=12)}
    shutil.rmtree(folders["a"])
    shutil.copytree(folders["c"], folders["a"])
    for i in range(5):  # one more than rows: the last one waits
        engine.add_request(request_of(f"old{i}", {old: 1.0}, max_tokens=12))
    outputs = list(engine.step())
    new = add(engine, "a", folders["a"])
    assert new != old
    engine.remove_adapter(old)
    with pytest.raises(UnknownModelError, match="'a' is not loaded"):
        engine.add_request(request_of("late", {old: 1.0}))
    engine.add_request(request_of("new", {new: 1.0}, max_tokens=12))
    engine.check_integrity()
    parts = run_to_end(engine)
    for output in outputs:
        parts[output.request_id].insert(0, output)
    wanted[new] = answer(engine, {new: 1.0}, max_tokens=12)
    assert wanted[new] != wanted[old]
    assert token_ids(parts["new"]) == wanted[new]
    for i in range(5):
        assert token_ids(parts[f"old{i}"]) == wanted[old]
    with pytest.raises(UnknownModelError):
        engine.adapter_status(old)
    assert engine.store.host.num_bytes == bytes_of(split, 2)
    assert set(engine.slot_cache.resident) == {new}


def test_e1_a_removed_adapter_frees_slots_and_host_and_comes_back_as_one_copy(split, folders) -> None:
    engine = make_engine(split)
    ids = {name: add(engine, name, folders[name]) for name in "ab"}
    wanted = {name: answer(engine, {ids[name]: 1.0}) for name in "ab"}
    engine.remove_adapter(ids["b"])
    engine.check_integrity()
    assert (engine.store.host.num_bytes, engine.slot_cache.num_free) == (bytes_of(split, 2), 2)
    assert shown(engine, "adapters_resident", "adapter_host_bytes") == [1, bytes_of(split, 2)]  # though no step came
    for remove in (ids["b"], "never@seen"):
        with pytest.raises(UnknownModelError):
            engine.remove_adapter(remove)
    assert add(engine, "b", folders["b"]) == ids["b"]
    assert engine.store.host.num_bytes == bytes_of(split, 4)
    assert shown(engine, "adapters_resident", "adapter_host_bytes") == [1, bytes_of(split, 4)]
    assert answer(engine, {ids["b"]: 1.0}) == wanted["b"]


def test_an_adapter_added_again_while_its_last_requests_run_is_the_same_copy(split, folders) -> None:
    engine = make_engine(split)
    adapter_id = add(engine, "a", folders["a"])
    wanted = answer(engine, {adapter_id: 1.0})
    engine.add_request(request_of("r", {adapter_id: 1.0}))
    engine.step()
    engine.remove_adapter(adapter_id)
    assert add(engine, "a", folders["a"]) == adapter_id
    assert token_ids(run_to_end(engine)["r"])[-5:] == wanted[-5:]
    assert engine.adapter_status(adapter_id) == "slots"
    assert engine.store.host.num_bytes == bytes_of(split, 2)


def test_g2_an_adapter_made_in_memory_that_gets_the_name_of_another_shares_none_of_its_blocks(split) -> None:
    engine = make_engine(split)
    for seed in range(2):
        adapter = engine.store.from_memory("m", random_adapter(split.config, rank=4, seed=seed))
        assert engine.add_adapter(adapter) == "m"
        engine.add_request(request := request_of("r", {"m": 1.0}))
        run_to_end(engine)
        assert request.num_cached_tokens == 0
        engine.remove_adapter("m")


def test_an_expert_of_a_gated_set_stays(split, folders) -> None:
    store = AdapterStore(split.config, slot_rank=SLOT_RANK, dtype=split.dtype, max_rank=16)
    ids = [store.add(store.read(name, folders[name])) for name in "ab"]
    config = EngineConfig(adapter_slots=4, slot_rank=SLOT_RANK, max_num_seqs=4, num_blocks=24, block_size=4)
    engine = Engine(split, None, store, [gated_set_of(split, "ab")], config)
    assert engine.gated_sets[0].experts == tuple(ids)
    with pytest.raises(InvalidRequestError, match="'a' is an expert of the gated set 'moe'"):
        engine.remove_adapter(ids[0])
    assert ids[0] in store
    with pytest.raises(ValueError, match="gated set 'moe' uses the adapters x, which are not loaded"):
        Engine(split, None, store, [gated_set_of(split, "x")], config)


@pytest.mark.parametrize("damage", ["gone", "changed", "truncated"])
def test_a_load_that_fails_ends_its_requests_alone_and_frees_all_it_had(split, folders, damage: str) -> None:
    engine = make_engine(split, host_slots=2)
    a, b = (add(engine, name, folders[name]) for name in "ab")  # b pushes a out of host memory
    file = folders["a"] / "adapter_model.safetensors"
    content = file.read_bytes()
    engine.add_request(request_of("runs", {b: 1.0}, max_tokens=12))
    outputs = engine.step()
    if damage == "gone":
        file.unlink()
    else:
        other = write_adapter(folders["a"].parent / "x", split.config, rank=8, alpha=8, seed=9)
        changed = (other / "adapter_model.safetensors").read_bytes()
        file.write_bytes(changed if damage == "changed" else content[:-1])
    engine.add_request(request_of("fails", {a: 1.0}))
    engine.add_request(request_of("fails too", {a: 1.0, b: 1.0}))
    for request_id, parts in run_to_end(engine).items():
        if request_id == "runs":
            outputs += parts
            continue
        assert [part.finish_reason for part in parts] == [FinishReason.ERROR]
        reason = {
            "gone": "holds no adapter_model.safetensors",
            "changed": "has changed on disk",
            "truncated": "has changed on disk",
        }
        assert parts[0].error is not None
        assert parts[0].error.startswith("adapter 'a' could not be read: ")
        assert reason[damage] in parts[0].error
    assert token_ids(outputs) == answer(engine, {b: 1.0}, max_tokens=12)
    assert (engine.loader.staged_bytes, engine.loader.num_loading, dict(engine.slot_cache.num_pins)) == (0, 0, {})
    file.write_bytes(content)
    assert len(answer(engine, {a: 1.0})) == 6


def test_a_step_never_waits_for_a_load_and_a_base_request_goes_on(split, folders) -> None:
    """In threads: the disk is held until the base request has ended."""
    engine = make_engine(split, host_slots=2, in_background=True)
    a, _ = (add(engine, name, folders[name]) for name in "ab")
    wanted = {"base": answer(make_engine(split), {})}
    is_open, read_again = threading.Event(), engine.store.read_again

    def slow(adapter: KnownAdapter) -> AdapterContents:
        assert is_open.wait(30)
        return read_again(adapter)

    engine.store.read_again = slow  # type: ignore[method-assign]
    engine.add_request(request_of("a", {a: 1.0}))
    engine.add_request(request_of("base", {}))
    outputs: list[RequestOutput] = []
    while not any(output.finish_reason for output in outputs):
        outputs += engine.step()
    assert token_ids(outputs) == wanted["base"]
    assert engine.is_waiting_for_adapters or engine.step() == []
    is_open.set()
    assert len(token_ids(run_to_end(engine)["a"])) == 6
    assert not engine.is_waiting_for_adapters


def test_processes_read_for_a_server_and_end_with_its_engine(split, folders, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, engine = make_engine(split), make_engine(split, host_slots=2, in_background=True)
    readers = engine.store._readers
    assert readers is not None
    wait_until(lambda: readers.num_started == NUM_PROCESSES)
    wanted = [answer(plain, {add(plain, name, folders[name]): 1.0}) for name in "ab"]
    monkeypatch.setattr("serving.adapter_store.load_adapter", lambda *_, **__: 1 / 0)
    monkeypatch.setattr("serving.adapter_store.load_again", lambda *_, **__: 1 / 0)
    ids = [add(engine, name, folders[name]) for name in "ab"]  # there is room for one of them
    assert [answer(engine, {i: 1.0}) for i in ids * 2] == wanted * 2
    assert engine.loader.num_reads == 2
    (folders["a"] / "adapter_config.json").write_text("{}")
    for name in "ab":  # out of slots, staging and host
        engine.loader.drop(adapter_id := ids["ab".index(name)])
        engine.store.host.remove(adapter_id)
        if adapter_id in engine.slot_cache.resident:
            engine.slot_cache.remove(adapter_id)
    for i, adapter_id in enumerate(ids):
        engine.add_request(request_of(str(i), {adapter_id: 1.0}))
    outputs = run_to_end(engine)
    assert outputs["0"][0].error == (
        f"adapter 'a' could not be read: {folders['a']} has changed on disk since it was loaded; load it anew under "
        "its name to use what is there now"
    )
    assert token_ids(outputs["1"]) == wanted[1]
    pids = readers.pids
    assert all(map(is_running, pids))
    engine.close()
    engine.close()
    assert not any(map(is_running, pids))


def test_an_idle_step_waits_for_the_load_and_not_longer(split, folders, monkeypatch: pytest.MonkeyPatch) -> None:
    readers, copiers = ManualExecutor(), ManualExecutor()
    monkeypatch.setattr("serving.engine.thread_pools", lambda: (readers, copiers))
    engine = make_engine(split, host_slots=2, in_background=True)
    a, _ = (add(engine, name, folders[name]) for name in "ab")
    heard = []
    engine.on_adapter_news(lambda: heard.append(engine.is_waiting_for_adapters))
    engine.add_request(request_of("r", {a: 1.0}))
    assert not engine.is_waiting_for_adapters
    assert engine.step() == []
    assert engine.is_waiting_for_adapters
    timer = threading.Timer(0.02, readers.run)
    timer.start()
    assert engine.step() == []  # wakes when the read has ended, and begins the copy
    timer.join()
    assert heard == [False]
    assert len(copiers) == 1
    engine.abort("r")
    assert not engine.is_waiting_for_adapters
    copiers.run()
    engine.step()
    engine.check_integrity()


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.slow
def test_i1_two_hundred_adapters_that_come_and_go_leave_no_memory_behind(tmp_path: Path) -> None:
    """Of 1.8 MB each, in threads; cases I1 and I3."""
    split = tiny_model(vocab=257, hidden=512, ffn=1024, num_layers=8)
    engine = make_engine(split, in_background=True)
    write_adapter(tmp_path / "x", split.config, rank=8, alpha=8, seed=0)
    content = (tmp_path / "x" / "adapter_config.json").read_text()
    assert (tmp_path / "x" / "adapter_model.safetensors").stat().st_size > 1e6

    def cycle(times: int, first: int) -> None:
        for i in range(first, first + times):
            (tmp_path / "x" / "adapter_config.json").write_text(content + " " * i)  # another content hash
            adapter_id = add(engine, "x", tmp_path / "x")
            answer(engine, {adapter_id: 1.0}, max_tokens=2)
            engine.remove_adapter(adapter_id)
            engine.check_integrity()

    cycle(20, 1)
    device_bytes, host_bytes = live_bytes(), resident_bytes()
    cycle(200, 100)
    assert live_bytes() == device_bytes
    assert resident_bytes() - host_bytes < 16e6  # of 350 MB that went through
    assert engine.store.host.num_bytes == 0
    assert not engine.slot_cache.resident


class Trace:
    """Random arrivals and cancels, adapters that come, go and are replaced, and jobs that end at any time or fail."""

    def __init__(self, split: SplitModel, folders: Mapping[str, Path], reference: Engine, seed: int) -> None:
        self.draw = random.Random(seed)
        self.reads, self.copies = ManualExecutor(), ManualExecutor()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("serving.engine.thread_pools", lambda: (self.reads, self.copies))
            patch.setattr("serving.engine.STAGING_SLOTS", self.draw.choice([1, 3, 4]))
            self.engine = make_engine(split, host_slots=self.draw.choice([3, 4, 6]), in_background=True)
        self.folders = folders
        self.reference = reference
        self.ids = {name: add(self.engine, name, folder) for name, folder in folders.items()}
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.cancelled: set[str] = set()
        self.may_fail: set[str] = set()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for action, share in ((self.arrive, 0.5), (self.cancel, 0.1), (self.change, 0.15), (self.end_job, 0.7)):
                if self.draw.random() < share:
                    action()
            self.step()
        for _ in range(1000):
            if not self.engine.has_work:
                break
            self.reads.run_all()
            self.copies.run_all()
            self.step()
        assert not self.engine.has_work, f"never admitted: {self.engine.scheduler.waiting}"

    def arrive(self) -> None:
        request_id = f"r{len(self.requests)}"
        names = self.draw.sample(sorted(self.ids), min(self.draw.choice([0, 1, 1, 1, 2]), len(self.ids)))
        ids = [self.ids[name] for name in names]
        if sum(map(self.engine.store.num_slots, ids)) > 4:
            ids = ids[:1]
        mix = {adapter_id: self.draw.choice([1.0, 0.5]) for adapter_id in ids}
        request = request_of(request_id, mix, max_tokens=self.draw.randrange(1, 9))
        request.arrival_s = self.engine._clock() - self.draw.choice([0.0, 1.0])  # half of them are overdue
        self.requests[request_id] = request
        self.outputs[request_id] = []
        self.engine.add_request(request)

    def cancel(self) -> None:
        if self.requests:
            self.cancelled.add(request_id := self.draw.choice(list(self.requests)))
            self.engine.abort(request_id)

    def change(self) -> None:
        """Removes an adapter, or brings it back with its own content or with another's."""
        name = self.draw.choice(sorted(self.folders))
        if name in self.ids:
            self.engine.remove_adapter(self.ids.pop(name))
        else:
            self.ids[name] = add(self.engine, name, self.folders[self.draw.choice(sorted(self.folders))])

    def end_job(self) -> None:
        executor = self.draw.choice([self.reads, self.copies])
        if len(executor):
            fails = self.draw.random() < 0.15
            executor.run(self.draw.randrange(len(executor)), OSError("bad luck") if fails else None)

    def step(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("serving.engine._MAX_WAIT_S", 0.0)
            for output in self.engine.step():
                self.outputs[output.request_id].append(output)
        self.engine.check_integrity()

    def check(self) -> None:
        num_failed = 0
        for request_id, request in self.requests.items():
            parts = self.outputs[request_id]
            tokens = [token for part in parts for token in part.token_ids]
            if request_id not in self.cancelled:
                assert parts[-1].finish_reason in (FinishReason.LENGTH, FinishReason.ERROR)
            is_failed = bool(parts) and parts[-1].finish_reason is FinishReason.ERROR
            num_failed += is_failed
            if not is_failed and request_id not in self.cancelled:
                assert len(tokens) == request.sampling.max_tokens
            if is_failed:
                assert parts[-1].error is not None
                assert "bad luck" in parts[-1].error
                assert any(adapter_name(i) in parts[-1].error for i in request.adapters)
            elif tokens:
                assert tokens == self.expected(request)[: len(tokens)], request_id
        assert num_failed > 0
        for adapter_id in self.ids.values():
            assert self.engine.adapter_status(adapter_id) in ("slots", "host", "disk")
        self.engine.check_integrity()

    def expected(self, request: Request) -> list[int]:
        """What an engine with room for all gives the request alone; adapters of one content are one there."""
        contents = {folder_id.rpartition("@")[2]: folder_id for folder_id in self.reference_ids}
        mix = {contents[i.rpartition("@")[2]]: weight for i, weight in request.mix.entries}
        if len(mix) < len(request.mix.entries):  # one content under two names: their weights add up
            mix = {}
            for i, weight in request.mix.entries:
                key = contents[i.rpartition("@")[2]]
                mix[key] = mix.get(key, 0.0) + weight
        return answer(self.reference, mix, max_tokens=8)

    @property
    def reference_ids(self) -> list[str]:
        return [adapter.id for adapter in self.reference.store.adapters if adapter.root is not None]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_whatever_comes_goes_and_fails_every_request_ends_with_its_own_answer(split, folders, seed: int) -> None:
    reference = make_engine(split)
    for name, folder in folders.items():
        add(reference, name, folder)
    trace = Trace(split, folders, reference, seed)
    trace.run(80 if seed == 0 else 250)
    trace.check()


def test_an_adapter_added_from_another_folder_is_read_again_from_there(
    split: SplitModel, folders: dict[str, Path], tmp_path: Path
) -> None:
    engine = make_engine(split)
    first = add(engine, "a", folders["a"])
    moved = Path(shutil.copytree(folders["a"], tmp_path / "moved"))
    assert add(engine, "a", moved) == first
    shutil.rmtree(folders["a"])
    engine.store.host.remove(first)
    assert engine.store.read_again(engine.store.known(first))


def test_an_adapter_made_in_memory_is_cut_once(split: SplitModel) -> None:
    store = AdapterStore(split.config, slot_rank=SLOT_RANK, dtype=split.dtype, host_bytes=bytes_of(split, 2))
    key = store.add(store.from_memory("m", random_adapter(split.config, rank=8, seed=1)))
    assert set(store.host.resident) == {key}
    with pytest.raises(ValueError, match=r"adapter 'big' takes \d+ bytes of host memory"):
        store.from_memory("big", random_adapter(split.config, rank=12, seed=1))
