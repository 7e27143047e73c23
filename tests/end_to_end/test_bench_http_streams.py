"""The benchmark of HTTP streams, made small: both runs, and its result as a file."""

import json
from pathlib import Path

import pytest

from serving.bench.http_streams import main


@pytest.mark.slow
def test_streams_are_measured_beside_the_engine_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    flags = ["--streams", "4", "--tokens", "40", "--tokens-per-s", "100", "--host-ms", "1", "--output", str(output)]
    assert main(flags) == 0
    assert "with streams" in capsys.readouterr().out
    result = json.loads(output.read_text())
    assert result["client"]["events"] == 4 * 40  # every token came, in an event of its own
    assert result["client"]["itl_ms"]["p50"] == pytest.approx(10, abs=5)
    assert result["quiet"]["step_ms"]["p50"] == pytest.approx(10, abs=5)
    assert result["streaming"]["host_ms"]["p50"] >= 1
