"""Adapters loaded, replaced and unloaded over HTTP while the real engine serves a tiny model."""

import concurrent.futures
import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dymerge_jax.config import named_config
from dymerge_jax.serve import build, engine_config, make_parser, make_server_config
from serving.async_engine import AsyncEngine
from serving.engine import Engine
from serving.prompts import PromptEncoder
from serving.queue_bound import QueueBound
from serving.request import FinishReason, Phase, Request, RequestOutput
from serving.server import create_app
from tests.http.conftest import begin_request, running
from tests.support.tiny_checkpoints import write_adapter, write_gated_set, write_tiny_llama
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow  # compiles every program of an engine

CONFIG = named_config("tiny")
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is started with adapter "a", a gated set of it and a mix; "b", "c" and "wide" are there to load."""
    path = tmp_path_factory.mktemp("hot")
    write_tiny_llama(path / "tiny")
    for seed, (name, rank) in enumerate({"a": 4, "b": 8, "c": 12, "wide": 40}.items()):
        write_adapter(path / "adapters" / name, CONFIG, rank=rank, alpha=rank, seed=seed)
    write_gated_set(path / "sets" / "moe", CONFIG, ["a", "../../adapters/b"], top_k=1)
    (path / "mixes.json").write_text('{"half": {"a": 0.5}}')
    return path


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[httpx.Client, Engine]]:
    """Seven slots of rank 4: adapters evict each other."""
    flags = ["--model", folder / "tiny", "--adapters", folder / "adapters" / "a", "--adapter-root", folder / "adapters"]
    flags += ["--gated-sets", folder / "sets" / "moe", "--mixes", folder / "mixes.json", "--max-waiting", 64]
    sizes = ["--adapter-slots", 7, "--slot-rank", 4, "--max-num-seqs", 4, "--max-model-len", 96, "--num-blocks", 32]
    options = make_parser().parse_args([str(flag) for flag in (*flags, *sizes, "--max-num-batched-tokens", 32)])
    engine, loaded, registry = build(options, engine_config(options))
    config = make_server_config(options)
    async_engine = AsyncEngine(engine, QueueBound(config.max_waiting))
    encoder = PromptEncoder(loaded.tokenizer, vocab=loaded.config.vocab, max_model_len=engine.max_model_len)
    metrics = engine.metrics
    app = create_app(async_engine, registry, encoder, lambda: (metrics.render(), "text/plain"), config, metrics)
    with running(app, async_engine, config) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client, engine


@pytest.fixture
def client(served: tuple[httpx.Client, Engine]) -> httpx.Client:
    return served[0]


@pytest.fixture
def engine(served: tuple[httpx.Client, Engine]) -> Iterator[Engine]:
    """Nothing may be left of a test's requests and adapters."""
    client, engine = served
    yield engine
    for card in client.get("/v1/models").json()["data"]:
        if "adapter_mix" in card and card["id"] != "half":
            client.delete(f"/v1/mixes/{card['id']}")
    for card in client.get("/v1/models").json()["data"]:
        if "generation" in card and card["id"] not in ("a", "b"):
            unload(client, card["id"])
    wait_until(lambda: not engine.has_work)
    engine.check_integrity()
    assert {adapter.name for adapter in engine.store.adapters} == {"a", "b"}
    wait_until(lambda: not engine.store.retired)


def load(client: httpx.Client, name: str, path: str | Path, **fields: Any) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)} | fields)


def unload(client: httpx.Client, name: str) -> httpx.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def ask(client: httpx.Client, **fields: Any) -> str:
    body = {"prompt": "Items: lamp, river", "max_tokens": 16, "temperature": 0, "ignore_eos": True} | fields
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_a_loaded_adapter_answers_as_one_given_at_the_start_alone_in_mixes_and_replaced(
    client: httpx.Client, engine: Engine
) -> None:
    assert load(client, "x", "a").status_code == 200
    assert ask(client, model="x") == ask(client, model="a") != ask(client)
    assert ask(client, adapter_mix={"x": 0.5}) == ask(client, model="half")
    assert client.post("/v1/mixes", json={"name": "m", "adapter_mix": {"x": 1, "a": -0.5}}).status_code == 200
    before = ask(client, model="m")
    assert load(client, "x", "c", load_inplace=True).status_code == 200
    assert load(client, "y", "c").status_code == 200
    assert ask(client, model="x") == ask(client, model="y") != ask(client, model="a")
    assert ask(client, model="m") == ask(client, adapter_mix={"y": 1, "a": -0.5}) != before


