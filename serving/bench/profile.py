"""Where a step's time goes, kernel by kernel, from a profiler trace of `serving.bench.decode --trace`.

python -m serving.bench.profile TRACE_FOLDER --steps 7
"""

import argparse
import collections
import re
from pathlib import Path

from jax.profiler import ProfileData

from serving.bench.decode import TRACED_STEPS


def kernel_times(trace: Path, plane_prefix: str) -> dict[str, tuple[int, float]]:
    """Count and total microseconds by kernel name; numbers in names are left out, so that layers add up.

    Args:
      trace: folder written by `jax.profiler.trace`, or an .xplane.pb file.
      plane_prefix: which planes of the trace count, e.g. "/device:GPU".

    Raises:
      FileNotFoundError: If the folder holds no trace.
    """
    files = [trace] if trace.is_file() else sorted(trace.rglob("*.xplane.pb"))
    if not files:
        raise FileNotFoundError(f"{trace} holds no .xplane.pb file; write one by serving.bench.decode --trace {trace}")
    counts: collections.Counter[str] = collections.Counter()
    total_us: collections.Counter[str] = collections.Counter()
    for plane in ProfileData.from_file(str(files[-1])).planes:
        if not plane.name.startswith(plane_prefix):
            continue
        for line in plane.lines:
            if "Stream" not in line.name and plane_prefix.startswith("/device"):
                continue  # lines that group the kernels by module or scope would count them again
            for event in line.events:
                name = re.sub(r"[\d_.]*\d+", "", event.name)
                counts[name] += 1
                total_us[name] += event.duration_ns / 1e3
    return {name: (counts[name], us) for name, us in total_us.most_common()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="folder written by --trace, or an .xplane.pb file")
    parser.add_argument("--steps", type=int, default=TRACED_STEPS, help="divide by that many (default: %(default)s)")
    parser.add_argument("--plane", default="/device:GPU", help="planes that count (default: %(default)s)")
    parser.add_argument("--top", type=int, default=40, help="rows to show (default: %(default)s)")
    options = parser.parse_args()
    times = kernel_times(options.trace, options.plane)
    total_us = sum(us for _, us in times.values())
    print(f"{total_us / options.steps:.1f} us a step over {options.steps} steps")
    print(f"{'us/step':>9} {'share':>6} {'calls':>6}  kernel")
    for name, (count, us) in list(times.items())[: options.top]:
        print(f"{us / options.steps:9.1f} {us / total_us:6.1%} {count / options.steps:6.1f}  {name}")


if __name__ == "__main__":
    main()
