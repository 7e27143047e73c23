"""What HTTP streams cost the engine's thread, and what clients see of it.

    python -m serving.bench.http_streams --streams 256 --tokens-per-s 50

A fake engine makes a token for every running request in each step. As the real one it is a step ahead: its thread
works in Python for --host-ms to plan and dispatch a step, then waits for the step before, on a device that is a clock
here. It runs twice: alone, and with as many streams over real sockets to a client in a process of its own. What the
second run adds to plan and dispatch is what HTTP takes from the engine by the interpreter's lock and the machine's
cores; it costs clients nothing as long as it fits beside the device's step.
"""

import argparse
import asyncio
import dataclasses
import json
import logging
import multiprocessing
import os
import platform
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import uvloop

from serving.async_engine import AsyncEngine
from serving.metrics import CONTENT_TYPE, Metrics
from serving.mixes import ModelRegistry
from serving.prompts import PromptEncoder
from serving.queue_bound import QueueBound
from serving.request import FinishReason, Mix, Request, RequestOutput, SamplingParams
from serving.server import Server, ServerConfig, create_app, listen

TEXT = " token"


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is run.

    Attributes:
      num_streams: requests that run at once.
      num_tokens: tokens of each.
      step_s: seconds of a step, in which each gets one.
      host_s: seconds of it in which the engine's thread works in Python.
    """

    num_streams: int
    num_tokens: int
    step_s: float
    host_s: float


class ClockEngine:
    """Makes a token for each request a step, one step ahead of what it reads, on a device that is a clock.

    Measured are the steps in which every stream runs.

    Attributes:
      step_times_s: from the outputs of a step to those of the next.
      host_times_s: from the start of a step to its dispatch: `host_s`, and what others took from the thread.
      idle_s: how long the device waited for the dispatch.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._num_output_tokens: dict[str, int] = {}
        self._device_end_s = 0.0
        self._last_end_s: float | None = None
        self.step_times_s: list[float] = []
        self.host_times_s: list[float] = []
        self.idle_s: list[float] = []

    @property
    def has_work(self) -> bool:
        return bool(self._num_output_tokens)

    is_waiting_for_adapters = False

    def on_adapter_news(self, listener: Callable[[], None]) -> None:
        """It never waits for adapters."""

    def add_request(self, request: Request) -> None:
        self._num_output_tokens[request.request_id] = 0

    def abort(self, request_id: str) -> None:
        self._num_output_tokens.pop(request_id, None)

    def step(self) -> list[RequestOutput]:
        """Plans and dispatches a step, then waits for the one before."""
        start_s = time.perf_counter()
        _work(self._workload.host_s)
        dispatched_s, before_end_s = time.perf_counter(), self._device_end_s
        self._device_end_s = max(dispatched_s, before_end_s) + self._workload.step_s
        time.sleep(max(0.0, before_end_s - dispatched_s))
        outputs = [self._advance(request_id) for request_id in list(self._num_output_tokens)]
        self._measure(len(outputs), dispatched_s - start_s, max(0.0, dispatched_s - before_end_s))
        return outputs

    def _advance(self, request_id: str) -> RequestOutput:
        num_tokens = self._num_output_tokens[request_id] = self._num_output_tokens[request_id] + 1
        reason = FinishReason.LENGTH if num_tokens == self._workload.num_tokens else None
        if reason is not None:
            del self._num_output_tokens[request_id]
        return RequestOutput(request_id, TEXT, (5,), (), reason, 1, num_tokens)

    def _measure(self, num_outputs: int, host_s: float, idle_s: float) -> None:
        now_s = time.perf_counter()
        is_full = num_outputs == self._workload.num_streams
        if is_full and self._last_end_s is not None:
            self.step_times_s.append(now_s - self._last_end_s)
            self.host_times_s.append(host_s)
            self.idle_s.append(idle_s)
        self._last_end_s = now_s if is_full else None

    def read_adapter(self, name: str, folder: Path) -> Any:
        raise NotImplementedError("this engine has no adapters")

    def add_adapter(self, adapter: Any) -> str:
        raise NotImplementedError("this engine has no adapters")

    def remove_adapter(self, adapter_id: str) -> None:
        raise NotImplementedError("this engine has no adapters")


def _work(seconds: float) -> None:
    """Python for so much of the thread's processor time, with the interpreter's lock."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


# The client, in its own process


class StreamReader(asyncio.Protocol):
    """Reads one stream and notes when each of its events came.

    Attributes:
      times_s: of the events with a token.
      done: set when the stream has ended.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._tail = b""
        self.times_s: list[float] = []
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(self._body)}\r\n\r\n"
        cast(asyncio.Transport, transport).write(head.encode() + self._body)

    def data_received(self, data: bytes) -> None:
        text = self._tail + data
        self.times_s.extend([time.perf_counter()] * text.count(b"data: {"))
        if b"data: [DONE]" in text and not self.done.done():
            self.done.set_result(None)
        self._tail = text[-6:] if not text.endswith(b"\n") else b""  # a mark may be cut in two

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"a stream was cut off: {exc}"))


def run_client(port: int, workload: Workload, results: Connection) -> None:
    """Runs all streams at once; sends the time of each event, by stream, in seconds."""
    results.send(uvloop.run(_read_streams(port, workload)))