def test_e1_e6_unloading_frees_memory_and_a_name_that_is_used_again_serves_the_new_content(
    client: httpx.Client, engine: Engine
) -> None:
    expected = {name: ask(client, model=name) for name in ("a", "b")}
    bytes_before, resident_before = engine.store.host.num_bytes, set(engine.slot_cache.resident)
    for _ in range(2):
        for name in ("a", "b"):
            assert load(client, "x", name).status_code == 200
            assert ask(client, model="x") == expected[name]
            assert engine.store.host.num_bytes > bytes_before
            assert unload(client, "x").status_code == 200
            wait_until(lambda: engine.store.host.num_bytes == bytes_before)
            assert set(engine.slot_cache.resident) <= resident_before
            assert client.post("/v1/completions", json={"prompt": "x", "model": "x"}).status_code == 404


def test_running_and_waiting_requests_keep_what_they_began_with(
    client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(client, "x", "a")
    old, long = ask(client, model="x", max_tokens=64), {"model": "x", "max_tokens": 64}
    step, scheduler = engine.step, engine.scheduler

    def num_held() -> tuple[int, int]:
        return scheduler.num_running, len(scheduler.waiting)

    def step_until_half_of_eight_run() -> list[RequestOutput]:  # there are four rows
        if num_held() == (0, 8):
            return step()
        time.sleep(0.01)
        return []

    monkeypatch.setattr(engine, "step", step_until_half_of_eight_run)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, client, **long) for _ in range(8)]
        wait_until(lambda: num_held() == (4, 4))
        assert load(client, "x", "c", load_inplace=True).status_code == 200
        monkeypatch.setattr(engine, "step", step)
        new = ask(client, **long)
        assert {f.result() for f in asked} == {old}
    assert ask(client, **long) == new != old


def test_requests_are_right_while_an_adapter_is_replaced_again_and_again(client: httpx.Client, engine: Engine) -> None:
    right = set()
    for name in ("a", "b", "c"):
        load(client, "x", name, load_inplace=True)
        right.add(ask(client, model="x"))

    def replace(i: int) -> int:
        return load(client, "x", "abc"[i % 3], load_inplace=True).status_code

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, client, model="x") for _ in range(30)]
        assert {pool.submit(replace, i).result() for i in range(12)} == {200}
        assert {answer.result() for answer in answers} <= right


def test_a_bad_adapter_is_refused_with_its_reasons_and_the_server_goes_on(
    client: httpx.Client, engine: Engine, folder: Path
) -> None:
    """Cases A1, A3, A5, A6, A12, D8."""
    root, base = folder / "adapters", ask(client)
    before = client.get("/v1/models").json()

    def damaged(name: str) -> Path:
        shutil.copytree(root / "c", root / name, dirs_exist_ok=True)
        return root / name

    def resave(name: str, change: Any) -> None:
        path = damaged(name) / WEIGHTS
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    content = (root / "c" / WEIGHTS).read_bytes()
    (damaged("truncated") / WEIGHTS).write_bytes(content[:-100])
    (damaged("header") / WEIGHTS).write_bytes((2**60).to_bytes(8, "little") + content[8:])
    key = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    resave("nan", lambda t: t[key].fill(np.nan))
    resave("junk", lambda t: t.update({"base_model.model.model.layers.0.foo.lora_A.weight": t[key]}))
    resave("swapped", lambda t: t.update({key: np.ascontiguousarray(t[key].T)}))
    resave("head", lambda t: t.update({"base_model.model.lm_head.weight": np.zeros((8, 64), np.float32)}))
    (damaged("no weights") / WEIGHTS).unlink()
    (damaged("pickle") / WEIGHTS).rename(root / "pickle" / "adapter_model.bin")
    (damaged("json") / "adapter_config.json").write_text("{")
    expected = {
        "truncated": (400, WEIGHTS), "header": (400, WEIGHTS), "nan": (400, "NaN"), "junk": (400, "layers.0.foo"),
        "swapped": (400, "up_proj"), "head": (400, "lm_head"), "no weights": (404, WEIGHTS), "pickle": (400, "pickle"),
        "json": (400, "adapter_config.json"), "wide": (400, "rank 40"), str(folder / "tiny"): (403, "--adapter-root"),
    }  # fmt: skip
    for path, (status, words) in expected.items():
        refused = load(client, "bad", path)
        assert refused.status_code == status, (path, refused.text)
        assert words in refused.json()["error"]["message"], path
        assert client.get("/v1/models").json() == before
    assert ask(client) == base


