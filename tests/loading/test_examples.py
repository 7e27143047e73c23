"""Examples of a task as JSON lines, and files of named mixes: what is read, what is refused and how that is said."""

import json
import types
from pathlib import Path
from typing import Any

import pytest

from checkpoints.errors import CheckpointError
from checkpoints.tokenizer import read_tokenizer
from dymerge_jax.compose.examples import read_examples
from dymerge_jax.compose.mix_file import add_mix, check_mix_name, read_mix_file
from serving.admin import read_mixes
from tests.support.tiny_checkpoints import write_tokenizer

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, 300)
    return read_tokenizer(path, 300)


def write(path: Path, *lines: Any) -> Path:
    file = path / "examples.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_bytes("\n".join(texts).encode("utf-8", "surrogatepass"))
    return file


def test_prompts_and_completions_are_taken_as_they_are_with_the_end_behind(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path, {"prompt": "a b", "completion": " c"}, "", {"completion": "d", "prompt": "\n"})
    first, second = read_examples(file, tokenizer, max_len=8)
    assert (tokenizer.decode(first.prompt), tokenizer.decode(first.target)) == ("a b", " c<|im_end|>")
    assert (tokenizer.decode(second.prompt), tokenizer.decode(second.target)) == ("\n", "d<|im_end|>")
    assert len(first) == 6


def test_messages_go_through_the_chat_template_and_the_last_is_the_target(tmp_path: Path, tokenizer: Any) -> None:
    system = {"role": "system", "content": "Be brief."}
    (example,) = read_examples(write(tmp_path, {"messages": [system, *CHAT, *CHAT]}), tokenizer, max_len=500)
    assert tokenizer.decode(example.prompt) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(example.target) == "ho<|im_end|>"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("\udcff", "it is no JSON"),
        ([1], "it is a JSON list; expected"),
        ({}, "it has the fields of nothing; expected"),
        ({"prompt": "a", "answer": "b"}, "it has the fields 'prompt', 'answer'; expected"),
        ({"prompt": "a", "completion": ""}, "prompt and completion must be texts, the completion not an empty one"),
        ({"prompt": 1, "completion": "b"}, "prompt and completion must be texts"),
        ({"prompt": "", "completion": "b"}, "its prompt has no token"),
        ({"prompt": "a" * 40, "completion": "b"}, "it has 42 tokens; the model's context is 40"),
        ({"messages": "hi"}, "messages must be two or more objects"),
        ({"messages": CHAT[1:]}, "messages must be two or more objects"),
        ({"messages": [{"role": "user", "content": [1]}, CHAT[1]]}, "with the texts 'role' and 'content'"),
        ({"messages": CHAT[::-1]}, "its last message must be the assistant's"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": ""}]}, "its last message must be the assistant's"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line: Any, message: str, tmp_path: Path, tokenizer: Any) -> None:
    good = {"prompt": "a", "completion": "b"}
    with pytest.raises(ValueError, match=r"examples\.jsonl is refused:\n- line 3: ") as refused:
        read_examples(write(tmp_path, good, "", line, good), tokenizer, max_len=40)
    assert message in str(refused.value)
    assert len(str(refused.value)) < 500


def test_many_bad_lines_are_told_at_once_but_not_all(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)line 1: .*line 10: .*- and 5 lines more") as refused:
        read_examples(write(tmp_path, *["x"] * 15), tokenizer, max_len=40)
    assert "line 11" not in str(refused.value)


def test_no_file_and_no_example_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist or is no file; expected examples"):
        read_examples(tmp_path / "nowhere", tokenizer, max_len=40)
    with pytest.raises(ValueError, match="holds no example; expected lines of"):
        read_examples(write(tmp_path, "", " "), tokenizer, max_len=40)


def test_a_tokenizer_without_a_chat_template_takes_no_messages(tmp_path: Path) -> None:
    plain = types.SimpleNamespace(chat_template=None)
    with pytest.raises(ValueError, match="line 1: the model's tokenizer has no chat template; give prompt and compl"):
        read_examples(write(tmp_path, {"messages": CHAT}), plain, max_len=40)


# Files of named mixes


def test_mixes_are_added_to_a_file_that_the_server_reads(tmp_path: Path) -> None:
    file = tmp_path / "new" / "mixes.json"
    assert read_mix_file(file) == {}
    add_mix(file, "première", {"a": 0.5, "b": -1.25})
    add_mix(file, "second", {"b": 1})
    assert read_mixes(file, ["a", "b"]) == {"première": {"a": 0.5, "b": -1.25}, "second": {"b": 1.0}}
    assert [p.name for p in file.parent.iterdir()] == ["mixes.json"]


def test_a_mix_that_cannot_be_written_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "mixes.json"
    add_mix(file, "first", {"a": 1})
    before = file.read_bytes()
    with pytest.raises(TypeError):
        add_mix(file, "second", {"a": object()})  # type: ignore[dict-item]
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["mixes.json"]


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("{}", "", "the mix's name is ''; give one that is not empty"),
        ("{}", "a", "the name 'a' is that of an adapter"),
        ('{"mix": {"a": 1}}', "mix", "holds a mix named 'mix' already"),
        ("[]", "mix", "an object was expected"),
        ("{", "mix", "is not valid JSON"),
    ],
)
def test_a_name_that_cannot_be_added_is_refused(content: str, name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mixes.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        check_mix_name(tmp_path / "mixes.json", name, ["a"])
