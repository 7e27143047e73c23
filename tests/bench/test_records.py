"""What the load benchmark computes from what clients saw."""

import json

import pytest

from serving.bench.records import Record, ServerCounts, agreement, compare, json_text, summarise


def record(index: int, arrival_s: float, times_s: list[float], *, is_done: bool = True) -> Record:
    return Record(index, arrival_s, 10, output_times_s=times_s, num_tokens=len(times_s), is_done=is_done)


def test_the_summary_counts_as_the_peers_do():
    records = [
        record(0, 0.0, [0.1, 0.2, 0.4]),
        record(1, 1.0, [1.3, 1.4]),
        record(2, 1.5, [1.9], is_done=False),  # cut off: its token and its TTFT count, its TPOT does not
        record(3, 1.6, [], is_done=False),
    ]
    result = summarise(records, ServerCounts(), wall_s=2.0)
    assert (result["requests"], result["completed"]) == (4, 2)
    assert result["output_tokens_per_s"] == pytest.approx(6 / 2)
    assert result["ttft_ms_p50"] == pytest.approx(300)
    assert result["tpot_ms_p50"] == pytest.approx((150 + 100) / 2)
    assert result["itl_ms_p50"] == pytest.approx(100)
    assert result["e2e_s_p50"] == pytest.approx(0.4)
    assert result["queueing_ms_p50"] is None
    assert result["hit_rate"] is None


def test_server_counts_of_a_run_are_those_since_its_start():
    before = ServerCounts(steps=10, step_rows=20, adapter_loads=3, adapter_uses=30, queueing_s=(1.0,))
    after = ServerCounts(steps=15, step_rows=40, adapter_loads=4, adapter_uses=40, queueing_s=(1.0, 2.0))
    counts = after.since(before)
    assert counts == ServerCounts(
        steps=5, step_rows=20, step_tokens=None, adapter_loads=1, adapter_uses=10, queueing_s=(2.0,)
    )
    assert counts.hit_rate == pytest.approx(0.9)
    result = summarise([], counts, wall_s=0.0)
    assert result["mean_step_rows"] == 4
    assert result["queueing_ms_p99"] == pytest.approx(2000)
    assert result["ttft_ms_p50"] is None


@pytest.mark.parametrize(
    ("first", "second", "at"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [5], 0), ("abc", "abd", 2), ([], [], None)],
)
def test_outputs_differ_from_the_first_token_that_is_not_the_same(first, second, at: int | None):
    assert compare(first, second) == at


def test_the_agreement_names_the_requests_that_differ():
    result = agreement({4: ([1, 2, 3], [1, 2, 3]), 7: ([1, 2, 3], [1, 9, 3])})
    assert result == {"sample": 2, "equal": 1, "compared_tokens": 6, "first_differences": {"7": 1}}


def test_a_result_is_json_whatever_its_numbers_are():
    text = json_text({"theta_s": float("inf"), "rows": ({"p50": float("nan"), "n": 1.5},)})
    assert json.loads(text) == {"theta_s": "inf", "rows": [{"p50": "nan", "n": 1.5}]}
