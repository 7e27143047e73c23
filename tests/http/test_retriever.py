"""Prompts embedded beside requests, in batches; what a failure, a client that leaves and a changed adapter mean."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from dymerge_jax.embedding import MAX_ROWS
from dymerge_jax.retrieval import Scorer, tokenized_pieces
from serving.async_engine import AsyncEngine
from serving.auto_mix import AutoMix, parse_auto_mix
from serving.errors import EngineError, InvalidRequestError, OverloadedError, UnknownModelError
from serving.mixes import ModelRegistry, check_names, parse_adapter_mix
from serving.prompts import PromptEncoder
from serving.queue_bound import QueueBound
from serving.retrieval import Retriever
from serving.server import ServerConfig, create_app
from serving.service import OpenAIService
from tests.http.conftest import MAX_MODEL_LEN, VOCAB, make_entry, running, serving
from tests.http.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S

HIDDEN = 300
EXAMPLES = {"a": ["aaa", "aa a"], "b": ["bbb", "bb"], "c": ["ccc"]}


class CountingEmbedder:
    """A vector says which tokens a row has.

    Attributes:
      hidden: width of a vector.
      batches: rows of each batch so far.
      threads: that have called it.
      errors: one is raised by each of the next calls.
      may_run: while it is not set, a batch waits.
    """

    hidden = HIDDEN

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.threads: set[int] = set()
        self.errors: list[Exception] = []
        self.may_run = threading.Event()
        self.may_run.set()

    def dispatch(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        self.threads.add(threading.get_ident())
        self.batches.append(len(rows))
        assert self.may_run.wait(PATIENCE_S)
        if self.errors:
            raise self.errors.pop()
        assert 0 < len(rows) <= MAX_ROWS
        return np.stack([np.bincount(row, minlength=HIDDEN) / len(row) for row in rows]).astype(np.float32)


class FakeIndex:
    """As `serving.retrieval.PromptIndex`, whose constructor compiles."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, given: dict[str, list[str]] | None = None) -> None:
        self.embedder: Any = CountingEmbedder()
        self.tokenizer = tokenizer
        self.given = given or {}
        self.vectors = {
            name: [self.embedder.dispatch(tokenized_pieces(tokenizer, text)) for text in texts]
            for name, texts in EXAMPLES.items()
        }
        self.scorer = Scorer.fit(self.vectors)
        self.embedder.batches.clear()
        self.embedder.threads.clear()


def run(
    tokenizer: PreTrainedTokenizerFast,
    work: Callable[[Retriever, CountingEmbedder, AsyncEngine], Awaitable[None]],
    *,
    max_waiting: int = 100,
    given: dict[str, list[str]] | None = None,
) -> None:
    """Runs `work` with a retriever whose engine's thread is started."""

    async def main() -> None:
        index: Any = FakeIndex(tokenizer, given)
        engine = AsyncEngine(FakeEngine(tokenizer), QueueBound(max_waiting))
        engine.start()
        try:
            await work(Retriever(index, engine), index.embedder, engine)
            assert engine.queue_bound.num_waiting == 0
        finally:
            assert engine.stop()

    asyncio.run(main())


async def best(retriever: Retriever, text: str, k: int = 1) -> set[str]:
    (vectors,) = await retriever.embed_prompts([text])
    return set(retriever.weights(AutoMix(k), vectors, "adapter_mix"))


