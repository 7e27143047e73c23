"""Engines of random weights for the load benchmark, and the paper's baselines inside them.

What a baseline models, and what not:

    naive     a loop over the adapters of the batch, a gather and two matmuls each. Compiled, so that nothing is
              dispatched from Python, which an eager engine (PEFT) pays on top.
    bmm       every token through every adapter of the batch, as LoraRetriever does it. Shapes are fixed: A and B of 8
              slots are gathered where the batch uses no more, and of all slots otherwise.
    sgmv      Copy+SGMV: in every step, every layer merges each mix of the batch into a composite in memory, and one
              SGMV (our own kernel, as fast as we have) runs over the composites. Shapes are fixed: a step of n rows
              copies n composites, though rows of equal mix read one; so it is right for Distinct, too slow for Single.
    premerge  what a server of one adapter a request must do: the first request with a mix makes a rank k * r adapter on
              the host and waits for it; it is loaded into slots like any other, and never dropped from host memory.

The base product of the first three is a launch of its own, as in the systems that they come from. Scheduler, cache,
attention and host are ours in all of them: only what the name says differs.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import jax
import numpy as np

from dymerge_jax.config import LlamaConfig, named_config
from dymerge_jax.gating import GatedSetWeights
from dymerge_jax.lora import AdapterWeights, ProjectionWeights
from dymerge_jax.model import Implementations, SplitModel, random_model
from pallas_kernels.maf_mvm.baselines import COMPOSITE_MIX_SIZE, MAX_COMPOSITES
from serving.adapter_store import AdapterStore
from serving.bench.decode import SHAPES, random_adapters
from serving.bench.workloads import GATED_SET, NUM_EXPERTS, TOP_K
from serving.config import DTypeName, EngineConfig
from serving.engine import Engine

Baseline = Literal["none", "premerge", "sgmv", "naive", "bmm"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)

BASELINE_IMPLEMENTATIONS: Mapping[str, Implementations] = {
    "naive": Implementations(maf_mvm="loop"),
    "bmm": Implementations(maf_mvm="bmm"),
    "sgmv": Implementations(maf_mvm="copy_sgmv"),
}


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """What makes one engine differ from another; all points of a spec run on the same one.

    Attributes:
      shape: a named model size, or 8b or 1b.
      dtype: of weights, cache and slots.
      num_adapters: base adapters, "lora-0" and following.
      rank: of each.
      slots, slot_rank: of the slot array.
      max_num_seqs, max_num_batched_tokens, max_model_len: as in `EngineConfig`.
      baseline: "none" is this engine itself.
      has_gated_set: with the gated set of the workload "gated", whose gate then runs in every step.
    """

    shape: str
    dtype: DTypeName
    num_adapters: int = 64
    rank: int = 8
    slots: int = 64
    slot_rank: int = 8
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int = 2048
    baseline: Baseline = "none"
    has_gated_set: bool = False

    def __post_init__(self) -> None:
        if self.num_adapters < 1 or self.rank < 1:
            raise ValueError(f"--adapters is {self.num_adapters} and --rank {self.rank}; both must be at least 1")
        if self.has_gated_set and self.num_adapters < NUM_EXPERTS:
            raise ValueError(f"gated needs {NUM_EXPERTS} adapters, but --adapters is {self.num_adapters}")
        if self.baseline not in ("none", "naive", "bmm") and self.has_gated_set:
            raise ValueError(f"--baseline {self.baseline} merges mixes that are known beforehand, and cannot run gated")
        if self.baseline == "sgmv" and self.max_num_seqs > MAX_COMPOSITES:
            raise ValueError(
                f"--baseline sgmv has room for {MAX_COMPOSITES} mixes a step, but --max-num-seqs is {self.max_num_seqs}"
            )

    @property
    def config(self) -> LlamaConfig:
        """Shape of the model."""
        return named_config(SHAPES.get(self.shape, self.shape))

    @property
    def most_mix_slots(self) -> int | None:
        """Slots of the largest mix that the baseline can run; None for any."""
        return COMPOSITE_MIX_SIZE if self.baseline == "sgmv" else None


def default_dtype() -> DTypeName:
    """bfloat16 on an accelerator, float32 on a CPU."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def make_model(spec: EngineSpec) -> SplitModel:
    """A model of random weights for `make_engine`; engines of one shape share it."""
    return random_model(spec.config, spec.dtype)


def make_engine(spec: EngineSpec, model: SplitModel) -> Engine:
    """An engine with its adapters on the host; compiles nothing yet."""
    adapters = random_adapters(spec.config, spec.num_adapters, rank=spec.rank)
    store = AdapterStore(spec.config, slot_rank=spec.slot_rank, dtype=spec.dtype)
    for name, weights in adapters.items():
        store.add(store.from_memory(name, weights))
    engine_config = EngineConfig(
        adapter_slots=spec.slots,
        slot_rank=spec.slot_rank,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_model_len=spec.max_model_len,
        dtype=spec.dtype,
    )
    gated_sets = [random_gated_set(spec.config, list(adapters)[:NUM_EXPERTS])] if spec.has_gated_set else []
    implementations = BASELINE_IMPLEMENTATIONS.get(spec.baseline, Implementations())
    return Engine(
        model, None, store, gated_sets, engine_config, implementations=implementations, loads_in_background=True
    )


def random_gated_set(config: LlamaConfig, experts: Sequence[str]) -> GatedSetWeights:
    """The gated set of the workload "gated": one gate a layer over `experts`, the top 2 renormalised."""
    rng = np.random.default_rng(7)
    gates = {
        (layer, "layer"): rng.standard_normal((len(experts), config.hidden), np.float32)
        for layer in range(config.num_layers)
    }
    return GatedSetWeights(
        name=GATED_SET, experts=tuple(experts), granularity="layer", top_k=TOP_K, renormalize=True, gates=gates
    )


def merge_adapters(adapters: Sequence[tuple[AdapterWeights, float]], *, name: str) -> AdapterWeights:
    """One adapter that does what a mix does: ranks side by side, weight and scaling folded into A.

    Args:
      adapters: (adapter, weight) pairs.
      name: told apart from other composites by it.

    Returns:
      An adapter of the sum of the ranks, with scale 1, in the dtype of the first.
    """
    keys = {key for adapter, _ in adapters for key in adapter.projections}
    projections = {}
    for key in sorted(keys):
        parts = [(p, weight) for adapter, weight in adapters if (p := adapter.projections.get(key)) is not None]
        dtype = parts[0][0].a.dtype
        a = np.concatenate([(p.a.astype(np.float32) * (weight * p.scale)).astype(dtype) for p, weight in parts])
        b = np.concatenate([p.b.astype(dtype) for p, _ in parts], axis=1)
        projections[key] = ProjectionWeights(a, b, 1.0)
    return AdapterWeights(projections, content_hash=name)
