"""The benchmark of gated decoding runs, and its engines agree."""

import json
from pathlib import Path

import pytest

from serving.bench import gated


@pytest.mark.slow
def test_every_contestant_is_timed_and_gives_the_same_tokens(tmp_path: Path) -> None:
    out = tmp_path / "gated.json"
    gated.main(["--shape", "tiny", "--batch", "2", "--prompt-len", "8", "--output-len", "8", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["workload"] for row in rows] == [c.name for c in gated.contestants(2)]
    assert all(row["tpot_ms_median"] > 0 and row["tokens_repeat"] for row in rows)
    shares = [row.get("first_tokens_like_ours") for row in rows]
    # In float32; the first three have none to be like. "xla" is ours on a CPU.
    assert shares == [None] * 3 + [1] * (len(rows) - 3)


@pytest.mark.slow
def test_a_baseline_is_compared_with_nothing_but_ours(tmp_path: Path) -> None:
    out = tmp_path / "gated.json"
    flags = ["--shape", "tiny", "--batch", "2", "--prompt-len", "8", "--output-len", "2", "--out", str(out)]
    gated.main([*flags, "--workload", "layer-bmm", "layer-naive"])
    rows = json.loads(out.read_text())["rows"]
    assert [row["workload"] for row in rows] == ["layer-bmm", "layer-naive"]
    assert not any("first_tokens_like_ours" in row for row in rows)


def test_too_few_slots_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gated.main(["--slots", "4"])
    assert "--slots is 4; expected at least 8" in capsys.readouterr().err
