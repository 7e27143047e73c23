"""Draws the paper's figures from result files: ours, and the paper's numbers where they are known.

    python -m serving.bench figures --from sweep.json maf_mvm.json --out figures/

Takes the JSON of `python -m serving.bench sweep`, whose points say which figures they are for, and of
`python -m pallas_kernels.maf_mvm.bench` (figures 14 and 16). Writes a PNG for each figure that there are points for,
and figures.md with a table of each.

The paper's numbers are from one L40 (864 GB/s) in bfloat16: compare ratios within a machine, not times across.
"""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]

_L40 = "the paper, one L40"


@dataclasses.dataclass(frozen=True)
class Series:
    """One line, or one group of bars.

    Attributes:
      label: of the legend.
      x, y: values; x may be words.
      is_paper: drawn dashed and grey.
    """

    label: str
    x: Sequence[float | str]
    y: Sequence[float]
    is_paper: bool = False


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
      title, x_label, y_label: with units.
      series: what is drawn.
      kind: "line" or "bar".
      is_log_x, is_log_y: of lines.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    kind: str = "line"
    is_log_x: bool = False
    is_log_y: bool = False


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of the paper, redrawn.

    Attributes:
      name: file name without its ending.
      title: what it shows.
      panels: side by side.
      columns, table: the numbers as text.
      note: what the paper says of it; empty if nothing is known.
      source: device and commit of the points.
    """

    name: str
    title: str
    panels: Sequence[Panel]
    columns: Sequence[str]
    table: Sequence[Sequence[str]]
    note: str
    source: str


def figure_9(rows: Sequence[Row], source: str) -> Figure:
    """Throughput by workload."""
    panels = []
    for workload in _distinct(rows, "workload"):
        found = [r for r in rows if r["workload"] == workload]
        series = [_line(_label(b), _where(found, baseline=b), "rate", "output_tokens_per_s") for b in _baselines(found)]
        panels.append(Panel(workload, "requests/s", "output tokens/s", series))
    return Figure(
        "figure-9", "Throughput", panels, *_table(rows, ("workload", "baseline", "rate")), source=source,
        note=f"{_L40}, 8B, Skewed: 1034.9 tokens/s against 941.2 of vLLM; 1.5B, Skewed: 1314.9 against 891 of S-LoRA; "
        "Single: about 1.3k against about 1.4k of vLLM; Gated: 4 times LoraRetriever and 15 times MoELoRA-PEFT.",
    )  # fmt: skip


def figure_10(rows: Sequence[Row], source: str) -> Figure:
    """Slots."""
    ours = [_line(f"ours, {p}", rows, "slots", f"ttft_ms_{p}") for p in ("p50", "p99")]
    e2e = [_line("ours, p50", rows, "slots", "e2e_s_p50", factor=1e3)]
    paper = Series(f"{_L40} (P50)", [32, 64, 96], [302.2, 255.1, 246.7], is_paper=True)
    panels = [
        Panel("time to first token", "adapter slots", "ms", [*ours, paper]),
        Panel("end to end", "adapter slots", "ms", e2e),
        Panel("adapter loads", "adapter slots", "loads", [_line("ours", rows, "slots", "adapter_loads")]),
    ]
    return Figure(
        "figure-10", "Adapter slots", panels, *_table(rows, ("slots", "num_adapters", "rate")), source=source,
        note=f"{_L40}: P50 302.2, 255.1 and 246.7 ms at 32, 64 and 96 slots of rank 8; gains flatten at 64.",
    )  # fmt: skip


def figure_11(rows: Sequence[Row], source: str) -> Figure:
    """Distributions of TTFT and TPOT at low rates."""
    panels = []
    for name, title in (("ttft_ms", "time to first token"), ("tpot_ms", "time per output token")):
        series = [
            Series(f"{_label(r['baseline'])}, {r['rate']:g}/s", r[name], _cumulative(len(r[name])))
            for r in rows
            if r[name]
        ]
        panels.append(Panel(title, f"{title}, ms", "share of requests", series, is_log_x=True))
    return Figure(
        "figure-11", "Latency at low rates", panels, *_table(rows, ("baseline", "rate")), source=source,
        note=f"{_L40}, 3 requests/s: median TTFT 0.25 s against 0.54 s of pre-merge.",
    )  # fmt: skip


def figure_12(rows: Sequence[Row], source: str) -> Figure:
    """Popularity."""
    by_count = {n: [r for r in rows if r["num_adapters"] == n] for n in _distinct(rows, "num_adapters")}
    panels = [
        Panel(
            title,
            "Zipf exponent",
            unit,
            [_line(f"{n} adapters", found, "zipf_s", key) for n, found in by_count.items()],
        )
        for title, unit, key in (
            ("throughput", "output tokens/s", "output_tokens_per_s"),
            ("time to first token, p50", "ms", "ttft_ms_p50"),
            ("adapter loads", "loads", "adapter_loads"),
        )
    ]
    return Figure(
        "figure-12", "Popularity of mixes", panels, *_table(rows, ("num_adapters", "zipf_s", "rate")), "", source
    )


def figure_13(rows: Sequence[Row], source: str) -> Figure:
    """LAG's bound."""
    panels = [
        Panel(f"time to first token, {p}", "θ, s", "ms", [_line("ours", rows, "theta_s", f"ttft_ms_{p}")])
        for p in ("p50", "p99")
    ]
    return Figure(
        "figure-13", "LAG's bound θ", panels, *_table(rows, ("theta_s", "slots", "rate")), source=source,
        note=f"{_L40}: P50 is best near θ = 0.7 s, P99 near 0.2 s.",
    )  # fmt: skip


