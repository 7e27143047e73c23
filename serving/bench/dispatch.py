"""The host's work per decode step, by part, without the device's.

    python -m serving.bench.dispatch --rows 32 --mix-size 3

A model of tiny widths has as many layers, hence as many arrays, as the one to be known of. In place of its step runs a
program that takes the same arguments, gives back the same results and computes nothing; with --real, the step itself
does, as one program, as on an accelerator. Scheduler, batch, dispatch, reading and detokenizing are the engine's own.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import logging
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from tokenizers import Tokenizer, decoders, models

from dymerge_jax.config import named_config
from dymerge_jax.kv_cache import KVCache
from dymerge_jax.model import Implementations, SplitModel, random_model
from dymerge_jax.step import StepResult, StepTables, Weights, split_weights
from pallas_kernels.bench_report import run_facts
from serving.adapter_store import AdapterStore, StoredAdapter
from serving.batch import Bucket
from serving.bench.decode import random_adapters
from serving.config import EngineConfig
from serving.engine import Engine
from serving.programs import CompiledStep, StepPrograms, abstract_batch, compile_whole_step
from serving.request import Mix, Request, SamplingParams

_PROMPT_LEN = 64
_SETTLING_STEPS = 4  # the first full steps still wait for prefills and for the first use of an argument's kind

PARTS = {
    "plan": "choose the rows, give out blocks",
    "rows": "bring block tables, mixes and sampling up to date on the device",
    "batch": "pack tokens and lengths",
    "forward": "call the step's program",
    "sample": "call the sampler's program, if any",
    "copy": "pick the bucket, start the copy of the tokens",
    "commit": "read the tokens, detokenize, look for the end",
    "rest": "metrics and the like",
}
"""Of a step, in order; they add up to it."""


def compile_empty_step(
    model: SplitModel,
    bucket: Bucket,
    cache: KVCache,
    last_tokens: Int[Array, " num_rows"],
    tables: StepTables,
    implementations: Implementations,
    *,
    turn: contextlib.AbstractContextManager[object],
) -> CompiledStep:
    """A step of the right signature that computes nothing."""

    def step(
        weights: Weights,
        cache: KVCache,
        last_tokens: Int[Array, " num_rows"],
        tables: StepTables,
        batch: Int[Array, " packed_len"],
    ) -> StepResult:
        logits = jnp.zeros((bucket.num_seqs, model.config.vocab), jnp.float32)
        return StepResult(last_tokens, cache, logits, jnp.full((bucket.num_seqs,), 7, jnp.int32))

    weights = split_weights(model.graph, model.state)[1]
    jitted = jax.jit(step, donate_argnums=(1, 2), keep_unused=True)  # as the real step has a use for all of them
    with turn:
        return jitted.lower(weights, cache, last_tokens, tables, abstract_batch(bucket)).compile()


def word_tokenizer(vocab: int) -> types.SimpleNamespace:
    """One word a token, as an engine wants it."""
    tokenizer = Tokenizer(models.BPE({f"Ġw{i}": i for i in range(vocab)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return types.SimpleNamespace(backend_tokenizer=tokenizer)


class PartTimer:
    """Seconds of every part of an engine's steps."""

    def __init__(self, engine: Engine) -> None:
        self._seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._engine = engine
        for part, owner, names in (
            ("plan", engine.scheduler, ("plan", "plan_ahead", "on_dispatched")),
            ("rows", engine._rows, ("update",)),
            ("batch", engine, ("_run", "_run_many")),
            ("forward", engine._programs, ("forward", "forward_many")),
            ("sample", engine._programs, ("sample",)),
            ("copy", engine, ("_dispatch", "_dispatch_many")),
            ("commit", engine, ("_commit",)),
        ):
            for name in names:
                setattr(owner, name, self._timed(part, getattr(owner, name)))

    def step(self) -> dict[str, float]:
        """Runs a step; seconds by part, and in total."""
        self._seconds.clear()
        start_s = time.perf_counter()
        self._engine.step()
        total_s = time.perf_counter() - start_s
        parts = {name: self._seconds[name] for name in PARTS if name != "rest"}
        return parts | {"rest": total_s - sum(parts.values()), "total": total_s}

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, whose time counts for `part`, but for what it spends in others that are timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s, counted_s = time.perf_counter(), sum(self._seconds.values())
            result = method(*args, **kwargs)
            inner_s = sum(self._seconds.values()) - counted_s
            self._seconds[part] += time.perf_counter() - start_s - inner_s
            return result

        return timed


