"""Time of one decision of the scheduler: a whole `plan()` with thousands of requests waiting, for each policy.

    python -m serving.bench.schedule --out result.json

There is no model: steps are planned, dispatched to nobody, and their tokens made up. Each situation keeps the given
number of requests waiting, with mixes of 1 to 3 adapters by Zipf's law, and prompts that have nothing in common:

  cold       nothing runs and nothing is resident: one plan fills the rows, as far as the budget goes
  steady     two requests end in each step, so two or more are admitted, with loads and evictions
  few rows   as steady, but every row is taken; one request ends in each step
  few blocks rows are free, but hardly a KV block is: few of those who wait fit
  few slots  rows are free, but every slot is pinned: nobody fits who would load an adapter
  overdue    as steady, and one request in a hundred is overdue
  late       as steady, and all are overdue

Wall time includes what other processes take from a shared machine; the thread's CPU time does not.
"""

import argparse
import dataclasses
import gc
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serving.block_pool import BlockPool
from serving.plan import StepPlan
from serving.policies import Fifo, Lag, LeastFirst, Policy, Random
from serving.prefix_cache import PrefixCache
from serving.request import FinishReason, Mix, Request, SamplingParams
from serving.scheduler import Scheduler
from serving.slot_cache import SlotCache

_SPAN_S = 100.0  # those who wait at the start came in this time
_STEP_S = 0.01
_BLOCK_SIZE = 16
_NEVER_S = 1e9
POLICIES = ("lag", "fifo", "random", "least-first")


@dataclasses.dataclass(frozen=True)
class Situation:
    """What the plans are short of.

    Attributes:
      name: of the table's row.
      num_rows: engine rows.
      num_running: requests to start with; fewer if no more fit.
      num_blocks: KV blocks.
      num_ending: requests that end in each step.
      overdue: share of the waiting requests that is overdue at the start.
      is_cold: only the first plan counts, and each starts anew.
    """

    name: str
    num_rows: int = 128
    num_running: int = 64
    num_blocks: int = 16384
    num_ending: int = 2
    overdue: float = 0.0
    is_cold: bool = False


SITUATIONS = (
    Situation("cold", num_rows=64, num_running=0, is_cold=True),
    Situation("steady"),
    Situation("few rows", num_rows=32, num_running=32, num_ending=1),
    Situation("few blocks", num_blocks=1200),
    Situation("few slots", num_rows=256, num_running=96, num_ending=0),
    Situation("overdue", overdue=0.01),
    Situation("late", overdue=1.0),
)


