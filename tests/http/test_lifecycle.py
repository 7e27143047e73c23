"""Clients that leave, steps that fail, too many requests, and the end of the server."""

import concurrent.futures
import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from serving.mixes import ModelRegistry
from serving.request import RequestOutput
from serving.server import ServerConfig
from tests.http.conftest import begin_request, serving
from tests.http.fake_engine import FakeEngine
from tests.support.waiting import wait_until

LONG = {"prompt": "Hello", "max_tokens": 100, "temperature": 0}  # five seconds


@pytest.fixture
def engine(tokenizer: PreTrainedTokenizerFast) -> FakeEngine:
    return FakeEngine(tokenizer, step_s=0.05, max_running=1)


@pytest.mark.parametrize("num_events", [0, 1, 3])
def test_j1_a_stream_whose_client_leaves_is_aborted(client: httpx.Client, engine: FakeEngine, num_events: int) -> None:
    with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        lines = response.iter_lines()
        for _ in range(2 * num_events):  # each event is a line and an empty one
            next(lines)
    wait_until(lambda: not engine.held and len(engine.aborted) == 1)


@pytest.mark.parametrize("is_stream", [False, True])
def test_j3_a_client_that_leaves_is_noticed_while_its_request_waits_and_while_it_runs(
    url: str, engine: FakeEngine, is_stream: bool
) -> None:
    body = LONG | {"stream": is_stream}
    connections = [begin_request(httpx.URL(url), body) for _ in range(2)]  # one runs, one waits
    wait_until(lambda: len(engine.held) == 2)
    running, waiting = (r for r in engine.held.values())
    wait_until(lambda: running.num_output_tokens > 0)
    assert waiting.num_output_tokens == 0
    for connection in connections:
        connection.close()
    wait_until(lambda: not engine.held and len(engine.aborted) == 2)
    assert httpx.get(f"{url}/health").status_code == 200


def test_all_choices_of_a_request_end_with_its_client(client: httpx.Client, engine: FakeEngine) -> None:
    with client.stream("POST", "/v1/completions", json=LONG | {"stream": True, "n": 5}) as response:
        next(response.iter_lines())
        assert len(engine.held) == 5
    wait_until(lambda: not engine.held and len(engine.aborted) == 5)


def test_sixteen_clients_at_once_get_what_each_gets_alone(url: str, engine: FakeEngine) -> None:
    engine.step_s, engine.max_running = 0.001, 16
    mixes = [{"a": i / 8, "b": 1 - i / 8} for i in range(16)]

    def ask(i: int) -> str:
        body = LONG | {"prompt": f"Prompt {i}", "max_tokens": 20, "adapter_mix": mixes[i], "stream": bool(i % 2)}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
        if not body["stream"]:
            return response.json()["choices"][0]["text"]
        return "".join(c["choices"][0]["text"] for c in stream_contents(response))

    alone = [ask(i) for i in range(16)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == alone
    assert len(set(alone)) == 16
    assert len(engine.threads) == 1


def stream_contents(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_a_failed_step_ends_its_requests_and_the_next_one_is_answered(client: httpx.Client, engine: FakeEngine) -> None:
    engine.step_error = RuntimeError("out of luck")
    failed = client.post("/v1/completions", json=LONG)
    assert failed.status_code == 500
    assert "out of luck" in failed.json()["error"]["message"]
    streamed = list(stream_contents(client.post("/v1/completions", json=LONG | {"stream": True})))
    assert "out of luck" in streamed[-1]["error"]["message"]
    assert not engine.held
    engine.step_error = None
    assert client.post("/v1/completions", json=LONG | {"max_tokens": 2}).status_code == 200
    assert client.get("/health").status_code == 200


def test_steps_that_keep_failing_make_the_server_unhealthy(client: httpx.Client, engine: FakeEngine) -> None:
    engine.step_error = RuntimeError("out of luck")
    for _ in range(3):
        assert client.post("/v1/completions", json=LONG).status_code == 500
    health = client.get("/health")
    assert health.status_code == 503
    assert "out of luck" in health.json()["reason"]
    assert client.post("/v1/completions", json=LONG).status_code == 503


def test_failures_count_although_the_step_before_went_well(
    client: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the real engine, where a step dispatches and the next one finds out that it failed."""
    num_steps = itertools.count()

    def step() -> list[RequestOutput]:
        if next(num_steps) % 2:
            raise RuntimeError("out of luck")
        return []

    monkeypatch.setattr(engine, "step", step)
    for _ in range(3):
        assert client.post("/v1/completions", json=LONG).status_code == 500
    assert client.get("/health").status_code == 503


def test_stopping_lets_short_requests_end_and_cuts_long_ones_off(
    engine: FakeEngine, registry: ModelRegistry, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine.max_running, engine.step_s = 8, 0.5  # slow until all three have arrived
    config = ServerConfig(port=0, drain_s=4.0)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        with serving(engine, registry, tokenizer, config) as url:
            short = pool.submit(httpx.post, f"{url}/v1/completions", json=LONG | {"max_tokens": 10}, timeout=20)
            long = pool.submit(httpx.post, f"{url}/v1/completions", json=LONG, timeout=20)
            stream = pool.submit(httpx.post, f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=20)
            wait_until(lambda: len(engine.held) == 3)
            engine.step_s = 0.08  # the short one takes a second now, the long ones eight
        assert short.result().status_code == 200
        assert long.result().status_code == 503
        assert "shutting down" in list(stream_contents(stream.result()))[-1]["error"]["message"]


def test_requests_beyond_the_queue_are_refused_before_any_token_and_counted(
    engine: FakeEngine, registry: ModelRegistry, tokenizer: PreTrainedTokenizerFast
) -> None:
    with serving(engine, registry, tokenizer, max_waiting=2) as url, httpx.Client(base_url=url) as client:
        assert client.post("/v1/completions", json=LONG | {"n": 3}).status_code == 400  # could never wait
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            first = pool.submit(client.post, "/v1/completions", json=LONG)
            wait_until(lambda: any(r.num_output_tokens for r in engine.held.values()))
            engine.step_s = 1.0  # it stays until the others have been refused
            others = [pool.submit(client.post, "/v1/completions", json=LONG | {"max_tokens": 1}) for _ in range(2)]
            wait_until(lambda: len(engine.held) == 3)
            for body in (LONG, LONG | {"stream": True}):
                refused = client.post("/v1/completions", json=body)
                assert refused.status_code == 429
                error = refused.json()["error"]
                assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
                assert "of at most 2 (--max-waiting)" in error["message"]
                assert 1 <= int(refused.headers["retry-after"]) <= 60
            engine.step_s = 0.0
            assert [f.result().status_code for f in (first, *others)] == [200] * 3
        assert 'dymerge_requests_refused_total{reason="queue_full"} 2.0' in client.get("/metrics").text
        assert client.post("/v1/completions", json=LONG | {"max_tokens": 1}).status_code == 200


def test_a_place_in_the_queue_comes_back_when_its_client_leaves(
    engine: FakeEngine, registry: ModelRegistry, tokenizer: PreTrainedTokenizerFast
) -> None:
    with serving(engine, registry, tokenizer, max_waiting=2) as url, httpx.Client(base_url=url) as client:
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}):
            wait_until(lambda: any(r.num_output_tokens for r in engine.held.values()))
            for _ in range(5):  # each waits behind the first and leaves
                with client.stream("POST", "/v1/completions", json=LONG | {"stream": True, "n": 2}) as waiting:
                    assert waiting.status_code == 200
                wait_until(lambda: len(engine.held) == 1)
        wait_until(lambda: not engine.held)
