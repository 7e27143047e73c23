"""Questions as JSON lines, as training, search and retrieval read them."""

import json
from pathlib import Path

import pytest

from dymerge_jax.example_lines import read_prompts
from dymerge_jax.quality.__main__ import main
from dymerge_jax.quality.data import cotraining_lines, draw_questions
from dymerge_jax.quality.skills import SKILLS, TEST_WORDS, VOCABULARY, score


def data(out: Path, *flags: str) -> list[dict]:
    assert main(["data", "--out", str(out), *flags]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_seed_repeats_the_questions_and_another_draws_others(tmp_path: Path) -> None:
    flags = ["--skills", "reverse", "--num", "20"]
    one, two, three = (
        data(tmp_path / name, *flags, "--seed", seed) for name, seed in (("a", "4"), ("b", "4"), ("c", "5"))
    )
    assert one == two
    assert one != three
    assert len(one) == 20


def test_lines_are_conversations_whose_answers_are_right(tmp_path: Path) -> None:
    lines = data(tmp_path / "tasks.jsonl", "--skills", "sign", "json", "--num", "40", "--instructed", "1")
    for i, line in enumerate(lines):
        asked, answered = line["messages"]
        assert (asked["role"], answered["role"]) == ("user", "assistant")
        items = asked["content"].partition("Items: ")[2].split(", ")
        skill = ("sign", "json")[i % 2]
        assert all(score([skill], items, answered["content"]).values())
        assert any(phrase in asked["content"] for phrase in SKILLS[skill].phrases)


def test_questions_for_a_search_ask_for_all_skills_at_once(tmp_path: Path) -> None:
    for line in data(tmp_path / "pairs.jsonl", "--skills", "sign", "reverse", "--together", "--num", "5", "--held-out"):
        asked, answered = (message["content"] for message in line["messages"])
        items = asked.partition("Items: ")[2].split(", ")
        assert all(score(["sign", "reverse"], items, answered).values())
        assert {*items} <= {*TEST_WORDS, *VOCABULARY}


def test_prompts_for_retrieval_are_read_by_retrieval(tmp_path: Path) -> None:
    lines = data(tmp_path / "examples.jsonl", "--skill", "count", "--num", "6", "--prompts-only")
    prompts = read_prompts(tmp_path / "examples.jsonl", max_prompts=64)
    assert prompts == [line["prompt"] for line in lines]
    assert len(prompts) == 6


def test_most_samples_of_a_co_trained_adapter_have_a_mate_and_show_it() -> None:
    lines = list(cotraining_lines("json", ["reverse", "upper"], 300, seed=3))
    mates = [next(iter(line["mates"]), None) for line in lines]
    assert 0.5 < sum(mate is not None for mate in mates) / 300 < 0.7
    assert {*mates} == {None, "reverse", "upper"}
    for line, mate in zip(lines, mates, strict=True):
        asked, answered = (message["content"] for message in line["messages"])
        assert all(
            score(["json", *([mate] if mate else [])], asked.partition("Items: ")[2].split(", "), answered).values()
        )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--skills", "dance"], "unknown skills: dance; expected some of echo, reverse"),
        (["--skills", "json", "bullets", "--together"], "json and bullets both act on the layout"),
        (["--skills", "sign", "--num", "0"], "num is 0; expected at least 1"),
        (["--skills", "sign", "--instructed", "2"], "instructed is 2.0; expected a share from 0 to 1"),
    ],
)
def test_wrong_flags_are_told_and_leave_nothing(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "--out", str(tmp_path / "out"), *flags]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("mine")
    assert main(["data", "--out", str(tmp_path / "out"), "--skills", "sign"]) == 1
    assert "exists; give a file that does not exist yet" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine"


def test_a_draw_is_the_same_whatever_was_drawn_before() -> None:
    alone = draw_questions([["sign"]], 3, seed=1)
    draw_questions([["json"]], 9, seed=1)
    assert draw_questions([["sign"]], 3, seed=1) == alone
