"""Runs the synchronous engine in its own thread and hands its outputs to asyncio.

Only the engine thread touches the engine. Event-loop code leaves commands (add, abort, call) in an inbox; the thread
takes the inbox, runs one step while there is work, and gives all outputs of the step to the event loop in one call.

Why a thread and no process, for now: a token costs HTTP about 35 us of processor time, so that 256 streams of 50
tokens a second take less than half a core, and give the interpreter's lock away at every write to a socket. The
median time to plan and dispatch (2 ms) is the same with them as without (`python -m serving.bench.http_streams`). Its
p99 was 15 to 21 ms with them and 6 to 14 without in most runs, of steps of 20 ms, on two cores shared with the client
and with other work: whether the lock or the cores were short is not known. Measure it again where the engine runs.
"""

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from serving.errors import EngineError, ServingError, UnavailableError
from serving.queue_bound import QueueBound
from serving.request import FinishReason, Request, RequestOutput

logger = logging.getLogger(__name__)

# A failed step may have lost donated device state: then every later step fails too, and health must say so.
MAX_FAILED_STEPS = 3


@runtime_checkable
class ReadAdapter(Protocol):
    """What HTTP needs of `serving.adapter_store.StoredAdapter`."""

    @property
    def name(self) -> str: ...

    @property
    def root(self) -> Path | None: ...

    @property
    def id(self) -> str: ...

    @property
    def content_hash(self) -> str: ...

    @property
    def num_slots(self) -> int: ...


