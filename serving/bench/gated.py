"""Time per output token where a gate chooses the adapters of every token, beside static mixes and beside baselines.

    python -m serving.bench.gated --shape 8b --out gated.json

Every row of a closed batch uses one gated set of 8 experts, of which the top 2 keep a weight: "layer" has one gate a
layer, "linear" one for each of its seven projections. In the static workload, each row mixes two of the same 8 adapters
by weights that its request gives, so all 8 slots are active in every step, as they are where rows are gated. "xla" has
XLA's product for the gates of a site in place of the kernel of `gate_mix`. What the baselines model:
`serving.bench.bench_engine`. All engines share one model of random weights; the tokens of the others are compared with
ours. In bfloat16 they part at some token: a gate chooses another expert where two are as good but for rounding, and
random weights amplify that.
"""

import argparse
import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dymerge_jax.config import PROJECTIONS, LlamaConfig
from dymerge_jax.gating import GatedSetWeights
from dymerge_jax.model import Implementations, SplitModel
from pallas_kernels.bench_report import run_facts
from pallas_kernels.gate_mix import Implementation as GateImplementation
from serving.adapter_store import AdapterStore
from serving.batch import Bucket, Buckets
from serving.bench.bench_engine import (
    BASELINE_IMPLEMENTATIONS,
    EngineSpec,
    default_dtype,
    make_model,
    random_gated_set,
)
from serving.bench.decode import StepTimer, Workload, random_adapters, run_workload
from serving.bench.workloads import GATED_SET, NUM_EXPERTS, TOP_K
from serving.config import EngineConfig
from serving.engine import Engine
from serving.request import Mix

_EXPERTS = tuple(f"lora-{i}" for i in range(NUM_EXPERTS))
_PREFILL_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class GatedWorkload(Workload):
    """A closed batch whose rows all use the gated set."""

    def mix(self, index: int) -> Mix:
        return Mix(gated_set=GATED_SET)

    def adapters(self, index: int) -> tuple[str, ...]:
        return _EXPERTS


@dataclasses.dataclass(frozen=True)
class Contestant:
    """An engine and what it runs.

    Attributes:
      name: of the table's row, and what --workload calls it.
      baseline: see `bench_engine`; "none" is this engine itself.
      is_per_projection: the gated set has a gate for each projection.
      workload: the batch.
      gate_mix: implementation of the gates; None for the one that is picked.
    """

    name: str
    baseline: str
    is_per_projection: bool
    workload: Workload
    gate_mix: GateImplementation | None = None


def contestants(batch: int) -> list[Contestant]:
    """The static mix first: what the others are compared with."""
    static = Workload("static", batch, TOP_K, NUM_EXPERTS)
    gated = GatedWorkload("gated", batch, NUM_EXPERTS, NUM_EXPERTS)
    return [
        Contestant("static", "none", False, static),
        Contestant("layer", "none", False, gated),
        Contestant("linear", "none", True, gated),
        Contestant("layer-bmm", "bmm", False, gated),
        Contestant("layer-naive", "naive", False, gated),
        Contestant("linear-naive", "naive", True, gated),
        Contestant("layer-xla", "none", False, gated, "reference"),
        Contestant("linear-xla", "none", True, gated, "reference"),
    ]


def per_projection(config: LlamaConfig, gated_set: GatedSetWeights) -> GatedSetWeights:
    """The set with random gates for every projection in place of its own."""
    rng = np.random.default_rng(8)
    fan_in = {p: group.in_features for group in config.groups.values() for p in group.projections}
    gates = {
        (layer, projection): rng.standard_normal((len(gated_set.experts), fan_in[projection]), np.float32)
        for layer in range(config.num_layers)
        for projection in PROJECTIONS
    }
    return dataclasses.replace(gated_set, granularity="projection", gates=gates)


