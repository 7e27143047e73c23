"""Metrics read back through Prometheus' own parser."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.adapter_tally import AdapterTally
from serving.metrics import OTHER_ADAPTERS, Metrics
from serving.plan import StepPlan
from serving.request import FinishReason, Request
from tests.support.host import make_request


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Values by name and value of the only label ("" if there is none); buckets left out."""
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def tally_of(*requests: Request) -> AdapterTally:
    tally = AdapterTally()
    for request in requests:
        tally.add(request)
    return tally


def test_m1_each_adapter_counts_where_its_requests_are_and_nowhere_else():
    metrics = Metrics()
    running = [make_request("r1", "a"), make_request("r2", "a", "c"), make_request("r3")]
    running_tally, waiting_tally = tally_of(*running), tally_of(make_request("r4", "b"))
    metrics.watch_queues(running_tally, waiting_tally)
    values = samples(metrics)
    assert values["dymerge_requests_running", ""] == 3
    assert values["dymerge_requests_waiting", ""] == 1
    by_adapter = {key: value for key, value in values.items() if key[0].startswith("dymerge_adapter_requests_")}
    assert by_adapter == {
        ("dymerge_adapter_requests_running", "a"): 2,
        ("dymerge_adapter_requests_running", "c"): 1,
        ("dymerge_adapter_requests_waiting", "b"): 1,
    }
    for request in running:
        running_tally.remove(request)
    waiting_tally.remove(make_request("r4", "b"))
    assert not [key for key in samples(metrics) if key[0].startswith("dymerge_adapter_requests_")]


def test_m2_requests_are_counted_under_their_adapters():
    metrics = Metrics()
    metrics.observe_arrival(make_request("r1", "a", num_prompt=7))
    metrics.observe_arrival(make_request("r2", "a", "b", num_prompt=5))
    values = samples(metrics)
    assert values["dymerge_adapter_requests_total", "a"] == 2
    assert values["dymerge_adapter_requests_total", "b"] == 1
    assert values["dymerge_prompt_tokens_total", ""] == 12


@pytest.mark.parametrize("name", ["a,b", 'say "hi"', "back\\slash", "two\nlines", "ünï", "{x=1}"])
def test_m4_any_name_makes_a_valid_exposition(name: str):
    metrics = Metrics()
    metrics.observe_arrival(make_request("r", name))
    metrics.watch_queues(tally_of(make_request("r", name)), tally_of())
    values = samples(metrics)
    assert values["dymerge_adapter_requests_total", name] == 1
    assert values["dymerge_adapter_requests_running", name] == 1


def test_adapters_beyond_the_limit_share_one_label():
    metrics = Metrics(max_adapter_labels=2)
    requests = [make_request(f"r{i}", name) for i, name in enumerate(["a", "a", "b", "c", "d", "a"])]
    for request in requests:
        metrics.observe_arrival(request)
    metrics.watch_queues(tally_of(*requests), tally_of(*requests))
    values = samples(metrics)
    for name in ("total", "running", "waiting"):
        by_label = {label: value for (key, label), value in values.items() if key == f"dymerge_adapter_requests_{name}"}
        assert by_label == {"a": 3, "b": 1, OTHER_ADAPTERS: 2}


def test_m4_an_adapter_named_as_the_others_are_counts_among_them_and_leaves_them_alone():
    metrics = Metrics(max_adapter_labels=2)
    names = ["a", "a", OTHER_ADAPTERS, OTHER_ADAPTERS, "b", "c"]
    requests = [make_request(f"r{i}", name) for i, name in enumerate(names)]
    for request in requests:
        metrics.observe_arrival(request)
    metrics.forget_adapter(OTHER_ADAPTERS)
    metrics.watch_queues(tally_of(*requests), tally_of())
    assert metrics.render().count(b'dymerge_adapter_requests_running{adapter="(other)"}') == 1
    values = samples(metrics)
    for name in ("total", "running"):
        assert values[f"dymerge_adapter_requests_{name}", OTHER_ADAPTERS] == 3


