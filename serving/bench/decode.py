"""Time per output token of the engine's own decode loop, for one closed batch: sampling and host included.

    python -m serving.bench.decode --shape 8b --out result.json

Weights and adapters are random. Every workload generates greedily on all rows at once, end tokens ignored; a decode
step is timed from one read of tokens to the next. Outputs are checked in the same run: each workload runs again and
must give the same tokens, and the logits of a batch of mixes are compared with those of the portable implementations.
Prefill is the tokens of all prompts over the time until every request has its first token.
"""

import argparse
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dymerge_jax.config import LlamaConfig, named_config
from dymerge_jax.generate import batch_logits
from dymerge_jax.library import pad_batch
from dymerge_jax.lora import AdapterWeights, ProjectionWeights, slot_bytes
from dymerge_jax.model import Implementations, SplitModel, random_model
from dymerge_jax.step import AdapterMix
from pallas_kernels.bench_report import run_facts
from serving.adapter_store import AdapterStore, StoredAdapter
from serving.batch import Bucket, Buckets
from serving.config import EngineConfig
from serving.engine import Engine
from serving.programs import decode_programs, mixed_programs
from serving.request import Mix, Request, SamplingParams

TRACED_STEPS = 8
_SETTLING_STEPS = 2  # the first full steps still wait for prefills
_NUM_TENSOR_SETS = 4
MAX_ADAPTERS = 96
SHAPES = {"8b": "llama-3-8b", "1b": "llama-3.2-1b"}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A closed batch.

    Attributes:
      name: of the table's row.
      batch: requests.
      mix_size: adapters of each request.
      num_adapters: different adapters of the batch; requests take `mix_size` of them in turn.
    """

    name: str
    batch: int
    mix_size: int
    num_adapters: int

    def mix(self, index: int) -> Mix:
        """That of one request."""
        first = index * self.mix_size
        return Mix(
            tuple((f"lora-{(first + i) % self.num_adapters}", 1.0 / self.mix_size) for i in range(self.mix_size))
        )

    def adapters(self, index: int) -> tuple[str, ...]:
        """Those that the request needs."""
        return self.mix(index).adapters


def workloads(batches: Sequence[int]) -> list[Workload]:
    """Base, one adapter for all, and mixes over more and more adapters."""
    result = []
    for batch in batches:
        result += [Workload("base", batch, 0, 0), Workload("one adapter for all", batch, 1, 1)]
        if batch == 1:
            result.append(Workload("3 each", batch, 3, 3))
        else:
            counts = {(k, min(most, k * batch)): None for k, most in ((1, 32), (3, 52), (3, MAX_ADAPTERS))}
            result += [Workload(f"{k} each, {n} distinct", batch, k, n) for k, n in counts]
    return result


def prefill_workloads(batch: int) -> list[Workload]:
    """Base and mixes of three."""
    return [Workload("prefill, base", batch, 0, 0), Workload("prefill, 3 each", batch, 3, min(3 * batch, MAX_ADAPTERS))]


def random_adapters(config: LlamaConfig, count: int, *, rank: int) -> dict[str, AdapterWeights]:
    """Adapters on all seven projections. A few sets of random tensors serve them in turn, with scales of their own."""
    rng = np.random.default_rng(0)
    shapes = {
        n: (g.in_features, w) for g in config.groups.values() for n, w in zip(g.projections, g.widths, strict=True)
    }
    tensors = []
    for _ in range(min(count, _NUM_TENSOR_SETS)):
        tensors.append(
            {
                (layer, name): (
                    (rng.standard_normal((rank, fan_in), np.float32) * fan_in**-0.5).astype(jnp.bfloat16),
                    (rng.standard_normal((fan_out, rank), np.float32) * 0.3).astype(jnp.bfloat16),
                )
                for layer in range(config.num_layers)
                for name, (fan_in, fan_out) in shapes.items()
            }
        )
    adapters = {}
    for i in range(count):
        scale = 0.5 + 0.5 * (i + 1) / count
        projections = {k: ProjectionWeights(a, b, scale) for k, (a, b) in tensors[i % len(tensors)].items()}
        adapters[f"lora-{i}"] = AdapterWeights(projections, content_hash=str(i))
    return adapters


class StepTimer:
    """Splits an engine's steps into dispatching the next one and waiting for the tokens of the one before.

    What is dispatched together shares its time evenly.
    """

    def __init__(self, engine: Engine) -> None:
        self.dispatch_s: list[float] = []
        self.commit_s: list[float] = []
        engine._dispatch = self._timed(engine._dispatch, self.dispatch_s)
        engine._dispatch_many = self._timed(engine._dispatch_many, self.dispatch_s)
        engine._commit = self._timed(engine._commit, self.commit_s)

    def clear(self) -> None:
        self.dispatch_s.clear()
        self.commit_s.clear()

    @staticmethod
    def _timed(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
        def timed(argument: Any) -> Any:
            start_s = time.perf_counter()
            result = method(argument)
            # A plan becomes a dispatch, and that is committed; _dispatch_many may leave the plan to _dispatch.
            dispatched = argument if hasattr(argument, "plans") else result
            if dispatched is not None:
                seconds.append((time.perf_counter() - start_s) / len(dispatched.plans))
            return result

        return timed


def run_workload(
    engine: Engine,
    timer: StepTimer,
    workload: Workload,
    *,
    prompt_len: int,
    output_len: int,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Runs one closed batch to its end; the step times are those in which every row decodes.

    With `trace`, a profiler trace of TRACED_STEPS such steps is written to that folder.
    """
    rng = np.random.default_rng(1)
    vocab = engine.model.config.vocab
    requests = []
    for i in range(workload.batch):
        mix = workload.mix(i)
        requests.append(
            Request(
                request_id=str(i),
                prompt_token_ids=rng.integers(0, vocab, prompt_len).tolist(),
                sampling=SamplingParams(max_tokens=output_len, ignore_eos=True),
                mix=mix,
                arrival_s=time.monotonic(),
                adapters=workload.adapters(i),
            )
        )
        engine.add_request(requests[-1])
    start_s = last_s = time.perf_counter()
    ttft_s, step_s = 0.0, []
    timer.clear()
    while engine.has_work:
        read = engine._in_flight
        engine.step()
        now_s = time.perf_counter()
        if read is not None and all(plan.is_decode and plan.num_seqs == workload.batch for plan in read.plans):
            step_s.append((now_s - last_s) / len(read.plans))
            if trace is not None and len(step_s) == _SETTLING_STEPS:
                jax.profiler.start_trace(trace)
            if trace is not None and len(step_s) == _SETTLING_STEPS + TRACED_STEPS:
                jax.profiler.stop_trace()
        if not ttft_s and all(r.output_token_ids for r in requests):
            ttft_s = now_s - start_s
        last_s = now_s
    engine.check_integrity()
    step_ms = np.asarray(step_s[_SETTLING_STEPS:]) * 1e3
    if not len(step_ms):
        step_ms = np.full(1, np.nan)  # too few steps for one that is settled
    return {
        "workload": workload.name,
        "batch": workload.batch,
        "active_adapters": workload.num_adapters,
        "repeats": len(step_ms),
        "tpot_ms_median": float(np.median(step_ms)),
        "tpot_ms_p90": float(np.percentile(step_ms, 90)),
        "tpot_ms_min": float(step_ms.min()),
        "dispatch_ms_median": float(np.median(timer.dispatch_s)) * 1e3,
        "commit_ms_median": float(np.median(timer.commit_s)) * 1e3,
        "all_first_tokens_ms": ttft_s * 1e3,
        "tokens": [r.output_token_ids for r in requests],
    }


