"""A real uvicorn on a free port, with a fake engine behind it."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastapi
import httpx
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from serving.async_engine import AsyncEngine
from serving.metrics import Metrics
from serving.mixes import AdapterEntry, GatedSetEntry, ModelRegistry
from serving.prompts import PromptEncoder
from serving.queue_bound import QueueBound
from serving.server import Server, ServerConfig, create_app, listen
from tests.http.fake_engine import FakeEngine
from tests.support.tiny_checkpoints import write_tokenizer
from tests.support.waiting import PATIENCE_S

VOCAB = 300
MAX_MODEL_LEN = 128


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, VOCAB)
    return PreTrainedTokenizerFast.from_pretrained(path)


@pytest.fixture
def tokenizer_with_bos(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """As Llama 3's: begins a text with a special token, and so does its chat template."""
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    template = "<|endoftext|>" + str(tokenizer.chat_template)
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)


@pytest.fixture
def registry() -> ModelRegistry:
    """Base "tiny" with 8 slots; adapters a and b of 1, c of 2, huge of 9 slots; gated sets "moe" and "wide"."""
    adapters = [make_entry(name, n) for name, n in (("a", 1), ("b", 1), ("c", 2), ("huge", 9))]
    gated_sets = [GatedSetEntry("moe", ("a", "b"), "sets/moe"), GatedSetEntry("wide", ("a", "huge"), "sets/wide")]
    return ModelRegistry("tiny", "models/tiny", adapters, gated_sets, num_slots=8, slot_rank=8)


def make_entry(name: str, num_slots: int = 1) -> AdapterEntry:
    return AdapterEntry(name, f"adapters/{name}", num_slots, f"{name}@0123456789abcdef", "0123456789abcdef" * 4)


@pytest.fixture
def engine(tokenizer: PreTrainedTokenizerFast) -> FakeEngine:
    return FakeEngine(tokenizer)


@contextlib.contextmanager
def serving(
    engine: FakeEngine,
    registry: ModelRegistry,
    tokenizer: PreTrainedTokenizerFast | None,
    config: ServerConfig | None = None,
    *,
    max_waiting: int = 1000,
) -> Iterator[str]:
    """Serves until the block ends; gives the URL."""
    config = config or ServerConfig(port=0, drain_s=0.2, max_body_bytes=2**16)
    metrics = Metrics()
    queue_bound = QueueBound(max_waiting, lambda count: metrics.observe_refused("queue_full", count))
    async_engine = AsyncEngine(engine, queue_bound)
    encoder = PromptEncoder(tokenizer, vocab=VOCAB, max_model_len=MAX_MODEL_LEN)
    app = create_app(async_engine, registry, encoder, lambda: (metrics.render(), "text/plain"), config, metrics)
    with running(app, async_engine, config) as url:
        yield url


@contextlib.contextmanager
def running(app: fastapi.FastAPI, async_engine: AsyncEngine, config: ServerConfig) -> Iterator[str]:
    """Runs an application on a free port until the block ends; gives the URL."""
    ready = threading.Event()
    server = Server(app, async_engine, config, ready.set)
    bound = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        bound.close()


@pytest.fixture
def url(engine: FakeEngine, registry: ModelRegistry, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    with serving(engine, registry, tokenizer) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
        yield http


def begin_request(url: httpx.URL, body: dict[str, Any]) -> socket.socket:
    """A connection on which a completion was asked for; closing it is how a client leaves."""
    connection = socket.create_connection((url.host, url.port))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection
