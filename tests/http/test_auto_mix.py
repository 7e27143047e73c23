"""adapter_mix "auto" over HTTP, with the real engine on a tiny model, put together as the command line does it."""

import concurrent.futures
import contextlib
import dataclasses
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from checkpoints.errors import MissingFileError
from checkpoints.loaded_model import LoadedModel
from dymerge_jax.config import named_config
from dymerge_jax.retrieval import tokenized_pieces
from dymerge_jax.serve import (
    build,
    build_retrieval,
    engine_config,
    load_embedding_model,
    make_parser,
    make_server_config,
)
from serving.async_engine import AsyncEngine
from serving.engine import Engine
from serving.mixes import AdapterEntry, ModelRegistry
from serving.prompts import PromptEncoder
from serving.retrieval import PromptIndex, Retriever
from serving.server import create_app
from tests.http.conftest import begin_request, running
from tests.support.tiny_checkpoints import write_adapter, write_tiny_llama
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow  # compiles every program of an engine

CONFIG = named_config("tiny")
NARROW = dataclasses.replace(CONFIG, vocab=300, hidden=32)
EXAMPLES = {
    "a": ["Shout it. Items: lamp", "Shout it. Items: river, stone", "All caps. Items: apple"],
    "b": ["Sign it. Items: chair", "Add a name. Items: table, window", "Sign it. Items: garden"],
    "c": ["How many? Items: bridge", "Count them. Items: cloud", "How many? Items: forest, ocean"],
}
ASKED = {"a": "Shout it. Items: desert", "b": "Sign it. Items: valley", "c": "How many? Items: engine"}
Started = tuple[httpx.Client, Engine, Retriever, LoadedModel]
COMMON = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}


def write_examples(folder: Path, prompts: list[str]) -> None:
    (folder / "examples.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters a and b with examples, c with examples in a file of its own, d without, late and bad to load."""
    path = tmp_path_factory.mktemp("auto")
    write_tiny_llama(path / "tiny")
    write_tiny_llama(path / "narrow", config=NARROW)
    for seed, name in enumerate("abcd"):
        write_adapter(path / "adapters" / name, CONFIG, rank=4, alpha=4, seed=seed)
    for name in "ab":
        write_examples(path / "adapters" / name, EXAMPLES[name])
    lines = [json.dumps({"adapter": "c", "prompt": prompt}) for prompt in EXAMPLES["c"]]
    (path / "more.jsonl").write_text("\n".join(lines))
    for seed, name in enumerate(("late", "bad", "plain"), start=7):
        write_adapter(path / "more" / name, CONFIG, rank=4, alpha=4, seed=seed)
    write_examples(path / "more" / "late", ["Zigzag now. Items: hammer", "Zigzag now. Items: ladder"])
    (path / "more" / "bad" / "examples.jsonl").write_text('{"completion": "x"}')
    return path


def flags_of(folder: Path, *more: str) -> list[str]:
    flags = ["--model", folder / "tiny", "--adapters", folder / "adapters", "--adapter-root", folder / "more"]
    sizes = ["--adapter-slots", 8, "--slot-rank", 4, "--max-num-seqs", 8, "--max-model-len", 128, "--num-blocks", 64]
    return [str(flag) for flag in (*flags, *sizes, "--max-num-batched-tokens", 64, *more)]


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[Started]:
    options = make_parser().parse_args(flags_of(folder, "--retrieval-examples", str(folder / "more.jsonl")))
    parts = engine, loaded, registry = build(options, engine_config(options))
    index = build_retrieval(options, *parts)
    assert index is not None
    config = make_server_config(options)
    async_engine = AsyncEngine(engine)
    encoder = PromptEncoder(loaded.tokenizer, vocab=loaded.config.vocab, max_model_len=engine.max_model_len)
    metrics, retriever = engine.metrics, Retriever(index, async_engine)
    app = create_app(
        async_engine, registry, encoder, lambda: (metrics.render(), "text/plain"), config, metrics, retriever
    )
    with running(app, async_engine, config) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client, engine, retriever, loaded


@pytest.fixture
def served(started: Started) -> tuple[httpx.Client, Engine]:
    return started[:2]


@pytest.fixture
def retriever(started: Started) -> Retriever:
    return started[2]


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json=COMMON | fields)
    assert response.status_code == 200, response.text
    return response.json()


