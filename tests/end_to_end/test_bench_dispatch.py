"""The benchmark of the host's work runs, and its parts add up."""

import json
import sys
from pathlib import Path

import pytest

from serving.bench import dispatch


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [[], ["--real", "--temperature", "0.5"], ["--decode-steps", "4"]], ids=["empty", "real", "many"]
)
def test_the_parts_of_a_step_add_up_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    out = tmp_path / "result.json"
    sizes = ["--layers", "2", "--rows", "2", "--max-model-len", "256", "--steps", "20"]
    monkeypatch.setattr(sys, "argv", ["dispatch", *sizes, *flags, "--out", str(out)])
    dispatch.main()
    means = {name: us["mean"] for name, us in json.loads(out.read_text())["microseconds"].items()}
    assert list(means) == [*dispatch.PARTS, "total"]
    assert all(mean > 0 for name, mean in means.items() if name != "sample")
    assert sum(means.values()) == pytest.approx(2 * means["total"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("total ")