class Workload:
    """Requests with random lengths and mixes; the same seed gives the same ones."""

    def __init__(self, *, num_adapters: int, zipf_s: float, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        weights = np.arange(1, num_adapters + 1) ** -zipf_s
        self._cumulative = np.cumsum(weights / weights.sum())
        self._num_made = 0

    def request(self, arrival_s: float) -> Request:
        mix_size = int(self._rng.integers(1, 4))
        adapters: dict[str, None] = {}
        while len(adapters) < mix_size:
            rank = int(np.searchsorted(self._cumulative, self._rng.random(), side="right"))
            adapters[f"lora-{min(rank, len(self._cumulative) - 1)}"] = None
        num_prompt, max_tokens = (int(n) for n in np.clip(self._rng.lognormal(4.9, 1.0, 2), 4, 1024))
        self._num_made += 1
        return Request(
            request_id=f"r{self._num_made}",
            prompt_token_ids=self._rng.integers(0, 128_000, num_prompt).tolist(),
            sampling=SamplingParams(max_tokens=max_tokens + 8),
            mix=Mix(tuple((adapter_id, 1.0) for adapter_id in adapters)),
            adapters=tuple(adapters),
            arrival_s=arrival_s,
        )


class PlanTimer:
    """A scheduler whose plans are timed, and the engine's part of the loop without a device."""

    def __init__(self, situation: Situation, policy: str, workload: Workload, options: argparse.Namespace) -> None:
        self.situation = situation
        block_pool = BlockPool(situation.num_blocks, _BLOCK_SIZE)
        self.scheduler = Scheduler(
            policy=_make_policy(policy, theta_s=_SPAN_S * (1 - situation.overdue) if situation.overdue else _NEVER_S),
            block_pool=block_pool,
            slot_cache=SlotCache(options.slots),
            prefix_cache=PrefixCache(block_pool),
            num_slots_by_adapter=lambda adapter_id: 1,
            max_num_seqs=situation.num_rows,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=4096,
        )
        self.plan_s: list[float] = []
        self.cpu_s: list[float] = []
        self.num_admitted: list[int] = []
        self._workload = workload
        self._num_waiting = options.waiting
        self._now_s = _SPAN_S
        self._previous = StepPlan()
        self._start()

    def step(self) -> None:
        """Ends some requests, lets as many come, and times the next plan."""
        ending = sorted(self.scheduler.running, key=lambda r: r.arrival_order)[: self.situation.num_ending]
        for request in ending:
            self.scheduler.finish(request, FinishReason.STOP)
        self._fill()
        self._plan()
        self._now_s += _STEP_S

    def _start(self) -> None:
        """Lets requests run one after another as far as they fit, then the others wait."""
        for _ in range(self.situation.num_running):
            self.scheduler.add(self._workload.request(arrival_s=0.0))
            self._plan()
        for request in self.scheduler.waiting:
            self.scheduler.finish(request, FinishReason.ABORT)
        for i in range(self._num_waiting):
            self.scheduler.add(self._workload.request(arrival_s=i * _SPAN_S / self._num_waiting))
        self.plan_s.clear()
        self.cpu_s.clear()
        self.num_admitted.clear()

    def _fill(self) -> None:
        while self.scheduler.num_waiting < self._num_waiting:
            self.scheduler.add(self._workload.request(arrival_s=self._now_s))

    def _plan(self) -> None:
        num_running = self.scheduler.num_running
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        plan = self.scheduler.plan(self._now_s)
        self.cpu_s.append(time.thread_time() - start_cpu_s)
        self.plan_s.append(time.perf_counter() - start_s)
        self.num_admitted.append(self.scheduler.num_running - num_running + len(plan.preempted))
        self.scheduler.on_dispatched(plan)
        for chunk in self._previous.chunks:
            if chunk.samples and not chunk.request.is_finished:
                chunk.request.commit_token(0)
                if self.scheduler.has_reached_limit(chunk.request):
                    self.scheduler.finish(chunk.request, FinishReason.LENGTH)
        self._previous = plan


def measure(situation: Situation, policy: str, zipf_s: float, options: argparse.Namespace) -> dict[str, Any]:
    """Times the plans of one situation; garbage is collected between them, as it comes from the bench's own load."""
    plan_s: list[float] = []
    cpu_s: list[float] = []
    num_admitted: list[int] = []
    num_runs = options.cold_runs if situation.is_cold else 1
    for seed in range(num_runs):
        timer = PlanTimer(situation, policy, Workload(num_adapters=options.adapters, zipf_s=zipf_s, seed=seed), options)
        gc.collect()
        gc.disable()
        for _ in range(1 if situation.is_cold else options.plans):
            timer.step()
        gc.enable()
        plan_s += timer.plan_s
        cpu_s += timer.cpu_s
        num_admitted += timer.num_admitted
    return {
        "situation": situation.name,
        "policy": policy,
        "zipf_s": zipf_s,
        "num_plans": len(plan_s),
        "wall_us": _median_p90_max_us(plan_s),
        "cpu_us": _median_p90_max_us(cpu_s),
        "mean_admitted": round(statistics.fmean(num_admitted), 2),
    }


def _median_p90_max_us(seconds: list[float]) -> list[float]:
    return [round(float(us), 1) for us in np.quantile(np.array(seconds) * 1e6, [0.5, 0.9, 1.0])]


def _make_policy(name: str, *, theta_s: float) -> Policy:
    match name:
        case "lag":
            return Lag(theta_s)
        case "fifo":
            return Fifo()
        case "random":
            return Random(0)
        case "least-first":
            return LeastFirst()
    raise ValueError(f"policy is {name!r}, expected one of {', '.join(POLICIES)}")


def parse_options(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=10_000, help="waiting requests (default %(default)s)")
    parser.add_argument("--adapters", type=int, default=1_000, help="adapters to draw from (default %(default)s)")
    parser.add_argument("--slots", type=int, default=64, help="slots, one an adapter (default %(default)s)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="budget (default %(default)s)")
    parser.add_argument("--plans", type=int, default=200, help="plans of each row (default %(default)s)")
    parser.add_argument("--cold-runs", type=int, default=3, help="first plans that are timed (default %(default)s)")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--situations", nargs="+", choices=[s.name for s in SITUATIONS], help="default: all")
    parser.add_argument("--zipf", nargs="+", type=float, default=[1.0, 1.5], help="exponents (default 1.0 1.5)")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    return parser.parse_args(args)


def main() -> None:
    options = parse_options()
    print(f"{options.waiting} waiting, {options.adapters} adapters, {options.slots} slots")
    titles = ["wall us p50", "p90", "max", "cpu us p50", "p90", "max"]
    print(f"{'situation':<11}{'policy':<12}{'zipf':>4}{''.join(f'{t:>11}' for t in titles)} admitted", flush=True)
    rows = []
    for situation in SITUATIONS:
        if options.situations and situation.name not in options.situations:
            continue
        for policy in options.policies:
            for zipf_s in options.zipf:
                row = measure(situation, policy, zipf_s, options)
                rows.append(row)
                times = "".join(f"{us:>11.1f}" for us in row["wall_us"] + row["cpu_us"])
                print(f"{situation.name:<11}{policy:<12}{zipf_s:>4}{times}{row['mean_admitted']:>9}", flush=True)
    if options.out is not None:
        result = {
            "command": shlex.join(["python", "-m", "serving.bench.schedule", *sys.argv[1:]]),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