def test_many_prompts_share_few_batches_on_the_engines_thread(tokenizer: PreTrainedTokenizerFast) -> None:
    async def work(retriever: Retriever, embedder: CountingEmbedder, _: AsyncEngine) -> None:
        prompts = [f"{letter * 3}. {letter}" for letter in "abc" * 10]
        found = await asyncio.gather(*(best(retriever, prompt) for prompt in prompts))
        assert found == [{letter} for letter in "abc" * 10]
        assert sum(embedder.batches) == 60
        assert max(embedder.batches) == MAX_ROWS
        assert len(embedder.batches) <= 10
        assert threading.get_ident() not in embedder.threads
        assert len(embedder.threads) == 1
        (mix,) = [retriever.weights(AutoMix(2), v, "x") for v in await retriever.embed_prompts(["aaa. ccc"])]
        assert mix == {"a": 0.5, "c": 0.5}
        (nothing,) = await retriever.embed_prompts([" "])
        assert retriever.weights(AutoMix(None, "softmax"), nothing, "x").keys() == {"a", "b", "c"}

    run(tokenizer, work)


def test_a_batch_that_fails_takes_no_other_prompt_with_it(tokenizer: PreTrainedTokenizerFast) -> None:
    async def work(retriever: Retriever, embedder: CountingEmbedder, _: AsyncEngine) -> None:
        embedder.errors = [RuntimeError("out of memory")]
        long = ". ".join(["a"] * MAX_ROWS)  # fills a batch
        failed, good = await asyncio.gather(best(retriever, long), best(retriever, "bbb"), return_exceptions=True)
        assert isinstance(failed, EngineError)
        assert "the prompt could not be embedded: RuntimeError: out of memory" in failed.message
        assert good == {"b"}
        assert await best(retriever, "ccc") == {"c"}

    run(tokenizer, work)


