"""Figures and their tables hold what the result files say."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from serving.bench import figures
from serving.bench.records import PERCENTILES
from serving.bench.sweep import make_parser, make_points


def sweep_result() -> dict[str, Any]:
    """A result of every point of a quick sweep, the i-th with i tokens/s."""
    points = make_points(make_parser().parse_args(["--quick", "--dtype", "bfloat16"]))
    names = ("ttft_ms", "tpot_ms", "queueing_ms", "e2e_s")
    measured = {f"{name}_p{p}": float(p) for name in names for p in PERCENTILES}
    measured |= {"adapter_loads": 7, "hit_rate": 0.5, "completed": 9, "requests": 10, "is_cut": True}
    measured |= {"ttft_ms": [1.0, 2.0], "tpot_ms": [3.0, 4.0]}
    rows = [p.settings() | measured | {"output_tokens_per_s": float(i)} for i, p in enumerate(points)]
    return {"device": "a device", "commit": "abc1234", "rows": rows}


def kernel_result() -> dict[str, Any]:
    layers = [
        {
            "batch": batch,
            "rank": rank,
            "active_adapters": 3,
            "median_us": {"maf": 1.0 * batch, "naive": 5.0, "site_fused": 9.0, "site_plain": 7.0},
        }
        for batch in (1, 32)
        for rank in (8, 64)
    ]
    del layers[0]["median_us"]["naive"]  # refused there
    del layers[0]["median_us"]["site_fused"]
    return {"device": "a device", "layers": layers}


@pytest.fixture
def results(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "sweep.json", tmp_path / "kernels.json"]
    for path, result in zip(paths, (sweep_result(), kernel_result()), strict=True):
        path.write_text(json.dumps(result))
    return paths


def test_every_figure_of_the_paper_has_its_numbers(results: list[Path]):
    found = {figure.name: figure for figure in figures.read_figures(results)}
    assert list(found) == ["table-1", *(f"figure-{n}" for n in range(9, 17))]
    for figure in found.values():
        assert figure.table
        assert "a device" in figure.source
        assert all(len(row) == len(figure.columns) for row in figure.table)
        assert all(panel.series and all(len(s.x) == len(s.y) > 0 for s in panel.series) for panel in figure.panels)
    (slots, *_), *_ = [panel.series for panel in found["figure-10"].panels]
    assert list(slots.x) == [32, 64, 96]
    assert any(s.is_paper and list(s.y) == [302.2, 255.1, 246.7] for s in found["figure-10"].panels[0].series)
    added = found["figure-14"].panels[0].series[0]
    assert ("ours" in added.label, list(added.x), list(added.y)) == (True, [32], [2.0])
    text = figures.markdown(found["figure-9"])
    assert "1034.9" in text
    assert "commit abc1234" in text
    assert "| single | ours | 8.0 | 0 |" in text
    assert "9/10 cut off |" in text


@pytest.mark.slow
def test_figures_are_drawn_as_png(results: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "figures"
    assert figures.main(["--from", *map(str, results), "--out", str(out)]) == 0
    pictures = sorted(path.name for path in out.glob("*.png"))
    assert len(pictures) == 9
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert all(f"]({name})" in (out / "figures.md").read_text() for name in pictures)
    assert "figure-9.png: Throughput" in capsys.readouterr().out


def test_figures_without_points_or_matplotlib_say_so(
    results: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    empty = tmp_path / "empty.json"
    for text, message in [('{"rows": []}', "no point for 9 in"), ("[]", "neither rows nor layers"), ("{", "cannot be")]:
        empty.write_text(text)
        assert figures.main(["--from", str(empty), "--figure", "9", "--out", str(tmp_path)]) == 1
        assert message in capsys.readouterr().err
    real_import = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    assert figures.main(["--from", str(results[0]), "--out", str(tmp_path)]) == 1
    assert 'pip install "dymerge-jax[bench]"' in capsys.readouterr().err
