"""Law 4 over HTTP, with the real engine on a tiny model, put together as the command line does it."""

import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from dymerge_jax.config import named_config
from dymerge_jax.serve import build, engine_config, make_parser
from serving.async_engine import AsyncEngine
from serving.engine import Engine
from serving.prompts import PromptEncoder
from serving.server import ServerConfig, create_app
from tests.http.conftest import running
from tests.support.tiny_checkpoints import write_adapter, write_gated_set, write_tiny_llama
from tests.support.waiting import wait_until

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
    return "".join(part["choices"][0]["text"] for part in stream_contents(response))


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


def test_d3_every_route_gives_one_prompt_and_mix_the_same_log_probabilities(served: tuple[str, Engine]) -> None:
    """Completions and chat, streamed or not, one choice or two: case D3; a mix, its alias and a name as model."""
    url, _ = served
    text = "Items: lamp"
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    common = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    completion = common | {"prompt": rendered, "logprobs": 3}
    chat = common | {"messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": 3}
    answers = set()
    for fields in ({}, {"adapter_mix": {"a": 1}}, {"adapter_mix": {"a": 0.25}}, {"adapter_mix": {"b": 1, "c": -0.5}}):
        alone = logprobs_of(url, completion | fields)[0]
        assert len(alone) == 12
        answers.add(tuple(alone))
        for body in (completion, chat):
            for how in ({}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}):
                choices = logprobs_of(url, body | fields | how)
                assert len(choices) == how.get("n", 1)
                for choice in choices:
                    np.testing.assert_allclose(choice, alone, atol=1e-4)
    assert len(answers) == 4
    aliases = ({"model": "a"}, {"lora": [{"id": 0, "scale": 1}]}, {"adapter_mix": [{"adapter": "a", "weight": 1}]})
    wanted = logprobs_of(url, completion | {"adapter_mix": {"a": 1}})[0]
    for alias in aliases:
        np.testing.assert_allclose(logprobs_of(url, chat | alias)[0], wanted, atol=1e-4)


def logprobs_of(url: str, body: dict[str, Any]) -> list[list[float]]:
    """The log probabilities of every choice of a request, streamed or not."""
    route = "chat/completions" if "messages" in body else "completions"
    response = httpx.post(f"{url}/v1/{route}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    parts = [response.json()] if not body.get("stream") else stream_contents(response)
    found: dict[int, list[float]] = {}
    for part in parts:
        for choice in part["choices"]:
            logprobs = choice.get("logprobs") or {}
            values = logprobs.get("token_logprobs") or [e["logprob"] for e in logprobs.get("content") or []]
            found.setdefault(choice["index"], []).extend(values)
    return [found[index] for index in sorted(found)]


def stream_contents(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.iter_lines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_an_answer_says_how_much_of_its_prompts_was_cached(served: tuple[str, Engine]) -> None:
    """Each prompt counts once, whatever its choices; block_size is 16."""
    url, engine = served
    engine.forget_prefixes()  # between requests nothing else uses the engine
    body = {"prompt": [[7] * 40, [8] * 33], "max_tokens": 4, "adapter_mix": {"a": 1}, "n": 2}

    def details(**fields: Any) -> dict[str, int]:
        response = httpx.post(f"{url}/v1/completions", json=body | fields, timeout=60)
        parts = stream_contents(response) if fields.get("stream") else [response.json()]
        usage = parts[-1]["usage"]
        assert usage["prompt_tokens"] == 73
        return usage["prompt_tokens_details"]

    assert details()["cached_tokens"] < 64
    assert details() == {"cached_tokens": 64}
    assert details(stream=True, stream_options={"include_usage": True}) == {"cached_tokens": 64}
    assert details(adapter_mix={"b": 1}, n=1) == {"cached_tokens": 0}
    metrics = httpx.get(f"{url}/metrics").text
    assert "dymerge_prefix_cache_hits_total" in metrics


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
