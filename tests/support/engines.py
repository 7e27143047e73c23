"""Small engines in memory, and running requests on them to the end."""

from collections.abc import Mapping, Sequence
from typing import Any

from dymerge_jax.lora import AdapterWeights
from dymerge_jax.model import SplitModel
from dymerge_jax.xlora import GatedSet
from serving.adapter_store import AdapterStore, StoredAdapter
from serving.batch import Buckets
from serving.config import EngineConfig
from serving.engine import Engine
from serving.request import FinishReason, Mix, Request, RequestOutput, SamplingParams
from tests.support.compiles import recorded_compiles
from tests.support.tiny_models import random_gated_set


def make_engine(
    model: SplitModel,
    adapters: Mapping[str, AdapterWeights],
    gated_sets: Sequence[GatedSet] = (),
    *,
    buckets: Buckets | None = None,
    **config: Any,
) -> Engine:
    """A compiled engine; `config` replaces small defaults."""
    sizes: dict[str, Any] = {
        "adapter_slots": 8,
        "slot_rank": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "max_model_len": 64,
    }
    engine_config = EngineConfig(**(sizes | config))
    store = AdapterStore(
        model.config,
        slot_rank=engine_config.slot_rank,
        dtype=model.dtype,
        max_rank=engine_config.adapter_slots * engine_config.slot_rank,
        host_bytes=engine_config.adapter_host_bytes,
    )
    for name, weights in adapters.items():
        store.add(StoredAdapter(name, None, weights))
    engine = Engine(model, None, store, gated_sets, engine_config, buckets=buckets)
    engine.compile(progress=False)
    return engine


def make_tight_engine(
    model: SplitModel,
    adapters: Mapping[str, AdapterWeights],
    gated_set: GatedSet | None = None,
    *,
    max_num_batched_tokens: int = 16,
) -> Engine:
    """Four slots, and 24 blocks for four rows of up to 48 tokens; by default with a set "gated" of adapters a and b.

    Every such engine of one model takes its programs from the first: jax keeps what it has compiled.
    """
    if gated_set is None:
        gated_set = random_gated_set(
            model.config, "gated", ["a", "b"], granularity="layer", top_k=1, renormalize=True, seed=3
        )
    return make_engine(
        model,
        adapters,
        [gated_set],
        max_num_batched_tokens=max_num_batched_tokens,
        adapter_slots=4,
        num_blocks=24,
        max_model_len=48,
    )


def make_request(
    engine: Engine, request_id: str, prompt: Sequence[int], mix: Mapping[str, float] | str, **sampling: Any
) -> Request:
    """A greedy request unless `sampling` says otherwise; a str as mix names a gated set."""
    if isinstance(mix, str):
        gated_set = next(s for s in engine.gated_sets if s.name == mix)
        request_mix, adapters = Mix(gated_set=mix), gated_set.experts
    else:
        request_mix = Mix(tuple(mix.items()))
        adapters = request_mix.adapters
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(**({"max_tokens": 6, "ignore_eos": True} | sampling)),
        mix=request_mix,
        arrival_s=0.0,
        adapters=tuple(adapters),
    )


def run_to_end(engine: Engine) -> dict[str, list[RequestOutput]]:
    """Steps until nothing is left; outputs by request id. Law 6 must hold: nothing compiles on the way."""
    outputs: dict[str, list[RequestOutput]] = {}
    with recorded_compiles() as compiles:
        while engine.has_work:
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
    assert compiles == []
    engine.check_integrity()
    return outputs


def token_ids(outputs: Sequence[RequestOutput]) -> list[int]:
    """All tokens of one request's outputs, which must end with a finish reason."""
    assert outputs[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    return [t for o in outputs for t in o.token_ids]


def generate(engine: Engine, prompt: Sequence[int], mix: Mapping[str, float] | str, **sampling: Any) -> list[int]:
    """One request alone."""
    engine.add_request(make_request(engine, "alone", prompt, mix, **sampling))
    return token_ids(run_to_end(engine)["alone"])