def figure_15(rows: Sequence[Row], source: str) -> Figure:
    """Policies."""
    panels = [
        Panel(
            title, "requests/s", unit,
            [_bars(s, _where(rows, scheduler=s), "rate", key) for s in _distinct(rows, "scheduler")], kind="bar",
        )
        for title, unit, key in (
            ("time to first token, p50", "ms", "ttft_ms_p50"),
            ("time to first token, p99", "ms", "ttft_ms_p99"),
            ("adapter loads", "loads", "adapter_loads"),
        )
    ]  # fmt: skip
    return Figure("figure-15", "Schedulers", panels, *_table(rows, ("scheduler", "slots", "rate")), "", source)


def table_1(rows: Sequence[Row], source: str) -> Figure:
    """Ranks."""
    ours = _line("ours", rows, "rank", "output_tokens_per_s")
    paper = Series(_L40, [4, 32], [895.5, 728.1], is_paper=True)
    relative = [
        dataclasses.replace(s, y=[value / s.y[0] for value in s.y], label=s.label) for s in (ours, paper) if len(s.y)
    ]
    panels = [
        Panel("throughput", "rank", "output tokens/s", [ours, paper]),
        Panel("throughput, of that at the lowest rank", "rank", "ratio", relative),
    ]
    return Figure(
        "table-1", "Rank of the adapters", panels, *_table(rows, ("rank", "slots", "rate")), source=source,
        note=f"{_L40}: rank 4 to 32 costs 895.5 to 728.1 tokens/s.",
    )  # fmt: skip


FIGURES: dict[str, Callable[[Sequence[Row], str], Figure]] = {
    "9": figure_9,
    "10": figure_10,
    "11": figure_11,
    "12": figure_12,
    "13": figure_13,
    "15": figure_15,
    "table1": table_1,
}
_KERNEL_LABELS = {"added": "ours, what it adds to the base's launch"}
_KERNEL_NOTE = (
    f'{_L40}: 0.04 ms a token, half of Copy+SGMV and a fifth of naive. "added", where there is one, is site_fused less '
    "site_plain: what adapters add to the launch that the engine runs."
)


def kernel_figures(result: dict[str, Any], source: str) -> list[Figure]:
    """Figure 14, the kernels by batch, and figure 16, by rank, from the JSON of the kernel bench: µs a layer."""
    layers = [layer | {"median_us": _with_added(layer["median_us"])} for layer in result["layers"]]
    columns: list[str] = list(dict.fromkeys(column for layer in layers for column in layer["median_us"]))
    columns.sort(key=lambda column: column != "added")
    drawn = [column for column in columns if not column.startswith("site_")]
    figures = []
    for name, title, axis, fixed in (
        ("figure-14", "LoRA kernels by batch", "batch", "rank"),
        ("figure-16", "LoRA kernels by rank", "rank", "batch"),
    ):
        panels = []
        for value in sorted({layer[fixed] for layer in layers}):
            points = [{axis: x[axis], **x["median_us"]} for x in layers if x[fixed] == value]
            lines = [_line(_KERNEL_LABELS.get(c, c), points, axis, c) for c in drawn]
            panels.append(Panel(f"{fixed} {value}", axis, "µs a layer", lines, is_log_y=True))
        table = [
            [f"{x['batch']}", f"{x['rank']}", f"{x['active_adapters']}"]
            + [_cell(x["median_us"].get(c), 1) for c in columns]
            for x in sorted(layers, key=lambda x: (x[fixed], x[axis]))
        ]
        heads = ["batch", "rank", "active adapters", *(f"{c}, µs a layer" for c in columns)]
        figures.append(Figure(name, title, panels, heads, table, _KERNEL_NOTE, source))
    return figures


