"""The decode benchmark runs, and says what it is to say."""

import json
import sys
from pathlib import Path

import pytest

from serving.bench import decode


@pytest.mark.slow
def test_the_decode_benchmark_reports_every_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    flags = ["--shape", "tiny", "--batches", "1,2", "--prompt-len", "8", "--output-len", "16", "--dtype", "float32"]
    flags += ["--prefill", "2x24", "--max-num-batched-tokens", "64"]
    monkeypatch.setattr(sys, "argv", ["decode", *flags, "--out", str(out)])
    decode.main()
    result = json.loads(out.read_text())
    names = [(row["workload"], row["batch"], row["active_adapters"]) for row in result["rows"]]
    assert names == [
        ("base", 1, 0),
        ("one adapter for all", 1, 1),
        ("3 each", 1, 3),
        ("base", 2, 0),
        ("one adapter for all", 2, 1),
        ("1 each, 2 distinct", 2, 2),
        ("3 each, 6 distinct", 2, 6),
    ]
    prefills = [(row["workload"], row["active_adapters"]) for row in result["prefill"]]
    assert prefills == [("prefill, base", 0), ("prefill, 3 each", 6)]
    assert all(row["tokens_repeat"] and row["tokens_per_s"] > 0 for row in result["prefill"])
    assert all(row["tokens_repeat"] and row["tpot_ms_median"] > 0 for row in result["rows"])
    assert result["logits_error"]["max_abs_difference"] < 1e-4 < result["logits_error"]["max_change_by_adapters"]
    header, *rows = capsys.readouterr().out.splitlines()[-10:-2]
    assert all(len(row.rsplit(None, 1)[0]) == len(header.removesuffix("same twice").rstrip()) for row in rows)
