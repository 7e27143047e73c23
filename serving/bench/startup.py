"""Time from a process's start to an engine that can serve, cold and with the programs of the last start kept.

    python -m serving.bench.startup --shape 8b --out startup.json

Weights are random and no adapter is read: this is JAX's own start, memory, and every program that a server of these
sizes compiles. Each start is a process of its own; the first finds an empty cache folder, the others what it left.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def start_once(shape: str, *, slots: int, max_num_seqs: int, max_num_batched_tokens: int) -> dict[str, Any]:
    """In this process: makes model and engine, and compiles; seconds of each part."""
    start_s = time.perf_counter()
    import jax

    from dymerge_jax.config import named_config
    from dymerge_jax.model import random_model
    from serving.adapter_store import AdapterStore
    from serving.bench.decode import SHAPES
    from serving.config import EngineConfig
    from serving.engine import Engine

    device = jax.devices()[0].device_kind
    imported_s = time.perf_counter()
    config = named_config(SHAPES.get(shape, shape))
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    engine_config = EngineConfig(
        adapter_slots=slots, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, dtype=dtype
    )
    model = random_model(config, dtype)
    jax.block_until_ready(model.state)
    model_s = time.perf_counter()
    store = AdapterStore(model.config, slot_rank=engine_config.slot_rank, dtype=dtype)
    engine = Engine(model, None, store, (), engine_config)
    engine.compile(progress=True)
    end_s = time.perf_counter()
    return {
        "device": device,
        "jax": jax.__version__,
        "num_programs": engine.num_programs,
        "jax_s": imported_s - start_s,
        "model_s": model_s - imported_s,
        "compile_s": end_s - model_s,
        "total_s": end_s - start_s,
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", help="8b, 1b or a named model size (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=128, help="adapter slots (default: %(default)s)")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="rows (default: %(default)s)")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=512, help="token budget of a step (default: %(default)s)"
    )
    parser.add_argument("--warm-starts", type=int, default=1, help="starts after the cold one (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--once", action="store_true", help="start in this process and print JSON")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    if options.once:
        sizes = {k: getattr(options, k) for k in ("slots", "max_num_seqs", "max_num_batched_tokens")}
        print(json.dumps(start_once(options.shape, **sizes)))
        return
    starts = []
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",  # as the server sets it
        }
        command = [sys.executable, "-m", "serving.bench.startup", "--once", *sys.argv[1:]]
        for i in range(1 + options.warm_starts):
            start_s = time.perf_counter()
            child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            result = json.loads(child.stdout.splitlines()[-1])
            result |= {"cache": "warm" if i else "cold", "process_s": time.perf_counter() - start_s}
            starts.append(result)
            print(
                f"{result['device']}, {options.shape}, {result['num_programs']} programs, {result['cache']}: "
                f"{result['total_s']:.1f} s (jax {result['jax_s']:.1f}, model {result['model_s']:.1f}, "
                f"compile {result['compile_s']:.1f})",
                flush=True,
            )
    if options.out is not None:
        command_line = shlex.join(["python", "-m", "serving.bench.startup", *sys.argv[1:]])
        options.out.write_text(json.dumps({"command": command_line, "starts": starts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
