"""Lines of JSON to tokens and to what is learnt of them."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.errors import CheckpointError, MissingFileError
from checkpoints.tokenizer import read_tokenizer
from dymerge_jax.train.batches import BatchPlan, seq_bucket, target_bucket
from dymerge_jax.train.data import Sample, read_samples
from tests.support.tiny_checkpoints import CHAT_TEMPLATE, write_tokenizer

END = 2  # <|im_end|> of the tiny tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 128)
    return read_tokenizer(folder, 128)


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return path


def read(path: Path, tokenizer: Any, **options: Any) -> list[Sample]:
    return read_samples(path, tokenizer, **{"max_len": 500, "end_ids": [END]} | options)


def learnt(sample: Sample, tokenizer: Any) -> str:
    return tokenizer.decode(sample.tokens[sample.is_target])


def turns(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


def test_an_answer_and_its_end_are_learnt_and_the_prompt_is_tokenized_as_in_serving(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "Hi", "completion": "Hello"}, "", turns("Hi", "Hello"))
    first, second = read(path, tokenizer)
    assert (first.line, second.line) == (1, 3)
    assert learnt(first, tokenizer) == learnt(second, tokenizer) == "Hello<|im_end|>"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert first.tokens[: len(ids)].tolist() == ids
    assert first.tokens[-1] == END, "the newline that the template writes behind it is never generated"


def test_every_answer_of_a_conversation_is_learnt_and_nothing_else(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "d.jsonl", turns("one", "1", "two", "2"))
    (sample,) = read(path, tokenizer)
    assert learnt(sample, tokenizer) == "1<|im_end|>2<|im_end|>"
    assert tokenizer.decode(sample.tokens) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"
    )


def test_plain_text_has_no_template_and_an_end_token(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "2+2=", "completion": "4"})
    (sample,) = read(path, tokenizer, plain_text=True)
    assert tokenizer.decode(sample.tokens) == "2+2=4<|im_end|>"
    assert sample.is_target.tolist() == [False] * 4 + [True] * 2


def test_wrong_lines_are_all_named_with_what_was_expected(tmp_path: Path, tokenizer: Any) -> None:
    path = write(
        tmp_path / "d.jsonl",
        {"prompt": "fine", "completion": "fine"},
        "{broken",
        [1],
        {"text": "x"},
        {"prompt": "x"},
        {"prompt": "x", "completion": ""},
        {"prompt": "x", "completion": "y", "messages": []},
        turns("only asked"),
        {"messages": [{"role": "user"}]},
        {"prompt": "x", "completion": "y", "mates": {"unknown": 1}},
        {"prompt": "x", "completion": "y", "mates": {"m": float("nan")}},
        {"prompt": "x", "completion": "y", "mates": {"m": 10**400}},
        {"prompt": "x", "completion": "y", "mates": {"m": -1e300}},
        {"prompt": "x", "completion": "y", "mates": {"m": True}},
    )
    with pytest.raises(CheckpointError) as caught:
        read(path, tokenizer, mates=["m"])
    text = str(caught.value)
    for line, reason in (
        (2, "no JSON"),
        (3, "a JSON list"),
        (4, "has the fields 'text'"),
        (5, "completion is None"),
        (6, "completion is ''"),
        (7, "has the fields 'prompt', 'completion', 'messages'"),
        (8, "its last message is {'role': 'user'"),
        (9, "message 0 is"),
        (10, "(the mates are: m)"),
        (11, "the weight of mate 'm' is nan"),
        (12, "the weight of mate 'm' is 1000"),
        (13, "the weight of mate 'm' is -1e+300; a finite number of float32 was expected"),
        (14, "the weight of mate 'm' is True"),
    ):
        assert f"\n- line {line}: " in text
        assert reason in next(x for x in text.splitlines() if x.startswith(f"- line {line}:"))
    assert "line 1:" not in text


def test_too_long_samples_are_left_out_and_named(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "x", "completion": "y"}, {"prompt": "x" * 100, "completion": "y"})
    with caplog.at_level(logging.WARNING):
        samples = read(path, tokenizer, max_len=60)
    assert [s.line for s in samples] == [1]
    assert "1 of 2 samples are longer than --max-len 60 tokens (the longest has 1" in caplog.text
    assert "left out: line 2" in caplog.text
    with pytest.raises(CheckpointError, match="all 2 are longer than --max-len 5 tokens"):
        read(path, tokenizer, max_len=5)


def test_files_without_samples_and_missing_files_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(CheckpointError, match="holds no sample to train on"):
        read(write(tmp_path / "empty.jsonl"), tokenizer)
    with pytest.raises(MissingFileError, match="does not exist or is no file; expected JSON lines"):
        read(tmp_path / "nothing", tokenizer)
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9", "completion": "x"}')
    with pytest.raises(CheckpointError, match="is no UTF-8 text"):
        read(tmp_path / "latin", tokenizer)


def test_a_template_that_rewrites_earlier_turns_is_refused_by_line(tmp_path: Path, tokenizer: Any) -> None:
    template = "{{ messages | length }}" + CHAT_TEMPLATE
    path = write(tmp_path / "d.jsonl", turns("a", "b", "c", "d"))

    class Counting:
        chat_template = template

        def apply_chat_template(self, messages: Sequence[dict[str, str]], **options: Any) -> str:
            return tokenizer.apply_chat_template(messages, chat_template=template, **options)

    with pytest.raises(
        CheckpointError, match=r"line 1: the chat template writes message 1 otherwise when more follow it"
    ):
        read(path, Counting())


def some_samples(lengths: Sequence[int]) -> list[Sample]:
    return [Sample(np.full(n, i + 1, np.int32), np.arange(n) >= n // 2, line=i + 1) for i, n in enumerate(lengths)]


def test_an_epoch_has_every_sample_and_a_step_the_same_whenever_it_is_asked_for() -> None:
    samples = some_samples(range(5, 28))
    plan = BatchPlan(samples, batch_size=4, seed=3)
    assert plan.steps_per_epoch == 6
    epochs = [[np.asarray(plan.batch(e * 6 + i).tokens)[:, 0].tolist() for i in range(6)] for e in range(2)]
    for epoch in epochs:
        seen = [first for batch in epoch for first in batch]
        assert set(seen) == set(range(1, 24))
        assert len(seen) == 24, "the last step is filled up"
    assert epochs[0] != epochs[1]
    again = BatchPlan(samples, batch_size=4, seed=3).batch(7)
    np.testing.assert_array_equal(again.tokens, plan.batch(7).tokens)
    other = BatchPlan(samples, batch_size=4, seed=4)
    assert [np.asarray(other.batch(i).tokens)[:, 0].tolist() for i in range(6)] != epochs[0]


def test_a_batch_says_before_which_tokens_its_targets_stand() -> None:
    samples = [*some_samples([9, 20]), Sample(np.arange(5, dtype=np.int32), np.arange(5) > 2, 3, {"n": 2.0})]
    plan = BatchPlan(samples, batch_size=3, seed=0, mates=("m", "n"), mate_weights={"m": 0.5})
    batch = plan.batch(0)
    assert batch.tokens.shape == (3, 20)
    flat = np.asarray(batch.tokens).reshape(-1)
    is_target, sources = np.asarray(batch.is_target), np.asarray(batch.sources)
    assert is_target.sum() == 5 + 10 + 2
    np.testing.assert_array_equal(flat[sources[is_target] + 1], np.asarray(batch.targets)[is_target])
    # Shortest first: a line's own mates replace those of the command.
    np.testing.assert_array_equal(batch.lengths, [5, 9, 20])
    np.testing.assert_array_equal(batch.mate_weights, [[0, 2], [0.5, 0], [0.5, 0]])


def test_lengths_are_rounded_up_to_few_sizes() -> None:
    sizes = [seq_bucket(n) for n in range(1, 1025)]
    assert all(size >= n for n, size in enumerate(sizes, 1))
    assert all(size <= max(16, n * 1.25 + 1) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) <= 25
    assert [target_bucket(n) for n in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 128]
