"""The points that the paper's figures need, run in one process, the engines one after another.

    python -m serving.bench sweep --figure 9 10 15 --out sweep.json
    python -m serving.bench figures --from sweep.json --out figures/

    9         throughput of Single, Distinct, Skewed and Sparse at several rates, ours and the baselines; and Gated
    10        64, 128 adapters: slots 32, 64, 96
    11        TTFT and TPOT at 0.5 to 3 requests/s, ours and premerge
    12        Zipf 1 to 8 over 64 and 128 adapters
    13        theta of LAG
    15        LAG, FIFO, Random and Least-First
    table1    rank 4 to 32

Figures 14 and 16 are those of `python -m pallas_kernels.maf_mvm.bench`, whose JSON `figures` takes too.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from serving.bench.bench_engine import BASELINES, Baseline, EngineSpec, default_dtype
from serving.bench.load import is_right, print_header, print_row, write_result
from serving.bench.points import Point, RunOptions, device_kind, run_points
from serving.bench.workloads import LengthsName, WorkloadConfig
from serving.config import DTypeName, SchedulerName

_SCHEDULERS: tuple[SchedulerName, ...] = get_args(SchedulerName)
_WORKLOADS = ("single", "distinct", "skewed", "sparse")
_SATURATED = 24.0  # requests/s, more than 32 sequences can take: what is measured is the most


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What all points of a sweep share.

    Attributes:
      base: the engine that figures vary.
      duration_s: of the arrivals of a point.
      longest: most tokens of a prompt or output.
      lengths: see `WorkloadConfig`.
      is_quick: fewer points.
      seed: of all points.
      baselines: of figures 9 and 11; the others leave out.
    """

    base: EngineSpec
    duration_s: float
    longest: int
    lengths: LengthsName
    is_quick: bool
    seed: int
    baselines: tuple[Baseline, ...] = BASELINES

    def of(self, baselines: Sequence[Baseline]) -> list[Baseline]:
        """Those among `baselines` that are asked for."""
        return [baseline for baseline in baselines if baseline in self.baselines]

    def some[T](self, values: Sequence[T], quick: Sequence[T]) -> Sequence[T]:
        """`values`, or fewer."""
        return quick if self.is_quick else values

    def point(
        self,
        figure: str,
        workload: str,
        rate: float,
        *,
        engine: EngineSpec | None = None,
        zipf_s: float = 1.5,
        is_cold: bool = False,
        scheduler: SchedulerName = "lag",
        theta_s: float = 0.5,
        duration_factor: float = 1.0,
    ) -> Point:
        """A point of a figure, with what all have in common."""
        engine = engine or self.base
        config = WorkloadConfig(
            num_adapters=engine.num_adapters,
            mix_size=min(3, engine.num_adapters),
            num_mixes=engine.num_adapters,
            zipf_s=zipf_s,
            lengths=self.lengths,
            longest=min(self.longest, engine.max_model_len // 2),
        )
        return Point(
            engine=engine,
            workload=workload,
            rate=rate,
            duration_s=self.duration_s * duration_factor,
            config=config,
            scheduler=scheduler,
            theta_s=theta_s,
            seed=self.seed,
            is_cold=is_cold,
            figures=(figure,),
        )


def figure_9(sizes: Sizes) -> list[Point]:
    """Throughput by workload and rate, ours and the baselines; Gated has an engine of its own."""
    points = []
    for baseline in sizes.of(BASELINES):
        # A composite of rank 3 * 8 fills three slots: premerge gets slots for 32 of them, as vLLM has.
        slots = max(sizes.base.slots, 3 * sizes.base.max_num_seqs) if baseline == "premerge" else sizes.base.slots
        engine = dataclasses.replace(sizes.base, baseline=baseline, slots=slots)
        is_slow = baseline not in ("none", "premerge")  # then a quick sweep has two workloads at the lower rate
        for workload in sizes.some(_WORKLOADS, ("distinct", "skewed") if is_slow else _WORKLOADS):
            points += [
                sizes.point("9", workload, rate, engine=engine)
                for rate in sizes.some([4.0, 8.0, 16.0, _SATURATED], [8.0] if is_slow else [8.0, _SATURATED])
            ]
    for baseline in sizes.of(sizes.some(["none", "naive", "bmm"], ["none"])):
        engine = dataclasses.replace(sizes.base, baseline=baseline, has_gated_set=True)
        points += [sizes.point("9", "gated", rate, engine=engine) for rate in sizes.some([8.0, _SATURATED], [8.0])]
    return points


def figure_10(sizes: Sizes) -> list[Point]:
    """Slots 32, 64 and 96 for twice as many adapters as the default slots."""
    return [
        sizes.point("10", "skewed", 8.0, engine=_with(sizes, slots=slots, num_adapters=128), is_cold=True)
        for slots in (32, 64, 96)
    ]


def figure_11(sizes: Sizes) -> list[Point]:
    """Latency at low rates, ours and premerge; each point lasts longer, as few requests come."""
    points = []
    for baseline in sizes.of(["none", "premerge"]):
        slots = max(sizes.base.slots, 3 * sizes.base.max_num_seqs) if baseline == "premerge" else sizes.base.slots
        engine = _with(sizes, baseline=baseline, slots=slots)
        points += [
            sizes.point("11", "skewed", rate, engine=engine, is_cold=True, duration_factor=2.0)
            for rate in sizes.some([0.5, 1.0, 2.0, 3.0], [3.0])
        ]
    return points


def figure_12(sizes: Sizes) -> list[Point]:
    """Popularity from hardly to extremely skewed."""
    return [
        sizes.point("12", "skewed", 16.0, engine=_with(sizes, num_adapters=num_adapters), zipf_s=zipf_s, is_cold=True)
        for num_adapters in (64, 128)
        for zipf_s in sizes.some([1.0, 2.0, 4.0, 6.0, 8.0], [1.0, 4.0])
    ]


def figure_13(sizes: Sizes) -> list[Point]:
    """LAG's bound, where slots are scarce and requests wait."""
    engine = _with(sizes, slots=32, num_adapters=128)
    return [
        sizes.point("13", "skewed", 16.0, engine=engine, zipf_s=1.0, theta_s=theta_s, is_cold=True)
        for theta_s in sizes.some([0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0], [0.0, 0.2, 0.7])
    ]


def figure_15(sizes: Sizes) -> list[Point]:
    """The four policies, where slots are scarce and requests wait."""
    engine = _with(sizes, slots=32, num_adapters=128)
    return [
        sizes.point("15", "skewed", rate, engine=engine, zipf_s=1.0, scheduler=scheduler, is_cold=True)
        for scheduler in _SCHEDULERS
        for rate in sizes.some([8.0, 16.0], [16.0])
    ]


def table_1(sizes: Sizes) -> list[Point]:
    """Ranks 4 to 32; as many slots as all adapters fill, so that only the rank differs."""
    return [
        sizes.point(
            "table1", "skewed", _SATURATED, engine=_with(sizes, rank=rank, slot_rank=8, slots=64 * -(-rank // 8))
        )
        for rank in sizes.some([4, 8, 16, 32], [8, 32])
    ]


def _with(sizes: Sizes, **changes: object) -> EngineSpec:
    """The base engine with other sizes, in proportion if the base is smaller than the paper's 64 adapters and slots."""
    scale = sizes.base.num_adapters / 64
    for name in ("slots", "num_adapters"):
        if name in changes and scale < 1:
            changes[name] = max(4, round(int(str(changes[name])) * scale))
    return dataclasses.replace(sizes.base, **changes)  # pyright: ignore[reportArgumentType]


FIGURES: dict[str, Callable[[Sizes], list[Point]]] = {
    "9": figure_9,
    "10": figure_10,
    "11": figure_11,
    "12": figure_12,
    "13": figure_13,
    "15": figure_15,
    "table1": table_1,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status is 1 if float32 outputs differ or a flag is wrong."""
    options = make_parser().parse_args(arguments)
    try:
        points = make_points(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(points)} points on {len({p.engine for p in points})} engines")
    options.url = None
    print_header(device_kind(), options)
    rows: list[dict[str, Any]] = []

    def report(row: dict[str, Any]) -> None:
        rows.append(row)
        print_row(row)
        write_result(options, {"rows": rows})  # a sweep that is stopped leaves what it has

    run_points(points, RunOptions(num_checked=options.check, drain_s=options.drain, keeps_times=True), report=report)
    return 0 if is_right({"rows": rows}) else 1


def make_points(options: argparse.Namespace) -> list[Point]:
    """The points of the figures that are asked for."""
    base = EngineSpec(
        shape=options.shape,
        dtype=options.dtype or default_dtype(),
        num_adapters=options.adapters,
        slots=options.adapters,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    base = dataclasses.replace(base, max_model_len=min(base.max_model_len, base.config.max_position))
    sizes = Sizes(
        base, options.duration, options.longest, options.lengths, options.quick, options.seed, tuple(options.baseline)
    )
    return [point for name in options.figure for point in FIGURES[name](sizes)]


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m serving.bench sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--figure", nargs="+", choices=FIGURES, default=list(FIGURES), help="figures to measure for (default: all)")
    add(
        "--baseline", nargs="+", choices=BASELINES, default=list(BASELINES),
        help="of figures 9 and 11; none is the engine itself (default: all)",
    )  # fmt: skip
    add("--quick", action="store_true", help="fewer points of each figure")
    add("--duration", type=float, default=20.0, metavar="S", help="seconds of arrivals a point (default: %(default)s)")
    add("--longest", type=int, default=1024, metavar="N", help="most tokens of a prompt or output (default: 1024)")
    add("--lengths", choices=get_args(LengthsName), default="lognormal", help="(default: %(default)s)")
    add("--shape", default="8b", help="8b, 1b, tiny or a named model size (default: %(default)s)")
    add("--dtype", choices=get_args(DTypeName), help="of weights and cache (default: bfloat16; float32 on a CPU)")
    add(
        "--adapters", type=int, default=64, metavar="N",
        help="adapters and slots; figures with others scale them if this is below 64 (default: %(default)s)",
    )  # fmt: skip
    add("--max-num-seqs", type=int, default=32, metavar="N", help="requests that run at once (default: %(default)s)")
    add(
        "--max-num-batched-tokens", type=int, default=512, metavar="N",
        help="token budget of a step (default: %(default)s)",
    )  # fmt: skip
    add("--drain", type=float, default=60.0, metavar="S", help="seconds after the last arrival (default: %(default)s)")
    add("--check", type=int, default=2, metavar="N", help="requests of a point to run again alone (default: 2)")
    add("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="JSON file, written anew after every point (default: none)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
