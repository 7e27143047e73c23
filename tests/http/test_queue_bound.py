"""The bound on waiting requests: who is refused, and what the client is told about when to come back."""

import pytest

from serving.errors import InvalidRequestError, OverloadedError
from serving.queue_bound import MAX_RETRY_AFTER_S, QueueBound


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def refused(bound: QueueBound, *request_ids: str) -> int:
    """Takes requests that must be refused; seconds that the client is told."""
    with pytest.raises(OverloadedError, match=r"--max-waiting") as caught:
        bound.take(request_ids)
    assert f"try again in {caught.value.retry_after_s} s" in caught.value.message
    return caught.value.retry_after_s


def test_requests_are_taken_all_or_none_up_to_the_bound() -> None:
    counts: list[int] = []
    bound = QueueBound(3, counts.append)
    bound.take(["a", "b"])
    assert refused(bound, "c", "d") == 1
    bound.take(["c"])
    refused(bound, "d")
    bound.start("a")
    bound.start("a")  # a later output
    bound.take(["d"])
    bound.leave("b")
    bound.leave("never there")
    bound.take(["e"])
    assert bound.num_waiting == 3
    assert counts == [2, 1]


def test_what_could_never_wait_is_not_told_to_come_back() -> None:
    with pytest.raises(InvalidRequestError, match=r"3 choices.*at most 2.*--max-waiting"):
        QueueBound(2).take(["a", "b", "c"])


def test_retry_after_is_the_time_in_which_so_many_have_started_lately() -> None:
    clock = Clock()
    bound = QueueBound(100, clock=clock)
    bound.take([str(i) for i in range(100)])
    for i in range(80):  # the first 10 at one a second, the others at ten
        clock.now_s += 1.0 if i < 10 else 0.1
        bound.start(str(i))
    bound.take([f"new{i}" for i in range(80)])
    assert refused(bound, "x") == 1
    assert refused(bound, *(f"x{i}" for i in range(50))) == 5
    clock.now_s += 7.0  # nothing starts any more: slower than before
    assert refused(bound, *(f"x{i}" for i in range(50))) == 11


def test_a_queue_that_stands_still_gives_longer_and_longer_waits_up_to_a_limit() -> None:
    clock = Clock()
    bound = QueueBound(1, clock=clock)
    bound.take(["a"])
    waits = []
    for _ in range(4):
        waits.append(refused(bound, "b"))
        clock.now_s += 25.0
    assert waits == [1, 25, 50, MAX_RETRY_AFTER_S]


def test_an_idle_night_does_not_count_as_slowness() -> None:
    clock = Clock()
    bound = QueueBound(1, clock=clock)
    bound.take(["a"])
    bound.start("a")
    clock.now_s += 30_000.0
    bound.take(["b"])
    assert refused(bound, "c") == 1
