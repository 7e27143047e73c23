"""What the routes answer: mixes, stops, echoes, keys, health; one case of each kind."""

import json
from typing import Any

import httpx
from transformers import PreTrainedTokenizerFast

from serving.mixes import ModelRegistry
from serving.request import SamplingParams
from tests.http.conftest import serving
from tests.http.fake_engine import FakeEngine

GREEDY = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}


def complete(client: httpx.Client, **fields: Any) -> str:
    response = client.post("/v1/completions", json=GREEDY | fields)
    assert response.status_code == 200, response.text
    return "".join(c["text"] for c in response.json()["choices"])


def test_every_way_to_say_one_mix_gives_one_answer(client: httpx.Client) -> None:
    assert complete(client, model="a") == complete(client, adapter_mix={"a": 1})
    assert complete(client, model="a") == complete(client, adapter_mix={"a": 1, "b": 0})
    assert complete(client, model="a") == complete(client, lora=[{"id": 0, "scale": 1.0}])
    assert complete(client, model="a") == complete(client, lora=[{"id": "a", "scale": 1}])
    assert complete(client, adapter_mix={"a": 1, "b": 2}) == complete(
        client, model="tiny", adapter_mix={"b": 2, "a": 1}
    )


def test_an_empty_mix_is_the_base(client: httpx.Client) -> None:
    base = complete(client)
    for fields in (
        {"model": "tiny"},
        {"adapter_mix": {}},
        {"adapter_mix": []},
        {"lora": []},
        {"adapter_mix": {"a": 0}},
    ):
        assert complete(client, **fields) == base


def test_a_weight_matters_for_a_single_adapter_too(client: httpx.Client) -> None:
    assert complete(client, adapter_mix={"a": 1}) != complete(client, adapter_mix={"a": 0.25})


def test_a_gated_set_is_served_by_its_name(client: httpx.Client) -> None:
    assert len({complete(client, model=name) for name in ("tiny", "a", "b", "moe")}) == 4


def test_prompts_are_texts_or_token_ids_and_answered_in_order(
    client: httpx.Client, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = tokenizer.encode("Hello", add_special_tokens=False)
    assert complete(client, prompt=ids) == complete(client)
    assert complete(client, prompt=[ids, ids[:2]]) == complete(client) + complete(client, prompt=ids[:2])
    assert complete(client, prompt=["Hello", "He"]) == complete(client) + complete(client, prompt="He")


def test_every_sampling_field_reaches_the_engine_by_either_route(client: httpx.Client, engine: FakeEngine) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.125, "seed": 11, "max_tokens": 3, "stop": ["~", "^"],
        "stop_token_ids": [4, 5], "ignore_eos": True,
    }  # fmt: skip
    expected = SamplingParams(
        temperature=0.5, top_p=0.75, top_k=7, min_p=0.125, seed=11, max_tokens=3, stop=("~", "^"),
        stop_token_ids=(4, 5), ignore_eos=True, logprobs=2,
    )  # fmt: skip
    messages = [{"role": "user", "content": "Hello"}]
    assert client.post("/v1/completions", json=fields | {"prompt": "Hello", "logprobs": 2}).status_code == 200
    chat = fields | {"messages": messages, "logprobs": True, "top_logprobs": 2}
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
    assert [r.sampling for r in engine.added] == [expected] * 2
    client.post("/v1/completions", json={"prompt": "Hello"})
    client.post("/v1/completions", json={"prompt": "Hello", "top_k": -1})
    assert [r.sampling for r in engine.added[2:]] == [SamplingParams(temperature=1.0, max_tokens=16)] * 2


def test_a_request_brings_every_adapter_it_needs(client: httpx.Client, engine: FakeEngine) -> None:
    for fields in ({"model": "moe"}, {"adapter_mix": {"b": 0.5, "a": 1}}, {"adapter_mix": {"a": 0, "c": 1}}, {}):
        complete(client, **fields)
    names = [tuple(adapter_id.partition("@")[0] for adapter_id in r.adapters) for r in engine.added]
    assert names == [("a", "b"), ("a", "b"), ("c",), ()]
    assert [r.mix.gated_set for r in engine.added] == ["moe", None, None, None]


def test_only_a_completion_gets_the_special_tokens_of_a_text(
    engine: FakeEngine, registry: ModelRegistry, tokenizer_with_bos: PreTrainedTokenizerFast
) -> None:
    with serving(engine, registry, tokenizer_with_bos) as url:
        completion = httpx.post(f"{url}/v1/completions", json=GREEDY).json()
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        conversation = httpx.post(f"{url}/v1/chat/completions", json=chat).json()
    assert completion["usage"]["prompt_tokens"] == len("Hello") + 1
    rendered = str(tokenizer_with_bos.apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=True))
    ids = tokenizer_with_bos.encode(rendered, add_special_tokens=False)
    assert conversation["usage"]["prompt_tokens"] == len(ids)


