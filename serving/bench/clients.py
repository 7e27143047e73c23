"""Sends the requests of a trace, when the trace says so: what a client is, and that of an engine in this process.

`http_client.py` has the client of a server.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from dymerge_jax.lora import AdapterWeights
from serving.adapter_store import StoredAdapter
from serving.async_engine import AsyncEngine
from serving.bench.bench_engine import merge_adapters
from serving.bench.records import Record, ServerCounts
from serving.bench.workloads import TraceRequest, prompt_token_ids
from serving.engine import Engine
from serving.errors import ServingError
from serving.plan import StepPlan
from serving.request import FinishReason, Mix, Request, SamplingParams


@dataclasses.dataclass(frozen=True)
class Clock:
    """Seconds from the start of a run.

    Attributes:
      start_s: the start, on the clock of `Request.arrival_s` (time.monotonic).
    """

    start_s: float = dataclasses.field(default_factory=time.monotonic)

    def elapsed_s(self) -> float:
        return time.monotonic() - self.start_s

    async def sleep_until(self, seconds: float) -> None:
        """Waits until so many seconds from the start."""
        delay_s = seconds - self.elapsed_s()
        if delay_s > 0:
            await asyncio.sleep(delay_s)


class Client(Protocol):
    """What sends requests and tells what came back.

    Attributes:
      vocab: token ids of prompts are below it.
    """

    vocab: int

    async def generate(self, request: TraceRequest, record: Record, clock: Clock, *, seed: int) -> None:
        """Sends one request and writes into `record` what comes; a refusal or failure is written there too.

        Cancelling it makes the client vanish: the server has to see to it.
        """
        ...

    async def settle(self) -> None:
        """Waits until the server holds no request of ours."""
        ...

    async def forget_prefixes(self) -> None:
        """Has later requests computed anew where the client can say so; a server over HTTP keeps its prefix cache."""
        ...

    async def counts(self) -> ServerCounts:
        """What the server has counted so far."""
        ...

    async def num_free_blocks(self) -> int | None:
        """KV blocks without an owner; None if the server does not say."""
        ...


class StepLog:
    """Counts what an engine's scheduler does, from the plans that it dispatches."""

    def __init__(self, engine: Engine) -> None:
        scheduler = engine.scheduler
        self._on_dispatched = scheduler.on_dispatched
        scheduler.on_dispatched = self._observe
        self._started: set[str] = set()
        self._queueing_s: list[float] = []
        self._num_steps = self._num_rows = self._num_tokens = self._num_loads = self._num_uses = 0

    def counts(self) -> ServerCounts:
        """All so far."""
        return ServerCounts(
            steps=self._num_steps,
            step_rows=self._num_rows,
            step_tokens=self._num_tokens,
            adapter_loads=self._num_loads,
            adapter_uses=self._num_uses,
            queueing_s=tuple(self._queueing_s),
        )

    def _observe(self, plan: StepPlan) -> None:
        now_s = time.monotonic()
        self._num_steps += 1
        self._num_rows += plan.num_seqs
        self._num_tokens += plan.num_tokens
        self._num_loads += len(plan.loads)
        for chunk in plan.chunks:
            request = chunk.request
            if request.request_id not in self._started:
                self._started.add(request.request_id)
                self._num_uses += len(request.adapters)
                self._queueing_s.append(now_s - request.arrival_s)
        self._on_dispatched(plan)


class MixResolver(Protocol):
    """What adapters of a trace mean to the engine."""

    async def resolve(self, request: TraceRequest) -> tuple[Mix, tuple[str, ...]]:
        """The mix of a request, and all adapters that it needs in slots; both by adapter id."""
        ...


class PlainMixes:
    """Every adapter is itself, and a mix is a mix.

    Args:
      adapter_ids: id of each adapter of the trace, by its number.
      experts: ids of the experts of each gated set, by its name.
    """

    def __init__(self, adapter_ids: Sequence[str], experts: Mapping[str, Sequence[str]]) -> None:
        self._adapter_ids = adapter_ids
        self._experts = experts

    async def resolve(self, request: TraceRequest) -> tuple[Mix, tuple[str, ...]]:
        if request.gated_set is not None:
            return Mix(gated_set=request.gated_set), tuple(self._experts[request.gated_set])
        mix = Mix(tuple((self._adapter_ids[adapter], weight) for adapter, weight in request.mix))
        return mix, mix.adapters


