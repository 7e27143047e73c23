"""The client of a server of OpenAI's API, and what a soak does to a server besides requests."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from serving.bench.clients import Clock
from serving.bench.records import Record, ServerCounts
from serving.bench.soak import DisturbanceCounts
from serving.bench.workloads import TraceRequest, prompt_token_ids

# Each is refused with 4xx by a server that looks at what it is given.
MALFORMED: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[]",
    b'{"prompt": "no model ends here"',
    b'{"model": "no-such-model", "prompt": "a"}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "adapter_mix": {"no-such-adapter": 1}}',
    b'{"prompt": "a", "adapter_mix": "a"}',
    b'{"prompt": [-1]}',
    b'{"prompt": "a", "temperature": "hot"}',
    b'\xff\xfe{"prompt": "a"}',
)


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
                f"the trace uses adapter {most}, but the server names {len(self.adapter_names)} models beside its "
                f"base: {', '.join(self.adapter_names) or 'none'}; start it with more --adapters"
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

    async def forget_prefixes(self) -> None:
        pass

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

    async def num_free_blocks(self) -> int | None:
        free = (await self.metrics()).get("dymerge_kv_blocks_free")
        return None if free is None else int(free)

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


async def send_malformed(client: HttpClient, counts: DisturbanceCounts) -> None:
    """Sends requests that are wrong, one after another; each must be refused with 4xx."""
    while True:
        body = MALFORMED[counts.num_malformed % len(MALFORMED)]
        counts.num_malformed += 1
        try:
            response = await client.http.post(
                "/v1/completions", content=body, headers={"Content-Type": "application/json"}
            )
            if not 400 <= response.status_code < 500:
                counts.fail(f"the malformed request {body!r} got HTTP {response.status_code}, expected 4xx")
        except httpx.HTTPError as error:
            counts.fail(f"the malformed request {body!r} got {error!r}, expected HTTP 4xx")
        await asyncio.sleep(0.5)


async def churn(client: HttpClient, counts: DisturbanceCounts, *, folder: str, admin_api_key: str | None) -> None:
    """Loads an adapter, sends it a request and unloads it while that runs, over and over."""
    headers = {} if admin_api_key is None else {"Authorization": f"Bearer {admin_api_key}"}
    name = "soak-churn"
    request = {"model": name, "prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True, "stream": True}

    async def post(
        route: str,
        body: dict[str, Any],
        headers: dict[str, str] | None = None,
        meanwhile: Callable[[], Awaitable[object]] | None = None,
    ) -> bool:
        """True if all is well; `meanwhile` is done between the head of the answer and the rest."""
        try:
            async with client.http.stream("POST", route, json=body, headers=headers) as response:
                if meanwhile is not None:
                    await meanwhile()
                text = (await response.aread()).decode()
        except httpx.HTTPError as error:
            counts.fail(f"{route} gave {error!r} for {body}")
            return False
        is_right = response.status_code == 200 and '"error"' not in text
        if not is_right:
            counts.fail(f"{route} gave HTTP {response.status_code} for {body}: {text[:300]}")
        return is_right

    def unload() -> Awaitable[bool]:
        return post("/v1/unload_lora_adapter", {"lora_name": name}, headers)

    while True:
        if await post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, headers):
            await post("/v1/completions", request, meanwhile=unload)  # it begins to answer once the engine has it
            counts.num_churns += 1
        await asyncio.sleep(0.5)