def only(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    """The one choice of a completion."""
    (choice,) = complete(client, **fields)["choices"]
    return choice


def test_a_request_gets_the_adapters_that_fit_its_prompt_and_is_told_which(
    served: tuple[httpx.Client, Engine],
) -> None:
    client, _ = served
    for name, prompt in ASKED.items():
        for how in ({"adapter_mix": "auto:1"}, {"model": "auto:1"}, {"model": "tiny", "adapter_mix": "auto:1"}):
            choice = only(client, prompt=prompt, **how)
            assert choice["adapter_mix"] == {name: 1.0}
            assert choice["text"] == only(client, prompt=prompt, adapter_mix={name: 1.0})["text"]
        everything = only(client, prompt=prompt, adapter_mix="auto:3")
        assert everything["adapter_mix"] == {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}  # d has no examples
        fitting = only(client, prompt=prompt, adapter_mix="auto")["adapter_mix"]
        assert name in fitting
        assert set(fitting.values()) == {1 / len(fitting)}
        softmax = only(client, prompt=prompt, adapter_mix="auto:2:softmax")["adapter_mix"]
        assert max(softmax, key=lambda n: softmax[n]) == name
        assert sum(softmax.values()) == pytest.approx(1)
    assert "adapter_mix" not in only(client, prompt="x", adapter_mix={"a": 1.0})


def test_a_mix_is_that_of_a_static_request(served: tuple[httpx.Client, Engine]) -> None:
    """y = Wx + (1/k) sum of the k adapters, through the same path as a mix that the client wrote."""
    client, _ = served
    choice = only(client, prompt="Shout it. Sign it. Items: fox", adapter_mix="auto:2")
    assert choice["adapter_mix"] == {"a": 0.5, "b": 0.5}
    assert (
        choice["text"] == only(client, prompt="Shout it. Sign it. Items: fox", adapter_mix={"a": 0.5, "b": 0.5})["text"]
    )


def test_the_last_message_of_the_user_counts_in_chat_and_a_stream_says_the_mix_first(
    served: tuple[httpx.Client, Engine],
) -> None:
    client, _ = served
    messages = [{"role": "user", "content": ASKED["c"]}, {"role": "assistant", "content": "x"}]
    body = COMMON | {"messages": [*messages, {"role": "user", "content": ASKED["b"]}], "model": "auto:1"}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["model"] == "auto:1"
    assert answer["choices"][0]["adapter_mix"] == {"b": 1.0}
    for route, fields in (
        ("chat/completions", body),
        ("completions", COMMON | {"prompt": ASKED["b"]} | {"model": "auto:1"}),
    ):
        with client.stream("POST", f"/v1/{route}", json=fields | {"stream": True, "n": 2}) as response:
            parts = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
        first = [part["choices"][0] for part in parts[:2]]
        assert [(choice["index"], choice["adapter_mix"]) for choice in first] == [(0, {"b": 1.0}), (1, {"b": 1.0})]
        assert not any("adapter_mix" in part["choices"][0] for part in parts[2:])


def test_each_of_several_prompts_has_a_mix_of_its_own(served: tuple[httpx.Client, Engine]) -> None:
    client, _ = served
    answer = complete(client, prompt=list(ASKED.values()), adapter_mix="auto:1", n=2)
    assert [c["adapter_mix"] for c in answer["choices"]] == [{n: 1.0} for n in "abc" for _ in range(2)]
    ids = [[int(byte) + 3 for byte in b"xyz"], [5, 6]]
    assert all(len(c["adapter_mix"]) == 1 for c in complete(client, prompt=ids, adapter_mix="auto:1")["choices"])


def test_openais_client_reads_what_was_found(served: tuple[httpx.Client, Engine]) -> None:
    client, _ = served
    api = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none")
    answer = api.chat.completions.create(
        model="auto:1", messages=[{"role": "user", "content": ASKED["a"]}], max_tokens=2
    )
    assert answer.choices[0].model_extra == {"adapter_mix": {"a": 1.0}}
    assert "auto" in [model.id for model in api.models.list()]
    assert api.models.retrieve("auto").id == "auto"


def test_a_batch_of_found_static_and_base_rows_equals_each_alone(served: tuple[httpx.Client, Engine]) -> None:
    client, engine = served
    asked: list[dict[str, Any]] = [
        {"prompt": p, "adapter_mix": how} for p in ASKED.values() for how in ("auto:1", "auto:3")
    ]
    asked += [{"prompt": f"{ASKED['a']} {ASKED['b']}", "adapter_mix": "auto:2:softmax"}]
    asked += [{"prompt": p, "adapter_mix": mix} for p in ASKED.values() for mix in ({}, {"a": 1}, {"d": 0.5, "b": -1})]
    asked += [{"prompt": "x" * 60, "model": "d"}]
    alone = [only(client, **fields)["text"] for fields in asked]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert [c["text"] for c in pool.map(lambda fields: only(client, **fields), asked)] == alone
    assert len(set(alone)) >= 12
    wait_until(lambda: not engine.has_work)
    engine.check_integrity()


def test_a_client_that_leaves_while_its_prompt_is_embedded_leaves_nothing(
    served: tuple[httpx.Client, Engine], retriever: Retriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, engine = served
    embedder, is_reached, may_go_on = retriever._index.embedder, threading.Event(), threading.Event()
    dispatch = embedder.dispatch

    def wait_and_dispatch(rows: Any) -> Any:
        is_reached.set()
        assert may_go_on.wait(PATIENCE_S)
        return dispatch(rows)

    monkeypatch.setattr(embedder, "dispatch", wait_and_dispatch)
    body = COMMON | {"prompt": ASKED["a"], "adapter_mix": "auto:1"}
    with contextlib.closing(begin_request(client.base_url, body)):
        assert is_reached.wait(PATIENCE_S)
    wait_until(lambda: retriever._engine.queue_bound.num_waiting == 0)
    may_go_on.set()
    assert only(client, prompt=ASKED["a"], adapter_mix="auto:1")["adapter_mix"] == {"a": 1.0}
    assert retriever._engine.num_requests == 0
    engine.check_integrity()


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"adapter_mix": "auto:0"}, 400, "adapter_mix", 'expected "auto", "auto:K" or "auto:K:softmax"'),
        ({"adapter_mix": "auto:4"}, 400, "adapter_mix", "only 3 have example prompts"),
        ({"model": "auto:4"}, 400, "model", "only 3 have example prompts"),
        ({"model": "auto:x"}, 400, "model", "model is 'auto:x'; expected"),
        ({"adapter_mix": "a"}, 400, "adapter_mix", "adapter_mix is 'a'; expected"),
        ({"model": "auto", "adapter_mix": {"a": 1}}, 400, "adapter_mix", "leaves the choice of adapters to the server"),
        ({"model": "a", "adapter_mix": "auto"}, 400, "adapter_mix", "but model 'a' is given too"),
        ({"model": "nothing", "adapter_mix": "auto"}, 404, "model", "does not exist"),
        ({"adapter_mix": "auto", "lora": []}, 400, "lora", "but lora is given too"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(
    served: tuple[httpx.Client, Engine], fields: dict[str, Any], status: int, param: str, message: str
) -> None:
    client, _ = served
    response = client.post("/v1/completions", json=COMMON | {"prompt": "x"} | fields)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param
    assert message in response.json()["error"]["message"]


def load(client: httpx.Client, name: str, path: str, **fields: Any) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path} | fields)


