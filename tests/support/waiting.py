"""Waiting for what other threads and processes do, for so long that a busy machine decides no test."""

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 60.0  # for what takes a second on a machine that is not busy


def wait_until(condition: Callable[[], object]) -> None:
    """Fails if it takes too long."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """False for one that is gone, and for one that has ended and whose parent has not asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
