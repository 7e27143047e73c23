"""Reads examples of a task from JSON lines: what is asked, and what is to be answered."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dymerge_jax.example_lines import is_message, read_json_lines

_FORMS = '{"prompt": "...", "completion": "..."} or {"messages": [..., {"role": "assistant", "content": "..."}]}'


@dataclasses.dataclass(frozen=True)
class Example:
    """One example as token ids.

    Attributes:
      prompt: what is given, at least one token.
      target: what is to be answered, the end of the turn included, at least one token.
    """

    prompt: tuple[int, ...]
    target: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.target)


def read_examples(path: Path, tokenizer: Any, *, max_len: int) -> list[Example]:
    """Reads a file of one JSON object a line; empty lines are left out.

    A prompt and its completion are taken as they are, with the tokenizer's begin and end tokens around them. Messages
    go through the tokenizer's chat template; the last one, the assistant's, is the target.

    Args:
      path: the file.
      tokenizer: a transformers tokenizer.
      max_len: most tokens of an example.

    Raises:
      FileNotFoundError: If there is no such file.
      ValueError: If a line cannot be used, or there is none; the message names the first such lines by number.
    """
    return read_json_lines(path, lambda content: _example(content, tokenizer, max_len), expected=_FORMS)


def _example(content: Mapping[str, Any], tokenizer: Any, max_len: int) -> Example:
    if set(content) == {"prompt", "completion"}:
        example = _plain(content["prompt"], content["completion"], tokenizer)
    elif set(content) == {"messages"}:
        example = _chat(content["messages"], tokenizer)
    else:
        raise ValueError(f"it has the fields {', '.join(map(repr, content)) or 'of nothing'}; expected {_FORMS}")
    if not example.prompt:
        raise ValueError("its prompt has no token; expected at least one")
    if len(example) > max_len:
        raise ValueError(f"it has {len(example)} tokens; the model's context is {max_len}")
    return example


def _plain(prompt: object, completion: object, tokenizer: Any) -> Example:
    if not isinstance(prompt, str) or not isinstance(completion, str) or not completion:
        raise ValueError("prompt and completion must be texts, the completion not an empty one")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    target = [*tokenizer.encode(completion, add_special_tokens=False), *end]
    return Example(tuple(tokenizer.encode(prompt)), tuple(target))


def _chat(messages: object, tokenizer: Any) -> Example:
    if not isinstance(messages, list) or len(messages) < 2 or not all(map(is_message, messages)):
        raise ValueError("messages must be two or more objects with the texts 'role' and 'content'")
    if messages[-1]["role"] != "assistant" or not messages[-1]["content"]:
        raise ValueError("its last message must be the assistant's, with the answer as its content")
    if not tokenizer.chat_template:
        raise ValueError("the model's tokenizer has no chat template; give prompt and completion instead of messages")
    asked = _rendered(tokenizer, messages[:-1], add_generation_prompt=True)
    whole = _rendered(tokenizer, messages, add_generation_prompt=False)
    if not whole.startswith(asked):
        raise ValueError("the chat template writes what comes before the answer otherwise when the answer is there")
    # The template's line break behind the end of the turn is not the model's to write.
    answer = whole[len(asked) :].rstrip("\n")
    encode: Callable[[str], Sequence[int]] = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    return Example(tuple(encode(asked)), tuple(encode(answer)))


def _rendered(tokenizer: Any, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
    import jinja2

    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses it: {error}") from None
