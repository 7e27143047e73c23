"""An executor whose jobs a test runs one by one, in any order, or fails."""

import concurrent.futures
import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass
class _Job:
    future: concurrent.futures.Future[Any]
    run: Callable[[], Any]


class ManualExecutor(concurrent.futures.Executor):
    """Keeps its jobs until they are asked for."""

    def __init__(self) -> None:
        self._jobs: list[_Job] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        job = _Job(concurrent.futures.Future(), lambda: fn(*args, **kwargs))
        self._jobs.append(job)
        return job.future

    def __len__(self) -> int:
        return len(self._jobs)

    def run(self, index: int = 0, error: Exception | None = None) -> None:
        """Ends a job, with an error if one is given."""
        job = self._jobs.pop(index)
        try:
            if error is not None:
                raise error
            job.future.set_result(job.run())
        except Exception as raised:
            job.future.set_exception(raised)

    def run_all(self) -> None:
        while self._jobs:
            self.run()
