"""Every refusal names its field, has OpenAI's error shape, and leaves the server able to answer the next request."""

import json
import re
from typing import Any

import httpx

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {"prompt": "Hello", "max_tokens": 4, "temperature": 0}
USER = [{"role": "user", "content": "Hello"}]

# field -> value, status, param, words of the message; beside a prompt that is good
BAD_COMPLETIONS: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"model": "nobody"}, 404, "model", "nobody"),
    ({"model": ""}, 404, "model", "does not exist"),
    ({"model": 3}, 400, "model", "string"),
    ({"adapter_mix": {"nobody": 1}}, 404, "adapter_mix", "nobody"),
    ({"adapter_mix": {"nobody": 0}}, 404, "adapter_mix", "nobody"),
    ({"adapter_mix": {"tiny": 1}}, 404, "adapter_mix", "tiny"),
    ({"adapter_mix": {"a": "1"}}, 400, "adapter_mix", "finite number"),
    ({"adapter_mix": {"a": True}}, 400, "adapter_mix", "finite number"),
    ({"adapter_mix": {"a": None}}, 400, "adapter_mix", "finite number"),
    ({"adapter_mix": {"a": float("nan")}}, 400, "adapter_mix", "nan"),
    ({"adapter_mix": {"a": float("inf")}}, 400, "adapter_mix", "inf"),
    ({"adapter_mix": {"a": 1e39}}, 400, "adapter_mix", "finite number"),
    ({"adapter_mix": {"a": 10**400}}, 400, "adapter_mix", "finite number"),
    ({"adapter_mix": "auto"}, 400, "adapter_mix", "auto"),
    ({"adapter_mix": ["a", "b"]}, 400, "adapter_mix", "adapter_mix\\[0\\]"),
    ({"adapter_mix": [{"adapter": "a"}]}, 400, "adapter_mix", "'weight'"),
    ({"adapter_mix": [{"adapter": 1, "weight": 1}]}, 400, "adapter_mix", "adapter's name"),
    ({"adapter_mix": [{"adapter": "a", "weight": 1}] * 2}, 400, "adapter_mix", "'a' twice"),
    ({"adapter_mix": {"moe": 1}}, 400, "adapter_mix", "gated set"),
    ({"adapter_mix": {"huge": 1}}, 400, "adapter_mix", "9 slots of rank 8.*has 8.*--adapter-slots"),
    ({"model": "huge"}, 400, "model", "9 slots.*--adapter-slots"),
    ({"model": "wide"}, 400, "model", "10 slots.*--adapter-slots"),
    ({"model": "a", "adapter_mix": {"b": 1}}, 400, "adapter_mix", "'a'"),
    ({"model": "moe", "adapter_mix": {"b": 1}}, 400, "adapter_mix", "'moe'"),
    ({"lora": [{"id": 4, "scale": 1}]}, 404, "lora", "4 adapters"),
    ({"lora": [{"id": -1, "scale": 1}]}, 404, "lora", "-1"),
    ({"lora": [{"id": 0}]}, 400, "lora", "'scale'"),
    ({"lora": [{"id": True, "scale": 1}]}, 400, "lora", "True"),
    ({"lora": [{"id": 0, "scale": 1}, {"id": "a", "scale": 1}]}, 400, "lora", "'a' twice"),
    ({"lora": {"a": 1}}, 400, "lora", "list"),
    ({"lora": [], "adapter_mix": {}}, 400, "lora", "use one"),
    ({"adapter_mixes": {"a": 1}}, 400, "adapter_mixes", "did you mean 'adapter_mix'"),
    ({"prompt": ""}, 400, "prompt", "empty"),
    ({"prompt": []}, 400, "prompt", "empty"),
    ({"prompt": [[]]}, 400, "prompt", "empty"),
    ({"prompt": ["Hello", ""]}, 400, "prompt", "empty"),
    ({"prompt": None}, 400, "prompt", "string"),
    ({"prompt": 7}, 400, "prompt", "string"),
    ({"prompt": [1, "x"]}, 400, "prompt", "token id"),
    ({"prompt": [1, True]}, 400, "prompt", "token id"),
    ({"prompt": [1, 2.0]}, 400, "prompt", "token id"),
    ({"prompt": [[1], "x"]}, 400, "prompt", "token id"),
    ({"prompt": [300]}, 400, "prompt", "300.*0 to 299"),
    ({"prompt": [-1]}, 400, "prompt", "-1"),
    ({"prompt": "\ud800"}, 400, None, "surrogate"),
    ({"prompt": "x" * 128}, 400, "prompt", "128 tokens.*128.*--max-model-len"),
    ({"prompt": "x" * 1000}, 400, "prompt", "1000 tokens"),
    ({"prompt": ["x"] * 129}, 400, "prompt", "128"),
    ({"prompt": "x" * 100, "max_tokens": 29}, 400, "max_tokens", "129.*128.*28"),
    ({"max_tokens": -1}, 400, "max_tokens", "-1"),
    ({"max_tokens": 0}, 400, "max_tokens", "0"),
    ({"max_tokens": 2.5}, 400, "max_tokens", "2.5"),
    ({"max_tokens": "5"}, 400, "max_tokens", "'5'"),
    ({"max_tokens": True}, 400, "max_tokens", "True"),
    ({"max_tokens": 10**30}, 400, "max_tokens", ""),
    ({"n": 0}, 400, "n", "0"),
    ({"n": 129}, 400, "n", "128"),
    ({"best_of": 2}, 400, "best_of", "best_of"),
    ({"temperature": -0.1}, 400, "temperature", "-0.1"),
    ({"temperature": float("nan")}, 400, "temperature", "nan"),
    ({"temperature": "hot"}, 400, "temperature", "hot"),
    ({"top_p": 0}, 400, "top_p", "0"),
    ({"top_p": 1.1}, 400, "top_p", "1.1"),
    ({"top_k": -2}, 400, "top_k", "-2"),
    ({"min_p": 2}, 400, "min_p", "2"),
    ({"seed": 2**63}, 400, "seed", ""),
    ({"seed": "x"}, 400, "seed", "x"),
    ({"stop": ""}, 400, "stop", "empty"),
    ({"stop": ["x", ""]}, 400, "stop", "empty"),
    ({"stop": 5}, 400, "stop", "string"),
    ({"stop": ["x"] * 17}, 400, "stop", "16"),
    ({"stop_token_ids": [300]}, 400, "stop_token_ids", "300"),
    ({"stop_token_ids": ["x"]}, 400, "stop_token_ids[0]", "x"),
    ({"logprobs": 21}, 400, "logprobs", "20"),
    ({"logprobs": True}, 400, "logprobs", "True"),
    ({"logprobs": 1, "echo": True}, 400, "logprobs", "echo"),
    ({"stream": "yes"}, 400, "stream", "yes"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "stream"),
    ({"stream": True, "stream_options": {"usage": True}}, 400, "stream_options.usage", "True"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty", "not supported"),
    ({"frequency_penalty": 0.5}, 400, "frequency_penalty", "not supported"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias", "not supported"),
    ({"suffix": "end"}, 400, "suffix", "not supported"),
]  # fmt: skip

BAD_CHATS: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"messages": []}, 400, "messages", "at least 1"),
    ({"messages": "Hello"}, 400, "messages", "list"),
    ({"messages": ["Hello"]}, 400, "messages[0]", "Hello"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content", "missing"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role", "king"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role", "tool"),
    ({"messages": [{"role": "user", "content": None}]}, 400, "messages[0].content", "string"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content", "image_url"),
    ({"messages": [{"role": "user", "content": "x" * 200}]}, 400, "messages", "tokens"),
    ({"prompt": "Hello"}, 400, "prompt", "unknown"),
    ({"top_logprobs": 2}, 400, "top_logprobs", "logprobs"),
    ({"logprobs": 2}, 400, "logprobs", "2"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "20"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_completion_tokens", "use one"),
    ({"max_completion_tokens": -4}, 400, "max_completion_tokens", "-4"),
    ({"tools": [{"type": "function"}]}, 400, "tools", "not supported"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format", "not supported"),
    ({"adapter_mix": {"nobody": 1}}, 404, "adapter_mix", "nobody"),
    ({"model": "nobody", "stream": True}, 404, "model", "nobody"),
]  # fmt: skip

BAD_BODIES = [b"", b"{", b"[1]", b'"x"', b"null", b"\xff\xfe{}", b'{"prompt": "x", "prompt": "y"}', b"[" * 60_000]


def post(client: httpx.Client, route: str, body: dict[str, Any]) -> httpx.Response:
    """httpx itself refuses NaN and lone surrogates, so the body is made here."""
    content = json.dumps(body).encode()
    return client.post(route, content=content, headers={"content-type": "application/json"})


def check_refused(response: httpx.Response, status: int, param: str | None, words: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert re.search(words, error["message"]), error


def check_alive(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    answer = post(client, COMPLETIONS, GOOD).json()
    assert len(answer["choices"][0]["text"]) == 4


def test_a_bad_completion_request_is_refused_by_the_name_of_its_field(client: httpx.Client) -> None:
    for fields, status, param, words in BAD_COMPLETIONS:
        for stream in ({}, {"stream": True}) if "stream" not in fields and "stream_options" not in fields else ({},):
            check_refused(post(client, COMPLETIONS, GOOD | stream | fields), status, param, words)
        check_alive(client)


def test_a_bad_chat_request_is_refused_by_the_name_of_its_field(client: httpx.Client) -> None:
    for fields, status, param, words in BAD_CHATS:
        check_refused(post(client, CHAT, {"messages": USER} | fields), status, param, words)
        check_alive(client)


def test_a_body_that_is_no_json_object_is_refused(client: httpx.Client) -> None:
    for route in (COMPLETIONS, CHAT):
        for body in BAD_BODIES:
            response = client.post(route, content=body, headers={"content-type": "application/json"})
            assert response.status_code == 400, body[:20]
            assert "body" in response.json()["error"]["message"]
            check_alive(client)


def test_a_body_of_another_type_or_too_large_is_refused(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, data={"prompt": "Hello"})
    check_refused(response, 415, None, "Content-Type: application/json")
    large = json.dumps(GOOD | {"prompt": "x" * 2**16}).encode()
    check_refused(client.post(COMPLETIONS, content=large), 413, None, "65536 bytes")
    check_refused(client.post(COMPLETIONS, content=iter([large[:9], large[9:]])), 413, None, "65536 bytes")
    check_alive(client)


def test_unknown_routes_and_methods_have_the_same_error_shape(client: httpx.Client) -> None:
    check_refused(client.get("/v1/nothing"), 404, None, "GET /v1/nothing")
    check_refused(client.get(COMPLETIONS), 405, None, "GET /v1/completions")
    check_refused(client.delete("/v1/models"), 405, None, "DELETE")
    check_refused(client.get("/v1/models/"), 404, "model", "does not exist")
    check_refused(client.get("/v1/models/nobody"), 404, "model", "nobody")
    check_alive(client)


def test_harmless_fields_are_ignored_and_nulls_are_defaults(client: httpx.Client) -> None:
    plain = post(client, COMPLETIONS, GOOD).json()["choices"]
    extra = {
        "user": "me",
        "metadata": {"k": "v"},
        "presence_penalty": 0,
        "logit_bias": {},
        "suffix": None,
        "best_of": 1,
    }
    nulls = dict.fromkeys(("model", "adapter_mix", "lora", "top_p", "top_k", "seed", "stop", "n", "stream", "logprobs"))
    assert post(client, COMPLETIONS, GOOD | extra | nulls).json()["choices"] == plain
