"""Workloads are what their names say, and traces are what vLLM's bench reads and writes."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from serving.bench.workloads import (
    WORKLOADS,
    TraceRequest,
    WorkloadConfig,
    make_trace,
    prompt_token_ids,
    read_trace,
    write_trace,
)

CONFIG = WorkloadConfig()


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_same_arguments_give_the_same_requests(workload):
    first = make_trace(workload, rate=10, duration_s=5, config=CONFIG, seed=3)
    assert first == make_trace(workload, rate=10, duration_s=5, config=CONFIG, seed=3)
    assert first != make_trace(workload, rate=10, duration_s=5, config=CONFIG, seed=4)


def test_workloads_differ_by_their_mixes_only():
    def rest(request: TraceRequest) -> TraceRequest:
        return dataclasses.replace(request, mix=(), gated_set=None)

    traces = [make_trace(workload, rate=10, duration_s=5, config=CONFIG) for workload in WORKLOADS]
    assert all([rest(r) for r in trace] == [rest(r) for r in traces[0]] for trace in traces)


def test_arrivals_are_poisson():
    trace = make_trace("base", rate=50, duration_s=100, config=CONFIG)
    gaps_s = np.diff([r.arrival_s for r in trace])
    assert len(trace) == pytest.approx(5000, rel=0.05)
    assert gaps_s.min() >= 0
    assert gaps_s.std() == pytest.approx(gaps_s.mean(), rel=0.1)  # exponential


def test_lengths_are_those_of_the_peers():
    trace = make_trace("base", rate=100, duration_s=100, config=CONFIG)
    prompts, outputs = [r.prompt_len for r in trace], [r.output_len for r in trace]
    assert (np.mean(prompts), np.mean(outputs)) == pytest.approx((208, 195), rel=0.05)  # means after clipping
    assert min(prompts + outputs) >= 4
    assert max(prompts + outputs) <= 1024


def test_sharegpt_lengths_have_the_quantiles_of_the_data():
    config = WorkloadConfig(lengths="sharegpt")
    trace = make_trace("base", rate=100, duration_s=100, config=config)
    assert np.percentile([r.prompt_len for r in trace], [50, 90]) == pytest.approx([58, 381], rel=0.1)
    assert np.percentile([r.output_len for r in trace], [50, 90]) == pytest.approx([473, 868], rel=0.1)


def test_distinct_mixes_that_follow_each_other_share_no_adapter():
    trace = make_trace("distinct", rate=21, duration_s=1, config=CONFIG, seed=1)
    used = [adapter for request in trace[:21] for adapter, _ in request.mix]
    assert len(used) == len(set(used)) == 3 * len(trace[:21])
    assert len({r.mix for r in make_trace("distinct", rate=50, duration_s=10, config=CONFIG)}) > 450


@pytest.mark.parametrize(("exponent", "share"), [(0.0, 1 / 64), (1.5, 0.43), (8.0, 0.99)])
def test_the_most_popular_mix_of_skewed_follows_zipf(exponent: float, share: float):
    trace = make_trace("skewed", rate=100, duration_s=50, config=WorkloadConfig(zipf_s=exponent))
    mixes = [r.mix for r in trace]
    assert len(set(mixes)) <= 64
    assert all(len(mix) == 3 for mix in mixes)
    assert max(map(mixes.count, set(mixes))) / len(mixes) == pytest.approx(share, rel=0.15, abs=0.01)


def test_sparse_names_five_to_eight_adapters_and_uses_two():
    trace = make_trace("sparse", rate=100, duration_s=5, config=CONFIG)
    assert {len(r.mix) for r in trace} == {5, 6, 7, 8}
    assert all(len({adapter for adapter, _ in r.mix}) == len(r.mix) for r in trace)
    assert {sum(weight != 0 for _, weight in r.mix) for r in trace} == {2}


def test_gated_requests_name_their_set_and_single_ones_adapter_zero():
    assert {(r.gated_set, r.mix) for r in make_trace("gated", rate=10, duration_s=2, config=CONFIG)} == {("gated", ())}
    single = make_trace("single", rate=10, duration_s=2, config=CONFIG)
    assert {(r.gated_set, r.mix) for r in single} == {(None, ((0, 1.0),))}


def test_a_trace_of_the_peers_is_read_as_it_is(tmp_path: Path):
    path = tmp_path / "skewed-16.json"
    path.write_text('[{"t": 0.25, "plen": 7, "olen": 9, "mix": [[12, 0.4], [3, 0.6]]}, {"t": 0.5, "plen": 4, "olen": 4, "mix": []}]')  # fmt: skip  # noqa: E501
    assert read_trace(path) == [TraceRequest(0.25, 7, 9, ((12, 0.4), (3, 0.6))), TraceRequest(0.5, 4, 4)]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_trace_that_is_written_is_read_again(tmp_path: Path, workload):
    trace = make_trace(workload, rate=10, duration_s=2, config=CONFIG)
    write_trace(tmp_path / "trace.json", trace)
    assert read_trace(tmp_path / "trace.json") == trace
    if workload != "gated":
        assert set(json.loads((tmp_path / "trace.json").read_text())[0]) == {"t", "plen", "olen", "mix"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("{}", "holds no list of requests"),
        ("[]", "holds no list of requests"),
        ('[{"t": 0, "plen": 4, "mix": []}]', "request 0 is .*expected .*KeyError: 'olen'"),
        ('[{"t": 0, "plen": 4, "olen": 4, "mix": [[1]]}]', "request 0 is .*expected"),
        ('[{"t": 0, "plen": 0, "olen": 4, "mix": []}]', "plen and olen at least 1"),
        (
            '[{"t": 1, "plen": 4, "olen": 4, "mix": []}, {"t": 0, "plen": 4, "olen": 4, "mix": []}]',
            "request 1 arrives before the one ahead of it",
        ),
    ],
)
def test_a_wrong_trace_is_refused_by_name_and_request(tmp_path: Path, text: str, message: str):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(path)


def test_wrong_settings_are_refused_by_their_flags():
    with pytest.raises(ValueError, match="--mix-size is 9, expected 1 to 4"):
        WorkloadConfig(num_adapters=4, mix_size=9)
    with pytest.raises(ValueError, match="--zipf is -1"):
        WorkloadConfig(zipf_s=-1.0)
    with pytest.raises(ValueError, match="both must be above 0"):
        make_trace("base", rate=0, duration_s=1, config=CONFIG)
    with pytest.raises(ValueError, match="sparse names up to 8 adapters"):
        make_trace("sparse", rate=1, duration_s=1, config=WorkloadConfig(num_adapters=4, mix_size=2))


def test_a_prompt_depends_on_its_index_and_the_seed_alone():
    assert prompt_token_ids(3, 8, 100) == prompt_token_ids(3, 8, 100) != prompt_token_ids(4, 8, 100)
    assert prompt_token_ids(3, 4, 100) == prompt_token_ids(3, 8, 100)[:4]
    assert max(prompt_token_ids(3, 500, 100)) < 100