def floor_ms(model: SplitModel, workload: Workload, rank: int, bandwidth: float) -> float:
    """Milliseconds to read weights and active adapters once; the embedding counts once, as output matrix."""
    config = model.config
    weights = config.num_params - (0 if config.tie_word_embeddings else config.vocab * config.hidden)
    num_bytes = weights * model.dtype.itemsize + workload.num_adapters * slot_bytes(config, rank, model.dtype)
    return num_bytes / bandwidth * 1e3


def logits_error(engine: Engine, names: Sequence[str]) -> dict[str, float]:
    """Largest difference of the logits of a batch of mixes to those of the portable implementations."""
    rng = np.random.default_rng(2)
    num_slots = engine.slot_cache.num_slots
    weights = np.zeros((4, num_slots), np.float32)
    for row in range(1, 4):
        for name in names[row - 1 : 2 * row]:
            slots = engine.slot_cache.lookup(name)
            assert slots is not None
            weights[row, list(slots)] = 0.7
    mix = AdapterMix(weights=jnp.asarray(weights), gated_set_ids=jnp.full((4,), -1, jnp.int32))
    batch = pad_batch(rng.integers(0, engine.model.config.vocab, (4, 16)).tolist())  # one tile, as a decode step

    def logits(implementations: Implementations) -> np.ndarray:
        model = engine.model
        return np.asarray(
            batch_logits(model.graph, model.state, engine._slots, None, mix, batch, implementations=implementations)
        )

    own, portable = logits(Implementations()), logits(Implementations("dense", "portable"))
    adapters_change = np.abs(own[1:] - own[:1]).max()
    return {
        "max_abs_difference": float(np.abs(own - portable).max()),
        "rms_difference": float(np.sqrt(np.square(own - portable).mean())),
        "logits_std": float(portable.std()),
        "max_change_by_adapters": float(adapters_change),
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", help="8b, 1b or a named model size (default: %(default)s)")
    parser.add_argument("--batches", default="1,32,64", help="batch sizes (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=128, help="adapter slots (default: %(default)s)")
    parser.add_argument("--prefill", default="16x2048", help="prompts x tokens, or none (default: %(default)s)")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=8192, help="tokens of a prefill step (default: %(default)s)"
    )
    parser.add_argument(
        "--decode-steps",
        type=int,
        help="steps of one dispatch, whose time is divided by them (default: the engine's choice; 1 with --trace)",
    )
    parser.add_argument(
        "--rank", type=int, default=8, help="rank of the adapters and of the slots (default: %(default)s)"
    )
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    parser.add_argument(
        "--bandwidth", type=float, default=4.3e12, help="bytes/s for the floor (default: H200, %(default)s)"
    )
    parser.add_argument("--trace", type=Path, help="folder for a profiler trace of decode steps of the last workload")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser


def make_engine(options: argparse.Namespace, batches: Sequence[int], prefill: tuple[int, int] | None) -> Engine:
    """An engine of random weights with programs for these batches and no others; compiles nothing yet."""
    config = named_config(options.shape)
    num_adapters = max(w.num_adapters for w in workloads(batches))
    if options.slots < num_adapters:
        raise ValueError(f"--slots is {options.slots}, but the workloads use {num_adapters} adapters at once")
    store = AdapterStore(config, slot_rank=options.rank, dtype=options.dtype)
    for name, weights in random_adapters(config, MAX_ADAPTERS, rank=options.rank).items():
        store.add(StoredAdapter(name, None, weights))
    prefill_batch, prefill_len = prefill or (1, 1)
    max_num_seqs = max(*batches, prefill_batch)
    engine_config = EngineConfig(
        adapter_slots=options.slots,
        slot_rank=options.rank,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=max(options.prompt_len + options.output_len, prefill_len + 2),
        enable_prefix_cache=False,  # every run has the same prompts
        decode_steps=options.decode_steps,
    )
    sizes = sorted({*batches, max_num_seqs})
    budget = options.max_num_batched_tokens
    buckets = Buckets(
        decode=tuple(Bucket(n, n, m) for n in sizes for m in decode_programs(n, options.slots, options.rank)),
        mixed=tuple(Bucket(budget, max_num_seqs, m) for m in mixed_programs(budget, largest=budget)),
    )
    return Engine(random_model(config, options.dtype), None, store, (), engine_config, buckets=buckets)


def measure(
    engine: Engine, batches: Sequence[int], prefill: tuple[int, int] | None, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Runs every workload; of its last run, reports whether the one before, in the same state, gave the same tokens.

    The first run loads adapters, by which requests that need fewer come first: another order of rows than later ones'.
    """
    timer = StepTimer(engine)
    lengths = {"prompt_len": options.prompt_len, "output_len": options.output_len}

    def run(workload: Workload, prompt_len: int, output_len: int) -> dict[str, Any]:
        runs = [run_workload(engine, timer, workload, prompt_len=prompt_len, output_len=output_len) for _ in range(3)]
        _, before, last = runs
        last["tokens_repeat"] = before["tokens"] == last.pop("tokens")
        return last

    rows, prefills = [], []
    for workload in workloads(batches):
        row = run(workload, **lengths)
        row["floor_ms"] = floor_ms(engine.model, workload, options.rank, options.bandwidth)
        rows.append(row)
    if prefill is not None:
        batch, prompt_len = prefill
        for workload in prefill_workloads(batch):
            row = run(workload, prompt_len, 1)  # with decode rows, one prompt's end would be a step of its own
            row["tokens_per_s"] = batch * prompt_len / row["all_first_tokens_ms"] * 1e3
            prefills.append({k: v for k, v in row.items() if "tpot" not in k and k != "repeats"})
    if options.trace is not None:
        run_workload(engine, timer, workloads(batches)[-1], **lengths, trace=options.trace)
    return rows, prefills


def print_report(result: dict[str, Any]) -> None:
    settings = result["settings"]
    print(
        f"\n{result['device']}, {settings['shape']}, {settings['dtype']}, rank {settings['rank']}, "
        f"prompt {settings['prompt_len']} + output {settings['output_len']} tokens, "
        f"start-up compile {result['compile_s']:.0f} s"
    )
    print(f"logits against the portable implementations: {result['logits_error']}")
    print(
        f"{'workload':22} {'batch':>5} {'active':>6} {'TPOT ms':>8} "
        f"{'p90':>7} {'floor':>7} {'dispatch':>8} {'commit':>7} "
        f"{'repeats':>7}  same twice"
    )
    for r in result["rows"]:
        print(
            f"{r['workload']:22} {r['batch']:5d} {r['active_adapters']:6d} {r['tpot_ms_median']:8.3f} "
            f"{r['tpot_ms_p90']:7.3f} {r['floor_ms']:7.3f} {r['dispatch_ms_median']:8.3f} {r['commit_ms_median']:7.3f} "
            f"{r['repeats']:7d}  {r['tokens_repeat']}"
        )
    for r in result["prefill"]:
        print(
            f"{r['workload']:22} {r['batch']:5d} {r['active_adapters']:6d} {r['tokens_per_s']:8.0f} tokens/s "
            f"({r['all_first_tokens_ms']:.0f} ms)  same twice {r['tokens_repeat']}"
        )


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if options.output_len < _SETTLING_STEPS + TRACED_STEPS + 2:
        parser.error(f"--output-len is {options.output_len}; expected at least {_SETTLING_STEPS + TRACED_STEPS + 2}")
    options.shape = SHAPES.get(options.shape, options.shape)
    batches = [int(b) for b in options.batches.split(",")]
    prefill = None
    if options.prefill != "none":
        batch, _, prompt_len = options.prefill.partition("x")
        if not (batch.isdigit() and prompt_len.isdigit()):
            parser.error(f"--prefill is {options.prefill!r}; expected BATCHxTOKENS such as 16x2048, or none")
        prefill = int(batch), int(prompt_len)
    if options.trace is not None and options.decode_steps is None:
        options.decode_steps = 1  # a trace is of so many dispatches
    engine = make_engine(options, batches, prefill)
    start_s = time.perf_counter()
    engine.compile()
    compile_s = time.perf_counter() - start_s
    rows, prefills = measure(engine, batches, prefill, options)
    result = {
        **run_facts("serving.bench.decode"),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "compile_s": compile_s,
        "logits_error": logits_error(engine, [adapter.name for adapter in engine.store.adapters]),
        "rows": rows,
        "prefill": prefills,
    }
    print_report(result)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
