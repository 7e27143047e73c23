"""Time of the search's evaluation: a population of mixes in one batch against fewer at a time, down to one.

    python -m serving.bench.search --shape smollm2-135m --adapters 20 --batches 24,8,1

Weights, adapters and examples are random; every mix uses every adapter, as the mixes of a search do. What is timed is
what the search does for a population, the host's part included; what compiles is compiled before.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dymerge_jax.compose.batched_loss import BatchedCrossEntropy
from dymerge_jax.compose.examples import Example
from dymerge_jax.config import named_config
from dymerge_jax.library import Model
from dymerge_jax.model import random_model
from pallas_kernels.bench_report import run_facts
from serving.bench.bench_engine import default_dtype
from serving.bench.decode import SHAPES, random_adapters


def make_model(options: argparse.Namespace) -> Model:
    """A random model with all of its adapters in slots."""
    shape: str = options.shape
    config = named_config(SHAPES.get(shape, shape))
    num_slots = options.adapters * -(-options.rank // options.slot_rank)
    model = Model(random_model(config, options.dtype), None, adapter_slots=num_slots, slot_rank=options.slot_rank)
    for name, adapter in random_adapters(config, options.adapters, rank=options.rank).items():
        model.add_adapter(name, adapter)
    return model


def random_examples(vocab: int, count: int, prompt_len: int, target_len: int) -> list[Example]:
    """Examples of one length."""
    tokens = np.random.default_rng(0).integers(0, vocab, (count, prompt_len + target_len)).tolist()
    return [Example(tuple(row[:prompt_len]), tuple(row[prompt_len:])) for row in tokens]


def measure(model: Model, options: argparse.Namespace, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Milliseconds a mix, by mixes at once."""
    examples = random_examples(model.config.vocab, options.examples, options.prompt_len, options.target_len)
    mixes = np.random.default_rng(1).uniform(-1.5, 1.5, (options.population, options.adapters)) / options.adapters
    for batch_mixes in batches:
        cross_entropy = BatchedCrossEntropy(model, examples, batch_mixes=batch_mixes, max_tokens=options.batch_tokens)
        start_s = time.perf_counter()
        losses = cross_entropy(mixes[:batch_mixes])
        compile_s = time.perf_counter() - start_s
        samples = []
        for _ in range(options.repeats):
            start_s = time.perf_counter()
            losses = cross_entropy(mixes)
            samples.append(1e3 * (time.perf_counter() - start_s) / len(mixes))
        yield {
            "batch_mixes": batch_mixes,
            "batch_rows": cross_entropy.num_rows,
            "batch_tokens": cross_entropy.num_rows * cross_entropy.row_len,
            "compile_s": compile_s,
            "ms_per_mix_median": statistics.median(samples),
            "ms_per_mix_min": min(samples),
            "ms_per_mix_max": max(samples),
            "mean_loss": float(losses.mean()),
        }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m", help="8b, 1b or a named model size (default: %(default)s)")
    parser.add_argument("--dtype", default=default_dtype(), help="of weights and slots (default here: %(default)s)")
    parser.add_argument("--adapters", type=int, default=20, help="adapters, all in every mix (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="of each adapter (default: %(default)s)")
    parser.add_argument("--slot-rank", type=int, default=8, help="rank rows of a slot (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=5, help="examples a mix is tried on (default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=40, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--target-len", type=int, default=8, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--population", type=int, default=24, help="mixes of an iteration (default: %(default)s)")
    parser.add_argument("--batches", default="24,8,1", help="mixes evaluated at once (default: %(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=16384, help="most tokens a batch (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="populations that are timed (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser()
    options = parser.parse_args(given)
    batches = [int(b) for b in options.batches.split(",")]
    if max(batches) > options.population:
        parser.error(f"--batches has {max(batches)}, more than --population {options.population}")
    device = jax.devices()[0].device_kind
    print(f"{device}, {options.shape}, {options.dtype}, {options.adapters} adapters of rank {options.rank}")
    rows = []
    for row in measure(make_model(options), options, batches):
        rows.append(row)
        print(
            f"{row['batch_mixes']:4d} mixes at once, {row['batch_tokens']:6d} tokens a batch: "
            f"{row['ms_per_mix_median']:9.3f} ms a mix ({row['ms_per_mix_min']:.3f} to {row['ms_per_mix_max']:.3f}), "
            f"compiled in {row['compile_s']:.1f} s",
            flush=True,
        )
    result = {
        **run_facts("serving.bench.search", given),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "rows": rows,
        "speed_up": rows[-1]["ms_per_mix_median"] / rows[0]["ms_per_mix_median"],
    }
    print(f"the first of these is {result['speed_up']:.2f} times as fast as the last")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
