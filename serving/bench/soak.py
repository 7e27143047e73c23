"""Hours of load with disturbances, and what must be as it was after them.

Requests of one workload come at a steady rate. A share of the clients vanishes at a random moment; over HTTP, malformed
requests come between, and an adapter is loaded and unloaded all the time. Watched meanwhile: memory of process and
device, which must stay flat. Checked at the end: nothing runs or waits, no block, slot or stream is stuck, and finished
answers equal those of the same requests alone. Once a minute all that is known is reported: a soak that is cut short
leaves the result of its last minute.
"""

import asyncio
import contextlib
import dataclasses
import math
import random
import statistics
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import jax

from serving.bench.clients import Client, replay
from serving.bench.points import Point, run_alone
from serving.bench.records import Record, agreement, percentiles, summarise
from serving.bench.workloads import TraceRequest
from serving.engine import Engine

_TEMPLATES = 64  # different requests; each comes again and again
_VANISH_S = (0.001, 3.0)  # evenly on a logarithmic scale: in the queue, in prefill and in decode
_SETTLE_S = 60.0
_FLAT_SHARE = 0.02
_FLAT_BYTES = 64 << 20  # allocators and Python's own caches breathe
_MAX_SAMPLES = 200  # of the memory, in a result


@dataclasses.dataclass(frozen=True)
class SoakOptions:
    """How long, and with which disturbances.

    Attributes:
      minutes: of arrivals.
      vanish_share: of the clients.
      server_pid: process to watch over HTTP; None watches this one if the engine is in it, else none.
      are_outputs_exact: any answer that differs from its request's alone is a failure.
      num_checked: different requests that are run again alone; all answers to them are compared.
      sample_s: time between two looks at the memory.
      report_s: time between two reports of what is known so far.
    """

    minutes: float
    vanish_share: float = 0.1
    server_pid: int | None = None
    are_outputs_exact: bool = False
    num_checked: int = 16
    sample_s: float = 1.0
    report_s: float = 60.0


@dataclasses.dataclass
class DisturbanceCounts:
    """What was done to the server besides requests, and what it answered wrongly."""

    num_malformed: int = 0
    num_churns: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)

    def fail(self, text: str) -> None:
        """Takes note of a failure; a few of them tell enough."""
        if len(self.failures) < 10:
            self.failures.append(text)


Disturbance = Callable[[DisturbanceCounts], Coroutine[None, None, None]]
"""Does something to the server, over and over, and counts what it did."""

Report = Callable[[dict[str, Any]], None]
"""Takes what is known of a soak that still runs: a result of its own, in which "partial" is true."""


async def soak(
    client: Client,
    point: Point,
    options: SoakOptions,
    *,
    engine: Engine | None,
    disturbances: Sequence[Disturbance] = (),
    report: Report = lambda partial: None,
) -> dict[str, Any]:
    """Runs the point's workload for so many minutes, with disturbances.

    Args:
      client: of the server.
      point: workload and rate; its duration is not used.
      options: how long, and what else.
      engine: the engine, if it is in this process; its books are checked at the end.
      disturbances: what else happens to the server meanwhile.
      report: called at the start, every `report_s` and when the last request has ended.

    Returns:
      The numbers of `summarise`, memory over time, and "failures": a sentence for each thing that is not as it must be.
    """
    templates, trace = soak_trace(point, minutes=options.minutes)
    run = _Run(point, options, [Record(i % len(templates), r.arrival_s, r.prompt_len) for i, r in enumerate(trace)])
    draw = random.Random(point.seed)
    vanish = [_vanish_s(draw) if draw.random() < options.vanish_share else None for _ in trace]
    before, num_free = await client.counts(), await client.num_free_blocks()
    if options.server_pid is not None:
        resident_bytes(options.server_pid)  # a wrong number is said at once
    async with contextlib.AsyncExitStack() as stack:
        for work in (
            _watch_memory(run, engine),
            _keep_reporting(run, report),
            *(disturbance(run.disturbed) for disturbance in disturbances),
        ):
            await stack.enter_async_context(_beside(work))
        records, is_cut = await replay(
            client, trace, drain_s=_SETTLE_S, seed=point.seed, vanish=lambda position: vanish[position],
            records=run.records,
        )  # fmt: skip
    report(run.partial())
    failures = await _settle(client, engine, is_cut, num_free)
    counts = (await client.counts()).since(before)
    same = await _compare_with_alone(client, templates, run, failures)
    failures += [*run.failed(), *run.growth(), *run.disturbed.failures]
    wall_s = max((r.output_times_s[-1] for r in records if r.output_times_s), default=0.0)
    summary = summarise(records, dataclasses.replace(counts, queueing_s=()), wall_s=wall_s)
    result = point.settings() | summary | run.surroundings() | {"agreement": same, "failures": failures}
    _print(result)
    return result


