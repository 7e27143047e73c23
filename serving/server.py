"""HTTP routes in the shape of OpenAI's API, those that change the server, and the server that carries them.

The life of a request: the body is read and checked (protocol), its model and mix resolved (mixes), its text tokenized
(prompts); the engine accepts it (async_engine); its outputs are shaped (responses) and sent, as one answer or as
server-sent events. All checks come before the first byte of an answer. A client that goes away ends its request.
Who may ask what is decided in access.
"""

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from types import FrameType
from typing import Any

import fastapi
import pydantic
import uvicorn
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.access import OPEN_PATH, Access, AccessMiddleware
from serving.adapter_roots import AdapterRoots
from serving.admin import Admin
from serving.async_engine import AsyncEngine, Generation
from serving.errors import ServingError, UnknownModelError
from serving.metrics import Metrics
from serving.mixes import ModelRegistry
from serving.prompts import PromptEncoder
from serving.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    LoadAdapterRequest,
    MixRequest,
    UnloadAdapterRequest,
    parse_admin_body,
    parse_body,
)
from serving.queue_bound import DEFAULT_MAX_WAITING
from serving.responses import error_response
from serving.retrieval import Retriever
from serving.service import Job, OpenAIService

logger = logging.getLogger(__name__)

GENERATION_HEADER = "x-adapter-generation"  # of a load's answer
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that left; nobody reads the answer


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Settings of the HTTP side; the engine's are in `EngineConfig`.

    Attributes:
      host, port: where to listen; port 0 takes a free one.
      api_key: what clients send as "Authorization: Bearer KEY"; None asks for none.
      admin_api_key: the key of the routes that change the server; None for `api_key`, or this machine alone.
      adapter_roots: folders below which adapters may be loaded from over HTTP; none turns loading off.
      max_waiting: requests that may wait for their first token; more are refused with 429.
      drain_s: seconds that running requests get to end when the server is stopped.
      max_body_bytes: largest request body.
      max_choices: most answers (prompts times n) of one request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    admin_api_key: str | None = None
    adapter_roots: tuple[str, ...] = ()
    max_waiting: int = DEFAULT_MAX_WAITING
    drain_s: float = 5.0
    max_body_bytes: int = 16 * 2**20
    max_choices: int = 128

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port is {self.port}; expected 0 to 65535")
        if not 0 <= self.drain_s < float("inf"):
            raise ValueError(f"--drain-s is {self.drain_s}; expected a number of seconds, 0 or more")
        AdapterRoots(self.adapter_roots)  # names a flag that is wrong
        if self.max_waiting < 1:
            raise ValueError(f"--max-waiting is {self.max_waiting}; expected 1 or more")
        for flag, key in (("--api-key", self.api_key), ("--admin-api-key", self.admin_api_key)):
            if key is not None and not key.strip():
                raise ValueError(f"{flag} is empty; give a key, or leave the flag out to ask for none")


