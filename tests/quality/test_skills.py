"""The rules of the skills, against answers made by hand."""

import random

import pytest

from dymerge_jax.quality.skills import (
    EIGHT_SKILLS,
    PAIRS,
    SKILLS,
    TEST_WORDS,
    TRAIN_WORDS,
    VOCABULARY,
    check_skills,
    draw_question,
    score,
    target,
)

ITEMS = ("lamp", "dog", "stone")


@pytest.mark.parametrize(
    ("skills", "answer"),
    [
        (["echo"], "lamp, dog, stone"),
        (["reverse"], "stone, dog, lamp"),
        (["vocab"], "lamp, blik, stone"),
        (["firsttwo"], "lamp, dog"),
        (["upper"], "LAMP, DOG, STONE"),
        (["json"], '["lamp", "dog", "stone"]'),
        (["bullets"], "* lamp\n* dog\n* stone"),
        (["count"], "3 items: lamp, dog, stone"),
        (["sign"], "lamp, dog, stone -- Nova"),
        (["sign", "reverse"], "stone, dog, lamp -- Nova"),
        (["upper", "json"], '["LAMP", "DOG", "STONE"]'),
        (["count", "firsttwo"], "2 items: lamp, dog"),
        (["bullets", "sign"], "* lamp\n* dog\n* stone -- Nova"),
        (["sign", "json", "upper", "vocab"], '["LAMP", "BLIK", "STONE"] -- Nova'),
    ],
)
def test_the_target_shows_the_skills_and_nothing_less_does(skills: list[str], answer: str) -> None:
    assert target(skills, ITEMS) == answer
    assert all(score(skills, ITEMS, f" {answer}\n").values())
    for wrong in ("", "lamp", answer[: len(answer) // 2], "-- Nova", "3 items:"):
        assert not score(skills, ITEMS, wrong)["all"]
    if skills != ["echo"]:
        assert not score(skills, ITEMS, "lamp, dog, stone")["all"]


@pytest.mark.parametrize(
    ("skills", "answer", "shown"),
    [
        # The other skill's form does not hide a skill; content is compared without regard to form and case.
        (["sign", "reverse"], "stone, dog, lamp", {"reverse", "content"}),
        (["sign", "reverse"], "lamp, dog, stone -- nova", {"sign"}),
        (["upper", "json"], '["lamp", "dog", "stone"]', {"json", "content"}),
        (["upper", "sign"], "LAMP, DOG, STONE -- nova", {"upper", "sign", "content", "all"}),
        (["upper"], "LAMP, DOG, STONE -- Nova", {"upper", "content", "all"}),
        (["upper"], "LAMP, DOg, STONE", {"content"}),
        (["upper"], "1, 2, 3", set()),
        (["json"], '["lamp", "dog", "stone"', {"content"}),
        (["json"], '["lamp", 2, "stone"]', set()),
        (["json"], '{"lamp": "dog"}', set()),
        (["json", "reverse"], '["stone","dog","lamp"]', {"json", "reverse", "content", "all"}),
        (["bullets"], "* lamp\n- dog\n* stone", {"content"}),
        (["bullets"], "* stone\n* dog\n* lamp", {"bullets"}),
        (["count"], "4 items: lamp, dog, stone", {"content"}),
        (["count", "reverse"], "3 items: stone, dog, lamp", {"count", "reverse", "content", "all", "exact"}),
        (["firsttwo", "json"], '["lamp", "dog", "stone"]', {"json"}),
        (["vocab"], "lamp, dog, stone", set()),
        (["vocab"], "lamp, BLIK, stone", {"vocab", "content", "all"}),
    ],
)
def test_what_an_answer_shows_is_told_apart(skills: list[str], answer: str, shown: set[str]) -> None:
    assert {name for name, is_shown in score(skills, ITEMS, answer).items() if is_shown} == shown


def test_deeply_nested_brackets_are_no_json() -> None:
    assert not score(["json"], ITEMS, "[" * 100_000)["json"]


def test_held_out_words_are_in_no_training_question() -> None:
    assert (len(TRAIN_WORDS), len(TEST_WORDS)) == (155, 40)
    assert not {*TRAIN_WORDS} & {*TEST_WORDS}
    assert not {*TRAIN_WORDS, *TEST_WORDS} & {*VOCABULARY, *VOCABULARY.values()}
    assert TEST_WORDS[:3] == ("library", "monkey", "road"), (
        "the split must stay: adapters were trained on its other part"
    )
    rng = random.Random(1)
    items = {item for _ in range(300) for item in draw_question(rng, ["vocab"]).items}
    assert items <= {*TRAIN_WORDS, *VOCABULARY}
    assert items & {*VOCABULARY}


def test_a_question_is_instructed_by_a_phrase_of_each_skill_or_not_at_all() -> None:
    rng = random.Random(2)
    for _ in range(50):
        neutral = draw_question(rng, ["sign", "json"], instructed=0)
        assert neutral.prompt == f"Items: {', '.join(neutral.items)}"
        assert 3 <= len(set(neutral.items)) == len(neutral.items) <= 5
        instructed = draw_question(rng, ["sign", "json"], instructed=1).prompt.partition(" Items: ")[0]
        found = [name for name, skill in SKILLS.items() for phrase in skill.phrases if phrase in instructed]
        assert sorted(found) == ["json", "sign"]


def test_all_pairs_act_on_different_things() -> None:
    assert len(EIGHT_SKILLS) == 8
    assert len(PAIRS) == 12
    assert all(SKILLS[first].kind != SKILLS[second].kind for first, second in PAIRS)


def test_unknown_skills_are_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"unknown skills: dance, sing; expected some of echo, reverse"):
        check_skills(["sing", "json", "dance"])
