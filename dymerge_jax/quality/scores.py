"""What was measured: counts of answers by task, way and kind of prompt, with their intervals."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from dymerge_jax.quality.skills import Question, score

Prompts = Literal["neutral", "instructed"]
Task = tuple[str, ...]
"""One skill, or a pair of them."""

_NORMAL_QUANTILE = 1.959964  # 95 %, both sides


def wilson_interval(num: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share; unlike the plain one it has a width at 0 and at n, too.

    Args:
      num: successes, 0 to n.
      n: trials, at least 1.
    """
    if not 0 <= num <= n or n < 1:
        raise ValueError(f"{num} of {n} is no share; expected 0 to n of at least 1")
    z2 = _NORMAL_QUANTILE**2
    middle = (num + z2 / 2) / (n + z2)
    half = _NORMAL_QUANTILE / (n + z2) * math.sqrt(num * (n - num) / n + z2 / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclasses.dataclass(frozen=True)
class Share:
    """Attributes:
    num, n: successes of trials.
    """

    num: int
    n: int

    @property
    def value(self) -> float:
        return self.num / self.n

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.num, self.n)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.2f} ({low:.2f}–{high:.2f})"

    def as_json(self) -> dict[str, float]:
        low, high = self.interval
        return {"num": self.num, "n": self.n, "share": self.value, "low": low, "high": high}


def total(shares: Iterable[Share]) -> Share:
    """All trials together."""
    counts = [(share.num, share.n) for share in shares]
    return Share(sum(num for num, _ in counts), sum(n for _, n in counts))


@dataclasses.dataclass(frozen=True)
class Result:
    """The answers to one task's questions, by one way.

    Attributes:
      task: skills that the answers are to show.
      way: how adapters were composed.
      prompts: whether they said what is wanted.
      shares: by what `score` looks for: each skill, "content", "all", "exact".
      example: prompt and answer of the first question.
    """

    task: Task
    way: str
    prompts: Prompts
    shares: dict[str, Share]
    example: tuple[str, str]

    def as_json(self) -> dict[str, Any]:
        return {
            "task": list(self.task),
            "way": self.way,
            "prompts": self.prompts,
            "scores": {name: share.as_json() for name, share in self.shares.items()},
            "example": {"prompt": self.example[0], "answer": self.example[1]},
        }


def result_of(task: Task, way: str, prompts: Prompts, questions: Sequence[Question], answers: Sequence[str]) -> Result:
    """Scores the answers to at least one question."""
    found = [score(task, q.items, answer) for q, answer in zip(questions, answers, strict=True)]
    shares = {name: Share(sum(f[name] for f in found), len(found)) for name in found[0]}
    return Result(task, way, prompts, shares, (questions[0].prompt, answers[0]))


@dataclasses.dataclass(frozen=True)
class StreamRow:
    """One skill of a stream of mixed tasks, in which the prompt alone says which adapter is the right one.

    Attributes:
      skill: its name, or "all" for all tasks of the stream.
      way: who chose the adapters.
      share: of the answers that are right.
      single: the same with the skill's own adapter.
    """

    skill: str
    way: str
    share: Share
    single: Share

    @property
    def ratio(self) -> float:
        """Of the single adapter's score; NaN if that is 0."""
        return self.share.value / self.single.value if self.single.num else math.nan

    def as_json(self) -> dict[str, Any]:
        ratio = self.ratio if self.single.num else None
        return {
            "skill": self.skill, "way": self.way, "share": self.share.as_json(), "single": self.single.as_json(),
            "ratio": ratio,
        }  # fmt: skip


def stream_rows(results: Iterable[Result], ways: Sequence[str], skills: Sequence[str]) -> list[StreamRow]:
    """The tasks of single skills with instructed prompts, seen as one stream.

    Args:
      results: of all tasks.
      ways: that choose adapters by the prompt.
      skills: of the stream; those without a result are left out.
    """
    found = {(r.way, r.task[0]): r.shares["all"] for r in results if len(r.task) == 1 and r.prompts == "instructed"}
    rows = []
    for way in ways:
        own = [s for s in skills if (way, s) in found and ("single", s) in found]
        rows += [StreamRow(skill, way, found[way, skill], found["single", skill]) for skill in own]
        if own:
            of_way = rows[-len(own) :]
            rows.append(StreamRow("all", way, total(r.share for r in of_way), total(r.single for r in of_way)))
    return rows