def make_engine(options: argparse.Namespace) -> Engine:
    """A compiled engine of tiny widths."""
    config = dataclasses.replace(named_config("tiny"), num_layers=options.layers, max_position=options.max_model_len)
    num_adapters = options.rows * options.mix_size
    store = AdapterStore(config, slot_rank=1, dtype="float32")
    for name, weights in random_adapters(config, num_adapters, rank=1).items():
        store.add(StoredAdapter(name, None, weights))
    engine_config = EngineConfig(
        adapter_slots=num_adapters,
        slot_rank=1,
        max_num_seqs=options.rows,
        max_model_len=options.max_model_len,
        num_blocks=-(-options.max_model_len // EngineConfig.block_size) * options.rows,
    )
    model = random_model(config, "float32")
    engine = Engine(model, word_tokenizer(config.vocab), store, (), engine_config)
    engine._programs = StepPrograms(
        model,
        engine.buckets,
        Implementations(),
        decode_steps=options.decode_steps,
        compile_step=compile_whole_step if options.real else compile_empty_step,
    )
    engine.compile(progress=options.real)
    return engine


def add_requests(engine: Engine, options: argparse.Namespace) -> None:
    """One request a row, of prompts so long that the rows need new blocks at different steps."""
    for i in range(options.rows):
        mix = Mix(tuple((f"lora-{i * options.mix_size + j}", 0.5) for j in range(options.mix_size)))
        num_steps = (options.steps + 2 * _SETTLING_STEPS + options.rows) * options.decode_steps
        sampling = SamplingParams(max_tokens=num_steps, ignore_eos=True, temperature=options.temperature, seed=i)
        prompt = [1] * (_PROMPT_LEN + i % EngineConfig.block_size)
        engine.add_request(Request(str(i), prompt, sampling, mix, time.monotonic(), mix.adapters))


def measure(engine: Engine, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Microseconds of a step in which every row decodes, by part: median, mean and p90."""
    timer = PartTimer(engine)
    add_requests(engine, options)
    steps = []
    while engine.scheduler.num_waiting or any(not r.output_token_ids for r in engine.scheduler.running):
        engine.step()
    for _ in range(_SETTLING_STEPS):
        engine.step()
    for _ in range(options.steps):
        steps.append(timer.step())
        assert engine.scheduler.num_running == options.rows, "a row has ended"
    microseconds = {name: np.asarray([step[name] for step in steps]) * 1e6 for name in (*PARTS, "total")}
    return {
        name: {"median": float(np.median(us)), "mean": float(us.mean()), "p90": float(np.percentile(us, 90))}
        for name, us in microseconds.items()
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="of the model (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=32, help="running requests (default: %(default)s)")
    parser.add_argument(
        "--mix-size", type=int, default=3, help="adapters of each request, its own (default: %(default)s)"
    )
    parser.add_argument("--max-model-len", type=int, default=4096, help="tokens (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument(
        "--decode-steps", type=int, default=1, help="of one dispatch, whose time is shown (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=300, help="steps measured (default: %(default)s)")
    parser.add_argument("--real", action="store_true", help="run the step itself")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser


def print_report(result: dict[str, Any]) -> None:
    settings = result["settings"]
    print(
        f"\n{result['device']}: {settings['layers']} layers, {settings['rows']} rows, mixes of {settings['mix_size']}, "
        f"temperature {settings['temperature']}, {settings['steps']} steps; microseconds of the host"
    )
    print(f"{'part':8} {'median':>7} {'mean':>7} {'p90':>7}")
    for name, us in result["microseconds"].items():
        print(f"{name:8} {us['median']:7.1f} {us['mean']:7.1f} {us['p90']:7.1f}  {PARTS.get(name, 'the whole step')}")


def main() -> None:
    options = make_parser().parse_args()
    logging.basicConfig(level=logging.WARNING)
    microseconds = measure(make_engine(options), options)
    result = {
        **run_facts("serving.bench.dispatch"),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "microseconds": microseconds,
    }
    print_report(result)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