def make_engine(contestant: Contestant, model: SplitModel, options: argparse.Namespace) -> Engine:
    """An engine with room for the workload and no more, with the programs that it uses; compiles nothing yet."""
    store = AdapterStore(model.config, slot_rank=options.rank, dtype=options.dtype)
    for name, weights in random_adapters(model.config, NUM_EXPERTS, rank=options.rank).items():
        store.add(store.from_memory(name, weights))
    sets: Sequence[GatedSetWeights] = ()
    if isinstance(contestant.workload, GatedWorkload):
        gated_set = random_gated_set(model.config, _EXPERTS)
        sets = [per_projection(model.config, gated_set) if contestant.is_per_projection else gated_set]
    batch, max_len = contestant.workload.batch, options.prompt_len + options.output_len
    engine_config = EngineConfig(
        adapter_slots=options.slots,
        slot_rank=options.rank,
        max_num_seqs=batch,
        max_num_batched_tokens=_PREFILL_TOKENS,
        max_model_len=max_len,
        num_blocks=batch * -(-max_len // EngineConfig.block_size),
        enable_prefix_cache=False,  # every run has the same prompts
        dtype=options.dtype,
    )
    buckets = Buckets(decode=(Bucket(batch, batch),), mixed=(Bucket(_PREFILL_TOKENS, batch),))
    implementations = BASELINE_IMPLEMENTATIONS.get(contestant.baseline, Implementations())
    implementations = dataclasses.replace(implementations, gate_mix=contestant.gate_mix)
    return Engine(model, None, store, sets, engine_config, buckets=buckets, implementations=implementations)


def measure(contestant: Contestant, model: SplitModel, options: argparse.Namespace) -> dict[str, Any]:
    """One row: of three runs the last, and whether the one before gave the same tokens."""
    engine = make_engine(contestant, model, options)
    engine.compile(progress=False)
    timer = StepTimer(engine)
    lengths = {"prompt_len": options.prompt_len, "output_len": options.output_len}
    _, before, last = (run_workload(engine, timer, contestant.workload, **lengths) for _ in range(3))
    return last | {
        "workload": contestant.name,
        "baseline": contestant.baseline,
        "is_gated": isinstance(contestant.workload, GatedWorkload),
        "is_per_projection": contestant.is_per_projection,
        "gate_mix": contestant.gate_mix,
        "tokens_repeat": before["tokens"] == last["tokens"],
    }


def compare_tokens(row: dict[str, Any], ours: dict[bool, Any]) -> None:
    """Puts the share of first tokens that a gated row has in common with ours in place of its tokens.

    Args:
      row: of the result.
      ours: tokens of this engine as it is, with a gate a layer and, by True, with one for each projection; filled.
    """
    tokens = row.pop("tokens")
    if not row["is_gated"]:
        return
    if row["baseline"] == "none" and row["gate_mix"] is None:
        ours[row["is_per_projection"]] = tokens
    elif (own := ours.get(row["is_per_projection"])) is not None:
        pairs = list(zip(tokens, own, strict=True))
        row["first_tokens_like_ours"] = sum(a[0] == b[0] for a, b in pairs) / len(pairs)


def print_report(result: dict[str, Any]) -> None:
    settings, rows = result["settings"], result["rows"]
    print(
        f"\n{result['device']}, {settings['shape']}, {settings['dtype']}, batch {settings['batch']}, {NUM_EXPERTS} "
        f"adapters of rank {settings['rank']} in {settings['slots']} slots, prompt {settings['prompt_len']} + output "
        f"{settings['output_len']} tokens"
    )
    head = f"{'workload':12} {'TPOT ms':>8} {'p90':>7} {'/ static':>8} {'/ layer':>8} {'1st =':>8} {'repeats':>7}"
    print(f"{head}  same twice")
    ms_of = {row["workload"]: row["tpot_ms_median"] for row in rows}
    for r in rows:
        ratios = [r["tpot_ms_median"] / ms_of[name] if name in ms_of else None for name in ("static", "layer")]
        shares = ["-" if n is None else f"{n:.2f}" for n in (*ratios, r.get("first_tokens_like_ours"))]
        print(
            f"{r['workload']:12} {r['tpot_ms_median']:8.3f} {r['tpot_ms_p90']:7.3f} "
            f"{shares[0]:>8} {shares[1]:>8} {shares[2]:>8} {r['repeats']:7d}  {r['tokens_repeat']}"
        )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    is_cpu = jax.default_backend() == "cpu"
    parser.add_argument("--shape", default="tiny" if is_cpu else "8b", help="model size (default here: %(default)s)")
    parser.add_argument("--dtype", default=default_dtype(), help="(default here: %(default)s)")
    names = [contestant.name for contestant in contestants(1)]
    parser.add_argument("--workload", nargs="+", choices=names, default=names, help="(default: all)")
    parser.add_argument("--batch", type=int, default=32, help="rows (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="of adapters and slots (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=64, help="adapter slots (default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=224, help="tokens (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if options.slots < NUM_EXPERTS:
        parser.error(f"--slots is {options.slots}; expected at least {NUM_EXPERTS}, one for each expert")
    model = make_model(EngineSpec(options.shape, options.dtype, rank=options.rank))
    rows: list[dict[str, Any]] = []
    result = {
        **run_facts("serving.bench.gated", arguments),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "rows": rows,
    }
    ours: dict[bool, Any] = {}
    for contestant in (c for c in contestants(options.batch) if c.name in options.workload):
        start_s = time.perf_counter()
        row = measure(contestant, model, options)
        compare_tokens(row, ours)
        rows.append(row)
        logging.info(
            "%s: TPOT %.3f ms, measured in %.0f s",
            contestant.name, row["tpot_ms_median"], time.perf_counter() - start_s,
        )  # fmt: skip
        if options.out is not None:  # what has been measured stays if the rest is not
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print_report(result)


if __name__ == "__main__":
    main()
