"""Law 4 over HTTP, with the real engine on a tiny model, put together as the command line does it."""

import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dymerge_jax.config import named_config
from dymerge_jax.serve import build, engine_config, make_parser
from serving.async_engine import AsyncEngine
from serving.engine import Engine
from serving.prompts import PromptEncoder
from serving.server import ServerConfig, create_app
from tests.http.conftest import running, wait_until
from tests.support.tiny_checkpoints import write_adapter, write_gated_set, write_tiny_llama

pytestmark = pytest.mark.slow  # compiles every program of an engine

CONFIG = named_config("tiny")
RANKS = {"a": 4, "b": 8, "c": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, adapters of three ranks, and a gated set one of whose experts is a folder of its own."""
    path = tmp_path_factory.mktemp("served")
    write_tiny_llama(path / "tiny")
    for seed, (name, rank) in enumerate(RANKS.items()):
        write_adapter(path / "adapters" / name, CONFIG, rank=rank, alpha=rank, seed=seed)
    write_adapter(path / "sets" / "expert", CONFIG, rank=4, alpha=4, seed=9)
    write_gated_set(path / "sets" / "moe", CONFIG, ["a", "../expert"], top_k=1)
    return path


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[str, Engine]]:
    """URL and engine. Seven slots: the requests of a test evict each other's adapters."""
    flags = ["--model", folder / "tiny", "--adapters", folder / "adapters", "--gated-sets", folder / "sets" / "moe"]
    sizes = ["--adapter-slots", 7, "--slot-rank", 4, "--max-num-seqs", 8, "--max-model-len", 96, "--num-blocks", 32]
    options = make_parser().parse_args([str(flag) for flag in (*flags, *sizes, "--max-num-batched-tokens", 32)])
    engine, loaded, registry = build(options, engine_config(options))
    async_engine = AsyncEngine(engine)
    encoder = PromptEncoder(loaded.tokenizer, vocab=loaded.config.vocab, max_model_len=engine.max_model_len)
    config = ServerConfig(port=0, drain_s=1.0)
    app = create_app(async_engine, registry, encoder, lambda: (engine.metrics.render(), "text/plain"), config)
    with running(app, async_engine, config) as url:
        yield url, engine


def ask(url: str, **fields: Any) -> str:
    body = {"prompt": "Items: lamp, river", "max_tokens": 24, "temperature": 0, "ignore_eos": True} | fields
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()["choices"][0]["text"]
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def requests_of_16_mixes() -> list[dict[str, Any]]:
    mixes = [{}, {"a": 1}, {"b": 1}, {"c": 1}, {"a": 0.5}, {"a": -1}, {"a": 0.7, "b": 0.3}, {"b": 0.3, "c": -0.5}]
    mixes += [{"a": 0.1 * i, "b": 1 - 0.2 * i, "c": 0.3} for i in range(1, 7)]
    asked = [{"adapter_mix": mix, "stream": bool(i % 2)} for i, mix in enumerate(mixes)]
    return [*asked, {"model": "moe"}, {"model": "expert", "prompt": "x" * 60}]


def test_law_4_sixteen_concurrent_mixes_get_over_http_what_each_gets_alone(served: tuple[str, Engine]) -> None:
    url, engine = served
    asked = requests_of_16_mixes()
    alone = [ask(url, **fields) for fields in asked]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda fields: ask(url, **fields), asked)) == alone
    assert len(set(alone)) >= 14
    wait_until(lambda: not engine.has_work)
    engine.check_integrity()


def test_the_same_adapter_is_used_by_every_route_streamed_or_not(served: tuple[str, Engine]) -> None:
    url, _ = served
    text = "Items: lamp"
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    for mix in ({"a": 1}, {"a": 0.25}, {"b": 1, "c": -0.5}):
        completion = ask(url, prompt=rendered, adapter_mix=mix)
        assert ask(url, prompt=rendered, adapter_mix=mix, stream=True) == completion
        assert ask(url, prompt=rendered, adapter_mix=mix, n=2, logprobs=1) == completion
        body = {"messages": [{"role": "user", "content": text}], "adapter_mix": mix, "max_tokens": 24, "temperature": 0}
        chat = httpx.post(f"{url}/v1/chat/completions", json=body | {"ignore_eos": True}, timeout=60).json()
        assert chat["choices"][0]["message"]["content"] == completion
    assert ask(url, adapter_mix={"a": 1}) != ask(url, adapter_mix={"a": 0.25})


def test_clients_that_leave_give_everything_back(served: tuple[str, Engine]) -> None:
    url, engine = served

    def leave(i: int) -> None:
        body = {"prompt": "x" * 60, "max_tokens": 30, "ignore_eos": True, "adapter_mix": {"abc"[i % 3]: 1}}
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as response:
            next(response.iter_lines())

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(leave, range(16)))
    wait_until(lambda: not engine.has_work)
    engine.check_integrity()
    assert "dymerge_requests_running 0.0" in httpx.get(f"{url}/metrics").text


def test_a_sampled_answer_repeats_with_its_seed(served: tuple[str, Engine]) -> None:
    url, _ = served
    answers = [ask(url, temperature=1.5, seed=seed, top_k=20) for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]
