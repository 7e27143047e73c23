"""The highest rate of a workload with TTFT p99 below a limit, by doubling and then bisection."""

from collections.abc import Awaitable, Callable


async def highest_rate(
    is_sustained: Callable[[float], Awaitable[bool]], *, start: float, precision: float, most_runs: int = 12
) -> float | None:
    """Searches between the highest rate that was sustained and the lowest that was not.

    Args:
      is_sustained: runs a rate, in requests per second; True if the limit holds.
      start: rate of the first run.
      precision: the search ends when the two are within this share of each other, such as 0.05.
      most_runs: no more runs than that.

    Returns:
      The highest rate that was sustained; None if none was.
    """
    best: float | None = None
    worst: float | None = None
    rate = start
    for _ in range(most_runs):
        if await is_sustained(rate):
            best = rate
        else:
            worst = rate
        if best is None:
            rate /= 2
        elif worst is None:
            rate *= 2
        elif worst <= best * (1 + precision):
            break
        else:
            rate = (best + worst) / 2
    return best
