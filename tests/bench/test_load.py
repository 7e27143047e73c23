"""The open loop, on a server that is made up; and the whole command on a tiny engine."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from serving.bench import __main__ as front
from serving.bench import load, sweep
from serving.bench.bench_engine import EngineSpec, merge_adapters
from serving.bench.clients import replay
from serving.bench.decode import random_adapters
from serving.bench.find_rate import highest_rate
from serving.bench.points import Point, RunOptions, run_point, ttft_p99_s
from serving.bench.workloads import TraceRequest, WorkloadConfig
from tests.support.load_client import FakeServer

TINY = ["--shape", "tiny", "--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--longest", "8"]


def trace(count: int, *, gap_s: float, output_len: int = 4) -> list[TraceRequest]:
    return [TraceRequest(i * gap_s, 4, output_len) for i in range(count)]


def point(**changes: Any) -> Point:
    settings: dict[str, Any] = {"workload": "base", "rate": 40.0, "duration_s": 0.2}
    return Point(engine=None, config=WorkloadConfig(longest=8), **(settings | changes))


def test_an_open_loop_does_not_wait_for_answers():
    server = FakeServer(token_s=0.02)
    records, is_cut = asyncio.run(replay(server, trace(5, gap_s=0.001), drain_s=5))
    assert server.most_running == 5
    assert not is_cut
    assert all(r.is_done and r.num_tokens == 4 and r.ttft_s is not None and r.ttft_s >= 0.02 for r in records)


def test_requests_that_do_not_end_are_cut_off_and_said_to_be():
    server = FakeServer(stuck=frozenset({1}))
    row = asyncio.run(run_point(server, point(seed=1), RunOptions(drain_s=0.3)))
    assert row["is_cut"]
    assert row["completed"] == row["requests"] - 1
    assert server.vanished == [1]
    assert ttft_p99_s(row) == float("inf")


def test_a_refused_request_is_counted_and_shown():
    row = asyncio.run(run_point(FakeServer(failing=frozenset({0})), point(), RunOptions()))
    assert row["failed"] == 1
    assert row["errors"] == ["no"]
    assert ttft_p99_s(row) == float("inf")


@pytest.mark.parametrize("depends_on_load", [False, True])
def test_a_sample_is_run_again_alone_and_compared(depends_on_load: bool):
    server = FakeServer(token_s=0.008, depends_on_load=depends_on_load)
    row = asyncio.run(run_point(server, point(rate=60.0), RunOptions(num_checked=4)))
    assert row["agreement"]["sample"] == 4
    assert (row["agreement"]["equal"] == 4) is not depends_on_load
    assert load.is_right({"rows": [row | {"dtype": "float32"}]}) is not depends_on_load
    assert load.is_right({"rows": [row | {"dtype": "bfloat16"}]})


@pytest.mark.parametrize("limit", [1.0, 13.0, 300.0])
def test_the_highest_rate_is_found_from_either_side(limit: float):
    tried = []

    async def is_sustained(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    found = asyncio.run(highest_rate(is_sustained, start=16.0, precision=0.05))
    assert found is not None
    assert limit / 1.06 <= found <= limit
    assert len(tried) <= 12


def test_no_rate_is_found_where_none_holds():
    async def never(rate: float) -> bool:
        return False

    assert asyncio.run(highest_rate(never, start=16.0, precision=0.05, most_runs=4)) is None


def test_a_premerged_mix_does_what_its_adapters_do_together(rng):
    config = EngineSpec(shape="tiny", dtype="float32").config
    adapters = random_adapters(config, 2, rank=4)
    merged = merge_adapters([(adapters["lora-0"], 0.7), (adapters["lora-1"], -0.2)], name="mix")
    assert merged.rank == 8
    x = rng.standard_normal(config.hidden).astype("float32")

    def delta(weights, key):
        p = weights.projections[key]
        return p.scale * (x @ p.a.astype("float32").T) @ p.b.astype("float32").T

    for key in [(0, "q_proj"), (1, "up_proj")]:
        expected = 0.7 * delta(adapters["lora-0"], key) - 0.2 * delta(adapters["lora-1"], key)
        assert delta(merged, key) == pytest.approx(expected, rel=0.02, abs=0.02)  # A is rounded to bfloat16 once more


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workloads", "gated", "--baseline", "premerge"], "cannot run gated"),
        (["--baseline", "sgmv", "--max-num-seqs", "64"], "room for 32 mixes"),
        (["--adapters", "2"], "--mix-size is 3, expected 1 to 2"),
        (["--rates", "0"], "both must be above 0"),
        (["--find-rate", "--rate-precision", "0"], "expected a share above 0"),
        (["--soak-minutes", "1", "--slots", "8", "16"], "use one engine"),
        (["--rank", "16", "--baseline", "sgmv"], "mixes of at most 3 slots"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_anything_compiles(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert load.main([*TINY, "--adapters", "16", *flags]) == 1
    assert message in capsys.readouterr().err


def test_a_trace_that_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "skewed-16.json"
    for request, message in [
        ({"t": 0, "plen": 400, "olen": 400, "mix": []}, "raise --max-model-len"),
        ({"t": 0, "plen": 4, "olen": 4, "mix": [[70, 1.0]]}, "uses adapter 70; raise --adapters"),
    ]:
        path.write_text(json.dumps([request]))
        assert load.main([*TINY, "--trace", str(path)]) == 1
        assert message in capsys.readouterr().err


def test_every_figure_of_a_sweep_has_its_points():
    options = sweep.make_parser().parse_args(["--shape", "tiny", "--adapters", "16"])
    points = sweep.make_points(options)
    assert {name for p in points for name in p.figures} == set(sweep.FIGURES)
    for p in points:
        assert p.requests()
        assert p.engine is not None
        assert p.engine.num_adapters <= 32
    quick = sweep.make_points(sweep.make_parser().parse_args(["--shape", "tiny", "--adapters", "16", "--quick"]))
    assert {name for p in quick for name in p.figures} == set(sweep.FIGURES)
    assert len(quick) < len(points)
    slow = [p for p in quick if p.engine is not None and p.engine.baseline in ("sgmv", "naive", "bmm")]
    assert sorted((p.workload, p.rate) for p in slow) == [("distinct", 8.0)] * 3 + [("skewed", 8.0)] * 3


@pytest.mark.slow
def test_the_load_benchmark_measures_every_workload_and_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    flags = [*TINY, "--adapters", "12", "--slots", "12", "--rates", "30", "--duration", "0.5", "--out", str(out)]
    workloads = ["single", "distinct", "skewed", "sparse"]
    baselines = ["none", "premerge", "sgmv", "naive", "bmm"]
    assert front.main([*flags, "--workloads", *workloads, "--baseline", *baselines]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["baseline"], r["workload"]) for r in rows] == [
        (baseline, workload) for baseline in baselines for workload in workloads
    ]
    assert all(row["completed"] == row["requests"] > 5 and not row["is_cut"] for row in rows)
    assert all(row["agreement"]["equal"] == row["agreement"]["sample"] > 0 for row in rows)
    assert all(row["steps"] > 0 and row["queueing_ms_p50"] > 0 and row["ttft_ms_p50"] > 0 for row in rows)
    assert next(r for r in rows if r["baseline"] == "premerge" and r["workload"] == "distinct")["adapter_loads"] > 5
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith(tuple(workloads))]) == len(rows)


@pytest.mark.slow
def test_the_load_benchmark_replays_a_trace_on_a_gated_set_and_finds_a_rate(tmp_path: Path) -> None:
    path, out = tmp_path / "gated-8.json", tmp_path / "result.json"
    requests = [{"t": i / 8, "plen": 4, "olen": 4, "mix": [], "gated_set": "gated"} for i in range(4)]
    path.write_text(json.dumps(requests))
    flags = [*TINY, "--adapters", "8", "--slots", "8", "--cold", "--out", str(out)]
    assert front.main(["load", *flags, "--workloads", "gated", "--trace", str(path)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["workload"], row["completed"], row["adapter_loads"]) == ("gated", 4, 8)
    find = ["--find-rate", "--workloads", "gated", "--rates", "20", "--duration", "0.2", "--ttft-limit", "1e-9"]
    assert front.main([*flags, *find, "--rate-precision", "0.1"]) == 0
    assert json.loads(out.read_text())["highest_rates"] == {"gated": None}