def test_the_index_follows_the_adapters_that_come_and_go(served: tuple[httpx.Client, Engine], folder: Path) -> None:
    client, engine = served
    zigzag = "Zigzag now. Items: duck"
    assert load(client, "late", "late").status_code == 200
    assert only(client, prompt=zigzag, adapter_mix="auto:1")["adapter_mix"] == {"late": 1.0}
    # Replaced by other examples: what it was is forgotten.
    other = shutil.copytree(folder / "more" / "late", folder / "more" / "other")
    write_examples(other, ["Quickly, quickly! Items: cow"])
    assert load(client, "late", "other", load_inplace=True).status_code == 200
    assert only(client, prompt="Quickly, quickly! Items: pig", adapter_mix="auto:1")["adapter_mix"] == {"late": 1.0}
    # Replaced by other weights without examples: it cannot be found.
    assert load(client, "late", "plain", load_inplace=True).status_code == 200
    assert "late" not in only(client, prompt=zigzag, adapter_mix="auto:3")["adapter_mix"]
    assert load(client, "late", "late", load_inplace=True).status_code == 200
    assert only(client, prompt=zigzag, adapter_mix="auto:1")["adapter_mix"] == {"late": 1.0}
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 200
    assert "late" not in only(client, prompt=zigzag, adapter_mix="auto:3")["adapter_mix"]
    wait_until(lambda: not engine.has_work)
    engine.check_integrity()


