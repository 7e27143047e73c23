"""What an adapter costs by the tier that has it: time to first token, and the jitter of decode steps beside loads.

    python -m serving.bench.adapter_tiers --out result.json

Weights are random; adapters lie as PEFT folders in a temporary directory. Files that were just written are in the
system's page cache: "disk" means reading, checking, hashing and cutting them, not the drive's own latency.

Time to first token is that of one request alone on an idle engine, from `add_request` to its token, for a mix whose
adapters are all on disk, in host memory, or in slots. Jitter is the time from one step's tokens to the next while most
rows decode: quiet; with short requests that arrive for adapters in slots; and with the same arrivals for new adapters
that stream in from disk, or from host memory. Steps that decode only and those that also take in a request, slot writes
included, are told apart: the first are compared with the quiet ones, the second with those of arrivals in slots.
"""

import argparse
import contextlib
import json
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from dymerge_jax.config import LlamaConfig, named_config
from dymerge_jax.lora import content_bytes
from dymerge_jax.model import random_model
from pallas_kernels.bench_report import run_facts
from serving.adapter_store import AdapterStore
from serving.batch import Bucket, Buckets
from serving.bench.decode import SHAPES
from serving.config import EngineConfig
from serving.engine import Engine, hand_over_quickly
from serving.programs import decode_programs
from serving.request import Mix, Request, SamplingParams

_NUM_WARM_UP = 2  # requests before a time to first token counts
_SETTLING_STEPS = 4


def write_adapters(folder: Path, config: LlamaConfig, count: int, *, rank: int) -> list[Path]:
    """Random bfloat16 adapters on all seven projections as PEFT folders; each has a file of its own."""
    rng = np.random.default_rng(0)
    blocks = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}
    shapes = {
        n: (g.in_features, w) for g in config.groups.values() for n, w in zip(g.projections, g.widths, strict=True)
    }
    tensors = {}
    for layer in range(config.num_layers):
        for name, (fan_in, fan_out) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{blocks.get(name, 'mlp')}.{name}.lora_"
            a = (rng.standard_normal((rank, fan_in), np.float32) * fan_in**-0.5).astype(jnp.bfloat16)
            b = (rng.standard_normal((fan_out, rank), np.float32) * 0.3).astype(jnp.bfloat16)
            tensors |= {f"{key}A.weight": a, f"{key}B.weight": b}
    folders = []
    for i in range(count):
        path = folder / f"lora-{i}"
        path.mkdir()
        lora_config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank * (1 + i / count),
            "target_modules": [*shapes],
        }
        (path / "adapter_config.json").write_text(json.dumps(lora_config))
        save_file(tensors, path / "adapter_model.safetensors")
        folders.append(path)
    return folders