def test_echo_begins_with_the_prompt_streamed_or_not(client: httpx.Client, tokenizer: PreTrainedTokenizerFast) -> None:
    whole = complete(client, echo=True)
    assert whole == "Hello" + complete(client)
    assert complete(client, echo=True, prompt=tokenizer.encode("Hello", add_special_tokens=False)) == whole
    chunks = events(client.post("/v1/completions", json=GREEDY | {"echo": True, "stream": True}))
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole


def test_several_tokens_of_one_step_are_streamed_one_by_one(client: httpx.Client, engine: FakeEngine) -> None:
    whole = client.post("/v1/completions", json=GREEDY).json()
    engine.tokens_per_step = 4
    assert client.post("/v1/completions", json=GREEDY).json()["choices"] == whole["choices"]
    body = GREEDY | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(client.post("/v1/completions", json=body))
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["length"]
    assert last["usage"] == whole["usage"]
    stop = whole["choices"][0]["text"][2]  # in the midst of a step
    answer = client.post("/v1/completions", json=GREEDY | {"stop": stop}).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == (whole["choices"][0]["text"].partition(stop)[0], "stop")


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The contents of a stream, which must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.removesuffix("\n\n").split("\n\n")
    assert parts[-1] == "data: [DONE]"
    return [json.loads(p.removeprefix("data: ")) for p in parts[:-1]]


def test_a_stop_string_ends_an_answer_with_reason_stop(client: httpx.Client) -> None:
    text = complete(client)
    response = client.post("/v1/completions", json=GREEDY | {"stop": text[3]}).json()
    assert response["choices"][0]["finish_reason"] == "stop"
    assert response["choices"][0]["text"] == text[: text.index(text[3])]


def test_chat_answers_fill_the_context_unless_limited(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["total_tokens"] == 128
    limited = client.post("/v1/chat/completions", json=body | {"max_completion_tokens": 3}).json()
    assert limited["usage"]["completion_tokens"] == 3


def test_text_parts_and_developer_messages_reach_the_template(client: httpx.Client) -> None:
    def chat(*messages: dict[str, Any]) -> str:
        body = {"messages": list(messages), "temperature": 0, "max_tokens": 8}
        return client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]

    plain = chat({"role": "system", "content": "Be kind"}, {"role": "user", "content": "a\nb"})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat({"role": "developer", "content": "Be kind"}, {"role": "user", "content": parts}) == plain
    reply = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}
    assert chat({"role": "user", "content": "a"}, reply, {"role": "user", "content": "b"}) != plain


def test_without_a_chat_template_or_tokenizer_the_way_out_is_named(
    engine: FakeEngine, registry: ModelRegistry, tokenizer: PreTrainedTokenizerFast
) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with serving(engine, registry, tokenizer) as url:
            refused = httpx.post(f"{url}/v1/chat/completions", json=chat)
            assert refused.status_code == 400
            assert "/v1/completions" in refused.json()["error"]["message"]
    finally:
        tokenizer.chat_template = template
    with serving(engine, registry, None) as url:
        for route, body in (("chat/completions", chat), ("completions", GREEDY)):
            refused = httpx.post(f"{url}/v1/{route}", json=body)
            assert refused.status_code == 400
            assert "token ids" in refused.json()["error"]["message"]
        answer = httpx.post(f"{url}/v1/completions", json=GREEDY | {"prompt": [5, 6]})
        assert answer.json()["usage"]["completion_tokens"] == 8


def test_a_template_that_refuses_the_messages_is_a_bad_request(
    engine: FakeEngine, registry: ModelRegistry, tokenizer: PreTrainedTokenizerFast
) -> None:
    template, tokenizer.chat_template = tokenizer.chat_template, "{{ raise_exception('roles must alternate') }}"
    try:
        with serving(engine, registry, tokenizer) as url:
            refused = httpx.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
            assert refused.status_code == 400
            assert "roles must alternate" in refused.json()["error"]["message"]
    finally:
        tokenizer.chat_template = template


def test_metrics_version_and_docs_are_served(client: httpx.Client) -> None:
    assert client.get("/metrics").status_code == 200
    assert set(client.get("/version").json()) == {"version"}
    assert client.get("/docs").status_code == 200
    schema = client.get("/openapi.json").json()["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    properties = schema["content"]["application/json"]["schema"]["properties"]
    assert {"messages", "adapter_mix", "lora", "stream"} <= set(properties)
    assert "$ref" not in json.dumps(schema)
