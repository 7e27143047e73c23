"""The engine: owns the device's state; one step is plan, upload, dispatch, and commit of the step before.

The life of a request:
  1. `add_request` checks it and lets it wait in the scheduler.
  2. A plan admits it: it gets a row, KV blocks and pins on its adapters; those not in slots yet are copied there.
     Blocks that hold what its prompt begins with, computed for the same mix, are shared.
  3. The rest of its prompt runs in prefill chunks, beside the decode rows of other requests.
  4. The step that runs the prompt's last token samples the first output token; from then on it is a decode row. Sampled
     tokens stay on the device, where the next step reads them.
  5. The host reads the tokens of a step while the next one runs, detokenizes them and checks for the end. A step that
     was dispatched before the end was seen computes one token too many, which is dropped.
  6. It finishes by a stop token or string, its length limit, or `abort`; row, blocks and pins are released at once.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from tqdm import tqdm

from checkpoints.loaded_model import LoadedModel
from checkpoints.peft_adapter import load_adapter
from dymerge_jax.gating import GatedSetWeights, build_gate_array, place_experts
from dymerge_jax.kv_cache import block_bytes, empty_cache
from dymerge_jax.lora import empty_content, empty_slots, slot_bytes, write_slot
from dymerge_jax.model import Implementations, SplitModel, model_from_params
from dymerge_jax.sampling import SampledTokens
from dymerge_jax.step import StepTables
from serving.adapter_store import AdapterStore, StoredAdapter
from serving.batch import Bucket, Buckets, RowTables, build_batch
from serving.block_pool import BlockPool
from serving.config import EngineConfig
from serving.detokenize import IncrementalDetokenizer
from serving.metrics import Metrics
from serving.plan import Load, StepPlan
from serving.policies import make_policy
from serving.prefix_cache import PrefixCache
from serving.programs import Sampler, StepPrograms, pick_buckets, sampler_of
from serving.request import FinishReason, Request, RequestOutput, TokenLogprob
from serving.scheduler import Scheduler
from serving.slot_cache import SlotCache

logger = logging.getLogger(__name__)

_CPU_CACHE_BYTES = 1 << 30  # KV memory without a device that says how much it has
_SPARE_FRACTION = 0.08  # of an accelerator's memory, for the step's temporaries and the compiler


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """A dispatched step whose tokens the host has not read."""

    plan: StepPlan
    sampled: SampledTokens
    dispatched_s: float


class Engine:
    """Runs requests with different mixes in one batch. Not thread-safe: one thread calls it.

    Attributes:
      config: as given.
      model: weights on the device.
      tokenizer: a transformers tokenizer, or None.
      store: adapters on the host.
      gated_sets: gated sets a request may name.
      max_model_len: most tokens of one request, prompt and output together.
      metrics: counters and histograms.
      scheduler: waiting and running requests, and who owns which rows and blocks.
      slot_cache: which adapter is in which slots.
      buckets: sizes of the step programs.
    """

    def __init__(
        self,
        model: SplitModel,
        tokenizer: Any,
        store: AdapterStore,
        gated_sets: Sequence[GatedSetWeights],
        config: EngineConfig,
        *,
        metrics: Metrics | None = None,
        implementations: Implementations = Implementations(),  # noqa: B008 (frozen)
        buckets: Buckets | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes memory for slots and KV blocks; compiles nothing yet (`compile`).

        Args:
          model: weights on the device.
          tokenizer: a transformers tokenizer; None leaves every output's text empty.
          store: adapters, which must include every expert of the gated sets.
          gated_sets: gated sets a request may name.
          config: sizes and policy.
          metrics: where to count; None counts into a registry of its own.
          implementations: of the ops; the default picks by backend and shape.
          buckets: sizes of the step programs; None picks them for this backend. Of use where few sizes will run.
          clock: seconds, the clock of `Request.arrival_s`.

        Raises:
          ValueError: If sizes do not fit the model or the device's memory.
        """
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.store = store
        self.gated_sets = tuple(gated_sets)
        self.metrics = metrics or Metrics()
        self._clock = clock
        self._gated_set_ids = {s.name: i for i, s in enumerate(self.gated_sets)}
        self._make_slots()
        num_slots = self._slots.num_slots
        self._gates = build_gate_array(model.config, self.gated_sets, num_slots=num_slots)
        num_blocks = config.num_blocks or _blocks_that_fit(model, config)
        self.max_model_len = _max_model_len(model, config, num_blocks)
        blocks_per_seq = -(-self.max_model_len // config.block_size)
        self._num_blocks = min(num_blocks, config.max_num_seqs * blocks_per_seq)
        self._make_cache()
        self._rows = RowTables(config.max_num_seqs, blocks_per_seq, num_slots)
        self.slot_cache = SlotCache(config.adapter_slots)
        block_pool = BlockPool(self._num_blocks, config.block_size)
        self.scheduler = Scheduler(
            policy=make_policy(config),
            block_pool=block_pool,
            slot_cache=self.slot_cache,
            prefix_cache=PrefixCache(block_pool) if config.enable_prefix_cache else None,
            num_slots_by_adapter=store.num_slots,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )
        self.buckets = buckets or pick_buckets(config.max_num_seqs, config.max_num_batched_tokens, config.adapter_slots)
        self._programs = StepPrograms(model, self.buckets, implementations)
        self._in_flight: _InFlight | None = None
        self._detokenizers: dict[str, IncrementalDetokenizer] = {}

    # Start-up

    def compile(self, *, progress: bool = True) -> None:
        """Compiles every program the engine will ever run, and runs each once."""
        start_s = time.perf_counter()
        programs = self._programs
        programs.compile(self._cache, self._last_tokens, self._tables(), progress=progress)
        self._warm_up()
        logger.info("compiled %d programs in %.1f s", programs.num_programs, time.perf_counter() - start_s)

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return self._programs.num_programs

    def _tables(self) -> StepTables:
        return StepTables(self._slots, self._gates, self._rows.rows, self._rows.block_tables)

    def _warm_up(self) -> None:
        """Runs programs once on an empty batch, and one slot update, so that no request pays for a first call."""
        for bucket, sampler in self._programs.first_calls():
            self._run(StepPlan(), bucket, sampler)
        content = empty_content(self.model.config, slot_rank=self.config.slot_rank, dtype=self.model.dtype)
        self._slots = write_slot(self._slots, 0, content)
        jax.block_until_ready(self._last_tokens)

    def _make_slots(self) -> None:
        # Kernels want at least one slot; the slot cache never hands it out when there are none.
        self._slots = empty_slots(
            self.model.config,
            num_slots=max(1, self.config.adapter_slots),
            slot_rank=self.config.slot_rank,
            dtype=self.model.dtype,
        )

    def _make_cache(self) -> None:
        config = self.config
        self._cache = empty_cache(
            self.model.config, num_blocks=self._num_blocks, block_size=config.block_size, dtype=self.model.dtype
        )
        self._last_tokens: Int[Array, " num_rows"] = jnp.zeros((config.max_num_seqs,), jnp.int32)

    # Requests

    def add_request(self, request: Request) -> None:
        """Lets a request wait.

        Raises:
          InvalidRequestError: If it could never run here; nothing has changed then.
        """
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                self.tokenizer.backend_tokenizer, request.prompt_token_ids, request.sampling.stop
            )
        self.scheduler.add(request)
        self.metrics.observe_arrival(request)
        if detokenizer is not None:
            self._detokenizers[request.request_id] = detokenizer

    def abort(self, request_id: str) -> None:
        """Ends a request and releases what it owns; an unknown or finished one is ignored."""
        request = self.scheduler.abort(request_id)
        if request is not None:
            self._forget(request)

    def forget_prefixes(self) -> None:
        """Lets every later request compute its prompt anew; for measurements of cold prompts."""
        self.scheduler.block_pool.forget_contents()

    @property
    def has_work(self) -> bool:
        """True while a request is not finished or a step's tokens are not read."""
        return self.scheduler.has_work or self._in_flight is not None

    # One step

    def step(self) -> list[RequestOutput]:
        """Dispatches the next step, then reads the tokens of the step before; returns what is new.

        If anything fails on the way, every running request ends with reason ERROR, the device's state is made anew
        where it was lost, and the exception goes on to the caller; waiting requests and later ones can run.
        """
        plan = None
        try:
            plan = self.scheduler.plan(self._clock())
            outputs = self._carry_out(plan)
        except Exception:
            self._give_up(plan)
            raise
        self._observe()
        if not self.has_work:
            self.scheduler.check_integrity()
        return outputs

    def _carry_out(self, plan: StepPlan) -> list[RequestOutput]:
        dispatched = None
        if not plan.is_empty:
            dispatched = self._dispatch(plan)
            self.scheduler.on_dispatched(plan)
        before, self._in_flight = self._in_flight, dispatched
        return self._commit(before) if before is not None else []

    def _give_up(self, plan: StepPlan | None) -> None:
        """Ends what runs after a failure in `plan`, or in planning if it is None; makes lost device state anew."""
        self._in_flight = None
        for request in self.scheduler.fail(plan or StepPlan()):
            self._forget(request)
        if _delete_if_lost((*self._cache.layers, self._last_tokens)):
            self._make_cache()
        are_slots_lost = _delete_if_lost(jax.tree.leaves(self._slots))
        if are_slots_lost:
            self._make_slots()
        if are_slots_lost or plan is None:  # without a plan, nobody knows which loads it began
            for name in tuple(self.slot_cache.resident):
                self.slot_cache.remove(name)

    def _dispatch(self, plan: StepPlan) -> _InFlight:
        start_s = self._clock()
        self._load(plan.loads)
        self._rows.update(plan.chunks, self.slot_cache.lookup, self._gated_set_ids)
        # Those of running requests that the step leaves out are counted too: they are few, and counting is slow.
        bucket = self.buckets.of(plan, self.slot_cache.num_pinned_slots)
        sampled = self._run(plan, bucket, sampler_of(plan))
        for array in jax.tree.leaves(sampled):
            array.copy_to_host_async()
        return _InFlight(plan=plan, sampled=sampled, dispatched_s=start_s)

    def _run(self, plan: StepPlan, bucket: Bucket, sampler: Sampler) -> SampledTokens:
        batch, tables = build_batch(plan, bucket), self._tables()
        result = self._programs.forward(bucket, self._cache, self._last_tokens, tables, batch)
        self._cache, self._last_tokens = result.cache, result.last_tokens
        sampled, self._last_tokens = self._programs.sample(sampler, result, tables, batch)
        return sampled

    def _load(self, loads: Iterable[Load]) -> None:
        """Copies adapters into their slots; ordered on the device after the steps that read the slots before."""
        loads = tuple(loads)
        for load in loads:
            contents = self.store.contents(load.adapter_id)
            for slot_id, content in zip(load.slot_ids, contents, strict=True):
                self._slots = write_slot(self._slots, slot_id, content)
        if loads and self._gates is not None:
            resident = {name: self.slot_cache.lookup(name) or () for name in self.slot_cache.resident}
            self._gates = place_experts(self._gates, self.gated_sets, resident)

    # Reading a step's tokens

    def _commit(self, step: _InFlight) -> list[RequestOutput]:
        sampled: SampledTokens = jax.tree.map(np.asarray, step.sampled)
        tokens = sampled.tokens.tolist()
        now_s = self._clock()
        self.metrics.observe_step(step.plan, now_s - step.dispatched_s)
        outputs = []
        for i, chunk in enumerate(step.plan.chunks):
            if chunk.samples and not chunk.request.is_finished:
                request, logprobs = chunk.request, ()
                if request.sampling.logprobs is not None:
                    logprobs = (_token_logprob(request, i, sampled),)
                outputs.append(self._commit_token(request, tokens[i], logprobs, now_s))
        self.metrics.observe_tokens(len(outputs))
        return outputs

    def _commit_token(
        self, request: Request, token_id: int, logprobs: tuple[TokenLogprob, ...], now_s: float
    ) -> RequestOutput:
        request.commit_token(token_id)
        if request.first_token_s is None:
            request.first_token_s = now_s
            self.metrics.observe_ttft(request, now_s)
        text, finish_reason = self._text_and_end(request, token_id)
        if finish_reason is not None:
            self.scheduler.finish(request, finish_reason)
            self._forget(request)
        return RequestOutput(
            request_id=request.request_id,
            text=text,
            token_ids=(token_id,),
            logprobs=logprobs,
            finish_reason=finish_reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _text_and_end(self, request: Request, token_id: int) -> tuple[str, FinishReason | None]:
        """New text after a token, and why the request ends with it, if it does."""
        detokenizer = self._detokenizers.get(request.request_id)
        if self._is_stop_token(request, token_id):
            return (detokenizer.finish() if detokenizer else ""), FinishReason.STOP
        text = ""
        if detokenizer is not None:
            text, is_stopped = detokenizer.push(token_id)
            if is_stopped:
                return text, FinishReason.STOP
        if self.scheduler.has_reached_limit(request):
            return text + (detokenizer.finish() if detokenizer else ""), FinishReason.LENGTH
        return text, None

    def _is_stop_token(self, request: Request, token_id: int) -> bool:
        if token_id in request.sampling.stop_token_ids:
            return True
        return not request.sampling.ignore_eos and token_id in self.model.config.eos_token_ids

    def _forget(self, request: Request) -> None:
        self._detokenizers.pop(request.request_id, None)
        self.metrics.observe_finish(request, self._clock())

    def _observe(self) -> None:
        self.metrics.set_queues(self.scheduler.running, self.scheduler.waiting)
        self.metrics.set_resources(
            num_resident=len(self.slot_cache.resident),
            num_loading=0,  # a load is part of the step that needs it
            num_free_blocks=self.scheduler.block_pool.num_free,
        )

    def check_integrity(self) -> None:
        """Checks that every row, block, slot and pin has exactly one owner."""
        self.scheduler.check_integrity()


def build_engine(
    model: LoadedModel,
    adapters: Sequence[tuple[str, Path]],
    gated_sets: Sequence[GatedSetWeights],
    config: EngineConfig,
    *,
    metrics: Metrics | None = None,
    progress: bool = True,
) -> Engine:
    """Reads the adapters, takes the device's memory and compiles every step program.

    Args:
      model: as loaded.
      adapters: (name, PEFT folder) pairs.
      gated_sets: whose experts are among the adapters, by name.
      config: sizes and policy.
      metrics: see `Engine`.
      progress: show progress bars.

    Raises:
      CheckpointError: If an adapter cannot be read or does not fit the model.
      ValueError: If a gated set's expert is missing or sizes do not fit.
    """
    split = model_from_params(model.config, model.params)
    store = AdapterStore(split.config, slot_rank=config.slot_rank, dtype=split.dtype)
    max_rank = config.adapter_slots * config.slot_rank
    for name, folder in tqdm(adapters, desc="reading adapters", unit="adapter", disable=not progress or not adapters):
        weights = load_adapter(folder, split.config, max_rank=max_rank)
        store.add(StoredAdapter(name, folder, weights))
    for gated_set in gated_sets:
        missing = [expert for expert in gated_set.experts if expert not in store]
        if missing:
            raise ValueError(
                f"gated set {gated_set.name!r} uses the adapters {', '.join(missing)}, which are not loaded; add them "
                "with --adapters"
            )
    engine = Engine(split, model.tokenizer, store, gated_sets, config, metrics=metrics)
    engine.compile(progress=progress)
    return engine


def _token_logprob(request: Request, index: int, sampled: SampledTokens) -> TokenLogprob:
    assert sampled.logprobs is not None
    assert sampled.top_tokens is not None
    assert sampled.top_logprobs is not None
    num_top = request.sampling.logprobs or 0
    top = zip(sampled.top_tokens[index, :num_top].tolist(), sampled.top_logprobs[index, :num_top].tolist(), strict=True)
    return TokenLogprob(int(sampled.tokens[index]), float(sampled.logprobs[index]), tuple(top))


def _delete_if_lost(arrays: Sequence[Array]) -> bool:
    """Frees the memory of all `arrays` and returns True if one of them was donated to, or made by, a failed program."""
    try:
        jax.block_until_ready(arrays)
    except Exception:
        logger.warning("the device's state is lost", exc_info=True)
    else:
        return False
    for array in arrays:
        array.delete()  # nothing happens to one that is deleted already
    return True


def _blocks_that_fit(model: SplitModel, config: EngineConfig) -> int:
    """KV blocks for the memory that weights and slots leave; a fixed amount where the device does not tell."""
    bytes_per_block = block_bytes(model.config, block_size=config.block_size, dtype=model.dtype)
    device = next(iter(jax.tree.leaves(model.state)[0].devices()))
    stats: dict[str, int] | None = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return max(1, _CPU_CACHE_BYTES // bytes_per_block)
    free_bytes = int(stats["bytes_limit"] * (1 - _SPARE_FRACTION)) - stats["bytes_in_use"]
    if free_bytes < bytes_per_block:
        slots_bytes = config.adapter_slots * slot_bytes(model.config, config.slot_rank, model.dtype)
        raise ValueError(
            f"weights and {slots_bytes / 1e9:.1f} GB of adapter slots leave no memory for a KV block on a device of "
            f"{stats['bytes_limit'] / 1e9:.1f} GB; lower --adapter-slots or --slot-rank"
        )
    return free_bytes // bytes_per_block


def _max_model_len(model: SplitModel, config: EngineConfig, num_blocks: int) -> int:
    """The limit asked for, or as much of the model's own as one request can have in the KV blocks."""
    room = num_blocks * config.block_size
    if config.max_model_len is None:
        return min(model.config.max_position, room)
    if config.max_model_len > model.config.max_position:
        raise ValueError(
            f"--max-model-len is {config.max_model_len}, but the model was made for {model.config.max_position} tokens"
        )
    if config.max_model_len > room:
        raise ValueError(
            f"--max-model-len is {config.max_model_len}, but the KV cache holds {room} tokens ({num_blocks} blocks of "
            f"{config.block_size}); lower it or raise --num-blocks"
        )
    return config.max_model_len