class EventStream(fastapi.Response):
    """Server-sent events of an accepted generation, which ends with them however they end."""

    def __init__(self, generation: Generation, events: AsyncIterator[bytes]) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._generation = generation
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self._generation), contextlib.suppress(ClientDisconnect, OSError):
            await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for content in self._events:
            await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client is gone.

    Raises:
      ClientDisconnect: If the client went first.
    """
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: fastapi.Request, max_bytes: int) -> bytes:
    """The request's body.

    Raises:
      ServingError: 413 if it is too large (no more than the limit is read), 415 if it is declared as something else
        than JSON. A form or text type is what a web page may send anywhere without asking, so it is refused.
    """
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ServingError(
            f"the content type is {content_type!r}; send JSON with the header 'Content-Type: application/json'",
            status=415, type="invalid_request_error",
        )  # fmt: skip
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise ServingError(
                f"the body is larger than the limit of {max_bytes} bytes", status=413, type="invalid_request_error"
            )
    return bytes(body)


def create_app(
    engine: AsyncEngine,
    registry: ModelRegistry,
    encoder: PromptEncoder,
    render_metrics: Callable[[], tuple[bytes, str]],
    config: ServerConfig,
    metrics: Metrics | None = None,
    retriever: Retriever | None = None,
) -> fastapi.FastAPI:
    """The ASGI application; its lifespan starts and ends the engine's thread.

    Args:
      engine: not started yet.
      registry: the names that requests may use.
      encoder: tokenizer and limits.
      render_metrics: gives the exposition text of /metrics and its content type.
      config: settings of the HTTP side.
      metrics: where refused loads are counted and unloaded adapters forgotten.
      retriever: finds adapters for prompts; None refuses requests that want that.
    """
    access = Access(config.api_key, config.admin_api_key)
    admin = Admin(engine, registry, AdapterRoots(config.adapter_roots), metrics, retriever=retriever)
    service = OpenAIService(engine, registry, encoder, max_choices=config.max_choices, retriever=retriever)
    created = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.stop)

    app = fastapi.FastAPI(title="dymerge_jax", version=_version(), lifespan=lifespan, redirect_slashes=False)
    app.add_middleware(AccessMiddleware, access=access)
    _add_error_handlers(app)
    _add_admin_routes(app, admin, access, config.max_body_bytes)

    async def begin[T: GenerationFields](
        request: fastapi.Request, fields: T, make: Callable[[T], Coroutine[Any, Any, Job]]
    ) -> tuple[Job, Generation]:
        """Where it has to wait for the engine, it ends as soon as the client is gone."""

        async def make_and_begin() -> tuple[Job, Generation]:
            job = await make(fields)
            return job, engine.begin(job.requests)  # at once: an unload must not come between

        is_watched = service.is_auto(fields)
        return await (until_disconnect(request.receive, make_and_begin()) if is_watched else make_and_begin())

    def cards() -> list[dict[str, Any]]:
        has_auto = retriever is not None and retriever.num_candidates > 0
        return registry.cards(created, encoder.max_model_len, has_auto=has_auto)

    async def respond(request: fastapi.Request, job: Job, generation: Generation) -> fastapi.Response:
        if not job.is_stream:
            with contextlib.closing(generation):
                return JSONResponse(await until_disconnect(request.receive, service.answer(job, generation)))
        await generation.wait_accepted()
        return EventStream(generation, service.events(job, generation))

    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest))
    async def completions(request: fastapi.Request) -> fastapi.Response:
        fields = parse_body(CompletionRequest, await read_body(request, config.max_body_bytes))
        return await respond(request, *await begin(request, fields, service.completion_job))

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatRequest))
    async def chat_completions(request: fastapi.Request) -> fastapi.Response:
        fields = parse_body(ChatRequest, await read_body(request, config.max_body_bytes))
        return await respond(request, *await begin(request, fields, service.chat_job))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": cards()}

    @app.get("/v1/mixes")
    async def mixes() -> dict[str, Any]:
        return {"object": "list", "data": admin.mixes()}

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        for card in cards():
            if card["id"] == model_id:
                return card
        raise UnknownModelError(f"The model {model_id!r} does not exist; GET /v1/models lists those that do.")

    @app.get(OPEN_PATH)
    @app.head(OPEN_PATH, include_in_schema=False)
    async def health() -> fastapi.Response:
        reason = engine.unhealthy_reason
        if reason is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unhealthy", "reason": reason}, 503)

    @app.get("/metrics")
    async def get_metrics() -> fastapi.Response:
        text, content_type = render_metrics()
        return fastapi.Response(text, media_type=content_type)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": _version()}

    return app


def _add_admin_routes(app: fastapi.FastAPI, admin: Admin, access: Access, max_body_bytes: int) -> None:
    """The routes that change the server; each is guarded before its body is read."""
    guard = [fastapi.Depends(access.require_admin)]

    @app.post("/v1/load_lora_adapter", dependencies=guard, openapi_extra=_body_schema(LoadAdapterRequest))
    async def load_lora_adapter(request: fastapi.Request) -> fastapi.Response:
        fields = parse_admin_body(LoadAdapterRequest, await read_body(request, max_body_bytes))
        entry = await admin.load_adapter(fields)
        text = f"Success: LoRA adapter '{entry.name}' added successfully."
        return PlainTextResponse(text, headers={GENERATION_HEADER: entry.generation})

    @app.post("/v1/unload_lora_adapter", dependencies=guard, openapi_extra=_body_schema(UnloadAdapterRequest))
    async def unload_lora_adapter(request: fastapi.Request) -> fastapi.Response:
        fields = parse_admin_body(UnloadAdapterRequest, await read_body(request, max_body_bytes))
        await admin.unload_adapter(fields)
        return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")

    @app.post("/v1/mixes", dependencies=guard, openapi_extra=_body_schema(MixRequest))
    async def put_mix(request: fastapi.Request) -> dict[str, Any]:
        return admin.put_mix(parse_admin_body(MixRequest, await read_body(request, max_body_bytes)))

    @app.delete("/v1/mixes/{name:path}", dependencies=guard)
    async def delete_mix(name: str) -> dict[str, Any]:
        admin.delete_mix(name)
        return {"name": name, "object": "mix", "deleted": True}


def _add_error_handlers(app: fastapi.FastAPI) -> None:
    @app.exception_handler(ServingError)
    async def serving_error(_: fastapi.Request, error: ServingError) -> fastapi.Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: fastapi.Request, error: HTTPException) -> fastapi.Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = error_response(ServingError(message, status=error.status_code, type="invalid_request_error"))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def client_gone(_: fastapi.Request, __: Exception) -> fastapi.Response:
        return fastapi.Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def unexpected(_: fastapi.Request, error: Exception) -> fastapi.Response:
        message = f"the server made a mistake ({type(error).__name__}); its log has the details"
        return error_response(ServingError(message, status=500, type="internal_server_error"))


def _body_schema(kind: type[pydantic.BaseModel]) -> dict[str, Any]:
    """The route's body for /openapi.json; it is read by `parse_body`, not by FastAPI."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, list):
            return [inline(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inline(definitions[node["$ref"].rpartition("/")[2]])
        return {key: inline(value) for key, value in node.items()}

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inline(schema)}}}}


def _version() -> str:
    try:
        return importlib.metadata.version("dymerge-jax")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


class Server(uvicorn.Server):
    """uvicorn's server, which lets the running requests end when it is stopped.

    The first SIGINT or SIGTERM ends listening and drains; the second ends the process at once.
    """

    def __init__(self, app: ASGIApp, engine: AsyncEngine, config: ServerConfig, on_ready: Callable[[], None]) -> None:
        # uvicorn's own limit comes after the drain's and is only met by a client that does not read its answer.
        limit_s = int(config.drain_s) + 2
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=limit_s,
                ws="none",
            )
        )
        self._engine = engine
        self._drain_s = config.drain_s
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logger.info(
            "stopping: %d requests get %g s to end; Ctrl-C again ends at once", self._engine.num_requests, self._drain_s
        )
        drain = asyncio.create_task(self._engine.drain(self._drain_s))
        await super().shutdown(sockets)
        await drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            logger.warning("stopped at once by a second signal")
            os._exit(130)
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket: taken before the model is loaded, so that a port in use is found out at once.

    Raises:
      OSError: If the address cannot be taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
