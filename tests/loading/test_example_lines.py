"""Example prompts as JSON lines: those beside an adapter and those of many adapters in one file."""

import json
from pathlib import Path
from typing import Any

import pytest

from dymerge_jax.example_lines import read_prompts, read_prompts_by_adapter

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
ANSWER = {"role": "assistant", "content": "ho"}


def write(path: Path, *lines: Any) -> Path:
    file = path / "examples.jsonl"
    file.write_bytes("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines).encode())
    return file


def test_prompts_are_read_from_every_form_of_training_data(tmp_path: Path) -> None:
    lines = [{"prompt": "a"}, "", {"prompt": "b", "completion": "x", "mates": {}}, {"messages": CHAT}]
    lines += [{"messages": [*CHAT, ANSWER]}, {"messages": [*CHAT, ANSWER, {"role": "user", "content": "ha"}, ANSWER]}]
    lines += [{"messages": [ANSWER]}]
    assert read_prompts(write(tmp_path, *lines), max_prompts=64) == ["a", "b", "hi", "hi", "ha", "ho"]


def test_only_the_first_prompts_are_read_and_checked(tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "a"}, "", {"prompt": "b"}, "not read")
    assert read_prompts(file, max_prompts=2) == ["a", "b"]
    with pytest.raises(ValueError, match=r"examples\.jsonl is refused:\n- line 3: it is no JSON"):
        read_prompts(file, max_prompts=3)


def test_of_a_large_file_the_beginning_is_read(tmp_path: Path) -> None:
    text = "x" * 300_000
    file = write(tmp_path, *({"prompt": f"{i} {text}"} for i in range(9)))
    assert [prompt[0] for prompt in read_prompts(file, max_prompts=64)] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "it is no JSON"),
        ([1], "it is a JSON list; expected"),
        ({}, "it has the fields of nothing; expected"),
        ({"completion": "a"}, "it has the fields 'completion'; expected"),
        ({"prompt": "a", "messages": CHAT}, "it has the fields 'prompt', 'messages'; expected"),
        ({"prompt": " \n"}, "its prompt is ' \\n'; expected a text that is not empty"),
        ({"prompt": 1}, "its prompt is 1; expected a text"),
        ('{"prompt": "\\ud800"}', "surrogates not allowed"),
        ({"messages": []}, "messages must be objects"),
        ({"messages": [{"role": "user"}]}, "messages must be objects"),
        ({"messages": [{"role": "user", "content": ""}]}, "its prompt is ''"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"examples\.jsonl is refused:\n- line 2: ") as refused:
        read_prompts(write(tmp_path, {"prompt": "a"}, line), max_prompts=64)
    assert message in str(refused.value)


def test_a_file_that_is_missing_or_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist or is no file"):
        read_prompts(tmp_path / "examples.jsonl", max_prompts=64)
    with pytest.raises(ValueError, match="holds no example; expected lines of"):
        read_prompts(write(tmp_path, "", " "), max_prompts=64)


def test_a_file_for_many_adapters_names_one_in_each_line(tmp_path: Path) -> None:
    lines = [{"adapter": "a", "prompt": "1"}, {"adapter": "b", "messages": CHAT}, {"adapter": "a", "prompt": "2"}]
    assert read_prompts_by_adapter(write(tmp_path, *lines)) == {"a": ["1", "2"], "b": ["hi"]}
    with pytest.raises(ValueError, match="line 1: adapter is None; expected the name of one"):
        read_prompts_by_adapter(write(tmp_path, {"prompt": "a"}))
