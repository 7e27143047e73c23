"""Chat JSONL to samples: token ids and which of them are to be learnt."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from checkpoints.errors import CheckpointError, MissingFileError, refuse_if
from checkpoints.json_values import is_float32
from dymerge_jax.example_lines import json_object

_log = logging.getLogger(__name__)

_EXPECTED = (
    'expected {"messages": [{"role": ..., "content": ...}, ...]} that ends with an assistant message, or '
    '{"prompt": text, "completion": text}'
)
_FIELDS = ("messages", "prompt", "completion", "mates")
_MAX_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Sample:
    """One conversation.

    Attributes:
      tokens: [num_tokens] int32 token ids.
      is_target: [num_tokens] bool, tokens whose prediction counts; never the first.
      line: where it stands in its file, from 1.
      mates: weights of the mates for this sample; None for those of the command.
    """

    tokens: Int[np.ndarray, " num_tokens"]
    is_target: Bool[np.ndarray, " num_tokens"]
    line: int
    mates: Mapping[str, float] | None = None


def read_samples(
    path: str | Path,
    tokenizer: Any,
    *,
    max_len: int,
    end_ids: Sequence[int],
    plain_text: bool = False,
    mates: Sequence[str] = (),
) -> list[Sample]:
    """Reads and tokenizes a file of samples; nothing is returned unless every line is right.

    Args:
      path: a JSON object a line; empty lines are skipped.
      tokenizer: a transformers tokenizer.
      max_len: longer samples are left out, and the log says which.
      end_ids: token ids that end an answer; what the chat template writes after one is not learnt.
      plain_text: prompt and completion as they are, the first of `end_ids` after the completion, no chat template.
      mates: names that a line's "mates" may give weights to.

    Raises:
      MissingFileError: If there is no such file.
      CheckpointError: If lines are wrong (each is named with its reason) or none is left.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"data file {str(path)!r} does not exist or is no file; expected JSON lines")
    if not plain_text and not tokenizer.chat_template:
        raise CheckpointError(
            "the model's tokenizer has no chat template; give prompt and completion with --plain-text"
        )
    samples, problems, ignored = [], [], set()
    for number, line in _lines(path):
        try:
            content = _parse(line)
            ignored |= content.keys() - set(_FIELDS)
            pieces = _plain_pieces(content) if plain_text else _chat_pieces(content, tokenizer)
            sample = _encode(pieces, tokenizer, end_ids if plain_text else (), number, _mates(content, mates))
            samples.append(_without_tail(sample, end_ids))
        except _LineError as error:
            problems.append(f"line {number}: {error}")
    if len(problems) > _MAX_SHOWN:
        problems = [*problems[:_MAX_SHOWN], f"and {len(problems) - _MAX_SHOWN} lines more"]
    refuse_if(problems, f"data file {str(path)!r}")
    if ignored:
        _log.info("%s: fields that are not used: %s", path, ", ".join(sorted(map(repr, ignored))))
    return _short_enough(path, samples, max_len)


class _LineError(ValueError):
    """Why one line cannot be used."""


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise CheckpointError(f"data file {str(path)!r} is no UTF-8 text ({error})") from error


def _parse(line: str) -> dict[str, Any]:
    try:
        content = json_object(line, _EXPECTED.removeprefix("expected "))
    except ValueError as error:
        raise _LineError(str(error)) from error
    has_pair = "prompt" in content or "completion" in content
    if has_pair == ("messages" in content):
        raise _LineError(f"has the fields {', '.join(map(repr, content)) or 'none'}; {_EXPECTED}")
    if has_pair:
        for field in ("prompt", "completion"):
            if not isinstance(content.get(field), str) or not content[field]:
                raise _LineError(f"{field} is {content.get(field)!r}; a text that is not empty was expected")
    return content


def _messages(content: Mapping[str, Any]) -> list[dict[str, str]]:
    if "messages" not in content:
        return [
            {"role": "user", "content": content["prompt"]},
            {"role": "assistant", "content": content["completion"]},
        ]
    messages = content["messages"]
    if not isinstance(messages, list) or not messages:
        raise _LineError(f"messages is {messages!r}; {_EXPECTED}")
    for i, message in enumerate(messages):
        is_message = isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))
        if not is_message:
            raise _LineError(f'message {i} is {message!r}; expected {{"role": text, "content": text}}')
    if messages[-1]["role"] != "assistant" or not messages[-1]["content"]:
        raise _LineError(f"its last message is {messages[-1]!r}; expected one of the assistant that is not empty")
    return messages


