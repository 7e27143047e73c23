"""Where a step's time goes, kernel by kernel, from a profiler trace of `serving.bench.decode --trace`.

python -m serving.bench.profile TRACE_FOLDER --steps 7
"""

import argparse
from pathlib import Path

from pallas_kernels.bench_report import kernel_durations_us
from serving.bench.decode import TRACED_STEPS


def kernel_times(trace: Path, plane_prefix: str) -> dict[str, tuple[int, float]]:
    """Count and total microseconds by kernel name, the largest first; see `kernel_durations_us`."""
    durations = kernel_durations_us(trace, plane_prefix)
    times = {name: (len(us), sum(us)) for name, us in durations.items()}
    return dict(sorted(times.items(), key=lambda item: item[1][1], reverse=True))


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