def test_an_adapter_with_bad_examples_is_loaded_and_never_found(
    served: tuple[httpx.Client, Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """The file may be for others than this server."""
    client, _ = served
    assert load(client, "bad", "bad").status_code == 200
    assert "line 1: it has the fields 'completion'; expected" in caplog.text
    body = {"model": "auto:1", "prompt": "x", "max_tokens": 1}
    assert "bad" not in client.post("/v1/completions", json=body).json()["choices"][0]["adapter_mix"]
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "bad"}).status_code == 200


def test_an_adapter_with_a_link_in_place_of_examples_is_not_loaded(
    served: tuple[httpx.Client, Engine], folder: Path
) -> None:
    client, _ = served
    linked = shutil.copytree(folder / "more" / "plain", folder / "more" / "linked")
    (linked / "examples.jsonl").symlink_to(folder / "more.jsonl")
    response = load(client, "linked", "linked")
    assert response.status_code == 403
    assert "examples.jsonl: a link that leads out of every --adapter-root" in response.json()["error"]["message"]
    assert load(client, "auto:1", "plain").status_code == 400
    assert not {"linked", "auto:1"} & {card["id"] for card in client.get("/v1/models").json()["data"]}


IndexOf = Callable[..., PromptIndex | None]


@pytest.fixture
def index_of(started: Started, folder: Path) -> IndexOf:
    """The index of a server with these adapters and flags."""
    _, engine, _, loaded = started

    def build_index(adapters: str, *flags: str) -> PromptIndex | None:
        options = make_parser().parse_args(flags_of(folder, *flags))
        entries = [AdapterEntry(n, str(folder / "adapters" / n), 1, n, n) for n in adapters]
        registry = ModelRegistry("tiny", "tiny", entries, [], num_slots=8, slot_rank=4)
        return build_retrieval(options, engine, loaded, registry, load_embedding_model(options))

    return build_index


def test_another_model_compares_prompts_by_its_own_tokens_if_it_is_given(
    index_of: IndexOf, folder: Path, tmp_path: Path
) -> None:
    other = str(folder / "narrow")
    index = index_of("abd", "--retrieval-model", other)
    assert index is not None
    assert index.embedder.hidden == NARROW.hidden
    assert len(index.tokenizer) == NARROW.vocab
    assert index.scorer is not None
    for name in "ab":
        vectors = index.embedder(tokenized_pieces(index.tokenizer, ASKED[name]))
        assert [c.name for c in index.scorer.top_k(vectors, 1)] == [name]
    assert index_of("d", "--retrieval-model", other) is not None  # adapters that are loaded later may have examples
    (shutil.copytree(other, tmp_path / "silent") / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="the directory of the model that compares them has no tokenizer"):
        index_of("abd", "--retrieval-model", str(tmp_path / "silent"))
    with pytest.raises(MissingFileError, match="nowhere"):
        index_of("abd", "--retrieval-model", str(folder / "nowhere"))


def test_flags_decide_whether_there_is_an_index(started: Started, folder: Path, index_of: IndexOf) -> None:
    _, engine, _, loaded = started
    assert index_of("d") is None
    assert index_of("abd", "--no-retrieval") is None
    empty, found = index_of("d", "--retrieval"), index_of("abd")
    assert empty is not None
    assert (empty.vectors, empty.scorer) == ({}, None)
    assert found is not None
    assert found.scorer is not None
    assert found.scorer.names == ("a", "b")
    given = str(folder / "more.jsonl")
    assert index_of("abd", "--retrieval-examples", given) is not None  # c may be loaded later
    options = make_parser().parse_args(["--retrieval-examples", given])
    registry = ModelRegistry("tiny", "tiny", [], [], num_slots=8, slot_rank=4)
    with pytest.raises(ValueError, match=r"more\.jsonl names 'c', not loaded; add --adapters"):
        build_retrieval(options, engine, loaded, registry)
    with pytest.raises(ValueError, match="the directory of the model that compares them has no tokenizer"):
        build_retrieval(
            make_parser().parse_args(["--retrieval"]), engine, dataclasses.replace(loaded, tokenizer=None), registry
        )
