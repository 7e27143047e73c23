"""Examples as JSON lines: how search and retrieval read them, and what an example asks for.

Training reads its data itself, line by line (`train.data`), and shares `json_object` alone.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

EXAMPLES_FILE = "examples.jsonl"  # in the folder of an adapter
_MAX_LISTED = 10
_MAX_FOLDER_BYTES = 1 << 20  # of a file that lies beside an adapter and may be all of its training data
_PROMPT_FORMS = '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}'


def read_json_lines[T](path: Path, read: Callable[[dict[str, Any]], T], *, expected: str) -> list[T]:
    """Reads a file of one JSON object a line; empty lines are left out.

    Args:
      path: the file.
      read: makes something of one object, or raises a ValueError that says why not.
      expected: what a line looks like, for errors.

    Raises:
      FileNotFoundError: If there is no such file.
      ValueError: If a line cannot be used, or there is none; the message names the first such lines by number.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist or is no file; expected examples, one JSON object a line")
    return _read_lines(path, path.read_bytes().split(b"\n"), read, expected)


def _read_lines[T](path: Path, lines: Sequence[bytes], read: Callable[[dict[str, Any]], T], expected: str) -> list[T]:
    found, problems = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(read(json_object(line, expected)))
        except ValueError as error:
            problems.append(f"\n- line {number}: {error}")
    if problems:
        more = f"\n- and {len(problems) - _MAX_LISTED} lines more" if len(problems) > _MAX_LISTED else ""
        raise ValueError(f"{path} is refused:" + "".join(problems[:_MAX_LISTED]) + more)
    if not found:
        raise ValueError(f"{path} holds no example; expected lines of {expected}")
    return found


def json_object(line: bytes | str, expected: str) -> dict[str, Any]:
    """One line as an object.

    Raises:
      ValueError: If it is something else.
    """
    try:
        content = json.loads(line.decode("utf-8") if isinstance(line, bytes) else line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"it is a JSON {type(content).__name__}; expected {expected}")
    return content


def is_message(value: object) -> bool:
    """True for a message of a conversation."""
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def asked_text(messages: Sequence[Mapping[str, str]]) -> str:
    """What a conversation asks for: its last message of the user, or its last one if it has none."""
    asked = [message["content"] for message in messages if message["role"] == "user"]
    return asked[-1] if asked else messages[-1]["content"]


def read_prompts(path: Path, *, max_prompts: int) -> list[str]:
    """The first prompts of a file of examples, which may be one of training data: answers are not looked at.

    Raises:
      FileNotFoundError, ValueError: See `read_json_lines`; only what is used is checked.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist or is no file; expected examples, one JSON object a line")
    with path.open("rb") as file:
        content = file.read(_MAX_FOLDER_BYTES + 1)
    lines = content.split(b"\n")
    if len(content) > _MAX_FOLDER_BYTES and len(lines) > 1:
        lines = lines[:-1]  # the last one is cut off
    lines = [line for line in lines if line.strip()][:max_prompts]
    return _read_lines(path, lines, _prompt, _PROMPT_FORMS)


def read_prompts_by_adapter(path: Path) -> dict[str, list[str]]:
    """Prompts by adapter from a file whose lines name one: {"adapter": "legal", "prompt": "..."}.

    Raises:
      FileNotFoundError, ValueError: See `read_json_lines`.
    """
    found: dict[str, list[str]] = {}
    expected = '{"adapter": "legal", "prompt": "..."}, or messages in place of prompt'
    for name, prompt in read_json_lines(path, _named_prompt, expected=expected):
        found.setdefault(name, []).append(prompt)
    return found


def _named_prompt(content: Mapping[str, Any]) -> tuple[str, str]:
    name = content.get("adapter")
    if not isinstance(name, str) or not name:
        raise ValueError(f"adapter is {name!r}; expected the name of one")
    return name, _prompt(content)


def _prompt(content: Mapping[str, Any]) -> str:
    if ("prompt" in content) == ("messages" in content):
        raise ValueError(f"it has the fields {', '.join(map(repr, content)) or 'of nothing'}; expected {_PROMPT_FORMS}")
    text = content.get("prompt")
    if "messages" in content:
        messages = content["messages"]
        if not isinstance(messages, list) or not messages or not all(map(is_message, messages)):
            raise ValueError("messages must be objects with the texts 'role' and 'content', at least one")
        text = asked_text(messages)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"its prompt is {text!r}; expected a text that is not empty")
    text.encode("utf-8")  # an escaped half of a surrogate pair is no text, and no tokenizer takes it
    return text