def test_e4_twenty_loads_of_one_name_make_one_copy(client: httpx.Client, engine: Engine) -> None:
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        statuses = [r.status_code for r in pool.map(lambda _: load(client, "x", "c"), range(20))]
        assert (statuses.count(200), statuses.count(400)) == (1, 19)
        assert [adapter.name for adapter in engine.store.adapters].count("x") == 1
        statuses = [r.status_code for r in pool.map(lambda _: unload(client, "x"), range(20))]
        assert (statuses.count(200), statuses.count(404)) == (1, 19)


def test_experts_of_a_gated_set_stay(client: httpx.Client, engine: Engine) -> None:
    moe = ask(client, model="moe")
    for refused in (unload(client, "b"), load(client, "b", "c", load_inplace=True)):
        assert refused.status_code == 409
        assert "'moe'" in refused.json()["error"]["message"]
    assert ask(client, model="moe") == moe


def test_m2_series_of_unloaded_adapters_end(client: httpx.Client, engine: Engine) -> None:
    for i in range(3):
        load(client, f"x{i}", "c")
        ask(client, model=f"x{i}")
    assert 'dymerge_adapter_requests_total{adapter="x1"} 1.0' in client.get("/metrics").text
    load(client, "x1", "a", load_inplace=True)
    ask(client, model="x1")
    assert 'dymerge_adapter_requests_total{adapter="x1"} 2.0' in client.get("/metrics").text
    for i in range(3):
        unload(client, f"x{i}")
    text = client.get("/metrics").text
    assert not [line for line in text.splitlines() if 'adapter="x' in line]
    assert 'dymerge_adapter_requests_total{adapter="a"}' in text


STATES: dict[str, Callable[[Request], bool]] = {
    "behind a load": lambda request: request.phase is Phase.WAITING,
    "prefill": lambda request: 0 < request.num_computed_tokens < request.num_prompt_tokens,
    "decode": lambda request: request.num_output_tokens > 0,
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_j1_j3_a_client_that_leaves_gives_everything_back_in_every_state(
    client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch, state: str, is_stream: bool
) -> None:
    load(client, "x", "c")
    num_free, step, abort = engine.scheduler.block_pool.num_free, engine.step, AsyncEngine.abort
    may_copy, has_left, requests, num_steps_after = threading.Event(), threading.Event(), [], 0

    def step_until_client_leaves() -> list[RequestOutput]:
        nonlocal num_steps_after
        num_steps_after += has_left.is_set()
        outputs = step()
        if state != "behind a load" and STATES[state](requests[0]):
            assert has_left.wait(PATIENCE_S)
        return outputs

    def note_abort(async_engine: AsyncEngine, request_ids: Iterable[str]) -> None:
        abort(async_engine, request_ids)
        has_left.set()

    def add_request(request: Request) -> None:
        requests.append(request)
        Engine.add_request(engine, request)

    monkeypatch.setattr(engine, "step", step_until_client_leaves)
    monkeypatch.setattr(AsyncEngine, "abort", note_abort)
    monkeypatch.setattr(engine, "add_request", add_request)
    if state == "behind a load":
        engine.loader._copiers.submit(may_copy.wait, PATIENCE_S)  # the one thread that copies has something else to do
    body = {"prompt": "x" * 80, "max_tokens": 15, "ignore_eos": True, "model": "x", "stream": is_stream}
    with contextlib.closing(begin_request(client.base_url, body)):
        wait_until(lambda: requests and STATES[state](requests[0]))
        if state == "behind a load":
            time.sleep(0.1)  # and stays there
            assert STATES[state](requests[0])
    wait_until(lambda: requests[0].is_finished and not engine.has_work)
    assert requests[0].finish_reason is FinishReason.ABORT
    assert num_steps_after <= 1
    may_copy.set()
    engine.check_integrity()
    assert engine.scheduler.block_pool.num_free == num_free
    assert not engine.slot_cache.num_pins
    assert ask(client, model="x")
