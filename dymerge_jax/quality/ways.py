"""The ways to compose adapters that are compared, and what each makes of a task: the mix of every question.

    way              mix
    base             none
    single           of one skill: its adapter
    first, second    of a pair: the adapter of one of its skills alone
    0.5/0.5, 1/1     both adapters with these weights
    1/1-0.5echo      and less half of the adapter that copies the list, which both have in common
    searched         the weights that `compose search` finds, over all adapters
    retrieved        the adapters whose example prompts fit the prompt best, as many as skills, with equal weights
    retrieved-1      of a pair: the same with weights 1
    arrow            a gated set made of the adapters without training, for each token
    gate:NAME        a trained gated set
    cotrained        of a pair: one adapter that was trained while the other was active, and that other
    merged-METHOD    the adapter that `compose merge` makes of both, weights 1

For `retrieved`, `arrow` and the gates the prompt says which adapters to use; for all others the task does.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from dymerge_jax.compose.merge_maths import METHODS, MergeConfig, Method
from dymerge_jax.library import MixSpec
from dymerge_jax.quality.scores import Task
from dymerge_jax.quality.skills import SHARED_SKILL, SKILLS, Question, check_together
from dymerge_jax.quality.training import MATES
from dymerge_jax.retrieval import RetrievalIndex

_STATIC: Mapping[str, tuple[float, float]] = {"0.5/0.5": (0.5, 0.0), "1/1": (1.0, 0.0), "1/1-0.5echo": (1.0, -0.5)}
"""Weight of both adapters, and of `echo`."""
ECHO_WAY = "1/1-0.5echo"
GATE = "gate"
ARROW = "arrow"
RETRIEVED, RETRIEVED_1 = "retrieved", "retrieved-1"
PROMPT_WAYS = (RETRIEVED, ARROW, GATE)
"""They choose the adapters by the prompt."""
MERGED_WAYS: dict[str, Method] = {f"merged-{method}": method for method in METHODS}
SKILL_WAYS = ("base", "single", *PROMPT_WAYS)
PAIR_WAYS = (
    "base",
    "first",
    "second",
    *_STATIC,
    "searched",
    RETRIEVED,
    RETRIEVED_1,
    ARROW,
    GATE,
    "cotrained",
    *MERGED_WAYS,
)
WAYS = tuple(dict.fromkeys((*SKILL_WAYS, *PAIR_WAYS)))


def parse_pair(text: str) -> Task:
    """A pair of skills from "first+second".

    Raises:
      ValueError: If a skill is unknown, or one answer cannot show both.
    """
    names = tuple(text.split("+"))
    if len(names) != 2 or not {*names} <= {*SKILLS}:
        raise ValueError(f"pair {text!r} is unknown; expected two of {', '.join(SKILLS)}, such as sign+reverse")
    check_together(names)
    return names


def task_name(task: Task) -> str:
    """A task as it is written: "sign+reverse"."""
    return "+".join(task)


def merged_name(way: str, task: Task) -> str:
    """What a merged adapter is called in the model."""
    return f"{way}/{task_name(task)}"


def cotrained_name(skill: str) -> str:
    """What a co-trained adapter is called in the model."""
    return f"cotrained/{skill}"


def cotrained_half(task: Task, cotrained: Sequence[str]) -> tuple[str, str] | None:
    """Of a pair, the skill with a co-trained adapter that knows the other, and that other."""
    first, second = task
    halves = [(own, mate) for own, mate in ((first, second), (second, first)) if mate in MATES.get(own, ())]
    return next((half for half in halves if half[0] in cotrained), None)


def merge_config(way: str, *, density: float, seed: int) -> MergeConfig:
    """Settings of a merge; a density for the methods that prune."""
    method = MERGED_WAYS[way]
    return MergeConfig(method, density=density if method not in ("cat", "linear", "svd") else None, seed=seed)


@dataclasses.dataclass(frozen=True)
class Composer:
    """Makes the mixes of a task's questions.

    Attributes:
      searched: weights by pair.
      cotrained: skills with a co-trained adapter.
      index: None without the ways that retrieve.
    """

    searched: Mapping[Task, Mapping[str, float]]
    cotrained: Sequence[str]
    index: RetrievalIndex | None

    def mixes(self, way: str, task: Task, questions: Sequence[Question]) -> list[MixSpec]:
        """The mix of every question."""
        if way in (RETRIEVED, RETRIEVED_1):
            weight = 1 / len(task) if way == RETRIEVED else 1.0
            return [dict.fromkeys(names, weight) for names in self.retrieved(task, questions)]
        return [self._mix(way, task)] * len(questions)

    def retrieved(self, task: Task, questions: Sequence[Question]) -> list[list[str]]:
        """The adapters that fit each question's prompt best, as many as the task has skills."""
        assert self.index is not None
        found = self.index.top_k([question.prompt for question in questions], len(task))
        return [[candidate.name for candidate in candidates] for candidates in found]

    def _mix(self, way: str, task: Task) -> MixSpec:
        if way in _STATIC:
            weight, echo = _STATIC[way]
            return dict.fromkeys(task, weight) | ({SHARED_SKILL: echo} if echo else {})
        if way in MERGED_WAYS:
            return {merged_name(way, task): 1.0}
        match way:
            case "base":
                return {}
            case "single" | "first":
                return {task[0]: 1.0}
            case "second":
                return {task[1]: 1.0}
            case "searched":
                return self.searched[task]
            case "cotrained":
                half = cotrained_half(task, self.cotrained)
                assert half is not None
                return {cotrained_name(half[0]): 1.0, half[1]: 1.0}
        return way.removeprefix(f"{GATE}:")  # a gated set, arrow too
