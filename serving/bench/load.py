"""Open-loop load: requests come when the workload says, whatever became of those before; TTFT, TPOT and throughput.

    python -m serving.bench --workloads base single skewed distinct --rates 8 16 --out load.json
    python -m serving.bench --trace skewed-16.json --out load.json
    python -m serving.bench --url http://127.0.0.1:8000 --workloads skewed --rates 8
    python -m serving.bench --workloads skewed --find-rate
    python -m serving.bench --workloads skewed --rates 12 --soak-minutes 30

Without --url an engine of random weights runs in this process, in its own thread, as in the server. One start runs all
combinations of what is given; engines are built anew where sizes, ranks or baselines differ. A sample of the finished
requests of every point runs again alone, and must give the same tokens (in float32; in bfloat16 the share is told).

    python -m serving.bench sweep --figure 9 10     the points of the paper's figures
    python -m serving.bench figures --from *.json   draws them
    python -m serving.bench simulate                schedulers without a device
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pallas_kernels.bench_report import run_facts
from serving.bench.bench_engine import BASELINES, EngineSpec, default_dtype, make_engine, make_model
from serving.bench.find_rate import highest_rate
from serving.bench.points import (
    Point,
    RunOptions,
    device_kind,
    grid,
    prepare,
    run_point,
    run_points,
    started,
    ttft_p99_s,
)
from serving.bench.records import json_text
from serving.bench.soak import Disturbance, SoakOptions, soak
from serving.bench.workloads import WORKLOADS, LengthsName, WorkloadConfig, read_trace
from serving.config import DTypeName, EngineConfig, SchedulerName

TARGETS: dict[tuple[str, float], dict[str, float]] = {
    ("base", 16): {"output_tokens_per_s": 2630, "ttft_ms_p50": 45, "ttft_ms_p99": 150, "tpot_ms_p50": 7},
    ("single", 16): {"output_tokens_per_s": 2600, "ttft_ms_p50": 50, "ttft_ms_p99": 160, "tpot_ms_p50": 7.5},
    ("skewed", 16): {"output_tokens_per_s": 2600, "ttft_ms_p50": 60, "ttft_ms_p99": 200, "tpot_ms_p50": 8},
    ("distinct", 16): {"output_tokens_per_s": 2500, "ttft_ms_p50": 70, "ttft_ms_p99": 300, "tpot_ms_p50": 9},
}
"""By workload and requests/s: the 8B shape on an H200, 64 adapters of rank 8, at most 32 sequences. Throughput at
least, times at most."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status is 1 if float32 outputs differ, a soak fails, or a flag is wrong."""
    options = make_parser().parse_args(arguments)
    try:
        if options.rate_precision <= 0:
            raise ValueError(f"--rate-precision is {options.rate_precision:g}; expected a share above 0, such as 0.05")
        result = asyncio.run(_over_http(options)) if options.url is not None else _in_process(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_result(options, result)
    return 0 if is_right(result) else 1


def write_result(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Writes the result with what every result file begins with, if a file is asked for; never half a file."""
    if options.out is None:
        return
    url = getattr(options, "url", None)
    result = {
        **run_facts("serving.bench", device=None if url is None else f"that of {url}"),
        **result,
    }
    partial = options.out.with_name(options.out.name + ".part")
    partial.write_text(json_text(result))
    partial.replace(options.out)


def is_right(result: dict[str, Any]) -> bool:
    """False if a float32 output differs from its request's alone, or a soak failed."""
    rows = result.get("rows", [])
    are_equal = all(
        row["agreement"]["equal"] == row["agreement"]["sample"] for row in rows if row.get("dtype") == "float32"
    )
    return are_equal and not result.get("soak", {}).get("failures")


# In process


def make_points(options: argparse.Namespace) -> list[Point]:
    """All combinations of the flags' values.

    Raises:
      ValueError: If a value is wrong.
    """
    if options.trace:
        has_gated_set = any(request.gated_set for path in options.trace for request in read_trace(path))
    else:
        has_gated_set = "gated" in options.workloads
    points = []
    for axes in grid(
        baseline=options.baseline, num_adapters=options.adapters, rank=options.rank, slots=options.slots,
        scheduler=options.scheduler, theta_s=options.theta, zipf_s=options.zipf, work=_works(options),
    ):  # fmt: skip
        workload, rate, trace = axes["work"]
        spec = EngineSpec(
            shape=options.shape,
            dtype=options.dtype or default_dtype(),
            num_adapters=axes["num_adapters"],
            rank=axes["rank"],
            slots=axes["slots"],
            slot_rank=options.slot_rank,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=min(options.max_model_len, _max_position(options.shape)),
            baseline=axes["baseline"],
            has_gated_set=has_gated_set,
        )
        points.append(
            Point(
                engine=spec,
                workload=workload,
                rate=rate,
                duration_s=options.duration,
                config=_workload_config(options, axes["num_adapters"], axes["zipf_s"], spec.max_model_len // 2),
                scheduler=axes["scheduler"],
                theta_s=axes["theta_s"],
                seed=options.seed,
                trace=trace,
                is_cold=options.cold,
            )
        )
    return points


def _works(options: argparse.Namespace) -> list[tuple[str, float, Path | None]]:
    """(workload, rate, trace file) of each point."""
    if options.trace:
        return [(*_name_and_rate(path), path) for path in options.trace]
    return [(axes["workload"], axes["rate"], None) for axes in grid(workload=options.workloads, rate=options.rates)]


def _name_and_rate(path: Path) -> tuple[str, float]:
    """Of a trace file, from a name such as skewed-16.json; else its whole name, and the mean rate of its requests."""
    kind = next((name for name in WORKLOADS if path.stem.startswith(name)), path.stem)
    named = re.search(r"[-_](\d+(?:\.\d+)?)$", path.stem)
    if named is not None:
        return kind, float(named[1])
    trace = read_trace(path)
    return kind, round(len(trace) / max(trace[-1].arrival_s, 1e-3), 2)


def _workload_config(options: argparse.Namespace, num_adapters: int, zipf_s: float, longest: int) -> WorkloadConfig:
    return WorkloadConfig(
        num_adapters=num_adapters,
        mix_size=options.mix_size,
        num_mixes=options.mixes,
        zipf_s=zipf_s,
        lengths=options.lengths,
        longest=min(options.longest, longest),
    )


def _max_position(shape: str) -> int:
    return EngineSpec(shape=shape, dtype="float32").config.max_position


def _in_process(options: argparse.Namespace) -> dict[str, Any]:
    points = make_points(options)
    for point in points:
        point.requests()  # whatever is wrong with them is said before anything compiles
    if options.soak_minutes or options.find_rate:
        return _with_one_engine(points, options)
    print_header(device_kind(), options)
    rows: list[dict[str, Any]] = []

    def report(row: dict[str, Any]) -> None:
        rows.append(row)
        print_row(row)
        write_result(options, {"rows": rows})  # a run that is stopped leaves what it has

    run_points(points, _run_options(options), report=report)
    print_targets(rows)
    return {"rows": rows}


def _with_one_engine(points: list[Point], options: argparse.Namespace) -> dict[str, Any]:
    specs = {point.engine for point in points}
    if len(specs) > 1:
        raise ValueError(
            "--soak-minutes and --find-rate use one engine; give one value each to --baseline, --adapters, --rank and "
            "--slots"
        )
    spec = points[0].engine
    assert spec is not None
    engine = make_engine(spec, make_model(spec))
    engine.compile()

    async def run() -> dict[str, Any]:
        async with started(engine, spec) as client:
            prepare(engine, points[0])
            if options.soak_minutes:
                report = functools.partial(_report_soak, options)
                return {"soak": await soak(client, points[0], _soak_options(options), engine=engine, report=report)}
            return await _find_rates(client, points, options)

    return asyncio.run(run())


async def _find_rates(client: Any, points: Sequence[Point], options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    found = {}
    run_options = dataclasses.replace(_run_options(options), num_checked=0)
    for point in {p.workload: p for p in points}.values():

        async def is_sustained(rate: float, point: Point = point) -> bool:
            row = await run_point(client, dataclasses.replace(point, rate=rate), run_options, number=len(rows))
            rows.append(row)
            print_row(row)
            write_result(options, {"rows": rows, "highest_rates": found, "ttft_limit_s": options.ttft_limit})
            return ttft_p99_s(row) < options.ttft_limit

        found[point.workload] = await highest_rate(is_sustained, start=point.rate, precision=options.rate_precision)
    for workload, rate in found.items():
        text = "none that was tried" if rate is None else f"{rate:.1f} requests/s"
        print(f"{workload}: highest rate with TTFT p99 < {options.ttft_limit:g} s: {text}")
    return {"rows": rows, "highest_rates": found, "ttft_limit_s": options.ttft_limit}


# Over HTTP


async def _over_http(options: argparse.Namespace) -> dict[str, Any]:
    try:
        from serving.bench.http_client import HttpClient, churn, send_malformed
    except ImportError as error:  # not in the base installation, which an engine in this process is enough for
        raise ValueError('--url needs httpx: pip install "dymerge-jax[bench]"') from error
    async with contextlib.aclosing(HttpClient(options.url, api_key=options.api_key, vocab=options.vocab)) as client:
        await client.connect()
        points = [
            Point(
                engine=None,
                workload=workload,
                rate=rate,
                duration_s=options.duration,
                config=_workload_config(options, options.adapters[0], options.zipf[0], options.longest),
                seed=options.seed,
                trace=trace,
            )
            for workload, rate, trace in _works(options)
        ]
        if options.soak_minutes:
            disturbances: list[Disturbance] = [functools.partial(send_malformed, client)]
            if options.churn_adapter is not None:
                key = options.admin_api_key or options.api_key
                disturbances.append(functools.partial(churn, client, folder=options.churn_adapter, admin_api_key=key))
            result = await soak(
                client, points[0], _soak_options(options), engine=None, disturbances=disturbances,
                report=functools.partial(_report_soak, options),
            )  # fmt: skip
            return {"soak": result}
        if options.find_rate:
            return await _find_rates(client, points, options)
        rows = []
        print_header(options.url, options)
        for number, point in enumerate(points):
            rows.append(await run_point(client, point, _run_options(options), number=number))
            print_row(rows[-1])
        print_targets(rows)
        return {"rows": rows}


def _run_options(options: argparse.Namespace) -> RunOptions:
    return RunOptions(
        drain_s=options.drain,
        num_checked=RunOptions.num_checked if options.check is None else options.check,
        keeps_times=True,
        keeps_outputs=options.keep_outputs,
    )


def _soak_options(options: argparse.Namespace) -> SoakOptions:
    return SoakOptions(
        minutes=options.soak_minutes,
        vanish_share=options.soak_vanish,
        server_pid=options.server_pid,
        are_outputs_exact=options.exact_outputs
        or (options.url is None and (options.dtype or default_dtype()) == "float32"),
        num_checked=SoakOptions.num_checked if options.check is None else options.check,
    )


def _report_soak(options: argparse.Namespace, partial: dict[str, Any]) -> None:
    """One line of a soak that still runs; what is known of it is written, lest it be cut short."""
    print(
        f"{partial['so_far_s'] / 60:.1f} of {partial['minutes']:g} minutes: {partial['completed']} of "
        f"{partial['requests']} done, {partial['cancelled']} clients left, {partial['failed']} failed, TTFT ms "
        f"{_three(partial, 'ttft_ms', 0)}, TPOT ms {_three(partial, 'tpot_ms', 2)}",
        flush=True,
    )
    write_result(options, {"soak": partial})


# What is printed


def print_header(where: str, options: argparse.Namespace) -> None:
    """The line of titles."""
    print(f"{where}, {options.shape if options.url is None else 'over HTTP'}; times at p50 / p90 / p99")
    print(
        f"{'workload':<10}{'rate':>6} {'what':<28}{'done':>10} {'tok/s':>7} {'TTFT ms':>20} {'TPOT ms':>20} "
        f"{'ITL ms':>19} {'queue ms':>19} {'e2e s':>17} {'loads':>6} {'hits':>5} {'steps':>6} {'rows':>5}  same alone",
        flush=True,
    )


def print_row(row: dict[str, Any]) -> None:
    """One point."""
    what = "" if "scheduler" not in row else f"{row['scheduler']} θ{row['theta_s']:g}, {row['slots']} r{row['rank']}"
    what += "" if row.get("baseline", "none") == "none" else f" {row['baseline']}"
    same = row["agreement"]
    print(
        f"{row['workload']:<10}{row['rate']:>6g} {what:<28}{row['completed']:>5}/{row['requests']:<4} "
        f"{row['output_tokens_per_s']:>7.0f} {_three(row, 'ttft_ms', 0):>20} {_three(row, 'tpot_ms', 2):>20} "
        f"{_three(row, 'itl_ms', 1):>19} {_three(row, 'queueing_ms', 0):>19} {_three(row, 'e2e_s', 1):>17} "
        f"{_number(row['adapter_loads'], 0):>6} {_number(row['hit_rate'], 2):>5} {_number(row['steps'], 0):>6} "
        f"{_number(row['mean_step_rows'], 1):>5}  {same['equal']}/{same['sample']}"
        + (" CUT OFF" if row["is_cut"] else "")
        + (f" {row['failed']} FAILED: {row['errors'][0]}" if row["failed"] else ""),
        flush=True,
    )


def print_targets(rows: Sequence[dict[str, Any]]) -> None:
    """What was asked for beside what was measured, where the workload and rate are among the targets."""
    for row in rows:
        target = TARGETS.get((row["workload"], round(row["rate"])))
        if target is None or row.get("shape", "8b") not in ("8b", "llama-3-8b") or row.get("baseline") != "none":
            continue
        parts = []
        for name, bound in target.items():
            value = row[name]
            is_met = value is not None and (value >= bound if name == "output_tokens_per_s" else value <= bound)
            parts.append(f"{name} {_number(value, 1)} (target {bound:g}: {'met' if is_met else 'missed'})")
        print(f"{row['workload']} at {row['rate']:g}/s: {', '.join(parts)}")


def _three(row: dict[str, Any], name: str, digits: int) -> str:
    return " / ".join(_number(row[f"{name}_p{p}"], digits) for p in (50, 90, 99))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


# Flags


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m serving.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_workload_flags(parser)
    add_engine_flags(parser)
    _add_run_flags(parser)
    return parser


def _add_workload_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workloads")
    add = group.add_argument
    add(
        "--workloads", nargs="+", choices=WORKLOADS, default=["base", "single", "skewed", "distinct"], metavar="NAME",
        help=f"{', '.join(WORKLOADS)}; with gated, its gate runs in every step of the engine, those of the other "
        "workloads too (default: base single skewed distinct)",
    )  # fmt: skip
    add("--rates", nargs="+", type=float, default=[8.0, 16.0], metavar="N", help="requests/s (default: 8 16)")
    add("--duration", type=float, default=20.0, metavar="S", help="seconds of arrivals (default: %(default)s)")
    add(
        "--trace", "--trace-file", nargs="+", type=Path, metavar="FILE",
        help="replay these traces instead; a name such as skewed-16.json says the workload (default: none)",
    )  # fmt: skip
    add("--adapters", nargs="+", type=int, default=[64], metavar="N", help="adapters to draw from (default: 64)")
    add("--mix-size", type=int, default=3, metavar="N", help="adapters of a mix (default: %(default)s)")
    add("--mixes", type=int, default=64, metavar="N", help="mixes in skewed's catalogue (default: %(default)s)")
    add("--zipf", nargs="+", type=float, default=[1.5], metavar="S", help="exponents of skewed (default: 1.5)")
    add(
        "--lengths", choices=get_args(LengthsName), default="lognormal",
        help="lognormal: prompts of 220 and outputs of 200 tokens in the mean before clipping; sharegpt: quantiles of "
        "public conversations (default: %(default)s)",
    )  # fmt: skip
    add("--longest", type=int, default=1024, metavar="N", help="most tokens of a prompt or output (default: 1024)")
    add("--seed", type=int, default=0, metavar="N", help="of everything that is drawn (default: %(default)s)")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the engine in this process."""
    group = parser.add_argument_group("engine in this process (without --url)")
    add = group.add_argument
    add("--shape", default="8b", help="8b, 1b, tiny or a named model size (default: %(default)s)")
    add("--dtype", choices=get_args(DTypeName), help="of weights and cache (default: bfloat16; float32 on a CPU)")
    add("--rank", nargs="+", type=int, default=[8], metavar="N", help="rank of the adapters (default: 8)")
    add("--slots", nargs="+", type=int, default=[64], metavar="N", help="adapter slots (default: 64)")
    add("--slot-rank", type=int, default=8, metavar="N", help="rank rows of a slot (default: %(default)s)")
    add("--max-num-seqs", type=int, default=32, metavar="N", help="requests that run at once (default: %(default)s)")
    add(
        "--max-num-batched-tokens", type=int, default=EngineConfig.max_num_batched_tokens, metavar="N",
        help="token budget of a step (default: %(default)s)",
    )  # fmt: skip
    add(
        "--max-model-len", type=int, default=2048, metavar="N",
        help="most tokens of a request; half of it bounds prompts and outputs (default: %(default)s)",
    )  # fmt: skip
    add(
        "--scheduler", nargs="+", choices=get_args(SchedulerName), default=[EngineConfig.scheduler],
        help=f"who runs next (default: {EngineConfig.scheduler})",
    )  # fmt: skip
    add(
        "--theta", nargs="+", type=float, default=[EngineConfig.theta_s], metavar="S",
        help=f"seconds after which lag lets nobody pass (default: {EngineConfig.theta_s})",
    )  # fmt: skip
    add(
        "--baseline", nargs="+", choices=BASELINES, default=["none"],
        help="what computes the mixes, see serving/bench/bench_engine.py (default: none, the engine's own)",
    )  # fmt: skip
    add("--cold", action="store_true", help="start every point without an adapter in slots (default: as left)")


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("over HTTP")
    add = group.add_argument
    add("--url", help="a running server of OpenAI's API, instead of an engine in this process (default: none)")
    add("--api-key", help="key of the server (default: none)")
    add("--admin-api-key", help="key that may load adapters, for --churn-adapter (default: that of --api-key)")
    add("--vocab", type=int, default=32_000, metavar="N", help="token ids of prompts are below it (default: 32000)")
    group = parser.add_argument_group("run")
    add = group.add_argument
    add("--drain", type=float, default=60.0, metavar="S", help="seconds after the last arrival (default: 60)")
    add(
        "--check", type=int, metavar="N",
        help="requests of a point to run again alone; in a soak different requests, all answers to which are compared "
        f"(default: {RunOptions.num_checked}, in a soak {SoakOptions.num_checked})",
    )  # fmt: skip
    add("--keep-outputs", action="store_true", help="write times and tokens of every request (default: no)")
    add("--find-rate", action="store_true", help="search the highest rate, from the last of --rates on")
    add(
        "--rate-precision", type=float, default=0.05, metavar="SHARE",
        help="--find-rate ends where the next rate that is not sustained is within this share (default: %(default)s)",
    )  # fmt: skip
    add("--ttft-limit", type=float, default=1.0, metavar="S", help="TTFT p99 of --find-rate (default: 1)")
    add("--soak-minutes", type=float, default=0.0, metavar="N", help="run the first point so long, with disturbances")
    add("--soak-vanish", type=float, default=0.1, metavar="SHARE", help="clients that leave early (default: 0.1)")
    add(
        "--exact-outputs", action="store_true",
        help="an answer of a soak that differs from its request's alone fails it: for servers in float32 (default: if "
        "the engine is in this process and float32)",
    )  # fmt: skip
    add("--server-pid", type=int, metavar="PID", help="process whose memory is watched in a soak over HTTP")
    add("--churn-adapter", metavar="FOLDER", help="adapter that a soak over HTTP loads and unloads all the time")
    add("--out", type=Path, metavar="FILE", help="JSON file to write (default: none)")


if __name__ == "__main__":
    sys.exit(main())
