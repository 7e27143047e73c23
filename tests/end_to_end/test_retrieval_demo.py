"""Retrieval with a real model: it finds the adapters of instructed prompts whose words no example had."""

from collections.abc import Sequence

import pytest

import dymerge_jax as dm
from dymerge_jax.library import Model
from dymerge_jax.retrieval import RetrievalIndex
from tests.support.retrieval_quality import Asked, examples, hits, pairs, single

pytestmark = pytest.mark.slow  # embeds some hundred prompts


@pytest.fixture(scope="module")
def model() -> Model:
    return dm.load("demo", adapters=[], dtype="float32", progress=False)


@pytest.fixture(scope="module")
def index(model: Model) -> RetrievalIndex:
    return RetrievalIndex.build(model.split, model.tokenizer, examples())


@pytest.mark.parametrize(
    ("asked", "least"),
    [
        pytest.param(list(single(num=4)), 0.9, id="one-skill"),  # 1.00 when this was written
        pytest.param(list(pairs(num=3)), 0.9, id="two-skills"),  # 1.00
        pytest.param(list(pairs(num=3, joined=" and ")), 0.8, id="two-skills-in-one-sentence"),  # 0.90
    ],
)
def test_the_right_adapters_are_found_for_most_instructed_prompts(
    index: RetrievalIndex, asked: Sequence[Asked], least: float
) -> None:
    assert len(asked) >= 64
    found = hits(index, asked)
    assert sum(found) >= least * len(found), [a.prompt for a, is_hit in zip(asked, found, strict=True) if not is_hit]


def test_where_nobody_says_how_many_adapters_exactly_the_right_ones_are_found(index: RetrievalIndex) -> None:
    asked = [*single(num=2), *pairs(num=1)]
    mixes = index.mixes([a.prompt for a in asked])
    assert sum(mix.keys() == a.skills for mix, a in zip(mixes, asked, strict=True)) >= 0.9 * len(asked)  # 1.00


def test_examples_that_say_nothing_of_the_skill_do_no_harm(model: Model) -> None:
    index = RetrievalIndex.build(model.split, model.tokenizer, examples(num_neutral=12))
    asked = [*single(num=2), *pairs(num=1)]
    assert sum(hits(index, asked)) >= 0.9 * len(asked)
