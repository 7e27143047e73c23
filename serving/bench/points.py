"""One point of the load benchmark is one workload at one rate on one engine; this runs many of them in one process."""

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from dymerge_jax.model import SplitModel
from serving.async_engine import AsyncEngine
from serving.bench.bench_engine import EngineSpec, make_engine, make_model
from serving.bench.clients import Client, Clock, InProcessClient, PlainMixes, PremergedMixes, replay
from serving.bench.records import Record, agreement, summarise
from serving.bench.workloads import TraceRequest, WorkloadConfig, WorkloadName, make_trace, read_trace
from serving.config import EngineConfig, SchedulerName
from serving.engine import Engine, hand_over_quickly
from serving.policies import make_policy
from serving.queue_bound import QueueBound

_MAX_REQUESTS = 100_000  # the bench has its own bound, in time: nobody is refused


@dataclasses.dataclass(frozen=True)
class Point:
    """One run.

    Attributes:
      engine: what it runs on; None for a server over HTTP.
      workload: name of the workload, or of the trace file.
      rate: mean requests per second.
      duration_s: of the arrivals.
      config: what to draw requests from.
      scheduler, theta_s: the policy; a server over HTTP has its own.
      seed: of arrivals, lengths, mixes and prompts.
      trace: file to replay instead of drawing.
      is_cold: no adapter is in slots when it starts.
      figures: the paper's figures that it belongs to.
    """

    engine: EngineSpec | None
    workload: str
    rate: float
    duration_s: float
    config: WorkloadConfig
    scheduler: SchedulerName = EngineConfig.scheduler
    theta_s: float = EngineConfig.theta_s
    seed: int = 0
    trace: Path | None = None
    is_cold: bool = False
    figures: tuple[str, ...] = ()

    def requests(self) -> list[TraceRequest]:
        """What to send.

        Raises:
          ValueError: If the trace file is wrong, or a request does not fit the engine.
        """
        if self.trace is None:
            workload: WorkloadName = self.workload  # pyright: ignore[reportAssignmentType] (checked by the parser)
            trace = make_trace(workload, rate=self.rate, duration_s=self.duration_s, config=self.config, seed=self.seed)
        else:
            trace = read_trace(self.trace)
        if self.engine is not None:
            _check_fits(trace, self.engine)
        return trace

    def settings(self) -> dict[str, Any]:
        """What was measured, for the result file."""
        settings: dict[str, Any] = {
            "workload": self.workload,
            "rate": self.rate,
            "duration_s": self.duration_s,
            "seed": self.seed,
            "trace": None if self.trace is None else self.trace.name,
            "is_cold": self.is_cold,
            "figures": list(self.figures),
            **dataclasses.asdict(self.config),
        }
        if self.engine is not None:
            settings |= dataclasses.asdict(self.engine) | {"scheduler": self.scheduler, "theta_s": self.theta_s}
        return settings


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How points are run.

    Attributes:
      drain_s: requests that have not ended so long after the last arrival are cut off.
      warm_up: requests before the first point of an engine, which are not counted.
      num_checked: finished requests of each point that are run again, alone.
      keeps_times: whether rows hold every TTFT and TPOT, sorted, for plots of their distributions.
      keeps_outputs: whether rows hold each request's times and tokens.
    """

    drain_s: float = 60.0
    warm_up: int = 8
    num_checked: int = 8
    keeps_times: bool = False
    keeps_outputs: bool = False


def _check_fits(trace: Sequence[TraceRequest], spec: EngineSpec) -> None:
    for i, request in enumerate(trace):
        if request.prompt_len + request.output_len > spec.max_model_len:
            raise ValueError(
                f"request {i} of the trace has {request.prompt_len} + {request.output_len} tokens, but an engine's "
                f"request at most {spec.max_model_len}; raise --max-model-len or make another trace"
            )
        most = max((adapter for adapter, _ in request.mix), default=-1)
        if most >= spec.num_adapters:
            raise ValueError(f"request {i} of the trace uses adapter {most}; raise --adapters, now {spec.num_adapters}")
        num_slots = sum(weight != 0 for _, weight in request.mix) * -(-spec.rank // spec.slot_rank)
        if spec.most_mix_slots is not None and num_slots > spec.most_mix_slots:
            raise ValueError(
                f"request {i} of the trace needs {num_slots} slots, but --baseline {spec.baseline} runs mixes of at "
                f"most {spec.most_mix_slots} slots; raise --slot-rank or use smaller mixes"
            )
        if num_slots > spec.slots:
            raise ValueError(f"request {i} of the trace needs {num_slots} slots; raise --slots, now {spec.slots}")
        if request.gated_set is not None and not spec.has_gated_set:
            raise ValueError(f"request {i} of the trace uses a gated set, which this engine lacks")


@contextlib.asynccontextmanager
async def started(engine: Engine, spec: EngineSpec) -> AsyncIterator[InProcessClient]:
    """The engine in its thread: a client of it."""
    hand_over_quickly()  # as a server does
    async_engine = AsyncEngine(engine, QueueBound(_MAX_REQUESTS))
    adapter_ids = [adapter.id for adapter in engine.store.adapters]
    mixes = PlainMixes(adapter_ids, {s.name: s.experts for s in engine.gated_sets})
    if spec.baseline == "premerge":
        mixes = PremergedMixes(async_engine, adapter_ids)
    async_engine.start()
    try:
        yield InProcessClient(async_engine, mixes)
    finally:
        async_engine.stop(timeout_s=30.0)


def run_points(
    points: Sequence[Point], options: RunOptions, *, report: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Runs points in process, those of one engine in a row; the model of a shape is made once.

    Args:
      points: each with an engine.
      options: how.
      report: called with each row as soon as it is there.

    Returns:
      A row for each point, in the order that they ran.
    """
    rows: list[dict[str, Any]] = []
    model: SplitModel | None = None
    shape = None
    for spec, group in _by_engine(points):
        if (spec.shape, spec.dtype) != shape:
            model, shape = make_model(spec), (spec.shape, spec.dtype)
        assert model is not None
        start_s = time.perf_counter()
        engine = make_engine(spec, model)
        engine.compile()
        compile_s = time.perf_counter() - start_s
        for row in asyncio.run(_run_group(engine, spec, group, options, report)):
            rows.append(row | {"compile_s": compile_s})
        del engine
        gc.collect()  # before the next engine takes its memory
    return rows


