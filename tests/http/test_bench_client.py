"""The load benchmark as a client of a server: what it sends, and what it makes of the stream."""

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from serving.adapter_ids import adapter_name
from serving.bench import load, soak
from serving.bench.clients import Clock, replay
from serving.bench.http_client import MALFORMED, HttpClient, churn
from serving.bench.records import Record
from serving.bench.soak import DisturbanceCounts
from serving.bench.workloads import TraceRequest, prompt_token_ids
from serving.mixes import ModelRegistry
from serving.prompts import PromptEncoder
from serving.server import ServerConfig
from tests.http.conftest import VOCAB, serving
from tests.http.fake_engine import FakeEngine
from tests.support.waiting import wait_until


def send(url: str, request: TraceRequest) -> Record:
    async def run() -> Record:
        record = Record(3, 0.0, request.prompt_len)
        async with contextlib.aclosing(HttpClient(url, vocab=VOCAB)) as client:
            await client.connect()
            await client.generate(request, record, Clock(), seed=5)
        return record

    return asyncio.run(run())


def test_a_request_of_a_trace_arrives_as_it_was_meant(url: str, engine: FakeEngine):
    record = send(url, TraceRequest(0.0, 6, 4, ((0, 0.5), (1, -0.25))))
    (request,) = engine.added
    assert request.prompt_token_ids == prompt_token_ids(3, 6, VOCAB, seed=5)
    assert [(adapter_name(key), weight) for key, weight in request.mix.entries] == [("a", 0.5), ("b", -0.25)]
    assert (request.sampling.max_tokens, request.sampling.ignore_eos, request.sampling.is_greedy) == (4, True, True)
    assert (record.is_done, record.num_tokens, len(record.text), record.error) == (True, 4, 4, None)
    assert record.output_times_s == sorted(record.output_times_s)
    assert 4 <= len(record.output_times_s) <= 5


def test_a_gated_request_names_its_set(url: str, engine: FakeEngine):
    assert send(url, TraceRequest(0.0, 6, 4, gated_set="moe")).is_done
    assert engine.added[0].mix.gated_set == "moe"


def test_what_the_server_refuses_is_in_the_record(url: str):
    record = send(url, TraceRequest(0.0, 6, 4, ((3, 1.0),)))  # "huge" needs more slots than there are
    assert record.error is not None
    assert record.error.startswith("HTTP 400")
    assert not record.is_done


