"""What each way makes of a task, and what is there for it."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from checkpoints.errors import CheckpointError
from dymerge_jax.config import named_config
from dymerge_jax.quality.inventory import RunConfig, take_inventory
from dymerge_jax.quality.skills import PAIRS, SKILLS, Question
from dymerge_jax.quality.training import MATES, write_examples
from dymerge_jax.quality.ways import Composer, cotrained_half, parse_pair
from dymerge_jax.retrieval import Candidate, RetrievalIndex
from tests.support.tiny_checkpoints import write_adapter


class WordIndex(RetrievalIndex):
    """Finds the adapters whose names are in a prompt, then `echo`."""

    def __init__(self) -> None: ...

    def top_k(self, prompts: Sequence[str], k: int) -> list[list[Candidate]]:
        names = ("sign", "json", "reverse", "echo", "count")
        return [[Candidate(n, 1.0) for n in names if n in p or n in ("echo", "count")][:k] for p in prompts]


@pytest.mark.parametrize(
    ("way", "mix"),
    [
        ("base", {}),
        ("first", {"sign": 1.0}),
        ("second", {"reverse": 1.0}),
        ("0.5/0.5", {"sign": 0.5, "reverse": 0.5}),
        ("1/1", {"sign": 1.0, "reverse": 1.0}),
        ("1/1-0.5echo", {"sign": 1.0, "reverse": 1.0, "echo": -0.5}),
        ("searched", {"sign": 0.9, "echo": -0.3}),
        ("arrow", "arrow"),
        ("gate:demo-gated", "demo-gated"),
        ("cotrained", {"cotrained/sign": 1.0, "reverse": 1.0}),
        ("merged-ties", {"merged-ties/sign+reverse": 1.0}),
    ],
)
def test_a_way_makes_the_mix_that_its_table_says(way: str, mix: dict[str, float] | str) -> None:
    composer = Composer({("sign", "reverse"): {"sign": 0.9, "echo": -0.3}}, ["sign"], None)
    questions = [Question("Items: a", ("a",), ("sign", "reverse"), "")] * 2
    assert composer.mixes(way, ("sign", "reverse"), questions) == [mix, mix]


def test_retrieval_gives_every_question_its_own_mix() -> None:
    composer = Composer({}, [], WordIndex())
    questions = [Question(prompt, ("a",), ("sign", "reverse"), "") for prompt in ("sign reverse", "json", "")]
    found = [{"sign", "reverse"}, {"json", "echo"}, {"echo", "count"}]
    assert [{*names} for names in composer.retrieved(("sign", "reverse"), questions)] == found
    assert composer.mixes("retrieved", ("sign", "reverse"), questions) == [dict.fromkeys(names, 0.5) for names in found]
    assert composer.mixes("retrieved-1", ("sign", "reverse"), questions)[0] == {"sign": 1.0, "reverse": 1.0}
    assert composer.mixes("retrieved", ("sign",), questions)[1] == {"json": 1.0}


def test_every_pair_has_a_half_that_is_co_trained_with_the_other() -> None:
    assert all(cotrained_half(pair, list(MATES)) is not None for pair in PAIRS)
    assert cotrained_half(("upper", "json"), ["json"]) == ("json", "upper")
    assert cotrained_half(("upper", "json"), ["upper"]) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sign", "pair 'sign' is unknown"),
        ("sign+dance", "pair 'sign\\+dance' is unknown; expected two of echo, reverse"),
        ("sign+sign", "sign and sign both act on the wrap; expected skills"),
        ("json+bullets", "json and bullets both act on the layout"),
    ],
)
def test_a_pair_that_no_rule_can_check_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_pair(text)


def adapters_folder(root: Path, *names: str, has_examples: bool = True) -> Path:
    for seed, name in enumerate(names):
        write_adapter(root / name, named_config("tiny"), rank=2, alpha=4, seed=seed)
        if has_examples and name in SKILLS:
            write_examples(root / name, name, seed=0, num=3)
    return root


def test_all_that_is_there_is_measured_and_what_is_not_is_told(tmp_path: Path) -> None:
    folder = adapters_folder(tmp_path / "adapters", "reverse", "sign", "upper", "other")
    inventory = take_inventory(RunConfig(folder))
    assert list(inventory.tasks) == [
        ("reverse",), ("upper",), ("sign",), ("upper", "sign"), ("upper", "reverse"), ("sign", "reverse"),
    ]  # fmt: skip
    assert {*inventory.left_out} == {"1/1-0.5echo", "cotrained", "gate"}
    assert inventory.ways_of(("sign",)) == ["base", "single", "retrieved", "arrow"]
    assert "merged-dare_ties" in inventory.ways_of(("sign", "reverse"))
    assert not {"single", "1/1-0.5echo", "gate"} & {*inventory.ways_of(("sign", "reverse"))}


def test_a_gated_set_is_called_by_its_own_name(tmp_path: Path) -> None:
    folder = adapters_folder(tmp_path / "adapters", "reverse", "sign")
    for name, content in (("one", {"name": "skilled"}), ("two", {})):
        (tmp_path / "gated" / name).mkdir(parents=True)
        (tmp_path / "gated" / name / "gated_set.json").write_text(json.dumps(content))
    inventory = take_inventory(RunConfig(folder, gated=tmp_path / "gated", ways=("gate",)))
    assert list(inventory.ways) == ["gate:skilled", "gate:two"]


def test_one_adapter_is_measured_alone(tmp_path: Path) -> None:
    inventory = take_inventory(RunConfig(adapters_folder(tmp_path / "adapters", "sign")))
    assert inventory.ways_of(("sign",)) == ["base", "single"]
    assert {"searched", "retrieved", "arrow"} <= {*inventory.left_out}
    (tmp_path / "more").mkdir()
    assert "arrow" in take_inventory(RunConfig(adapters_folder(tmp_path / "more", "echo", "sign"))).left_out


def test_without_example_prompts_nothing_is_retrieved(tmp_path: Path) -> None:
    folder = adapters_folder(tmp_path / "adapters", "reverse", "sign", has_examples=False)
    assert {"retrieved", "retrieved-1"} <= {*take_inventory(RunConfig(folder)).left_out}
    with pytest.raises(ValueError, match=r"way 'retrieved' needs examples.jsonl beside reverse, sign"):
        take_inventory(RunConfig(folder, ways=("retrieved",)))


def test_tasks_without_adapters_and_folders_without_skills_are_refused(tmp_path: Path) -> None:
    folder = adapters_folder(tmp_path / "adapters", "reverse", "sign")
    with pytest.raises(
        ValueError, match=r"no adapter for json, upper in .*adapters, which has reverse, sign; train it"
    ):
        take_inventory(RunConfig(folder, skills=("json",), pairs=(("upper", "sign"),)))
    with pytest.raises(ValueError, match="no task is left"):
        take_inventory(RunConfig(folder, skills=(), pairs=()))
    with pytest.raises(ValueError, match="way 'cotrained' needs co-trained adapters"):
        take_inventory(RunConfig(folder, ways=("cotrained",)))
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        take_inventory(RunConfig(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="does not exist or is no folder; expected a folder of gated sets"):
        take_inventory(RunConfig(folder, gated=tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="holds no adapter named after a skill"):
        take_inventory(RunConfig(adapters_folder(tmp_path / "others", "x", "y")))
