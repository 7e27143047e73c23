"""Intervals, counts and the stream of mixed tasks."""

import math

import pytest

from dymerge_jax.quality.scores import Result, Share, result_of, stream_rows, total, wilson_interval
from dymerge_jax.quality.skills import Question


@pytest.mark.parametrize(
    ("num", "n", "low", "high"),
    [  # by another route: the roots of (p - num / n)^2 = z^2 p (1 - p) / n
        (0, 10, 0.0, 0.27753),
        (10, 10, 0.72247, 1.0),
        (5, 10, 0.23659, 0.76341),
        (58, 64, 0.81017, 0.95632),
        (1, 1, 0.20655, 1.0),
    ],
)
def test_wilsons_interval_is_right(num: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(num, n) == pytest.approx((low, high), abs=2e-5)
    for bound in wilson_interval(num, n):
        if 0 < bound < 1:
            assert (bound - num / n) ** 2 == pytest.approx(1.959964**2 * bound * (1 - bound) / n)


@pytest.mark.parametrize(("num", "n"), [(0, 0), (3, 2), (-1, 2)])
def test_what_is_no_share_is_refused(num: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"{num} of {n} is no share"):
        wilson_interval(num, n)


def question(skills: tuple[str, ...], target: str) -> Question:
    return Question("Items: lamp, river", ("lamp", "river"), skills, target)


def test_answers_are_counted_by_skill_and_all_together() -> None:
    task = ("sign", "reverse")
    right = "river, lamp -- Nova"
    answers = [right, "river, lamp", "lamp, river -- Nova", "river, lamp -- NOVA"]
    result = result_of(task, "1/1", "neutral", [question(task, right)] * 4, answers)
    counts = {name: share.num for name, share in result.shares.items()}
    assert counts == {"sign": 3, "reverse": 3, "content": 3, "all": 2, "exact": 1}
    assert all(share.n == 4 for share in result.shares.values())
    assert result.example == ("Items: lamp, river", right)


def test_a_stream_compares_each_skill_with_its_own_adapter() -> None:
    def result(skill: str, way: str, num: int, n: int) -> Result:
        return Result((skill,), way, "instructed", {"all": Share(num, n)}, ("", ""))

    results = [
        result("sign", "single", 10, 10), result("sign", "gate:g", 9, 10),
        result("json", "single", 5, 10), result("json", "gate:g", 5, 10),
        result("count", "single", 0, 10), result("count", "gate:g", 0, 10),
        Result(("sign",), "gate:g", "neutral", {"all": Share(1, 10)}, ("", "")),
        Result(("sign", "json"), "gate:g", "instructed", {"all": Share(2, 10)}, ("", "")),
    ]  # fmt: skip
    rows = stream_rows(results, ["gate:g", "arrow"], ["sign", "json", "count", "upper"])
    assert [row.skill for row in rows] == ["sign", "json", "count", "all"]
    assert [row.ratio for row in rows[:2]] == [0.9, 1.0]
    assert math.isnan(rows[2].ratio)
    assert rows[2].as_json()["ratio"] is None
    assert (rows[3].share, rows[3].single) == (Share(14, 30), Share(15, 30))
    assert total([Share(1, 2), Share(0, 3)]) == Share(1, 5)
