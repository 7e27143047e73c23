"""The simulation runs the real scheduler, and shows what the policies are for."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from serving.bench import simulate
from serving.bench.simulate import CostModel, Setting

# More than the engine can take: requests wait, and slots are scarce.
BUSY = Setting(num_requests=100, rate=50.0, num_adapters=40, slots=8, max_num_seqs=8, longest=24)


def run(**changes: Any) -> dict[str, Any]:
    return simulate.simulate(dataclasses.replace(BUSY, **changes), CostModel())


@pytest.mark.slow
def test_all_policies_get_the_same_requests_and_finish_them():
    requests = simulate.make_requests(BUSY)
    wanted = sum(r.sampling.max_tokens for r in requests)
    for scheduler in simulate.SCHEDULERS:
        row = run(scheduler=scheduler)
        assert row["output_tokens_per_s"] == pytest.approx(wanted / row["simulated_s"])


@pytest.mark.slow
def test_lag_loads_fewer_adapters_than_fifo_and_its_bound_keeps_the_longest_wait_short():
    fifo, endless, bounded = run(scheduler="fifo"), run(theta_s=math.inf), run(theta_s=0.3)
    assert endless["adapters_loaded"] < bounded["adapters_loaded"] < fifo["adapters_loaded"]
    assert endless["wait_s_p50"] < bounded["wait_s_p50"] < fifo["wait_s_p50"]
    assert bounded["wait_s_max"] < fifo["wait_s_max"] < endless["wait_s_max"]


def test_lag_that_waits_for_nobody_is_fifo():
    lag, fifo = run(num_requests=40, theta_s=0.0), run(num_requests=40, scheduler="fifo")
    assert all(lag[name] == fifo[name] for name in ("wait_s_max", "wait_s_p50", "adapters_loaded", "steps"))


def test_fairness_is_one_if_all_wait_alike():
    assert simulate.fairness([2.0, 2.0, 2.0]) == {"jain": 1.0, "max_over_median": 1.0}
    assert simulate.fairness([0.0, 0.0]) == {"jain": 1.0, "max_over_median": 1.0}
    uneven = simulate.fairness([1.0, 1.0, 1.0, 7.0])
    assert uneven == {"jain": pytest.approx(100 / 208), "max_over_median": 7.0}


def test_the_simulation_reports_every_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "simulation.json"
    flags = ["--requests", "10", "--longest", "8", "--zipf", "1", "4", "--theta", "0", "0.5", "--out", str(out)]
    assert simulate.main(flags) == 0
    rows = json.loads(out.read_text())["simulations"]
    assert [(r["zipf_s"], r["scheduler"]) for r in rows] == [
        (s, p) for s in (1.0, 4.0) for p in ("lag", "lag", "fifo", "random", "least-first")
    ]
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)
    with pytest.raises(SystemExit):
        simulate.main(["--mix-size", "100"])
    assert "--mix-size is 100, expected 1 to 64" in capsys.readouterr().err