def test_a_client_that_leaves_costs_no_batch_and_frees_its_place(tokenizer: PreTrainedTokenizerFast) -> None:
    async def work(retriever: Retriever, embedder: CountingEmbedder, engine: AsyncEngine) -> None:
        embedder.may_run.clear()
        first = asyncio.create_task(best(retriever, "aaa"))
        while not embedder.batches:
            await asyncio.sleep(0.01)
        waiting = [asyncio.create_task(best(retriever, "bbb")) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert engine.queue_bound.num_waiting == 4
        for task in (first, *waiting[:2]):
            task.cancel()
        await asyncio.sleep(0.01)
        assert engine.queue_bound.num_waiting == 1
        embedder.may_run.set()
        assert await waiting[2] == {"b"}
        assert embedder.batches == [1, 1]

    run(tokenizer, work)


def test_prompts_wait_within_the_bound_of_waiting_requests(tokenizer: PreTrainedTokenizerFast) -> None:
    async def work(retriever: Retriever, embedder: CountingEmbedder, _: AsyncEngine) -> None:
        embedder.may_run.clear()
        tasks = [asyncio.create_task(best(retriever, "aaa")) for _ in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(OverloadedError, match="2 requests wait for their first token, of at most 2"):
            await best(retriever, "bbb")
        embedder.may_run.set()
        assert await asyncio.gather(*tasks) == [{"a"}, {"a"}]

    run(tokenizer, work, max_waiting=2)


def test_a_change_counts_when_its_block_ends_and_not_at_all_if_it_fails(tokenizer: PreTrainedTokenizerFast) -> None:
    async def work(retriever: Retriever, embedder: CountingEmbedder, _: AsyncEngine) -> None:
        async with retriever.changing("d", ["ddd"]):
            assert retriever.num_candidates == 3
        assert await best(retriever, "ddd") == {"d"}
        async with retriever.changing("a", ["zzz"]):  # replaced: no more of what it was
            pass
        assert await best(retriever, "zzz") == {"a"}
        with pytest.raises(InvalidRequestError, match="x"):
            async with retriever.changing("b", ["yyy"]):
                raise InvalidRequestError("x")
        assert await best(retriever, "bbb") == {"b"}
        embedder.errors = [RuntimeError("x")]
        with pytest.raises(EngineError):
            async with retriever.changing("b", ["yyy"]):
                pytest.fail("the examples were not embedded")
        with pytest.raises(InvalidRequestError, match="the 1 examples of adapter 'b' hold no text"):
            async with retriever.changing("b", [" "]):
                pytest.fail("there are no examples")
        async with retriever.changing("b", None):
            assert await best(retriever, "bbb") == {"b"}
        assert retriever.num_candidates == 3
        assert "b" not in await best(retriever, "bbb", 3)
        for name in "acd":  # the last one too
            async with retriever.changing(name, ()):
                pass
        with pytest.raises(InvalidRequestError, match="no adapter of this server has example prompts"):
            await best(retriever, "aaa")
        async with retriever.changing("c", ["ccc"]):
            pass
        assert await best(retriever, "zzz") == {"c"}

    run(tokenizer, work)


def test_examples_that_were_given_apart_stay_those_of_an_adapter(tokenizer: PreTrainedTokenizerFast) -> None:
    async def work(retriever: Retriever, _: CountingEmbedder, __: AsyncEngine) -> None:
        async with retriever.changing("d", ["ddd"]):
            pass
        assert await best(retriever, "eee") == {"d"}
        async with retriever.changing("d", None):
            pass
        assert retriever.num_candidates == 3

    run(tokenizer, work, given={"d": ["eee"]})


def test_loads_at_once_forget_no_adapter(tokenizer: PreTrainedTokenizerFast) -> None:
    async def change(retriever: Retriever, letter: str) -> None:
        async with retriever.changing(letter, [letter * 3]):
            pass

    async def work(retriever: Retriever, _: CountingEmbedder, __: AsyncEngine) -> None:
        await asyncio.gather(*(change(retriever, letter) for letter in "defgh"))
        assert [await best(retriever, letter * 3) for letter in "abcdefgh"] == [{letter} for letter in "abcdefgh"]

    run(tokenizer, work)


@pytest.mark.parametrize(
    ("text", "mix"),
    [
        ("auto", AutoMix()),
        ("auto:2", AutoMix(2)),
        ("auto:1:equal", AutoMix(1)),
        ("auto:12:softmax", AutoMix(12, "softmax")),
        ("auto:softmax", AutoMix(None, "softmax")),
    ],
)
def test_what_asks_for_the_adapters_that_fit(text: str, mix: AutoMix) -> None:
    assert parse_auto_mix(text, "adapter_mix") == mix


@pytest.mark.parametrize("text", ["auto:0", "auto:", "auto:-1", "auto:2:x", "auto:2.5", "Auto", "legal", "", "x" * 999])
def test_what_is_no_such_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r'expected "auto", "auto:K" or "auto:K:softmax"') as refused:
        parse_auto_mix(text, "model")
    assert refused.value.param == "model"
    assert len(refused.value.message) < 250


def test_k_is_three_or_all_there_are_and_never_more() -> None:
    assert [AutoMix().num_adapters(n, "x") for n in (1, 3, 9)] == [1, 3, 3]
    assert AutoMix(9).num_adapters(9, "x") == 9
    with pytest.raises(InvalidRequestError, match="asks for the 4 adapters that fit best, but only 3 have example"):
        AutoMix(4).num_adapters(3, "adapter_mix")


def test_a_request_chooses_adapters_in_one_way(registry: ModelRegistry) -> None:
    auto = AutoMix(2)
    assert registry.auto_mix(None, auto, None) == (auto, "adapter_mix")
    assert registry.auto_mix("tiny", auto, None) == (auto, "adapter_mix")
    assert registry.auto_mix("auto:2", None, None) == (auto, "model")
    assert registry.auto_mix("a", {"b": 1.0}, None) is None
    for model, mix, lora in (("auto", auto, None), ("auto", {}, None), ("auto", None, []), (None, auto, [])):
        with pytest.raises(InvalidRequestError, match="leaves the choice of adapters to the server, but"):
            registry.auto_mix(model, mix, lora)
    with pytest.raises(InvalidRequestError, match="but model 'moe' is given too"):
        registry.auto_mix("moe", auto, None)
    with pytest.raises(UnknownModelError):
        registry.auto_mix("nothing", auto, None)
    with pytest.raises(InvalidRequestError, match="model is 'auto:0'"):
        registry.auto_mix("auto:0", None, None)


def test_nothing_else_may_be_named_auto(registry: ModelRegistry) -> None:
    for name in ("auto", "auto:2", "auto:legal"):
        with pytest.raises(ValueError, match=f"the names '{name}' are taken: requests ask by 'auto'"):
            check_names(["base", name])
        with pytest.raises(InvalidRequestError, match="by which requests ask for the adapters that fit"):
            registry.put_adapter(make_entry(name))
        with pytest.raises(InvalidRequestError, match="by which requests ask for the adapters that fit"):
            registry.put_mix(name, {"a": 1.0})
    check_names(["base", "automatic"])
    with pytest.raises(InvalidRequestError, match="adapter_mix is 'auto'; expected an object"):
        parse_adapter_mix("auto")  # a named mix says which adapters


def test_models_list_auto_where_adapters_can_be_found(registry: ModelRegistry) -> None:
    assert registry.cards(0, 1)[-1]["id"] != "auto"
    card = registry.cards(0, 1, has_auto=True)[-1]
    assert (card["id"], card["parent"]) == ("auto", "tiny")


def test_a_server_without_an_index_refuses_auto_and_says_what_to_add(client: httpx.Client) -> None:
    for fields, param in (({"adapter_mix": "auto"}, "adapter_mix"), ({"model": "auto:2"}, "model")):
        response = client.post("/v1/completions", json={"prompt": "x"} | fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        message = response.json()["error"]["message"]
        assert "no adapter of this server has example prompts; put a file examples.jsonl" in message
        assert "--retrieval-examples" in message
    assert "auto" not in [card["id"] for card in client.get("/v1/models").json()["data"]]


def test_nothing_comes_between_the_choice_of_adapters_and_the_engines_inbox(
    engine: FakeEngine, registry: ModelRegistry, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unload of a chosen adapter that came between would be a 404 for a client who named none."""
    order: list[str] = []
    make, begin = OpenAIService.completion_job, AsyncEngine.begin

    async def made(service: OpenAIService, fields: Any) -> Any:
        job = await make(service, fields)
        asyncio.get_running_loop().call_soon(order.append, "another task")
        return job

    def begun(async_engine: AsyncEngine, requests: Any) -> Any:
        order.append("begin")
        return begin(async_engine, requests)

    monkeypatch.setattr(OpenAIService, "completion_job", made)
    monkeypatch.setattr(AsyncEngine, "begin", begun)
    config = ServerConfig(port=0, drain_s=0.2)
    async_engine = AsyncEngine(engine, QueueBound(100))
    index: Any = FakeIndex(tokenizer)
    encoder = PromptEncoder(tokenizer, vocab=VOCAB, max_model_len=MAX_MODEL_LEN)
    for name in EXAMPLES.keys() - registry.adapters.keys():
        registry.put_adapter(make_entry(name))
    retriever = Retriever(index, async_engine)
    app = create_app(async_engine, registry, encoder, lambda: (b"", "text/plain"), config, retriever=retriever)
    with running(app, async_engine, config) as url:
        body = {"model": "auto:1", "prompt": "aaa", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
    assert order[0] == "begin"


def test_examples_of_an_adapter_are_not_read_by_a_server_without_an_index(
    engine: FakeEngine,
    registry: ModelRegistry,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "weights").write_text("1")
    (tmp_path / "new" / "examples.jsonl").write_text("no JSON")
    config = ServerConfig(port=0, adapter_roots=(str(tmp_path),))
    with serving(engine, registry, tokenizer, config) as url:
        body = {"lora_name": "new", "lora_path": "new"}
        assert httpx.post(f"{url}/v1/load_lora_adapter", json=body).status_code == 200
    assert "examples.jsonl is not used: retrieval is off, --retrieval turns it on" in caplog.text
