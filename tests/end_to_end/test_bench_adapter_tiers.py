"""The benchmark of the adapter tiers runs, and each case is what it says."""

import json
import sys
from pathlib import Path

import pytest

from serving.bench import adapter_tiers


@pytest.mark.slow
def test_the_adapter_tiers_benchmark_reports_every_tier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)  # for the process of a benchmark only
    out = tmp_path / "result.json"
    sizes = {"rows": 4, "held": 2, "stream": 5, "slots": 6, "steps": 20, "repeats": 2, "prompt-len": 8}
    flags = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    adapter_tiers.main([*flags, "--folder", str(tmp_path), "--out", str(out)])
    result = json.loads(out.read_text())
    assert [(row["adapters"], row["tier"]) for row in result["ttft"]] == [
        (0, "base"),
        *((size, tier) for size in (1, 3) for tier in ("slots", "host", "disk")),
    ]
    assert all(row["ttft"]["ms_p50"] > 0 for row in result["ttft"])
    quiet, in_slots, from_host, from_disk = result["jitter"]
    assert (quiet["decode_steps"]["count"], quiet["mixed_steps"], quiet["ttft"]) == (20, None, None)
    tiers = [row["arrivals_by_tier"] for row in (in_slots, from_host, from_disk)]
    assert tiers == [{"slots": 5}, {"host": 5}, {"disk": 5}]
    assert [row["arrivals"] for row in (in_slots, from_host, from_disk)] == [5, 5, 5]
    assert (in_slots["reads"], from_host["reads"], from_disk["reads"]) == (0, 0, 5)
    assert "p99 / that of 'quiet'" in capsys.readouterr().out
    assert not list(tmp_path.glob("*/lora-0")), "the adapters are left behind"