@dataclasses.dataclass
class _Run:
    """What is known of a soak, while it runs and after.

    Attributes:
      point, options: what was asked for.
      records: of all its requests, those too that have not come yet.
      memory: samples so far.
      disturbed: what else was done to the server.
    """

    point: Point
    options: SoakOptions
    records: list[Record]
    memory: list[dict[str, float]] = dataclasses.field(default_factory=list)
    disturbed: DisturbanceCounts = dataclasses.field(default_factory=DisturbanceCounts)

    def failed(self) -> list[str]:
        """A sentence if requests failed."""
        errors = [r.error for r in self.records if r.error is not None]
        return [f"{len(errors)} requests failed, the first with: {errors[0]}"] if errors else []

    def growth(self) -> list[str]:
        """A sentence for each memory that grew."""
        return [text for name in ("rss_bytes", "device_bytes") if (text := grows(self.memory, name))]

    def surroundings(self) -> dict[str, Any]:
        """What a result says beside its requests."""
        return {
            "minutes": self.options.minutes,
            "memory": self.memory[:: max(1, len(self.memory) // _MAX_SAMPLES)],
            "malformed_sent": self.disturbed.num_malformed,
            "adapter_churns": self.disturbed.num_churns,
        }

    def partial(self) -> dict[str, Any]:
        """The result so far, without what takes long to count or needs an idle server."""
        return self.point.settings() | self.surroundings() | {
            "partial": True,
            "so_far_s": self.memory[-1]["s"] if self.memory else 0.0,
            "requests": len(self.records),
            "completed": sum(r.is_done for r in self.records),
            "cancelled": sum(r.is_cancelled for r in self.records),
            "failed": sum(r.error is not None for r in self.records),
            "output_tokens": sum(r.num_tokens for r in self.records),
            **percentiles("ttft_ms", [s * 1e3 for r in self.records if (s := r.ttft_s) is not None]),
            **percentiles("tpot_ms", [s * 1e3 for r in self.records if (s := r.tpot_s) is not None]),
            "failures": [*self.failed(), *self.disturbed.failures],
        }  # fmt: skip


async def _keep_reporting(run: _Run, report: Report) -> None:
    while True:
        report(run.partial())
        await asyncio.sleep(run.options.report_s)


def soak_trace(point: Point, *, minutes: float) -> tuple[list[TraceRequest], list[TraceRequest]]:
    """A few templates, and the arrivals of a whole soak: request i is template i modulo their number."""
    drawn = dataclasses.replace(point, duration_s=minutes * 60, trace=None).requests()
    templates = drawn[:_TEMPLATES]
    return templates, [
        dataclasses.replace(templates[i % len(templates)], arrival_s=request.arrival_s)
        for i, request in enumerate(drawn)
    ]


def _vanish_s(draw: random.Random) -> float:
    return math.exp(draw.uniform(*map(math.log, _VANISH_S)))


@contextlib.asynccontextmanager
async def _beside(work: Any) -> AsyncIterator[None]:
    """Runs an endless coroutine until the block ends."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(result, Exception):
            raise result


async def _watch_memory(run: _Run, engine: Engine | None) -> None:
    clock = asyncio.get_running_loop().time
    start_s = clock()
    while True:
        sample: dict[str, float] = {"s": clock() - start_s}
        pid = run.options.server_pid if engine is None else "self"
        if pid is not None:
            try:
                sample["rss_bytes"] = resident_bytes(pid)
            except ValueError as error:  # the server has ended: the rest of the result is wanted all the same
                run.disturbed.fail(str(error))
                return
        stats = jax.devices()[0].memory_stats() if engine is not None else None
        if stats and "bytes_in_use" in stats:
            sample["device_bytes"] = stats["bytes_in_use"]
        run.memory.append(sample)
        await asyncio.sleep(run.options.sample_s)


def resident_bytes(pid: int | str) -> int:
    """Memory of a process, on Linux.

    Raises:
      ValueError: If there is no such process.
    """
    path = Path(f"/proc/{pid}/status")
    try:
        line = next(line for line in path.read_text().splitlines() if line.startswith("VmRSS:"))
    except (OSError, StopIteration) as error:
        raise ValueError(f"the memory of process {pid} cannot be read from {path}; expected your own") from error
    return int(line.split()[1]) * 1024


def grows(memory: Sequence[dict[str, float]], name: str) -> str | None:
    """A sentence if memory grew from the second quarter of the soak to the last, beyond what it breathes; else None.

    The first quarter is left out: caches fill, the allocator settles.
    """
    values = [sample[name] for sample in memory if name in sample]
    quarter = len(values) // 4
    if quarter == 0:
        return None
    early, late = statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])
    allowed = max(_FLAT_BYTES, _FLAT_SHARE * early)
    if late - early <= allowed:
        return None
    return f"{name} grew from {early / 1e6:.0f} to {late / 1e6:.0f} MB, more than the {allowed / 1e6:.0f} MB allowed"


async def _settle(client: Client, engine: Engine | None, is_cut: bool, num_free_before: int | None) -> list[str]:
    failures = [f"requests had not ended {_SETTLE_S:.0f} s after the last arrival"] if is_cut else []
    try:
        await asyncio.wait_for(client.settle(), _SETTLE_S)
    except TimeoutError:
        failures.append(f"{_SETTLE_S:.0f} s after the last client had left, requests are still running")
        return failures
    num_free = await client.num_free_blocks()
    if num_free is not None and num_free != num_free_before:
        failures.append(f"{num_free} KV blocks are free in the idle server, but {num_free_before} were at the start")
    if engine is not None:
        failures += leaks(engine)
    return failures


def leaks(engine: Engine) -> list[str]:
    """What an idle engine holds that it must not."""
    try:
        engine.check_integrity()
    except AssertionError as error:
        return [f"check_integrity: {error}"]
    scheduler = engine.scheduler
    found = []
    if scheduler.num_running or scheduler.num_waiting:
        found.append(f"{scheduler.num_running} requests run and {scheduler.num_waiting} wait in an idle engine")
    if pins := engine.slot_cache.num_pins:
        found.append(f"adapters are pinned by nobody: {dict(pins)}")
    return found


async def _compare_with_alone(
    client: Client, templates: Sequence[TraceRequest], run: _Run, failures: list[str]
) -> dict[str, Any]:
    """Some templates once alone; every finished answer to them must be the same, and is a failure if it has to be."""
    answers: dict[int, list[Record]] = {}
    for record in run.records:
        if record.is_done:
            answers.setdefault(record.index, []).append(record)
    checked = sorted(answers)[: run.options.num_checked]
    pairs: dict[int, tuple[list[int] | str, list[int] | str]] = {}
    for index in checked:
        alone = await run_alone(client, templates[index], index, seed=run.point.seed)
        if alone.error is not None:
            failures.append(f"request {index} failed alone: {alone.error}")
        for record in answers[index]:
            pairs[len(pairs)] = (record.output, alone.output)
    same = agreement(pairs)
    if run.options.are_outputs_exact and same["equal"] < same["sample"]:
        failures.append(f"{same['sample'] - same['equal']} answers differ from their requests' alone")
    if run.options.are_outputs_exact and not same["sample"]:
        failures.append("no answer was compared with its request's alone; none has finished, or --check is 0")
    return same | {"checked_templates": len(checked), "templates": len(templates)}


def _print(result: dict[str, Any]) -> None:
    same = result["agreement"]
    print(
        f"{result['minutes']:g} minutes of {result['workload']} at {result['rate']:g}/s: {result['completed']} of "
        f"{result['requests']} done, {result['cancelled']} clients left, {result['output_tokens_per_s']:.0f} tokens/s, "
        f"{same['equal']}/{same['sample']} answers to {same['checked_templates']} of {same['templates']} different "
        "requests as alone"
    )
    for failure in result["failures"] or ["nothing failed"]:
        print(f"  {failure}")