def _by_engine(points: Iterable[Point]) -> list[tuple[EngineSpec, list[Point]]]:
    groups: dict[EngineSpec, list[Point]] = {}
    for point in points:
        assert point.engine is not None
        groups.setdefault(point.engine, []).append(point)
    return list(groups.items())


async def _run_group(
    engine: Engine,
    spec: EngineSpec,
    points: Sequence[Point],
    options: RunOptions,
    report: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    rows = []
    async with started(engine, spec) as client:
        await _warm_up(client, points[0].requests()[: options.warm_up])
        for number, point in enumerate(points):
            prepare(engine, point)
            row = await run_point(client, point, options, number=number)
            rows.append(row)
            report(row)
    return rows


async def _warm_up(client: Client, requests: Sequence[TraceRequest]) -> None:
    """What a first request sets up is no part of any point."""
    if requests:
        short = [dataclasses.replace(r, arrival_s=0.0, output_len=min(r.output_len, 8)) for r in requests]
        await replay(client, short, drain_s=60.0, seed=-1 % 2**31)
        await client.settle()


def prepare(engine: Engine, point: Point) -> None:
    """Sets the policy of an idle engine, and takes the adapters from its slots for a cold start."""
    policy = EngineConfig(scheduler=point.scheduler, theta_s=point.theta_s, scheduler_seed=point.seed)
    engine.scheduler.policy = make_policy(policy)
    if point.is_cold:
        for adapter_id in tuple(engine.slot_cache.resident):
            engine.slot_cache.remove(adapter_id)


async def run_point(client: Client, point: Point, options: RunOptions, *, number: int = 0) -> dict[str, Any]:
    """Runs one point and checks a sample of what it gave; the server is idle before and after.

    Args:
      client: of the server.
      point: what to run.
      options: how.
      number: of the point among those of one server; each has prompts of its own, as a prefix cache remembers them.

    Returns:
      The point's settings, the numbers of `summarise`, whether it was cut off, and the sample's agreement.

    Raises:
      RuntimeError: If the server still runs requests when all of them have ended or been given up.
    """
    trace = point.requests()
    before = await client.counts()
    seed = point.seed + 7919 * number
    records, is_cut = await replay(client, trace, drain_s=options.drain_s, seed=seed)
    await _settle(client, options.drain_s)
    counts = (await client.counts()).since(before)
    wall_s = max((r.output_times_s[-1] for r in records if r.output_times_s), default=0.0)
    row = point.settings() | summarise(records, counts, wall_s=wall_s) | {"is_cut": is_cut}
    row["errors"] = sorted({r.error for r in records if r.error is not None})[:5]
    row["agreement"] = await check_sample(client, trace, records, options.num_checked, seed=seed)
    if options.keeps_times:
        row["ttft_ms"] = sorted(round(s * 1e3, 2) for r in records if (s := r.ttft_s) is not None)
        row["tpot_ms"] = sorted(round(s * 1e3, 3) for r in records if (s := r.tpot_s) is not None)
    if options.keeps_outputs:
        row["records"] = [dataclasses.asdict(record) for record in records]
    return row


async def _settle(client: Client, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(client.settle(), timeout_s)
    except TimeoutError as error:
        raise RuntimeError(
            f"{timeout_s:g} s after the last client had ended or left, the server still runs requests; see its log"
        ) from error


async def check_sample(
    client: Client, trace: Sequence[TraceRequest], records: Sequence[Record], count: int, *, seed: int
) -> dict[str, Any]:
    """Runs some of the finished requests again, one at a time, and compares their outputs."""
    done = [r for r in records if r.is_done]
    pairs = {}
    for record in random.Random(seed).sample(done, min(count, len(done))):
        await client.forget_prefixes()
        alone = await run_alone(client, trace[record.index], record.index, seed=seed)
        pairs[record.index] = (record.output, alone.output)
    return agreement(pairs)


async def run_alone(client: Client, request: TraceRequest, index: int, *, seed: int) -> Record:
    """A request on an idle server."""
    record = Record(index, 0.0, request.prompt_len)
    await client.generate(dataclasses.replace(request, arrival_s=0.0), record, Clock(), seed=seed)
    return record


def ttft_p99_s(row: dict[str, Any]) -> float:
    """Of a row; infinite if requests were cut off or failed, or none was answered."""
    p99_ms = row["ttft_ms_p99"]
    return float("inf") if p99_ms is None or row["is_cut"] or row["failed"] else p99_ms / 1e3


def device_kind() -> str:
    """What this process computes on."""
    return jax.devices()[0].device_kind


def grid(**axes: Iterable[Any]) -> list[dict[str, Any]]:
    """All combinations of some values of some names."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
