"""Schedulers without a device: who waits how long, and how many adapters are loaded, for the same 10,000 requests.

    python -m serving.bench simulate --zipf 1 2 4 8 --theta 0 0.2 0.5 0.7 inf --out simulation.json

The real Scheduler with its policies, SlotCache and BlockPool plans steps; a step takes

    step_ms + ms a prefill token + ms an active adapter + ms a load

of simulated time (the flags say how much: about what an H200 takes for the 8B shape), and its tokens are made up.
Requests are Poisson, of one to --mix-size adapters by Zipf's law, lengths as in the load benchmark.

Waits are from arrival to admission. Fairness is over adapters, of the mean wait of each adapter's requests: Jain's
index ((sum w)^2 / (n sum w^2), 1 if all wait alike) and the largest over the median.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from tqdm import tqdm

from pallas_kernels.bench_report import current_commit
from serving.bench.records import json_text
from serving.bench.workloads import WorkloadConfig, make_trace, zipf_cumulative
from serving.block_pool import BlockPool
from serving.config import EngineConfig, SchedulerName
from serving.plan import StepPlan
from serving.policies import make_policy
from serving.request import FinishReason, Mix, Request, SamplingParams
from serving.scheduler import Scheduler
from serving.slot_cache import SlotCache

SCHEDULERS: tuple[SchedulerName, ...] = get_args(SchedulerName)


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Milliseconds of a step.

    Attributes:
      step_ms: of any step: the weights are read once.
      prefill_token_ms: of each token of a chunk longer than one.
      adapter_ms: of each adapter that the step's requests use.
      load_ms: of each adapter copied into slots; the step waits for it.
    """

    step_ms: float = 5.0
    prefill_token_ms: float = 0.02
    adapter_ms: float = 0.02
    load_ms: float = 2.0

    def seconds(self, plan: StepPlan) -> float:
        """Time of one step."""
        prefill_tokens = sum(chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens > 1)
        time_ms = self.step_ms + self.prefill_token_ms * prefill_tokens + self.adapter_ms * len(plan.adapters)
        return (time_ms + self.load_ms * len(plan.loads)) / 1e3


@dataclasses.dataclass(frozen=True)
class Setting:
    """One simulation: a policy under a load.

    Attributes:
      scheduler, theta_s: the policy.
      zipf_s: exponent of the adapters' popularity.
      num_requests, rate: how many, and how many a second.
      num_adapters, mix_size: requests use 1 to mix_size of so many.
      slots, max_num_seqs, max_num_batched_tokens: of the engine; KV blocks are ample.
      longest: most tokens of a prompt or an output.
      seed: of the requests; all policies get the same ones.
    """

    scheduler: SchedulerName = "lag"
    theta_s: float = EngineConfig.theta_s
    zipf_s: float = 1.0
    num_requests: int = 10_000
    rate: float = 22.0
    num_adapters: int = 1_000
    mix_size: int = 3
    slots: int = 64
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    longest: int = 1024
    seed: int = 0


def make_requests(setting: Setting) -> list[Request]:
    """Requests by arrival; the same for all policies."""
    config = WorkloadConfig(num_adapters=setting.num_adapters, mix_size=setting.mix_size, longest=setting.longest)
    duration_s = 1.2 * setting.num_requests / setting.rate + 10.0  # enough for as many, in all likelihood
    trace = make_trace("base", rate=setting.rate, duration_s=duration_s, config=config, seed=setting.seed)
    rng = np.random.default_rng([setting.seed, 1])
    cumulative = zipf_cumulative(setting.num_adapters, setting.zipf_s)
    requests = []
    for i, drawn in enumerate(trace[: setting.num_requests]):
        count = int(rng.integers(1, setting.mix_size + 1))
        names = {f"lora-{adapter}": None for adapter in np.searchsorted(cumulative, rng.random(count), side="right")}
        requests.append(
            Request(
                request_id=str(i),
                prompt_token_ids=[0] * drawn.prompt_len,
                sampling=SamplingParams(max_tokens=drawn.output_len),
                mix=Mix(tuple((name, 1.0) for name in names)),
                adapters=tuple(names),
                arrival_s=drawn.arrival_s,
            )
        )
    return requests