_Piece = tuple[str, bool]
"""A text, and whether it is to be learnt."""


def _chat_pieces(content: Mapping[str, Any], tokenizer: Any) -> list[_Piece]:
    """The conversation as the template writes it, cut where the assistant begins and ends.

    A prompt is tokenized apart from its answer, as it is in serving.
    """
    messages = _messages(content)
    pieces: list[_Piece] = []
    so_far = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for turn, is_answer in ((messages[:i], True), (messages[: i + 1], False)):
            text = _rendered(tokenizer, turn, add_generation_prompt=is_answer)
            if not text.startswith(so_far):
                raise _LineError(
                    f"the chat template writes message {i} otherwise when more follow it; give the conversation as "
                    "samples that have one answer each"
                )
            pieces.append((text[len(so_far) :], not is_answer))
            so_far = text
    return pieces


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # a template may raise anything
        raise _LineError(f"the chat template refuses it: {error}") from error


def _plain_pieces(content: Mapping[str, Any]) -> list[_Piece]:
    if "messages" in content:
        raise _LineError("has messages, which need a chat template; without it (--plain-text) give prompt, completion")
    return [(content["prompt"], False), (content["completion"], True)]


def _encode(
    pieces: Sequence[_Piece], tokenizer: Any, end_ids: Sequence[int], line: int, mates: Mapping[str, float] | None
) -> Sample:
    tokens: list[int] = []
    is_target: list[bool] = []
    for i, (text, is_answer) in enumerate(pieces):
        # The begin token that a tokenizer adds belongs before a plain prompt; a chat template writes its own.
        ids = tokenizer.encode(text, add_special_tokens=bool(end_ids) and i == 0)
        tokens += ids
        is_target += [is_answer] * len(ids)
    tokens += list(end_ids[:1])
    is_target += [True] * len(end_ids[:1])
    if is_target:
        is_target[0] = False  # nothing stands before it
    return Sample(np.asarray(tokens, np.int32), np.asarray(is_target, bool), line, mates)


def _without_tail(sample: Sample, end_ids: Sequence[int]) -> Sample:
    """Tokens that follow an answer's end token are not learnt, for none is generated; the last ones are cut off."""
    is_target = sample.is_target.copy()
    has_ended = False
    for i, token in enumerate(sample.tokens):
        if not sample.is_target[i]:
            has_ended = False
        elif has_ended:
            is_target[i] = False
        else:
            has_ended = int(token) in end_ids
    if not is_target.any():
        raise _LineError("no token of it is an answer's")
    length = int(np.flatnonzero(is_target)[-1]) + 1
    return dataclasses.replace(sample, tokens=sample.tokens[:length], is_target=is_target[:length])


def _mates(content: Mapping[str, Any], names: Sequence[str]) -> dict[str, float] | None:
    if "mates" not in content:
        return None
    mates = content["mates"]
    known = ", ".join(names) or "none"
    if not isinstance(mates, dict) or not mates.keys() <= set(names):
        raise _LineError(f"mates is {mates!r}; expected an object from names to weights (the mates are: {known})")
    for name, weight in mates.items():
        if not is_float32(weight):
            raise _LineError(f"the weight of mate {name!r} is {weight!r}; a finite number of float32 was expected")
    return {name: float(weight) for name, weight in mates.items()}


def _short_enough(path: Path, samples: list[Sample], max_len: int) -> list[Sample]:
    long = [sample for sample in samples if len(sample.tokens) > max_len]
    kept = [sample for sample in samples if len(sample.tokens) <= max_len]
    if long:
        shown = ", ".join(str(sample.line) for sample in long[:_MAX_SHOWN])
        more = f" and {len(long) - _MAX_SHOWN} more" if len(long) > _MAX_SHOWN else ""
        longest = max(len(sample.tokens) for sample in long)
        _log.warning(
            "%s: %d of %d samples are longer than --max-len %d tokens (the longest has %d) and are left out: line %s%s",
            path, len(long), len(samples), max_len, longest, shown, more,
        )  # fmt: skip
    if not kept:
        hint = f"; all {len(long)} are longer than --max-len {max_len} tokens" if long else ""
        raise CheckpointError(f"data file {str(path)!r} holds no sample to train on{hint}")
    return kept