def _with_added(median_us: dict[str, float]) -> dict[str, float]:
    """With what adapters add to the launch of a site, where the launch was timed with them and without."""
    if not {"site_fused", "site_plain"} <= median_us.keys():
        return median_us
    return median_us | {"added": median_us["site_fused"] - median_us["site_plain"]}


# Files


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status is 1 if nothing can be drawn."""
    options = make_parser().parse_args(arguments)
    try:
        figures = read_figures(options.results, options.figure)
        write_figures(figures, options.out)
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for figure in figures:
        print(f"{options.out / figure.name}.png: {figure.title}")
    print(f"{options.out / 'figures.md'}: their tables")
    return 0


def read_figures(paths: Sequence[Path], names: Sequence[str] | None = None) -> list[Figure]:
    """All figures that the files have points for, or those named.

    Raises:
      ValueError: If a file is no result, or there is no point for any figure.
    """
    rows: list[tuple[Row, str]] = []
    figures: list[Figure] = []
    for path in paths:
        try:
            result = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"--from {path} cannot be read: {error}") from error
        if not isinstance(result, dict) or not ({"rows", "layers"} & result.keys()):
            raise ValueError(
                f"--from {path} holds neither rows nor layers; expected JSON of `python -m serving.bench sweep` or of "
                "`python -m pallas_kernels.maf_mvm.bench`"
            )
        source = f"{result.get('device', 'unknown device')}, commit {result.get('commit') or 'unknown'}"
        if "layers" in result:
            figures += [f for f in kernel_figures(result, source) if names is None or f.name.split("-")[1] in names]
        rows += [(row, f"{source}, {row.get('shape')}, {row.get('dtype')}") for row in result.get("rows", ())]
    for name, draw in FIGURES.items():
        found = [(row, source) for row, source in rows if name in row.get("figures", ())]
        if found and (names is None or name in names):
            figures.append(draw([row for row, _ in found], "; ".join(dict.fromkeys(source for _, source in found))))
    if not figures:
        raise ValueError(f"there is no point for {', '.join(names or FIGURES)} in {', '.join(map(str, paths))}")
    return sorted(figures, key=lambda figure: [*map(int, re.findall(r"\d+", figure.name))])


def write_figures(figures: Sequence[Figure], folder: Path) -> None:
    """Writes a PNG of each, and figures.md."""
    folder.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        draw(figure, folder / f"{figure.name}.png")
    (folder / "figures.md").write_text("\n".join(["# The paper's figures, redrawn\n", *map(markdown, figures)]))


def markdown(figure: Figure) -> str:
    """A section with its picture and its numbers."""
    lines = [f"## {figure.name}: {figure.title}\n", f"![{figure.title}]({figure.name}.png)\n", f"{figure.source}.\n"]
    if figure.note:
        lines.append(f"{figure.note}\n")
    lines.append("| " + " | ".join(figure.columns) + " |")
    lines.append("|" + "---|" * len(figure.columns))
    lines += ["| " + " | ".join(row) + " |" for row in figure.table]
    return "\n".join(lines) + "\n"


def draw(figure: Figure, path: Path) -> None:
    """One PNG.

    Raises:
      ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyright: ignore[reportMissingImports]
        from matplotlib.figure import Figure as Canvas  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install "dymerge-jax[bench]"') from error
    canvas = Canvas(figsize=(5.2 * len(figure.panels), 4.4), dpi=120, layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.subplots(1, len(figure.panels), squeeze=False)[0]
    for panel, ax in zip(figure.panels, axes, strict=True):
        _draw_panel(panel, ax)
    canvas.suptitle(f"{figure.title} ({figure.name})")
    canvas.supxlabel(figure.source, fontsize=7, color="dimgray")
    canvas.savefig(path)


def _draw_panel(panel: Panel, ax: Any) -> None:
    if panel.kind == "bar":
        _draw_bars(panel, ax)
    for series in panel.series if panel.kind == "line" else ():
        style = {"linestyle": "--", "color": "gray"} if series.is_paper else {}
        ax.plot(series.x, series.y, marker="o" if len(series.x) < 20 else None, label=series.label, **style)
    if panel.is_log_x:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter("{x:g}")
    if panel.kind == "line" and not panel.is_log_x:
        ax.set_xticks(sorted({x for series in panel.series for x in series.x}))
        ax.tick_params(axis="x", labelrotation=45, labelsize=8)
    # Room for the legend above bars and lines that leave none.
    highest = max((y for series in panel.series for y in series.y), default=0.0) or 1.0
    if panel.is_log_y:
        ax.set_yscale("log")
        ax.set_ylim(top=highest * 20)
    else:
        ax.set_ylim(0, highest * (1.3 if panel.kind == "bar" else 1.1))
    ax.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    ax.grid(alpha=0.3)
    if panel.series:
        ax.legend(fontsize=7, loc="upper left" if panel.is_log_y else "best")


def _draw_bars(panel: Panel, ax: Any) -> None:
    places = sorted({x for series in panel.series for x in series.x}, key=str)
    width = 0.8 / max(len(panel.series), 1)
    for i, series in enumerate(panel.series):
        at = [places.index(x) + (i - (len(panel.series) - 1) / 2) * width for x in series.x]
        ax.bar(at, series.y, width, label=series.label)
    ax.set_xticks(range(len(places)), places)


# Points to series and tables


def _where(rows: Iterable[Row], **values: object) -> list[Row]:
    return [row for row in rows if all(row.get(name) == value for name, value in values.items())]


def _distinct(rows: Iterable[Row], name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))


