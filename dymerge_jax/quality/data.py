"""Questions of skills as JSON lines: for training, for a search, for an index of retrieval."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dymerge_jax.quality.skills import TRAIN_WORDS, Question, check_together, draw_question

MATES_SHARE = 0.6
"""Of the samples of a co-trained adapter, how many have a mate."""

Line = Mapping[str, Any]


def draw_questions(
    skills: Sequence[Sequence[str]],
    num: int,
    *,
    seed: int,
    words: Sequence[str] = TRAIN_WORDS,
    instructed: float = 0.5,
) -> list[Question]:
    """Questions that take turns in what they are to show.

    Args:
      skills: what to show, one or several skills each.
      num: questions in all, at least 1.
      seed: of the draw, with the skills' names.
      words: the items.
      instructed: share of the prompts that say what is wanted.

    Raises:
      ValueError: If a skill is unknown or a number out of its range.
    """
    for names in {tuple(names) for names in skills}:
        check_together(names)
    if num < 1:
        raise ValueError(f"num is {num}; expected at least 1")
    check_share("instructed", instructed)
    rng = random.Random(f"{seed} {[list(names) for names in skills]}")
    return [draw_question(rng, skills[i % len(skills)], words=words, instructed=instructed) for i in range(num)]


def check_share(name: str, value: float) -> None:
    """Refuses what is no share.

    Raises:
      ValueError: Says what was given.
    """
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; expected a share from 0 to 1")


def chat_line(question: Question) -> Line:
    """A conversation as `train` and `compose search` read it."""
    messages = [("user", question.prompt), ("assistant", question.target)]
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def prompt_line(question: Question) -> Line:
    """An example prompt of an adapter, as retrieval reads it."""
    return {"prompt": question.prompt}


def cotraining_lines(
    skill: str, mates: Sequence[str], num: int, *, seed: int, instructed: float = 0.5
) -> Iterator[Line]:
    """Samples of one skill of which most have a mate: its adapter is active, and the answer shows both skills.

    Args:
      skill: of the adapter that is trained.
      mates: skills whose adapters are frozen.
      num, seed, instructed: see `draw_questions`.
    """
    rng = random.Random(f"{seed} mates of {skill}")
    chosen = [rng.choice(mates) if rng.random() < MATES_SHARE else None for _ in range(num)]
    draws = [(skill,) if mate is None else (skill, mate) for mate in chosen]
    for question, mate in zip(draw_questions(draws, num, seed=seed, instructed=instructed), chosen, strict=True):
        yield {**chat_line(question), "mates": {} if mate is None else {mate: 1.0}}


def write_lines(path: Path, lines: Iterable[Line]) -> None:
    """Writes JSON lines, wholly or not at all.

    Raises:
      FileExistsError: If the file is there.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists; give a file that does not exist yet")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    partial.rename(path)