async def _read_streams(port: int, workload: Workload) -> list[list[float]]:
    body = {"prompt": [5], "max_tokens": workload.num_tokens, "stream": True, "temperature": 0}
    loop = asyncio.get_running_loop()
    readers = []
    for _ in range(workload.num_streams):
        make = lambda: StreamReader(json.dumps(body).encode())  # noqa: E731
        _, reader = await loop.create_connection(make, "127.0.0.1", port)
        readers.append(reader)
    async with asyncio.timeout(60 + 10 * workload.num_tokens * workload.step_s):
        await asyncio.gather(*(reader.done for reader in readers))
    return [reader.times_s for reader in readers]


# The two runs


def run_quiet(workload: Workload) -> ClockEngine:
    """The engine's thread alone."""
    engine = ClockEngine(workload)
    for i in range(workload.num_streams):
        engine.add_request(Request(f"quiet-{i}", [5], SamplingParams(), Mix(), 0.0))

    def run() -> None:
        while engine.has_work:
            engine.step()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return engine


def run_streams(workload: Workload) -> tuple[ClockEngine, list[list[float]]]:
    """The engine behind the real server; also when each event came to the client, by stream, in seconds."""
    engine, config = ClockEngine(workload), ServerConfig(port=0)
    async_engine = AsyncEngine(engine, QueueBound(workload.num_streams))
    registry = ModelRegistry("clock", "clock", [], [], num_slots=0, slot_rank=8)
    encoder = PromptEncoder(None, vocab=10, max_model_len=workload.num_tokens + 1)
    metrics = Metrics()
    app = create_app(async_engine, registry, encoder, lambda: (metrics.render(), CONTENT_TYPE), config, metrics)
    bound = listen(config.host, config.port)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")
    times_s: list[list[float]] = []

    def drive() -> None:
        client = context.Process(target=run_client, args=(bound.getsockname()[1], workload, sender))
        client.start()
        while client.is_alive() and not receiver.poll(0.2):
            pass
        times_s.extend(receiver.recv() if receiver.poll() else [])
        client.join()
        server.should_exit = True

    driver = threading.Thread(target=drive)
    server = Server(app, async_engine, config, driver.start)
    server.run(sockets=[bound])
    driver.join()
    async_engine.stop()
    if not times_s:
        raise RuntimeError("the client failed; see its traceback above")
    return engine, times_s


def measure(workload: Workload) -> dict[str, Any]:
    """Both runs and their percentiles."""
    start_s = time.process_time()
    quiet = run_quiet(workload)
    quiet_s = time.process_time() - start_s
    streaming, times_s = run_streams(workload)
    streaming_s = time.process_time() - start_s - quiet_s
    num_tokens = workload.num_streams * workload.num_tokens
    itl_s = np.concatenate([np.diff(times) for times in times_s])
    return {
        "quiet": _engine_times(quiet),
        "streaming": _engine_times(streaming),
        "client": {"events": sum(map(len, times_s)), "itl_ms": _percentiles_ms(itl_s)},
        "http_cpu_us_per_token": round((streaming_s - quiet_s) / num_tokens * 1e6, 2),
    }


def _engine_times(engine: ClockEngine) -> dict[str, Any]:
    return {
        "steps": len(engine.step_times_s),
        "step_ms": _percentiles_ms(engine.step_times_s),
        "host_ms": _percentiles_ms(engine.host_times_s),
        "device_idle_percent": round(100 * sum(engine.idle_s) / sum(engine.step_times_s), 3),
    }


def _percentiles_ms(times_s: Sequence[float] | np.ndarray) -> dict[str, float]:
    values = np.percentile(np.asarray(times_s), [50, 90, 99, 100]) * 1e3
    return {name: round(float(value), 3) for name, value in zip(("p50", "p90", "p99", "max"), values, strict=True)}


def table(result: dict[str, Any]) -> str:
    rows = [
        ("step, engine alone", result["quiet"]["step_ms"]),
        ("step, with streams", result["streaming"]["step_ms"]),
        ("plan and dispatch, engine alone", result["quiet"]["host_ms"]),
        ("plan and dispatch, with streams", result["streaming"]["host_ms"]),
        ("client's time between tokens", result["client"]["itl_ms"]),
    ]
    lines = [f"{'ms':32}{'p50':>9}{'p90':>9}{'p99':>9}{'max':>9}"]
    for name, values in rows:
        lines.append(f"{name:32}" + "".join(f"{values[p]:9.2f}" for p in ("p50", "p90", "p99", "max")))
    idle = (result[run]["device_idle_percent"] for run in ("quiet", "streaming"))
    lines.append("device idle: {} % alone, {} % with streams".format(*idle))
    return "\n".join([*lines, f"processor time of HTTP: {result['http_cpu_us_per_token']} us a token"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m serving.bench.http_streams", description="Measures what HTTP streams cost the engine."
    )
    parser.add_argument("--streams", type=int, default=256, metavar="N", help="streams at once (default: %(default)s)")
    parser.add_argument(
        "--tokens-per-s", type=float, default=50.0, metavar="X", help="tokens a second of each (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=500, metavar="N", help="tokens of each (default: %(default)s)")
    parser.add_argument(
        "--host-ms", type=float, default=2.0, metavar="MS",
        help="milliseconds of a step in which the engine's thread works in Python (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result as JSON (default: print it)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level="WARNING")
    workload = Workload(options.streams, options.tokens, 1 / options.tokens_per_s, options.host_ms / 1e3)
    result = {
        "command": f"python -m serving.bench.http_streams {shlex.join(arguments or sys.argv[1:])}".strip(),
        "machine": {"python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "workload": dataclasses.asdict(workload),
        **measure(workload),
    }
    print(table(result))
    text = json.dumps(result, indent=2)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