def test_the_churn_of_a_soak_unloads_an_adapter_once_its_request_has_been_taken_however_long_that_takes(
    engine: FakeEngine,
    registry: ModelRegistry,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    (tmp_path / "weights").write_text("1")
    engine.step_s = 0.02
    check = PromptEncoder.check_token_ids

    def check_slowly(self: PromptEncoder, token_ids: Sequence[int], param: str) -> None:
        time.sleep(0.1)
        check(self, token_ids, param)

    monkeypatch.setattr(PromptEncoder, "check_token_ids", check_slowly)
    counts = DisturbanceCounts()

    async def run(url: str) -> None:
        async with contextlib.aclosing(HttpClient(url, vocab=VOCAB)) as client:
            task = asyncio.create_task(churn(client, counts, folder=str(tmp_path), admin_api_key=None))
            async with asyncio.timeout(5):
                while not counts.num_churns:
                    await asyncio.sleep(0.01)
            task.cancel()

    with serving(engine, registry, tokenizer, ServerConfig(port=0, drain_s=0.2, adapter_roots=(str(tmp_path),))) as url:
        asyncio.run(run(url))
    assert counts.failures == []
    assert [adapter_name(key) for request in engine.added for key in request.adapters] == ["soak-churn"]
    assert engine.adapters == {}


def test_a_client_that_vanishes_ends_its_request(url: str, engine: FakeEngine):
    engine.step_s = 0.1

    async def run() -> list[Record]:
        async with contextlib.aclosing(HttpClient(url, vocab=VOCAB)) as client:
            await client.connect()
            records, _ = await replay(client, [TraceRequest(0.0, 4, 100)], drain_s=5, vanish=lambda position: 2.0)
        return records

    (record,) = asyncio.run(run())
    assert record.is_cancelled
    assert 0 < record.num_tokens < 100
    wait_until(lambda: len(engine.aborted) == 1)


def test_a_trace_with_more_adapters_than_the_server_has_is_refused(url: str):
    with pytest.raises(ValueError, match=r"uses adapter 70, but the server names 6 models .*: a, b, c, huge"):
        send(url, TraceRequest(0.0, 6, 4, ((70, 1.0),)))


def test_every_malformed_request_is_refused(client: Any):
    for body in MALFORMED:
        response = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert 400 <= response.status_code < 500, body


def test_the_command_measures_a_server(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "result.json"
    flags = ["--url", url, "--vocab", str(VOCAB), "--workloads", "base", "single", "--longest", "8"]
    assert load.main([*flags, "--rates", "40", "--duration", "0.2", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["workload"], r["completed"] == r["requests"] > 0) for r in rows] == [("base", True), ("single", True)]
    assert all(row["agreement"]["equal"] == row["agreement"]["sample"] > 0 for row in rows)
    assert "over HTTP" in capsys.readouterr().out


def test_no_server_is_said(capsys: pytest.CaptureFixture[str]):
    assert load.main(["--url", "http://127.0.0.1:9"]) == 1
    assert "expected a running server of OpenAI's API" in capsys.readouterr().err


def soak_flags(url: str, out: Path) -> list[str]:
    flags = ["--url", url, "--vocab", str(VOCAB), "--workloads", "base", "--longest", "16", "--rates", "20"]
    return [*flags, "--soak-vanish", "0", "--soak-minutes", "0.01", "--out", str(out)]


def test_the_file_of_a_soak_is_there_from_the_start_and_replaced_at_the_end(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out, seen = tmp_path / "soak.json", []
    write_result = load.write_result

    def write(options: argparse.Namespace, result: dict[str, Any]) -> None:
        write_result(options, result)
        seen.append(json.loads(out.read_text())["soak"])

    monkeypatch.setattr(load, "write_result", write)
    assert load.main(soak_flags(url, out)) == 0
    assert [result.get("partial", False) for result in seen] == [True, True, False]
    assert [result["completed"] for result in seen] == [0, seen[-1]["requests"], seen[-1]["requests"]]
    assert seen[-1]["ttft_ms_p99"] >= seen[-1]["ttft_ms_p50"] > 0
    assert seen[-1]["tpot_ms_p50"] > 0


@pytest.mark.parametrize(("flags", "status"), [([], 0), (["--exact-outputs"], 1)])
def test_an_answer_that_differs_fails_a_soak_of_exact_outputs_only(
    flags: list[str], status: int, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    alone = soak.run_alone

    async def differ(*args: Any, **options: Any) -> Record:
        record = await alone(*args, **options)
        record.text = record.text[:-1] + "~"
        return record

    assert load.main([*soak_flags(url, tmp_path / "equal.json"), *flags]) == 0
    monkeypatch.setattr(soak, "run_alone", differ)
    out = tmp_path / "soak.json"
    assert load.main([*soak_flags(url, out), *flags]) == status
    result = json.loads(out.read_text())["soak"]
    assert result["agreement"]["equal"] == 0 < result["agreement"]["sample"]
    assert result["failures"] == [f"{result['agreement']['sample']} answers differ from their requests' alone"] * status


@pytest.mark.slow
def test_a_soak_of_a_server_sends_it_malformed_requests(url: str, tmp_path: Path):
    out = tmp_path / "soak.json"
    flags = ["--url", url, "--vocab", str(VOCAB), "--workloads", "base", "--longest", "16", "--rates", "20"]
    assert load.main([*flags, "--soak-minutes", "0.05", "--soak-vanish", "0.3", "--out", str(out)]) == 0
    result = json.loads(out.read_text())["soak"]
    assert result["failures"] == []
    assert result["malformed_sent"] >= 5
    # A server that cannot load adapters is told of.
    flags += ["--churn-adapter", str(tmp_path), "--out", str(out)]
    assert load.main([*flags, "--soak-minutes", "0.02"]) == 1
    assert any("/v1/load_lora_adapter gave HTTP" in text for text in json.loads(out.read_text())["soak"]["failures"])