def _baselines(rows: Sequence[Row]) -> list[str]:
    return _distinct(rows, "baseline")


def _label(baseline: str) -> str:
    return "ours" if baseline == "none" else baseline


def _line(label: str, rows: Sequence[Row], x: str, y: str, *, factor: float = 1.0) -> Series:
    """The mean of y where several rows have the same x; rows without a value are left out."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if row.get(y) is not None:
            found.setdefault(row[x], []).append(row[y] * factor)
    return Series(label, sorted(found), [float(np.mean(found[at])) for at in sorted(found)])


def _bars(label: str, rows: Sequence[Row], x: str, y: str) -> Series:
    line = _line(label, rows, x, y)
    return dataclasses.replace(line, x=[f"{value:g}" for value in line.x])


def _cumulative(count: int) -> list[float]:
    return [(i + 1) / count for i in range(count)]


_MEASURED = {
    "output_tokens_per_s": ("output tokens/s", 0),
    "ttft_ms_p50": ("TTFT p50, ms", 0),
    "ttft_ms_p99": ("p99", 0),
    "tpot_ms_p50": ("TPOT p50, ms", 2),
    "tpot_ms_p99": ("p99", 2),
    "queueing_ms_p50": ("queueing p50, ms", 0),
    "queueing_ms_p99": ("p99", 0),
    "adapter_loads": ("loads", 0),
    "hit_rate": ("hit rate", 2),
}


def _table(rows: Sequence[Row], settings: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells: the settings that differ, then what was measured."""
    columns = [*settings, *(title for title, _ in _MEASURED.values()), "done"]
    table = []
    for row in rows:
        chosen = [_label(row[s]) if s == "baseline" else f"{row[s]}" for s in settings]
        measured = [_cell(row[name], digits) for name, (_, digits) in _MEASURED.items()]
        table.append(
            [*chosen, *measured, f"{row['completed']}/{row['requests']}" + (" cut off" if row["is_cut"] else "")]
        )
    return columns, table


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m serving.bench figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--from", dest="results", nargs="+", type=Path, required=True, metavar="FILE", help="result files")
    add("--out", type=Path, default=Path("figures"), metavar="FOLDER", help="where to write (default: figures)")
    add(
        "--figure", nargs="+", choices=[*FIGURES, "14", "16"], metavar="NAME",
        help=f"{', '.join(FIGURES)}, 14 or 16 (default: all that there are points for)",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
