"""A benchmark's outcome as tables, JSON and pictures."""

import dataclasses
import json
import logging
import math
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dymerge_jax.quality.bench import Outcome
from dymerge_jax.quality.inventory import RunConfig
from dymerge_jax.quality.scores import Result, Task, total
from dymerge_jax.quality.ways import task_name

_log = logging.getLogger(__name__)

TABLE_FILE, JSON_FILE = "quality.md", "quality.json"
_CRITERIA = ("all", "content", "exact")


def write_report(folder: Path, config: RunConfig, outcome: Outcome) -> str:
    """Writes tables, JSON and pictures into an existing folder; returns the short tables."""
    (folder / TABLE_FILE).write_text(markdown(config, outcome), encoding="utf-8")
    (folder / JSON_FILE).write_text(json.dumps(as_json(config, outcome), indent=1) + "\n", encoding="utf-8")
    for num_skills, name in ((1, "skills"), (2, "pairs")):
        results = [result for result in outcome.results if len(result.task) == num_skills]
        if results:
            draw(results, folder / f"{name}.png", source=_source(outcome))
    return markdown(config, outcome, has_details=False)


def as_json(config: RunConfig, outcome: Outcome) -> dict[str, Any]:
    """Every number, and what is needed to get it again."""
    settings = dataclasses.asdict(config) | {"adapters": config.adapters.name, "gated": None, "cotrained": None}
    settings |= {name: path.name for name in ("gated", "cotrained") if (path := getattr(config, name)) is not None}
    return {
        "command": "python -m dymerge_jax.quality run",
        "commit": _commit(),
        "device": outcome.device,
        "dtype": outcome.dtype,
        "jax": jax.__version__,
        "settings": settings,
        "num_rows": outcome.num_rows,
        "batch_size": outcome.batch_size,
        "answering_s": outcome.seconds,
        "adapters": list(outcome.inventory.adapters),
        "cotrained": list(outcome.inventory.cotrained),
        "left_out": dict(outcome.inventory.left_out),
        "results": [result.as_json() for result in outcome.results],
        "stream": [row.as_json() for row in outcome.stream],
        "retrieval": [
            {"task": list(r.task), "prompts": r.prompts, "found": r.share.as_json()} for r in outcome.retrieval
        ],
        "searches": {task_name(task): dataclasses.asdict(result) for task, result in outcome.searches.items()},
    }


def markdown(config: RunConfig, outcome: Outcome, *, has_details: bool = True) -> str:
    """The tables.

    Args:
      config: what was asked for.
      outcome: what was measured.
      has_details: with a row for every task and way, which has the intervals and what each skill got.
    """
    blocks = [
        "# Quality of composed adapters",
        f"{_source(outcome)}; model {config.model}; n = {config.n} for every number, held-out words, greedy, seed "
        f"{config.seed}; 95 % Wilson intervals in brackets. An answer counts if it shows all skills of the task by the "
        f"exact rules of dymerge_jax/quality/skills.py. {outcome.num_rows} answers in {outcome.seconds:.0f} s, in "
        f"batches of {outcome.batch_size} rows of different mixes.",
    ]
    for prompts in config.prompts:
        for num_skills, what in ((1, "Single skills"), (2, "Pairs")):
            results = [r for r in outcome.results if len(r.task) == num_skills and r.prompts == prompts]
            if results:
                blocks += [f"## {what}, {prompts} prompts", _overview(results)]
                blocks += [_details(results)] if has_details else []
    if outcome.stream:
        blocks += ["## A stream of mixed tasks, instructed prompts", _stream(outcome)]
    if outcome.retrieval:
        blocks += ["## Just the right adapters retrieved", _retrieval(outcome)]
    if outcome.searches:
        blocks += ["## Weights found by the search", _searches(outcome)]
    if outcome.inventory.left_out:
        left_out = "; ".join(f"{way} {reason}" for way, reason in outcome.inventory.left_out.items())
        blocks.append(f"Not measured: {left_out}.")
    return "\n\n".join(blocks) + "\n"


def _overview(results: Sequence[Result]) -> str:
    """Ways by tasks: the share of answers that show everything."""
    tasks, ways = _tasks(results), _ways(results)
    shares = {(r.task, r.way): f"{r.shares['all'].value:.2f}" for r in results}
    return _table(["way", *map(task_name, tasks)], [[way, *(shares.get((t, way), "–") for t in tasks)] for way in ways])


