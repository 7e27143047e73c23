"""Two ways to send the requests of a trace: to an engine in this process, and over HTTP to a server of OpenAI's API."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import httpx

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

    async def counts(self) -> ServerCounts:
        """What the server has counted so far."""
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
        weights_of = {adapter.name: adapter.weights for adapter in self._engine.store.adapters}
        parts = [(weights_of[self._adapter_ids[adapter]], weight) for adapter, weight in key]

        def merge() -> StoredAdapter:
            start_s = time.perf_counter()
            adapter = StoredAdapter(name, None, merge_adapters(parts, name=name))
            self.merge_s.append(time.perf_counter() - start_s)
            return adapter

        adapter = await asyncio.get_running_loop().run_in_executor(self._pool, merge)
        self._engine.store.add(adapter)  # the engine reads the store's dictionary only when a request names it
        return name


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
            await asyncio.sleep(0.005)

    async def counts(self) -> ServerCounts:
        return self._log.counts()


class HttpClient:
    """Sends requests to a server over HTTP, streaming, as its users do.

    Args:
      url: of the server, without /v1.
      api_key: sent with every request; None sends none.
      vocab: token ids of prompts are below it.
      timeout_s: seconds without a byte after which a request has failed.
    """

    def __init__(self, url: str, *, api_key: str | None = None, vocab: int = 32_000, timeout_s: float = 120.0) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.http = httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers, limits=limits, timeout=timeout_s)
        self.vocab = vocab
        self.base_model = ""
        self.adapter_names: list[str] = []

    async def connect(self) -> None:
        """Asks the server for its models: adapter i of a trace is the i-th that has a parent; adapters come first.

        Raises:
          ValueError: If there is no server, or it refuses.
        """
        try:
            response = await self.http.get("/v1/models")
            response.raise_for_status()
            models = response.json()["data"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise ValueError(
                f"--url {self.http.base_url}: /v1/models gave no list of models ({error!r}); expected a running server "
                "of OpenAI's API, e.g. http://127.0.0.1:8000, and its key in --api-key"
            ) from error
        self.base_model = next(m["id"] for m in models if m.get("parent") is None)
        self.adapter_names = [m["id"] for m in models if m.get("parent") is not None]

    async def generate(self, request: TraceRequest, record: Record, clock: Clock, *, seed: int) -> None:
        body = self.body(request, prompt_token_ids(record.index, request.prompt_len, self.vocab, seed=seed))
        try:
            async with self.http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    record.error = f"HTTP {response.status_code}: {(await response.aread()).decode()[:500]}"
                    return
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        _take_event(line.removeprefix("data:").strip(), record, clock)
        except httpx.HTTPError as error:
            record.error = repr(error)

    def body(self, request: TraceRequest, prompt: list[int]) -> dict[str, Any]:
        """The JSON of a request.

        Raises:
          ValueError: If the server has too few adapters.
        """
        most = max((adapter for adapter, _ in request.mix), default=-1)
        if most >= len(self.adapter_names):
            raise ValueError(
                f"the trace uses adapter {most}, but the server names {len(self.adapter_names)} models beside its base: "
                f"{', '.join(self.adapter_names) or 'none'}; start it with more --adapters"
            )
        body = {
            "model": request.gated_set or self.base_model,
            "prompt": prompt,
            "max_tokens": request.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.mix:
            body["adapter_mix"] = {self.adapter_names[adapter]: weight for adapter, weight in request.mix}
        return body

    async def settle(self) -> None:
        while (await self.metrics()).get("dymerge_requests_running", 0) > 0:
            await asyncio.sleep(0.05)

    async def counts(self) -> ServerCounts:
        metrics = await self.metrics()
        if "dymerge_step_duration_seconds_count" not in metrics:
            return ServerCounts()  # another server
        return ServerCounts(
            steps=int(metrics["dymerge_step_duration_seconds_count"]),
            step_tokens=int(metrics.get("dymerge_step_tokens_total", 0)),
            adapter_loads=int(metrics.get("dymerge_adapter_loads_total", 0)),
            adapter_uses=int(metrics.get("dymerge_adapter_requests_total", 0)),
        )

    async def metrics(self) -> dict[str, float]:
        """The server's metrics by name, those of all labels added up; empty if it has none."""
        try:
            response = await self.http.get("/metrics")
        except httpx.HTTPError:
            return {}
        totals: dict[str, float] = {}
        for line in response.text.splitlines() if response.status_code == 200 else ():
            if not line.startswith("#") and line.strip():
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    async def aclose(self) -> None:
        """Ends all connections."""
        await self.http.aclose()


def _take_event(data: str, record: Record, clock: Clock) -> None:
    """Writes one event of a stream into the record; the usage, which comes last, says how many tokens there were."""
    if data == "[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        record.error = str(event["error"])
        return
    if event.get("usage"):
        record.num_tokens = event["usage"]["completion_tokens"]
    for choice in event.get("choices", ()):
        record.output_times_s.append(clock.elapsed_s())
        record.num_tokens += 1
        record.text += choice.get("text") or ""
        record.is_done = record.is_done or choice.get("finish_reason") in ("length", "stop")


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
    prompt_of: Callable[[int], int] = lambda position: position,
) -> tuple[list[Record], bool]:
    """Sends every request when the trace says so, whatever became of those before: an open loop.

    Args:
      client: sends them.
      trace: by arrival.
      drain_s: requests that have not ended so long after the last arrival are cut off.
      seed: of the prompts.
      vanish: clients that leave early.
      prompt_of: by position in the trace, which prompt it has; requests of one number have the same.

    Returns:
      A record of each request, and whether any was cut off.
    """
    clock = Clock()
    records = [Record(prompt_of(i), request.arrival_s, request.prompt_len) for i, request in enumerate(trace)]
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