class SynchronousEngine(Protocol):
    """What the thread needs of `serving.engine.Engine`."""

    def read_adapter(self, name: str, folder: Path) -> Any: ...  # gives a ReadAdapter; the one method for any thread

    def add_adapter(self, adapter: Any) -> str: ...

    def remove_adapter(self, adapter_id: str) -> None: ...

    def add_request(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> None: ...  # an id that has ended, or was never added, is ignored

    def step(self) -> list[RequestOutput]: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def is_waiting_for_adapters(self) -> bool: ...  # a step would do nothing

    def on_adapter_news(self, listener: Callable[[], None]) -> None: ...  # called when that may have changed


class Generation:
    """The outputs of requests submitted together: an async iterator of `RequestOutput`.

    It ends after the last request's final output. Whoever holds it must call `close`, which aborts what still runs.
    """

    def __init__(self, engine: "AsyncEngine", request_ids: Iterable[str]) -> None:
        self._engine = engine
        self._running = set(request_ids)
        self._outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._running and self._outputs.empty():
            raise StopAsyncIteration
        return await self._outputs.get()

    async def wait_accepted(self) -> None:
        """Waits until the engine has taken the requests.

        Raises:
          ServingError: If it refuses one of them; none of them runs then, and there is nothing to close.
        """
        try:
            await self.accepted
        except asyncio.CancelledError:
            self.close()
            raise
        except ServingError:
            self._engine.forget(self._running)
            self._running = set()
            raise

    def put(self, output: RequestOutput) -> None:
        """Called on the event loop with the next output of one of the requests."""
        if output.finish_reason is not None:
            self._running.discard(output.request_id)
        self._outputs.put_nowait(output)

    def close(self) -> None:
        """Aborts the requests that have not ended; may be called twice."""
        self._engine.abort(self._running)
        self._running = set()


@dataclasses.dataclass(frozen=True)
class _Call:
    """A function for the engine's thread and where its result goes."""

    function: Callable[..., Any]
    arguments: tuple[object, ...]
    result: asyncio.Future[Any]


_Command = tuple[Generation, Sequence[Request]] | _Call | str  # a str is the id of a request to abort


class AsyncEngine:
    """Owns the engine thread.

    Attributes:
      engine: the synchronous engine; after `start` only the thread may call it, but for `read_adapter`.
      queue_bound: refuses requests when too many wait.
    """

    def __init__(self, engine: SynchronousEngine, queue_bound: QueueBound | None = None) -> None:
        self.engine = engine
        self.queue_bound = queue_bound or QueueBound()
        self._generations: dict[str, Generation] = {}  # by request id; touched on the event loop only
        self._condition = threading.Condition()
        self._inbox: list[_Command] = []  # guarded by the condition
        self._is_stopping = False  # guarded by the condition
        self._is_draining = False
        self._failure: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # Event-loop side

    def start(self) -> None:
        """Starts the thread; called once, on the event loop that takes the outputs."""
        self._loop = asyncio.get_running_loop()
        self.engine.on_adapter_news(self._wake)
        self._thread.start()

    @property
    def unhealthy_reason(self) -> str | None:
        """Why new requests are refused; None while the engine is well."""
        if self._failure is not None:
            return self._failure
        if self._is_draining:
            return "the server is shutting down"
        if not self._thread.is_alive():
            return "the engine thread is not running"
        return None

    @property
    def num_requests(self) -> int:
        """Requests that are waiting or running."""
        return len(self._generations)

    @property
    def is_healthy(self) -> bool:
        return self.unhealthy_reason is None

    def begin(self, requests: Sequence[Request]) -> Generation:
        """Hands requests to the engine, which has not accepted them yet; see `Generation.wait_accepted`.

        There is no wait between a caller's look at the registry and the engine's inbox: an adapter that is unloaded
        or replaced meanwhile is removed from the engine after these requests came.

        Raises:
          ServingError: If the engine is unhealthy or too many requests wait.
        """
        if (reason := self.unhealthy_reason) is not None:
            raise UnavailableError(reason)
        self.queue_bound.take([r.request_id for r in requests])
        generation = Generation(self, [r.request_id for r in requests])
        self._generations.update((r.request_id, generation) for r in requests)
        self._send((generation, requests))
        return generation

    async def submit(self, requests: Sequence[Request]) -> Generation:
        """Hands requests to the engine and waits until it has accepted or refused them.

        Raises:
          ServingError: If the engine refuses one of them (then none runs), is unhealthy, or too many wait.
        """
        generation = self.begin(requests)
        await generation.wait_accepted()
        return generation

    async def call[T](self, function: Callable[..., T], *arguments: object) -> T:
        """Runs `function(*arguments)` on the engine's thread between two steps.

        It runs to its end even if the caller is cancelled.

        Raises:
          UnavailableError: If the engine does not work any more.
          Exception: What the function raises.
        """
        if (reason := self.unhealthy_reason) is not None:
            raise UnavailableError(reason)
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._send(_Call(function, arguments, result))
        return await result

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        """Outputs of one request; closing the iterator, or cancelling its reader, aborts the request."""
        generation = await self.submit([request])
        with contextlib.closing(generation):
            async for output in generation:
                yield output

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests wherever they are; ids that have ended already are ignored."""
        for request_id in list(request_ids):
            if self._generations.pop(request_id, None) is not None:
                self.queue_bound.leave(request_id)
                self._send(request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drops requests that the engine does not hold."""
        for request_id in request_ids:
            self._generations.pop(request_id, None)
            self.queue_bound.leave(request_id)

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, waits for the running ones, and ends what is left after `timeout_s` seconds."""
        self._is_draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._generations and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        if self._generations:
            logger.warning("%d requests did not end within %g s and are aborted", len(self._generations), timeout_s)
        for request_id in list(self._generations):
            self._deliver([_ended(request_id, FinishReason.ABORT, "the server is shutting down")])
            self._send(request_id)

    def stop(self, timeout_s: float = 2.0) -> bool:
        """Ends the thread after its current step; False if that took longer than `timeout_s` seconds."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify()

    def _send(self, command: _Command) -> None:
        with self._condition:
            self._inbox.append(command)
            self._condition.notify()

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            generation = self._generations.get(output.request_id)
            if generation is None:  # aborted while its output was on the way
                continue
            self.queue_bound.start(output.request_id)
            if output.finish_reason is not None:
                del self._generations[output.request_id]
            generation.put(output)

    # Engine-thread side

    def _run(self) -> None:
        running: set[str] = set()  # what the engine holds, as far as this thread knows
        inbox: deque[_Command] = deque()  # what is left of it if a command has failed
        failed_steps = 0
        while True:
            with self._condition:
                self._condition.wait_for(lambda: inbox or self._inbox or self._is_stopping or self._can_step)
                inbox.extend(self._inbox)
                self._inbox.clear()
                if self._is_stopping:
                    break
            try:
                while inbox:
                    self._apply(inbox.popleft(), running)
                outputs = self.engine.step() if self._can_step else []
                failed_steps = 0 if outputs else failed_steps
            except Exception as error:
                failed_steps += 1
                outputs = self._fail(error, running, failed_steps)
            running.difference_update(o.request_id for o in outputs if o.finish_reason is not None)
            if outputs:
                self._call_on_loop(self._deliver, outputs)
        for command in inbox:
            if isinstance(command, _Call):  # its caller waits
                self._call_on_loop(_refuse, command.result, UnavailableError("the server is shutting down"))

    @property
    def _can_step(self) -> bool:
        engine = self.engine
        return self._failure is None and engine.has_work and not engine.is_waiting_for_adapters

    def _apply(self, command: _Command, running: set[str]) -> None:
        if isinstance(command, str):
            running.discard(command)
            self.engine.abort(command)
            return
        if isinstance(command, _Call):
            self._carry_out(command)
            return
        generation, requests = command
        added: list[str] = []
        try:
            if self._failure is not None:
                raise UnavailableError(self._failure)
            for request in requests:
                self.engine.add_request(request)
                added.append(request.request_id)
        except Exception as error:
            for request_id in added:
                self.engine.abort(request_id)
            if not isinstance(error, ServingError):
                logger.exception("adding a request failed")
                error = EngineError(f"the engine could not take the request: {type(error).__name__}: {error}")
            self._call_on_loop(_refuse, generation.accepted, error)
            return
        running.update(added)
        self._call_on_loop(_accept, generation.accepted)

    def _carry_out(self, call: _Call) -> None:
        """What it raises is its caller's business: no step has failed."""
        try:
            result = call.function(*call.arguments)
        except Exception as error:
            self._call_on_loop(_refuse, call.result, error)
        else:
            self._call_on_loop(_accept, call.result, result)

    def _fail(self, error: Exception, running: set[str], failed_steps: int) -> list[RequestOutput]:
        """Ends every running request with the error, so that the next ones may start from a clean engine."""
        text = f"a step of the engine failed: {type(error).__name__}: {error}"
        logger.error("%s; %d requests end with it", text, len(running), exc_info=error)
        for request_id in running:
            try:
                self.engine.abort(request_id)
            except Exception:
                logger.exception("aborting request %s failed", request_id)
                failed_steps = MAX_FAILED_STEPS
        if failed_steps >= MAX_FAILED_STEPS:
            self._failure = f"{text} ({failed_steps} failures in a row); restart the server"
        return [_ended(request_id, FinishReason.ERROR, text) for request_id in running]

    def _call_on_loop(self, function, *args: object) -> None:  # pyright: ignore[reportMissingParameterType]
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear
            self._loop.call_soon_threadsafe(function, *args)


def _accept(future: asyncio.Future[Any], result: object = None) -> None:
    if not future.done():
        future.set_result(result)


def _refuse(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _ended(request_id: str, finish_reason: FinishReason, error: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason=finish_reason, error=error)