def _details(results: Iterable[Result]) -> str:
    rows = []
    for r in results:
        each = ", ".join(f"{name} {r.shares[name].value:.2f}" for name in r.task)
        rows.append(
            [task_name(r.task), r.way, *(str(r.shares[name]) for name in _CRITERIA), each, str(r.shares["all"].n)]
        )
    return _table(["task", "way", *_CRITERIA, "each skill", "n"], rows)


def _stream(outcome: Outcome) -> str:
    rows = [
        [row.skill, row.way, str(row.share), str(row.single), "–" if math.isnan(row.ratio) else f"{row.ratio:.2f}",
         str(row.share.n)]
        for row in outcome.stream
    ]  # fmt: skip
    return _table(["skill", "way", "all", "with its own adapter", "ratio", "n"], rows)


def _retrieval(outcome: Outcome) -> str:
    rows = [[task_name(r.task), r.prompts, str(r.share), str(r.share.n)] for r in outcome.retrieval]
    for num_skills, what in ((1, "all skills"), (2, "all pairs")):
        for prompts in dict.fromkeys(r.prompts for r in outcome.retrieval):
            shares = [r.share for r in outcome.retrieval if len(r.task) == num_skills and r.prompts == prompts]
            if shares:
                rows.append([what, prompts, str(total(shares)), str(total(shares).n)])
    return _table(["task", "prompts", "share", "n"], rows)


def _searches(outcome: Outcome) -> str:
    rows = []
    for task, result in outcome.searches.items():
        weights = ", ".join(f"{name} {weight:.2f}" for name, weight in result.weights.items() if weight)
        rows.append([task_name(task), weights or "none", f"{result.cross_entropy:.4f}", f"{result.seconds:.1f}"])
    return _table(["pair", "weights", "cross entropy (nats a token)", "seconds"], rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _tasks(results: Iterable[Result]) -> list[Task]:
    return list(dict.fromkeys(r.task for r in results))


def _ways(results: Iterable[Result]) -> list[str]:
    return list(dict.fromkeys(r.way for r in results))


def _source(outcome: Outcome) -> str:
    return f"{outcome.device}, {outcome.dtype}, commit {_commit() or 'unknown'}"


def _commit() -> str | None:
    """The checkout's commit, if this is one."""
    folder = Path(__file__).parent
    git = subprocess.run(
        ["git", "-C", folder, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return git.stdout.strip() or None


def draw(results: Sequence[Result], file: Path, *, source: str) -> bool:
    """Draws the share of each way with its interval, a panel a task, into a PNG file.

    Returns:
      Whether it was drawn: False without matplotlib, which comes with the extra "bench".
    """
    try:
        from matplotlib.figure import Figure  # an object of its own: no display and no state of pyplot's
    except ImportError:
        _log.info("no picture: matplotlib is not installed (pip install 'dymerge-jax[bench]')")
        return False
    tasks, ways = _tasks(results), _ways(results)
    num_columns = min(4, len(tasks))
    num_rows = -(-len(tasks) // num_columns)
    figure = Figure(figsize=(2 + 2.6 * num_columns, 1 + num_rows * (0.6 + 0.24 * len(ways))), layout="constrained")
    figure.suptitle(f"Answers that show all skills of the task, 95 % intervals\n{source}", fontsize=10)
    grid: Any = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    for axes, task in zip(grid.flat, tasks, strict=False):
        axes.set_title(task_name(task), fontsize=10)
        axes.set_xlim(-0.03, 1.03)
        axes.set_yticks(range(len(ways)), ways, fontsize=8)
        axes.set_ylim(len(ways) - 0.5, -0.5)
        axes.grid(alpha=0.3)
        for prompts, offset, colour in (("neutral", -0.15, "C0"), ("instructed", 0.15, "C1")):
            own = [r for r in results if r.task == task and r.prompts == prompts]
            _points(axes, own, ways, prompts, offset, colour)
    for axes in grid.flat[len(tasks) :]:
        axes.set_visible(False)
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(file, dpi=120)
    return True


def _points(
    axes: Any, results: Sequence[Result], ways: Sequence[str], prompts: str, offset: float, colour: str
) -> None:
    shares = [r.shares["all"] for r in results]
    values = np.asarray([share.value for share in shares])
    bounds = np.asarray([share.interval for share in shares]).reshape(-1, 2)
    errors = np.maximum(0, np.stack([values - bounds[:, 0], bounds[:, 1] - values]))
    y = [ways.index(r.way) + offset for r in results]
    axes.errorbar(values, y, xerr=errors, fmt="o", markersize=3, linewidth=1, color=colour, label=prompts)