def test_ttft_and_tpot_are_measured_from_arrival_and_from_the_first_token():
    metrics = Metrics()
    request = make_request("r", arrival_s=10.0, max_tokens=5)
    metrics.observe_ttft(request, now_s=10.25)
    request.first_token_s = 10.25
    request.output_token_ids += [1, 2, 3, 4, 5]
    request.finish_reason = FinishReason.LENGTH
    metrics.observe_finish(request, now_s=11.25)
    values = samples(metrics)
    assert values["dymerge_time_to_first_token_seconds_sum", ""] == 0.25
    assert values["dymerge_time_per_output_token_seconds_sum", ""] == 0.25
    assert values["dymerge_time_per_output_token_seconds_count", ""] == 1
    assert values["dymerge_requests_finished_total", "length"] == 1


def test_a_request_of_one_token_or_none_has_no_tpot():
    metrics = Metrics()
    request = make_request("r")
    request.finish_reason = FinishReason.ABORT
    metrics.observe_finish(request, now_s=1.0)
    request.first_token_s = 0.5
    request.output_token_ids.append(1)
    metrics.observe_finish(request, now_s=1.0)
    values = samples(metrics)
    assert values["dymerge_time_per_output_token_seconds_count", ""] == 0
    assert values["dymerge_requests_finished_total", "abort"] == 2


def test_steps_tokens_and_resources_are_counted():
    metrics = Metrics()
    metrics.observe_step(StepPlan(preempted=(make_request("r"),)), duration_s=0.02)
    metrics.observe_loads(2)
    metrics.observe_tokens(3)
    metrics.set_resources(num_resident=2, num_loading=1, num_free_blocks=30)
    values = samples(metrics)
    assert math.isclose(values["dymerge_step_duration_seconds_sum", ""], 0.02)
    assert values["dymerge_adapter_loads_total", ""] == 2
    assert values["dymerge_preemptions_total", ""] == 1
    assert values["dymerge_generated_tokens_total", ""] == 3
    assert values["dymerge_adapters_resident", ""] == 2
    assert values["dymerge_adapters_loading", ""] == 1
    assert values["dymerge_kv_blocks_free", ""] == 30


def test_a_replaced_adapter_counts_under_its_name_beside_the_new_one():
    metrics = Metrics()
    requests = [make_request("r1", "sql@v2@0123"), make_request("r2", "sql@v2@4567")]
    for request in requests:
        metrics.observe_arrival(request)
    metrics.watch_queues(tally_of(*requests), tally_of())
    values = samples(metrics)
    assert values["dymerge_adapter_requests_total", "sql@v2"] == 2
    assert values["dymerge_adapter_requests_running", "sql@v2"] == 2


def test_tiers_and_loads_are_counted():
    metrics = Metrics()
    for tier in ("slots", "host", "host"):
        metrics.observe_lookup(tier)
    metrics.observe_reads(3)
    metrics.observe_load_failure()
    metrics.set_adapter_bytes(host=100, host_limit=1000, staged=50)
    values = samples(metrics)
    assert values["dymerge_adapter_lookups_total", "slots"] == 1
    assert values["dymerge_adapter_lookups_total", "host"] == 2
    assert values["dymerge_adapter_reads_total", ""] == 3
    assert values["dymerge_adapter_load_failures_total", ""] == 1
    assert values["dymerge_adapter_host_bytes", ""] == 100
    assert values["dymerge_adapter_host_limit_bytes", ""] == 1000
    assert values["dymerge_adapter_staged_bytes", ""] == 50


def test_two_engines_in_one_process_count_apart():
    first, second = Metrics(), Metrics()
    first.observe_tokens(1)
    assert samples(second)["dymerge_generated_tokens_total", ""] == 0


def test_m1_the_series_of_an_unloaded_adapter_ends_and_leaves_its_label_to_another():
    metrics = Metrics(max_adapter_labels=2)
    for i in range(50):  # loaded and unloaded under a new name each time
        metrics.observe_arrival(make_request("r", f"x{i}@0123456789abcdef", "kept"))
        assert samples(metrics)["dymerge_adapter_requests_total", f"x{i}"] == 1
        metrics.forget_adapter(f"x{i}")
    metrics.forget_adapter("never there")
    values = samples(metrics)
    assert [label for name, label in values if name == "dymerge_adapter_requests_total"] == ["kept"]


def test_refusals_are_counted_by_reason():
    metrics = Metrics()
    metrics.observe_refused("queue_full", 3)
    metrics.observe_refused("lora_load_busy")
    values = samples(metrics)
    assert values["dymerge_requests_refused_total", "queue_full"] == 3
    assert values["dymerge_requests_refused_total", "lora_load_busy"] == 1