def make_engine(options: argparse.Namespace, folders: Sequence[Path]) -> tuple[Engine, list[str]]:
    """A compiled engine that loads in the background, and the ids of its adapters."""
    config = named_config(options.shape)
    num_slots = -(-options.rank // options.slot_rank) * options.slots
    store = AdapterStore(
        config,
        slot_rank=options.slot_rank,
        dtype=options.dtype,
        max_rank=options.rank,
        host_bytes=(len(folders) + 1) * options.rank * content_bytes(config, 1, options.dtype),
    )
    engine_config = EngineConfig(
        decode_steps=1,  # a step of the engine is one of the device, whatever the model
        adapter_slots=num_slots,
        slot_rank=options.slot_rank,
        max_num_seqs=options.rows,
        max_num_batched_tokens=max(256, options.rows),
        max_model_len=min(options.prompt_len + 64 + options.steps * 8, config.max_position),
    )
    # On a GPU, every bucket takes long to compile: those that these workloads use.
    buckets = None
    if jax.default_backend() != "cpu":
        sizes = (1, options.rows)
        buckets = Buckets(
            decode=tuple(
                Bucket(n, n, most) for n in sizes for most in decode_programs(n, num_slots, options.slot_rank)
            ),
            mixed=(Bucket(64, options.rows), Bucket(256, options.rows)),
        )
    engine = Engine(
        random_model(config, options.dtype), None, store, (), engine_config, buckets=buckets, loads_in_background=True
    )
    engine.compile()
    return engine, [engine.add_adapter(engine.read_adapter(path.name, path)) for path in folders]


def forget(engine: Engine, *, host: bool) -> None:
    """Empties the slots and the staging area, and the host tier if asked to; the engine must be idle."""
    assert not engine.has_work
    for adapter_id in tuple(engine.slot_cache.resident):
        engine.slot_cache.remove(adapter_id)
    engine.loader.drop_staged()
    if host:
        for adapter_id in engine.store.host.resident:
            engine.store.host.remove(adapter_id)


def make_request(
    engine: Engine, request_id: str, adapters: Sequence[str], *, prompt_len: int, max_tokens: int
) -> Request:
    rng = np.random.default_rng(len(request_id))
    mix = Mix(tuple((adapter_id, 1 / len(adapters)) for adapter_id in adapters))
    return Request(
        request_id,
        rng.integers(0, engine.model.config.vocab, prompt_len).tolist(),
        SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        mix,
        time.monotonic(),
        mix.adapters,
    )


def time_to_first_token_s(engine: Engine, adapters: Sequence[str], prompt_len: int) -> float:
    """Of one request on an idle engine, in seconds; the engine is idle again after it."""
    start_s = time.perf_counter()
    engine.add_request(make_request(engine, "alone", adapters, prompt_len=prompt_len, max_tokens=2))
    first_s = None
    while engine.has_work:
        outputs = engine.step()
        if outputs and first_s is None:
            first_s = time.perf_counter() - start_s
            if outputs[0].error:
                raise RuntimeError(outputs[0].error)
    assert first_s is not None
    return first_s


def measure_ttft(engine: Engine, ids: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows by mix size and tier."""
    rows = []
    for mix_size in (0, 1, 3):
        for tier in ("slots", "host", "disk") if mix_size else ("slots",):
            ttft_s = []
            for i in range(options.repeats + _NUM_WARM_UP):
                adapters = [ids[(i * mix_size + j) % len(ids)] for j in range(mix_size)]
                forget(engine, host=True)
                if tier != "disk":
                    time_to_first_token_s(engine, adapters, options.prompt_len)  # brings them to the host and to slots
                if tier == "host":
                    forget(engine, host=False)
                assert all(engine.adapter_status(adapter_id) == tier for adapter_id in adapters)
                ttft_s.append(time_to_first_token_s(engine, adapters, options.prompt_len))
            ttft = milliseconds(ttft_s[_NUM_WARM_UP:])
            rows.append({"adapters": mix_size, "tier": tier if mix_size else "base", "ttft": ttft})
    return rows


def arrivals(engine: Engine, adapters: Sequence[str], first_token_s: list[float]) -> Iterator[None]:
    """Every second step, a request of one adapter with a short prompt: goes on until every one has its first token."""
    arrived = []
    for i, adapter_id in enumerate(adapters):
        arrived.append(make_request(engine, f"arrival-{i}", [adapter_id], prompt_len=8, max_tokens=1))
        engine.add_request(arrived[-1])
        yield
        yield
    while not all(request.is_finished for request in arrived):
        yield
    for request in arrived:
        assert request.first_token_s is not None, f"{request} failed"
        first_token_s.append(request.first_token_s - request.arrival_s)


def step_times_s(engine: Engine, num_steps: int, events: Iterator[None] | None) -> dict[str, list[float]]:
    """Seconds between the reads of two steps' tokens, for `num_steps` steps or as long as `events` last.

    Returns:
      Those of "decode" steps and of "mixed" ones, which also take in a request.
    """
    seconds: dict[str, list[float]] = {"decode": [], "mixed": []}
    last_s = time.perf_counter()
    while len(seconds["decode"]) < num_steps if events is None else next(events, last_s) is None:
        read = engine._in_flight
        engine.step()
        now_s = time.perf_counter()
        if read is not None:
            is_decode = all(plan.is_decode for plan in read.plans)
            seconds["decode" if is_decode else "mixed"].append((now_s - last_s) / len(read.plans))
        last_s = now_s
    return seconds


def milliseconds(seconds: Sequence[float]) -> dict[str, float] | None:
    """Quantiles; None of nothing."""
    if not len(seconds):
        return None
    ms = np.asarray(seconds) * 1e3
    p50, p90, p99 = np.percentile(ms, (50, 90, 99)).tolist()
    return {"count": len(ms), "ms_p50": p50, "ms_p90": p90, "ms_p99": p99, "ms_max": float(ms.max())}


def measure_jitter(engine: Engine, ids: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of step times, quiet and beside arrivals; two rows are left for those that arrive."""
    held, streamed = ids[: options.held], ids[options.held :][: options.stream]
    resident = [held[i % len(held)] for i in range(len(streamed))]
    cases = {
        "quiet": None,
        "arrivals, adapters in slots": resident,
        "arrivals, adapters stream in from host": streamed,
        "arrivals, adapters stream in from disk": streamed,
    }
    rows = []
    for name, adapters in cases.items():
        forget(engine, host=name.endswith("disk"))
        if name.endswith("host"):  # each once through the tiers
            for adapter_id in streamed:
                time_to_first_token_s(engine, [adapter_id], 8)
            forget(engine, host=False)
        for i in range(options.rows - 2):
            adapters_of_row = [held[i % len(held)]]
            size = {"prompt_len": options.prompt_len, "max_tokens": engine.max_model_len - options.prompt_len}
            engine.add_request(make_request(engine, f"row-{i}", adapters_of_row, **size))
        while any(not request.output_token_ids for request in engine.scheduler.running) or engine.scheduler.num_waiting:
            engine.step()
        for _ in range(_SETTLING_STEPS):
            engine.step()
        tiers = [engine.adapter_status(adapter_id) for adapter_id in adapters or ()]
        num_reads, ttft_s = engine.loader.num_reads, []
        events = None if adapters is None else arrivals(engine, adapters, ttft_s)
        seconds = step_times_s(engine, options.steps, events)
        assert engine.scheduler.num_running >= options.rows - 2, "a row has ended; lower --steps or --stream"
        for request in engine.scheduler.running:
            engine.abort(request.request_id)
        while engine.has_work:
            engine.step()
        rows.append(
            {
                "case": name,
                "arrivals": len(ttft_s),
                "arrivals_by_tier": {tier: tiers.count(tier) for tier in sorted(set(tiers))},
                "reads": engine.loader.num_reads - num_reads,
                "decode_steps": milliseconds(seconds["decode"]),
                "mixed_steps": milliseconds(seconds["mixed"]),
                "ttft": milliseconds(ttft_s),
            }
        )
    return rows


def make_parser() -> argparse.ArgumentParser:
    is_cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape, dtype = ("tiny", "float32") if is_cpu else ("8b", "bfloat16")
    parser.add_argument("--shape", default=shape, help="8b, 1b or a named model size (default here: %(default)s)")
    parser.add_argument("--dtype", default=dtype, help="(default here: %(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (default: %(default)s)")
    parser.add_argument("--slot-rank", type=int, default=8, help="rank rows of a slot (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=32, help="adapters that slots hold (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="running requests at most (default: %(default)s)")
    parser.add_argument("--held", type=int, default=8, help="adapters of the rows that decode (default: %(default)s)")
    parser.add_argument("--stream", type=int, default=64, help="adapters that stream in (default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=32, help="tokens (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="quiet steps (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="times to first token (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the adapters are written for the run (default: a new one)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser


def print_report(result: dict[str, Any]) -> None:
    settings = result["settings"]
    print(
        f"\n{result['device']}, {settings['shape']}, {settings['dtype']}, adapters of rank {settings['rank']} and "
        f"{result['adapter_bytes'] / 1e6:.1f} MB, {settings['rows']} rows"
    )
    header = f"{'p50':>8} {'p90':>8} {'p99':>8} {'max':>8} {'count':>6}"

    def quantiles(row: dict[str, float]) -> str:
        return " ".join(f"{row[key]:8.2f}" for key in ("ms_p50", "ms_p90", "ms_p99", "ms_max")) + f" {row['count']:6d}"

    print(f"\n{'time to first token, ms':40} {header}")
    for r in result["ttft"]:
        print(f"{f'{r["adapters"]} from {r["tier"]}' if r['adapters'] else 'base':40} {quantiles(r['ttft'])}")
    quiet, in_slots = result["jitter"][:2]
    for kind, reference in (("decode_steps", quiet), ("mixed_steps", in_slots), ("ttft", in_slots)):
        print(f"\n{kind.replace('_', ' ') + ', ms':40} {header}  p99 / that of {reference['case']!r}")
        for r in result["jitter"]:
            if r[kind] is not None:
                ratio = r[kind]["ms_p99"] / reference[kind]["ms_p99"]
                print(f"{r['case']:40} {quantiles(r[kind])} {ratio:6.2f}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if options.rows < 3 or options.held > options.slots - 3:
        parser.error("expected --rows of 3 or more, and --held at least 3 below --slots")
    options.shape = SHAPES.get(options.shape, options.shape)
    config = named_config(str(options.shape))
    hand_over_quickly()  # as a server does
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        folders = write_adapters(Path(folder), config, options.held + options.stream, rank=options.rank)
        engine, ids = make_engine(options, folders)
        with contextlib.closing(engine):
            ttft = measure_ttft(engine, ids, options)
            jitter = measure_jitter(engine, ids, options)
    result = {
        **run_facts("serving.bench.adapter_tiers", arguments),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "adapter_bytes": engine.store.known(ids[0]).num_bytes,
        "ttft": ttft,
        "jitter": jitter,
    }
    print_report(result)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
