"""What a benchmark is asked for and what is there for it: adapters, gated sets, and the ways that they allow."""

import dataclasses
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from checkpoints.errors import MissingFileError
from checkpoints.files import read_json
from checkpoints.gated_set import SET_FILE
from checkpoints.loaded_model import ModelDtype
from checkpoints.peft_adapter import collect_adapters
from dymerge_jax.compose.search import SearchConfig
from dymerge_jax.example_lines import EXAMPLES_FILE
from dymerge_jax.quality.scores import Prompts, Task
from dymerge_jax.quality.skills import PAIRS, SHARED_SKILL, SKILLS, check_skills
from dymerge_jax.quality.ways import (
    ARROW,
    ECHO_WAY,
    GATE,
    PAIR_WAYS,
    RETRIEVED,
    RETRIEVED_1,
    SKILL_WAYS,
    WAYS,
    cotrained_half,
    task_name,
)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What is measured, and how.

    Attributes:
      adapters: folder with an adapter for each skill, named after it.
      gated: folder of gated sets over them; None for none.
      cotrained: folder of co-trained adapters; None for none.
      model: "demo" or a path.
      skills: single skills; None for all that have an adapter.
      pairs: pairs of skills; None for those of `PAIRS` that have both adapters.
      ways: see `ways`; None for all that can be taken.
      prompts: kinds of prompts.
      n: questions for each task, way and kind of prompts.
      batch_size: answers generated together, of all ways and tasks mixed; None is 32 on a CPU and 256 elsewhere.
      seed: of the questions, the search and the merges.
      density: of the merges that prune.
      search: how weights are searched for.
      search_examples: answered questions, of other words than those scored, that a search has.
      dtype: of the model; None keeps its own, and float32 for the demo on a CPU.
      progress: show progress bars.
    """

    adapters: Path
    gated: Path | None = None
    cotrained: Path | None = None
    model: str = "demo"
    skills: tuple[str, ...] | None = None
    pairs: tuple[Task, ...] | None = None
    ways: tuple[str, ...] | None = None
    prompts: tuple[Prompts, ...] = ("neutral", "instructed")
    n: int = 64
    batch_size: int | None = None
    seed: int = 0
    density: float = 0.5
    search: SearchConfig = SearchConfig()  # noqa: RUF009 (frozen)
    search_examples: int = 8
    dtype: ModelDtype | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("n", "batch_size", "search_examples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if not 0 < self.density <= 1:
            raise ValueError(f"density is {self.density}; expected a share above 0, at most 1")
        if not self.prompts:
            raise ValueError("no kind of prompts is given; expected neutral, instructed or both")
        check_skills(self.skills or ())
        if unknown := [way for way in self.ways or () if way not in WAYS]:
            raise ValueError(f"unknown ways: {', '.join(unknown)}; expected some of {', '.join(WAYS)}")


@dataclasses.dataclass(frozen=True)
class Inventory:
    """What a benchmark runs on.

    Attributes:
      adapters: folders by skill.
      cotrained: folders by skill.
      gated: folders of gated sets by the sets' names.
      tasks: skills and pairs that are measured.
      ways: that are compared, a gate's with the name of its set.
      left_out: why the other ways are not.
    """

    adapters: Mapping[str, Path]
    cotrained: Mapping[str, Path]
    gated: Mapping[str, Path]
    tasks: Sequence[Task]
    ways: Sequence[str]
    left_out: Mapping[str, str]

    @property
    def pairs(self) -> list[Task]:
        return [task for task in self.tasks if len(task) == 2]

    def ways_of(self, task: Task) -> list[str]:
        """The ways that a task is measured by."""
        known = SKILL_WAYS if len(task) == 1 else PAIR_WAYS
        ways = [way for way in self.ways if way.partition(":")[0] in known]
        has_cotrained = len(task) == 2 and cotrained_half(task, list(self.cotrained)) is not None
        return [way for way in ways if way != "cotrained" or has_cotrained]


def take_inventory(config: RunConfig) -> Inventory:
    """Looks at the folders; no weights are read.

    Raises:
      MissingFileError: If a folder does not exist or holds nothing.
      ValueError: If an adapter or what a way needs is missing.
    """
    adapters = _skill_adapters(config.adapters)
    cotrained = {} if config.cotrained is None else _skill_adapters(config.cotrained)
    gated = {} if config.gated is None else _gated_sets(config.gated)
    tasks = _tasks(config, adapters)
    left_out = _left_out(adapters, cotrained, gated)
    if refused := [way for way in config.ways or () if way in left_out]:
        raise ValueError("; ".join(f"way {way!r} {left_out[way]}" for way in refused))
    if config.ways is not None:
        left_out = {}
    for way, reason in left_out.items():
        _log.warning("the way %s is left out: it %s", way, reason)
    ways = [way for way in config.ways or WAYS if way not in left_out]
    ways = [name for way in ways for name in ([f"{GATE}:{s}" for s in gated] if way == GATE else [way])]
    inventory = Inventory(adapters, cotrained, gated, tasks, ways, left_out)
    if not any(inventory.ways_of(task) for task in tasks):
        raise ValueError(f"none of the ways {', '.join(ways)} is one for {', '.join(map(task_name, tasks))}")
    return inventory


def _skill_adapters(folder: Path) -> dict[str, Path]:
    found = {name: path for name, path in collect_adapters([folder]) if name in SKILLS}
    if not found:
        raise MissingFileError(f"{folder} holds no adapter named after a skill; expected some of {', '.join(SKILLS)}")
    return {name: found[name] for name in SKILLS if name in found}


def _gated_sets(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise MissingFileError(f"{folder} does not exist or is no folder; expected a folder of gated sets")
    files = sorted(folder.glob(f"*/{SET_FILE}"))
    return {str(read_json(file).get("name") or file.parent.name): file.parent for file in files}


def _tasks(config: RunConfig, adapters: Mapping[str, Path]) -> list[Task]:
    singles = [(name,) for name in (adapters if config.skills is None else config.skills)]
    pairs = config.pairs
    if pairs is None:
        pairs = tuple(pair for pair in PAIRS if {*pair} <= {*(name for (name,) in singles)})
    tasks: list[Task] = list(dict.fromkeys([*singles, *pairs]))
    if missing := sorted({name for task in tasks for name in task} - set(adapters)):
        raise ValueError(
            f"no adapter for {', '.join(missing)} in {config.adapters}, which has {', '.join(adapters)}; train it by "
            "python -m dymerge_jax.quality train, or leave out its tasks"
        )
    if not tasks:
        raise ValueError("no task is left; give skills or pairs")
    return tasks


def _left_out(adapters: Mapping[str, Path], cotrained: Mapping[str, Path], gated: Mapping[str, Path]) -> dict[str, str]:
    """Why ways cannot be taken."""
    reasons = {}
    if SHARED_SKILL not in adapters:
        reasons[ECHO_WAY] = f"needs an adapter {SHARED_SKILL}"
    if len(adapters) < 2:
        reasons |= dict.fromkeys(("searched", RETRIEVED, RETRIEVED_1), "needs two adapters or more")
    else:
        if importlib.util.find_spec("cma") is None:  # not imported, which takes seconds
            reasons["searched"] = "needs the package cma: pip install 'dymerge-jax[compose]'"
        if without := [name for name, path in adapters.items() if not (path / EXAMPLES_FILE).is_file()]:
            reasons |= dict.fromkeys((RETRIEVED, RETRIEVED_1), f"needs {EXAMPLES_FILE} beside {', '.join(without)}")
    if len({*adapters} - {SHARED_SKILL}) < 2:
        reasons[ARROW] = f"needs two adapters or more beside {SHARED_SKILL}"
    if not cotrained:
        reasons["cotrained"] = "needs co-trained adapters"
    if not gated:
        reasons[GATE] = "needs gated sets"
    return reasons
