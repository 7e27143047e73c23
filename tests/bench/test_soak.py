"""A soak notices what must not happen, and passes otherwise."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from serving.bench import load, soak
from serving.bench.points import Point
from serving.bench.workloads import WorkloadConfig
from tests.support.load_client import FakeServer

POINT = Point(engine=None, workload="skewed", rate=100.0, duration_s=1.0, config=WorkloadConfig(longest=8))


def run(server: FakeServer, *, report: soak.Report = lambda partial: None, **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"sample_s": 0.05, "are_outputs_exact": True, "num_checked": 64}
    settings = soak.SoakOptions(minutes=0.2 / 60, **defaults | options)
    return asyncio.run(soak.soak(server, POINT, settings, engine=None, report=report))


def test_a_soak_of_a_good_server_fails_at_nothing():
    server = FakeServer()
    result = run(server, vanish_share=0.5)
    assert result["failures"] == []
    assert result["agreement"]["equal"] == result["agreement"]["sample"] == result["completed"] > 10


@pytest.mark.slow
def test_clients_that_vanish_leave_before_their_answers_end():
    server = FakeServer(token_s=0.6)
    result = run(server, vanish_share=1.0)
    assert result["cancelled"] == len(server.vanished) > 10
    assert result["completed"] + result["cancelled"] == result["requests"]


@pytest.mark.slow
def test_a_soak_notices_answers_that_depend_on_the_load():
    result = run(FakeServer(token_s=0.004, depends_on_load=True))
    assert any("answers differ from their requests' alone" in text for text in result["failures"])
    assert not load.is_right({"soak": result})


def test_a_soak_notices_requests_that_fail():
    assert any(
        "requests failed, the first with: no" in text for text in run(FakeServer(failing=frozenset({2})))["failures"]
    )


def test_a_soak_notices_blocks_that_do_not_come_back():
    result = run(FakeServer(blocks_lost=2))
    assert result["failures"] == ["96 KV blocks are free in the idle server, but 98 were at the start"]


def test_answers_that_depend_on_the_load_are_told_where_they_need_not_be_exact():
    result = run(FakeServer(token_s=0.004, depends_on_load=True), are_outputs_exact=False)
    assert result["agreement"]["equal"] < result["agreement"]["sample"]
    assert result["failures"] == []


def test_all_answers_to_a_bounded_number_of_different_requests_are_compared():
    result = run(FakeServer(), num_checked=3, vanish_share=0.0)
    same = result["agreement"]
    assert (same["checked_templates"], same["templates"]) == (3, result["requests"])
    assert same["sample"] == 3  # each came once: there were fewer requests than templates


def test_a_soak_that_must_be_exact_and_compares_nothing_fails():
    (failure,) = run(FakeServer(), num_checked=0)["failures"]
    assert failure.startswith("no answer was compared with its request's alone")
    assert run(FakeServer(), num_checked=0, are_outputs_exact=False)["failures"] == []


def test_what_is_known_so_far_is_reported_all_the_time():
    partials: list[dict[str, Any]] = []
    result = run(FakeServer(failing=frozenset({2})), report=partials.append, report_s=0.05, vanish_share=0.0)
    assert len(partials) >= 3
    assert all(partial["partial"] and partial["requests"] == result["requests"] for partial in partials)
    done = [partial["completed"] for partial in partials]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, result["completed"])
    assert partials[-1]["failed"] == 1
    assert partials[-1]["failures"] == result["failures"]
    assert partials[-1]["ttft_ms_p99"] == result["ttft_ms_p99"] > 0
    assert "partial" not in result


def test_a_soak_notices_a_server_that_ends(monkeypatch: pytest.MonkeyPatch):
    looks = iter([1 << 30, 1 << 30])

    def resident_bytes(pid: int | str) -> int:
        if (found := next(looks, None)) is None:
            raise ValueError(f"process {pid} has ended")
        return found

    monkeypatch.setattr(soak, "resident_bytes", resident_bytes)
    result = run(FakeServer(), server_pid=7, sample_s=0.01)
    assert result["failures"] == ["process 7 has ended"]
    assert result["completed"] > 10


def test_a_soak_of_no_process_is_refused_at_the_start():
    server = FakeServer()
    with pytest.raises(ValueError, match="process 4194999 cannot be read"):
        run(server, server_pid=4194999)
    assert server.num_sent == 0


@pytest.mark.parametrize(("growth", "is_flat"), [(0.0, True), (0.5e6, True), (3e6, False)])
def test_memory_that_grows_all_the_time_is_noticed(growth: float, is_flat: bool):
    memory = [{"s": float(i), "rss_bytes": 1e9 + growth * i} for i in range(100)]
    assert (soak.grows(memory, "rss_bytes") is None) is is_flat
    assert soak.grows(memory, "device_bytes") is None


def test_memory_that_fills_at_the_start_is_flat():
    memory = [{"s": float(i), "rss_bytes": 1e9 + min(i, 20) * 5e7} for i in range(100)]
    assert soak.grows(memory, "rss_bytes") is None


def test_the_memory_of_a_process_that_is_not_there_is_no_number():
    assert soak.resident_bytes("self") > 1e6
    with pytest.raises(ValueError, match="process 4194999 cannot be read"):
        soak.resident_bytes(4194999)


@pytest.mark.slow
def test_a_soak_of_the_engine_leaves_nothing_behind(tmp_path: Path):
    out = tmp_path / "soak.json"
    sizes = ["--shape", "tiny", "--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--longest", "16"]
    flags = ["--adapters", "12", "--slots", "6", "--workloads", "distinct", "--rates", "40", "--soak-vanish", "0.3"]
    assert load.main([*sizes, *flags, "--soak-minutes", "0.05", "--out", str(out)]) == 0
    result = json.loads(out.read_text())["soak"]
    assert result["failures"] == []
    assert result["adapter_loads"] > 20
    assert result["agreement"]["equal"] == result["agreement"]["sample"] > 20