class PremergedMixes:
    """The baseline "premerge": a mix is one adapter, which its first request makes on the host.

    Args:
      async_engine: whose adapters are merged.
      adapter_ids: id of each adapter of the trace, by its number.
      num_workers: merges that run at once, each in a thread.

    Attributes:
      merge_s: seconds that each merge took.
    """

    def __init__(self, async_engine: AsyncEngine, adapter_ids: Sequence[str], *, num_workers: int = 4) -> None:
        self._async_engine = async_engine
        self._engine = _engine_of(async_engine)
        self._adapter_ids = adapter_ids
        self._pool = ThreadPoolExecutor(num_workers, "merge")
        self._composites: dict[tuple[tuple[int, float], ...], asyncio.Task[str]] = {}
        self.merge_s: list[float] = []

    async def resolve(self, request: TraceRequest) -> tuple[Mix, tuple[str, ...]]:
        key = tuple(sorted((adapter, weight) for adapter, weight in request.mix if weight != 0))
        if not key:
            return Mix(), ()
        if len(key) == 1 and key[0][1] == 1.0:  # an adapter alone needs no copy
            adapter_id = self._adapter_ids[key[0][0]]
        else:
            if key not in self._composites:
                self._composites[key] = asyncio.create_task(self._make(key, f"composite-{len(self._composites)}"))
            adapter_id = await asyncio.shield(self._composites[key])  # others may wait for it, whoever leaves
        return Mix(((adapter_id, 1.0),)), (adapter_id,)

    async def _make(self, key: tuple[tuple[int, float], ...], name: str) -> str:
        parts = [(self._weights(self._adapter_ids[adapter]), weight) for adapter, weight in key]

        def merge() -> StoredAdapter:
            start_s = time.perf_counter()
            adapter = self._engine.store.from_memory(name, merge_adapters(parts, name=name))
            self.merge_s.append(time.perf_counter() - start_s)
            return adapter

        adapter = await asyncio.get_running_loop().run_in_executor(self._pool, merge)
        return await self._async_engine.call(self._engine.add_adapter, adapter)

    def _weights(self, adapter_id: str) -> AdapterWeights:
        weights = self._engine.store.known(adapter_id).weights
        assert weights is not None, f"adapter {adapter_id!r} was not made in memory"
        return weights


class InProcessClient:
    """Sends requests to an engine in this process, whose thread must have been started.

    Args:
      async_engine: owns the engine.
      mixes: what the adapters of a trace mean.
    """

    def __init__(self, async_engine: AsyncEngine, mixes: MixResolver) -> None:
        self._async_engine = async_engine
        self._mixes = mixes
        self._engine = _engine_of(async_engine)
        self._log = StepLog(self._engine)
        self._num_sent = 0
        self.vocab = self._engine.model.config.vocab

    async def generate(self, request: TraceRequest, record: Record, clock: Clock, *, seed: int) -> None:
        try:
            mix, adapters = await self._mixes.resolve(request)
            self._num_sent += 1
            outputs = self._async_engine.generate(
                Request(
                    request_id=f"{self._num_sent}",
                    prompt_token_ids=prompt_token_ids(record.index, request.prompt_len, self.vocab, seed=seed),
                    sampling=SamplingParams(max_tokens=request.output_len, ignore_eos=True),
                    mix=mix,
                    arrival_s=clock.start_s + request.arrival_s,
                    adapters=adapters,
                )
            )
            async with contextlib.aclosing(outputs):  # leaving early aborts the request
                async for output in outputs:
                    if output.token_ids:
                        record.output_times_s.append(clock.elapsed_s())
                        record.num_tokens += len(output.token_ids)
                        record.token_ids += output.token_ids
                    record.error = output.error
                    record.is_done = output.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        except ServingError as error:
            record.error = str(error)

    async def settle(self) -> None:
        while self._async_engine.num_requests or self._engine.has_work:
            if (reason := self._async_engine.unhealthy_reason) is not None:
                raise RuntimeError(f"the engine has failed: {reason}")
            await asyncio.sleep(0.005)

    async def forget_prefixes(self) -> None:
        await self._async_engine.call(self._engine.forget_prefixes)

    async def counts(self) -> ServerCounts:
        return self._log.counts()

    async def num_free_blocks(self) -> int | None:
        return self._engine.scheduler.block_pool.num_free


def _engine_of(async_engine: AsyncEngine) -> Engine:
    engine = async_engine.engine
    assert isinstance(engine, Engine)
    return engine


Vanish = Callable[[int], float | None]
"""By position in the trace: seconds after its arrival at which the client vanishes; None if it stays."""


async def replay(
    client: Client,
    trace: Sequence[TraceRequest],
    *,
    drain_s: float,
    seed: int = 0,
    vanish: Vanish = lambda position: None,
    records: list[Record] | None = None,
) -> tuple[list[Record], bool]:
    """Sends every request when the trace says so, whatever became of those before: an open loop.

    Args:
      client: sends them.
      trace: by arrival.
      drain_s: requests that have not ended so long after the last arrival are cut off.
      seed: of the prompts.
      vanish: clients that leave early.
      records: of each request, in which what comes of it can be seen meanwhile; those of one index have the same
        prompt. None makes them, each with a prompt of its own.

    Returns:
      A record of each request, and whether any was cut off.
    """
    clock = Clock()
    if records is None:
        records = [Record(i, request.arrival_s, request.prompt_len) for i, request in enumerate(trace)]
    tasks = []
    for i, (request, record) in enumerate(zip(trace, records, strict=True)):
        await clock.sleep_until(request.arrival_s)
        tasks.append(asyncio.create_task(_send(client, request, record, clock, seed, vanish(i))))
    _, pending = await asyncio.wait(tasks, timeout=drain_s)
    for task in pending:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):  # of this bench, not of the server: those are in the records
            raise result
    return records, bool(pending)


async def _send(
    client: Client, request: TraceRequest, record: Record, clock: Clock, seed: int, vanish_s: float | None
) -> None:
    sending = client.generate(request, record, clock, seed=seed)
    if vanish_s is None:
        await sending
        return
    try:
        await asyncio.wait_for(sending, vanish_s)
    except TimeoutError:
        record.is_cancelled = True
