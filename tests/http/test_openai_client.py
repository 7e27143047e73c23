"""The OpenAI client, unmodified, against the server."""

from collections.abc import Iterator

import openai
import openai.types.chat as chat_types
import pytest

MESSAGES: list[chat_types.ChatCompletionMessageParam] = [{"role": "user", "content": "Items: lamp, river, stone"}]


@pytest.fixture
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client


def test_completions_answer_with_text_and_token_counts(api: openai.OpenAI) -> None:
    answer = api.completions.create(model="tiny", prompt="Hello", max_tokens=7, temperature=0)
    assert answer.id.startswith("cmpl-")
    assert answer.model == "tiny"
    assert len(answer.choices) == 1
    assert len(answer.choices[0].text) == 7
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 7, 12)


def test_completions_default_to_16_tokens(api: openai.OpenAI) -> None:
    assert len(api.completions.create(model="tiny", prompt="Hello").choices[0].text) == 16


def test_a_completion_stream_spells_the_whole_answer(api: openai.OpenAI) -> None:
    whole = api.completions.create(model="a", prompt="Hello", max_tokens=7, temperature=0)
    chunks = list(api.completions.create(model="a", prompt="Hello", max_tokens=7, temperature=0, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks] == [None] * 6 + ["length"]
    assert len({c.id for c in chunks}) == 1


def test_chat_answers_as_the_assistant(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=9, temperature=0)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].message.content or "") == 9
    assert answer.choices[0].finish_reason == "length"


def test_a_chat_stream_begins_with_the_role_and_may_end_with_the_token_counts(api: openai.OpenAI) -> None:
    settings = {"model": "b", "messages": MESSAGES, "max_tokens": 9, "temperature": 0}
    whole = api.chat.completions.create(**settings)
    chunks = list(api.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(c.usage is None for c in chunks[:-1])


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "mix", [{"a": 0.7, "b": -0.5}, [{"adapter": "b", "weight": -0.5}, {"adapter": "a", "weight": 0.7}]]
)
def test_an_adapter_mix_travels_in_extra_body(api: openai.OpenAI, mix: object, is_stream: bool) -> None:
    def complete(**body: object) -> str:
        answer = api.completions.create(
            model="tiny", prompt="Hello", temperature=0, stream=is_stream, extra_body=body
        )  # fmt: skip
        return "".join(c.choices[0].text for c in ([answer] if isinstance(answer, openai.types.Completion) else answer))

    def chat(**body: object) -> str:
        answer = api.chat.completions.create(
            model="tiny", messages=MESSAGES, temperature=0, max_tokens=9, stream=is_stream, extra_body=body
        )  # pyright: ignore  # fmt: skip
        if isinstance(answer, chat_types.ChatCompletion):
            return answer.choices[0].message.content or ""
        return "".join(c.choices[0].delta.content or "" for c in answer)

    for ask in (complete, chat):
        assert ask(adapter_mix=mix) == ask(adapter_mix={"b": -0.5, "a": 0.7})
        assert ask(adapter_mix=mix) != ask(adapter_mix={"a": 0.7})
        assert ask(adapter_mix=mix) != ask()


def test_log_probabilities_fit_the_clients_types(api: openai.OpenAI) -> None:
    completion = api.completions.create(model="tiny", prompt="Hello", max_tokens=3, logprobs=2).choices[0]
    assert completion.logprobs is not None
    assert "".join(completion.logprobs.tokens or []) == completion.text
    assert completion.logprobs.text_offset == [0, 1, 2]
    assert completion.logprobs.token_logprobs == [-0.5] * 3
    assert all(set(completion.text[i]) <= set(top) for i, top in enumerate(completion.logprobs.top_logprobs or []))

    settings = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    chat = api.chat.completions.create(**settings).choices[0]
    assert chat.logprobs is not None
    entries = chat.logprobs.content or []
    assert "".join(e.token for e in entries) == chat.message.content
    assert [(t.token, t.logprob) for t in entries[0].top_logprobs] == [("a", -1.0), ("b", -2.0)]
    assert entries[0].bytes == list(entries[0].token.encode())
    streamed = list(api.chat.completions.create(**settings, stream=True, temperature=0))
    assert sum(len(c.choices[0].logprobs.content or []) for c in streamed if c.choices[0].logprobs) == 3


def test_several_choices_differ_by_seed_and_a_seed_repeats_them(api: openai.OpenAI) -> None:
    settings = {"model": "a", "prompt": ["one", "two"], "n": 3, "seed": 5, "max_tokens": 6}
    first, second = api.completions.create(**settings), api.completions.create(**settings)
    assert [c.index for c in first.choices] == list(range(6))
    assert len({c.text for c in first.choices}) == 6
    assert [c.text for c in first.choices] == [c.text for c in second.choices]
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (6, 36)


def test_streamed_choices_are_told_apart_by_their_index(api: openai.OpenAI) -> None:
    settings = {"model": "a", "prompt": ["one", "two"], "n": 2, "seed": 5, "max_tokens": 6}
    whole = api.completions.create(**settings)
    texts = dict.fromkeys(range(4), "")
    for chunk in api.completions.create(**settings, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [c.text for c in whole.choices]

    chat = {"model": "a", "messages": MESSAGES, "n": 2, "seed": 5, "max_tokens": 6}
    answers = api.chat.completions.create(**chat)
    contents = dict.fromkeys(range(2), "")
    for chunk in api.chat.completions.create(**chat, stream=True):
        contents[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(contents.values()) == [c.message.content for c in answers.choices]


def test_an_unknown_adapter_is_not_found_before_the_first_event(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        api.completions.create(model="nobody", prompt="Hello", stream=True)
    with pytest.raises(openai.NotFoundError, match="nobody"):
        api.completions.create(model="tiny", prompt="Hello", extra_body={"adapter_mix": {"nobody": 1}}, stream=True)


def test_models_list_adapters_and_gated_sets_below_the_base(api: openai.OpenAI) -> None:
    models = {m.id: m.model_dump() for m in api.models.list()}
    assert list(models) == ["tiny", "a", "b", "c", "huge", "moe", "wide"]
    assert models["tiny"]["parent"] is None
    assert {models[name]["parent"] for name in list(models)[1:]} == {"tiny"}
    assert models["a"]["root"] == "adapters/a"
    assert models["tiny"]["max_model_len"] == 128
    assert api.models.retrieve("moe").id == "moe"
    with pytest.raises(openai.NotFoundError, match="nobody"):
        api.models.retrieve("nobody")
