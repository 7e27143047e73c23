"""The benchmark of the search: a tiny model's populations are timed, and the losses do not depend on the batch."""

import json
from pathlib import Path

import pytest

from serving.bench.search import main


@pytest.mark.slow
def test_every_number_of_mixes_at_once_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    sizes = ["--adapters", "3", "--rank", "4", "--slot-rank", "2", "--examples", "2", "--prompt-len", "6"]
    main(["--shape", "tiny", *sizes, "--population", "4", "--batches", "4,1", "--repeats", "2", "--out", str(out)])
    result = json.loads(out.read_text())
    assert [(row["batch_mixes"], row["batch_rows"]) for row in result["rows"]] == [(4, 8), (1, 2)]
    first, last = result["rows"]
    assert first["mean_loss"] == pytest.approx(last["mean_loss"], rel=1e-4)
    assert result["speed_up"] == last["ms_per_mix_median"] / first["ms_per_mix_median"]
    assert "times as fast as the last" in capsys.readouterr().out


def test_more_mixes_at_once_than_a_population_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--shape", "tiny", "--population", "4", "--batches", "5"])
    assert "--batches has 5, more than --population 4" in capsys.readouterr().err