class Simulation:
    """The engine's loop on simulated time: plan, dispatch, and commit of the step before."""

    def __init__(self, setting: Setting, costs: CostModel) -> None:
        policy = EngineConfig(scheduler=setting.scheduler, theta_s=setting.theta_s, scheduler_seed=setting.seed)
        longest = 2 * setting.longest
        self.scheduler = Scheduler(
            policy=make_policy(policy),
            block_pool=BlockPool(setting.max_num_seqs * (longest // 16 + 2), 16),
            slot_cache=SlotCache(setting.slots),
            num_slots_by_adapter=lambda adapter_id: 1,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            max_model_len=longest + 1,
        )
        self.now_s = 0.0
        self.num_steps = self.num_loads = 0
        self.wait_s: dict[str, float] = {}
        self._costs = costs
        self._previous = StepPlan()

    def run(self, requests: Sequence[Request], *, progress: bool = False) -> None:
        """Takes in requests as they arrive, until all have ended."""
        arrived = 0
        with tqdm(total=len(requests), unit="request", disable=not progress, leave=False) as bar:
            while arrived < len(requests) or self.scheduler.has_work:
                if not self.scheduler.has_work and not self._previous.chunks:
                    self.now_s = max(self.now_s, requests[arrived].arrival_s)
                before = arrived
                while arrived < len(requests) and requests[arrived].arrival_s <= self.now_s:
                    self.scheduler.add(requests[arrived])
                    arrived += 1
                bar.update(arrived - before)
                self._step()
        self.scheduler.check_integrity()

    def _step(self) -> None:
        plan = self.scheduler.plan(self.now_s)
        for chunk in plan.chunks:
            request = chunk.request
            self.wait_s.setdefault(request.request_id, self.now_s - request.arrival_s)
        self.scheduler.on_dispatched(plan)
        for chunk in self._previous.chunks:
            if chunk.samples and not chunk.request.is_finished:
                chunk.request.commit_token(0)
                if self.scheduler.has_reached_limit(chunk.request):
                    self.scheduler.finish(chunk.request, FinishReason.LENGTH)
        self._previous = plan
        if plan.chunks:
            self.num_steps += 1
            self.num_loads += len(plan.loads)
            self.now_s += self._costs.seconds(plan)


def simulate(setting: Setting, costs: CostModel, *, progress: bool = False) -> dict[str, Any]:
    """Runs one setting to its end.

    Returns:
      The setting with adapters loaded, waits, throughput and fairness.
    """
    requests = make_requests(setting)
    simulation = Simulation(setting, costs)
    simulation.run(requests, progress=progress)
    waits_s = np.array([simulation.wait_s[r.request_id] for r in requests])
    by_adapter: dict[str, list[float]] = {}
    for request, wait_s in zip(requests, waits_s.tolist(), strict=True):
        for adapter_id in request.adapters:
            by_adapter.setdefault(adapter_id, []).append(wait_s)
    uses = sum(len(r.adapters) for r in requests)
    return dataclasses.asdict(setting) | {
        "adapters_loaded": simulation.num_loads,
        "hit_rate": 1 - simulation.num_loads / uses,
        "wait_s_mean": float(waits_s.mean()),
        "wait_s_p50": float(np.percentile(waits_s, 50)),
        "wait_s_p99": float(np.percentile(waits_s, 99)),
        "wait_s_max": float(waits_s.max()),
        **fairness([float(np.mean(values)) for values in by_adapter.values()]),
        "output_tokens_per_s": sum(r.num_output_tokens for r in requests) / simulation.now_s,
        "steps": simulation.num_steps,
        "simulated_s": simulation.now_s,
    }


def fairness(waits_s: Sequence[float]) -> dict[str, float]:
    """Jain's index, and the largest over the median, of how long each adapter's requests wait; 1 and 1 is fair."""
    waits = np.asarray(waits_s, np.float64)
    if not waits.any():
        return {"jain": 1.0, "max_over_median": 1.0}
    median = float(np.median(waits))
    return {
        "jain": float(waits.sum() ** 2 / (len(waits) * np.square(waits).sum())),
        "max_over_median": float(waits.max() / median) if median else math.inf,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    costs = CostModel(options.step_ms, options.prefill_token_ms, options.adapter_ms, options.load_ms)
    try:
        settings = make_settings(options)
    except ValueError as error:
        parser.error(str(error))
    sizes = f"{options.adapters} adapters, {options.slots} slots"
    print(f"{options.requests} requests at {options.rate:g}/s, {sizes}; {costs}")
    print(
        f"{'policy':<12}{'θ s':>6}{'zipf':>6}{'loads':>8}{'hits':>6}{'wait p50':>10}{'p99':>9}{'max s':>9}"
        f"{'Jain':>7}{'max/med':>9}{'tok/s':>8}",
        flush=True,
    )
    rows = []
    for setting in settings:
        row = simulate(setting, costs, progress=sys.stderr.isatty())
        rows.append(row)
        theta = f"{setting.theta_s:g}" if setting.scheduler == "lag" else "-"
        print(
            f"{setting.scheduler:<12}{theta:>6}{setting.zipf_s:>6g}{row['adapters_loaded']:>8}{row['hit_rate']:>6.2f}"
            f"{row['wait_s_p50']:>10.3f}{row['wait_s_p99']:>9.3f}{row['wait_s_max']:>9.3f}{row['jain']:>7.3f}"
            f"{row['max_over_median']:>9.1f}{row['output_tokens_per_s']:>8.0f}",
            flush=True,
        )
    if options.out is not None:
        result = {
            "command": " ".join(["python -m serving.bench", *sys.argv[1:]]),
            "commit": current_commit(),
            "costs": dataclasses.asdict(costs),
            "simulations": rows,
        }
        options.out.write_text(json_text(result))
    return 0


def make_settings(options: argparse.Namespace) -> list[Setting]:
    """LAG for each θ, and the other policies, for each exponent."""
    if options.requests < 1 or not options.rate > 0:
        raise ValueError(f"--requests is {options.requests} and --rate {options.rate}; both must be above 0")
    if not 1 <= options.mix_size <= min(options.adapters, options.slots):
        raise ValueError(
            f"--mix-size is {options.mix_size}, expected 1 to {min(options.adapters, options.slots)}, as many as there "
            "are --adapters and --slots"
        )
    return [
        Setting(
            scheduler=scheduler, theta_s=theta_s, zipf_s=zipf_s, num_requests=options.requests, rate=options.rate,
            num_adapters=options.adapters, mix_size=options.mix_size, slots=options.slots,
            max_num_seqs=options.max_num_seqs, max_num_batched_tokens=options.max_num_batched_tokens,
            longest=options.longest, seed=options.seed,
        )
        for zipf_s in options.zipf
        for scheduler in options.scheduler
        for theta_s in (options.theta if scheduler == "lag" else [EngineConfig.theta_s])
    ]  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m serving.bench simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    costs, setting = CostModel(), Setting()
    zipf = [1.0, 1.5, 2.0, 4.0, 8.0]
    theta = [0.0, 0.2, 0.5, 0.7, math.inf]
    add = parser.add_argument
    add("--scheduler", nargs="+", choices=SCHEDULERS, default=list(SCHEDULERS), help="policies (default: all)")
    add("--theta", nargs="+", type=float, default=theta, metavar="S", help="of lag (default: 0 0.2 0.5 0.7 inf)")
    add("--zipf", nargs="+", type=float, default=zipf, metavar="S", help="exponents (default: 1 1.5 2 4 8)")
    for flag, default, kind, text in (
        ("--requests", setting.num_requests, int, "requests"),
        ("--rate", setting.rate, float, "requests/s"),
        ("--adapters", setting.num_adapters, int, "adapters to draw from"),
        ("--mix-size", setting.mix_size, int, "most adapters of a request"),
        ("--slots", setting.slots, int, "adapter slots"),
        ("--max-num-seqs", setting.max_num_seqs, int, "requests that run at once"),
        ("--max-num-batched-tokens", setting.max_num_batched_tokens, int, "token budget of a step"),
        ("--longest", setting.longest, int, "most tokens of a prompt or an output"),
        ("--seed", setting.seed, int, "of the requests"),
        ("--step-ms", costs.step_ms, float, "milliseconds of any step"),
        ("--prefill-token-ms", costs.prefill_token_ms, float, "more for each prefill token"),
        ("--adapter-ms", costs.adapter_ms, float, "more for each adapter that the step uses"),
        ("--load-ms", costs.load_ms, float, "more for each adapter copied into slots"),
    ):
        add(flag, type=kind, default=default, metavar="N", help=f"{text} (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="JSON file to write (default: none)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
