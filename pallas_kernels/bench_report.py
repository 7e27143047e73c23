"""What benchmarks share: what every result file says of its run, and the times of kernels in a profiler's trace."""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData


def run_facts(module: str, arguments: Sequence[str] | None = None, *, device: str | None = None) -> dict[str, Any]:
    """The command of `python -m module`, the checkout's commit, the device and the version of JAX.

    Args:
      module: that was run.
      arguments: of the command line; None takes those of this process.
      device: what was measured, where it is not this process's.
    """
    return {
        "command": shlex.join(["python", "-m", module, *(sys.argv[1:] if arguments is None else arguments)]),
        "commit": current_commit(),
        "device": device or jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def current_commit() -> str | None:
    """The checkout's commit, if this is one and there is a git to ask."""
    try:
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return git.stdout.strip() or None


def kernel_durations_us(trace: Path, plane_prefix: str = "/device:GPU") -> dict[str, list[float]]:
    """Microseconds of each launch by kernel name; numbers in names are left out, so that layers add up.

    Args:
      trace: folder written by `jax.profiler.trace`, or an .xplane.pb file.
      plane_prefix: which planes of the trace count.

    Raises:
      FileNotFoundError: If the folder holds no trace.
    """
    files = [trace] if trace.is_file() else sorted(trace.rglob("*.xplane.pb"))
    if not files:
        raise FileNotFoundError(
            f"{trace} holds no .xplane.pb file; jax.profiler.trace and serving.bench.decode --trace do"
        )
    durations: dict[str, list[float]] = {}
    for plane in ProfileData.from_file(str(files[-1])).planes:
        if not plane.name.startswith(plane_prefix):
            continue
        for line in plane.lines:
            if "Stream" not in line.name and plane_prefix.startswith("/device"):
                continue  # lines that group the kernels by module or scope would count them again
            for event in line.events:
                name = re.sub(r"[\d_.]*\d+", "", event.name)
                durations.setdefault(name, []).append(event.duration_ns / 1e3)
    return durations
