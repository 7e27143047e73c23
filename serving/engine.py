"""The engine: owns the device's state; one step is plan, upload, dispatch, and commit of the step before.

The life of a request:
  1. `add_request` checks it and lets it wait in the scheduler, while its adapters are brought to the device.
  2. A plan admits it: it gets a row, KV blocks and pins on its adapters; those not in slots yet are copied there from
     memory of the device. Blocks that hold what its prompt begins with, computed for the same mix, are shared.
  3. The rest of its prompt runs in prefill chunks, beside the decode rows of other requests. A step in which some
     request uses an X-LoRA set has a program that runs its batch twice: see `dymerge_jax.xlora`.
  4. The step that runs the prompt's last token samples the first output token; from then on it is a decode row. Sampled
     tokens stay on the device, where the next step reads them.
  5. The host reads the tokens of a dispatch while the next one runs, detokenizes them and checks for the end. Tokens
     after the end are dropped: one for a step that was dispatched before the end was seen, and with several steps a
     dispatch those that follow it there, too.
  6. It finishes by a stop token or string, its length limit, or `abort`; row, blocks and pins are released at once.
"""

import dataclasses
import logging
import sys
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
from dymerge_jax.gating import GatedSetWeights, build_gate_array, place_experts
from dymerge_jax.kv_cache import block_bytes, empty_cache
from dymerge_jax.lora import empty_content, empty_slots, slot_bytes, write_slot
from dymerge_jax.model import Implementations, SplitModel, model_from_params
from dymerge_jax.sampling import SampledTokens
from dymerge_jax.step import StepTables
from dymerge_jax.xlora import GatedSet, XLoraSetWeights, build_xlora_array, place_xlora_experts, set_id_of_row
from serving.adapter_loader import STAGING_SLOTS, AdapterLoader, thread_pools, to_device
from serving.adapter_store import AdapterStore, StoredAdapter, adapter_name, not_loaded
from serving.batch import Bucket, Buckets, RowTables, build_batch
from serving.block_pool import BlockPool
from serving.config import EngineConfig
from serving.detokenize import IncrementalDetokenizer
from serving.errors import InvalidRequestError
from serving.metrics import Metrics, Tier
from serving.plan import Load, StepPlan
from serving.policies import make_policy
from serving.prefix_cache import PrefixCache
from serving.programs import Sampler, StepPrograms, pick_buckets, pick_decode_steps, sampler_of
from serving.request import FinishReason, Request, RequestOutput, TokenLogprob
from serving.scheduler import Scheduler
from serving.slot_cache import SlotCache

logger = logging.getLogger(__name__)

_CPU_CACHE_BYTES = 1 << 30  # KV memory without a device that says how much it has
_LOOK_AHEAD = 32  # adapters that are loaded for waiting requests before there is room to run these
_MAX_SLOT_WRITES = 8  # of a step beside others: 0.2 ms of an H200, and no more than that of the host
_MAX_WAIT_S = 0.1  # of a step that has nothing to run, for an adapter
_LOCK_S = 5e-5
_SPARE_FRACTION = 0.08  # of an accelerator's memory, for the step's temporaries and the compiler


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """A dispatch whose tokens the host has not read.

    Attributes:
      plans: its steps.
      sampled: by sequence; of several steps, only tokens, [num_steps, num_seqs].
      dispatched_s: when it was dispatched.
    """

    plans: tuple[StepPlan, ...]
    sampled: SampledTokens
    dispatched_s: float


class Engine:
    """Runs requests with different mixes in one batch. Not thread-safe: one thread calls it.

    Attributes:
      config: as given.
      model: weights on the device.
      tokenizer: a transformers tokenizer, or None.
      store: which adapters there are, and the host tier.
      loader: adapters on their way to the slots.
      gated_sets: gated sets a request may name; their experts are ids of adapters.
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
        gated_sets: Sequence[GatedSet],
        config: EngineConfig,
        *,
        metrics: Metrics | None = None,
        implementations: Implementations = Implementations(),  # noqa: B008 (frozen)
        buckets: Buckets | None = None,
        clock: Callable[[], float] = time.monotonic,
        loads_in_background: bool = False,
    ) -> None:
        """Takes memory for slots and KV blocks; compiles nothing yet (`compile`).

        Args:
          model: weights on the device.
          tokenizer: a transformers tokenizer; None leaves every output's text empty.
          store: adapters, which must include every expert of the gated sets.
          gated_sets: gated sets a request may name, with names or ids of adapters as experts.
          config: sizes and policy.
          metrics: where to count; None counts into a registry of its own.
          implementations: of the ops; the default picks by backend and shape.
          buckets: sizes of the step programs; None picks them for this backend. Of use where few sizes will run.
          clock: seconds, the clock of `Request.arrival_s`.
          loads_in_background: load adapters in threads and processes, as a server must, until `close`; else a step
            waits for what it loads, and the same calls do the same things every time.

        Raises:
          ValueError: If sizes do not fit the model or the device's memory, or a gated set's expert is missing.
        """
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.store = store
        self.gated_sets = tuple(_with_expert_ids(gated_set, store) for gated_set in gated_sets)
        self.metrics = metrics or Metrics()
        self._clock = clock
        self._plain_sets = [s for s in self.gated_sets if isinstance(s, GatedSetWeights)]
        self._xlora_sets = [s for s in self.gated_sets if isinstance(s, XLoraSetWeights)]
        self._gated_set_ids = {s.name: i for i, s in enumerate(self._plain_sets)}
        self._gated_set_ids |= {s.name: set_id_of_row(i) for i, s in enumerate(self._xlora_sets)}
        self._make_slots()
        num_slots = self._slots.num_slots
        self._gates = build_gate_array(model.config, self._plain_sets, num_slots=num_slots)
        self._xlora = build_xlora_array(self._xlora_sets, num_slots=num_slots)
        has_two_caches = self._xlora is not None
        num_caches = 2 if has_two_caches else 1
        num_staging_slots = min(STAGING_SLOTS, config.adapter_slots)
        readers, copiers = thread_pools() if loads_in_background else (None, None)
        if loads_in_background:
            store.start_readers()
        self.loader = AdapterLoader(store, staging_slots=num_staging_slots, readers=readers, copiers=copiers)
        num_blocks = config.num_blocks or _blocks_that_fit(model, config, num_staging_slots)
        # So that a request of the greatest length fits, whatever it uses.
        self.max_model_len = _max_model_len(model, config, num_blocks, num_caches)
        blocks_per_seq = -(-self.max_model_len // config.block_size)
        self._num_blocks = min(num_blocks, config.max_num_seqs * blocks_per_seq * num_caches)
        self._make_cache()
        self._rows = RowTables(config.max_num_seqs, blocks_per_seq, num_slots, has_two_caches=has_two_caches)
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
            staging=self.loader,
            max_slot_writes=_MAX_SLOT_WRITES,
            two_cache_sets=frozenset(s.name for s in self._xlora_sets),
        )
        self.metrics.watch_queues(self.scheduler.running_tally, self.scheduler.waiting_tally)
        self.buckets = buckets or pick_buckets(
            config.max_num_seqs, config.max_num_batched_tokens, config.adapter_slots, config.slot_rank
        )
        if has_two_caches:
            self.buckets = self.buckets.with_two_passes()
        decode_steps = pick_decode_steps(model) if config.decode_steps is None else config.decode_steps
        self._programs = StepPrograms(model, self.buckets, implementations, decode_steps=decode_steps)
        self._in_flight: _InFlight | None = None
        self._detokenizers: dict[str, IncrementalDetokenizer] = {}
        self._is_idle = False  # the last step found nothing to run or to read
        self._num_reads = 0  # of the loader, as far as they are counted
        self._observe()

    def close(self) -> None:
        """Ends the threads and processes that load adapters; no step may follow. May be called twice."""
        self.loader.close()
        self.store.close()

    # Start-up

    def compile(self, *, progress: bool = True) -> None:
        """Compiles every program the engine will ever run, and runs each once."""
        start_s = time.perf_counter()
        programs = self._programs
        programs.compile(self._cache, self._last_tokens, self._tables, progress=progress)
        self._warm_up()
        logger.info("compiled %d programs in %.1f s", programs.num_programs, time.perf_counter() - start_s)

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return self._programs.num_programs

    def _tables(self, bucket: Bucket) -> StepTables:
        rows = self._rows
        tables = StepTables(self._slots, self._gates, rows.rows, rows.block_tables)
        if not bucket.has_scaling_pass:
            return tables
        return dataclasses.replace(tables, xlora=self._xlora, scaling_tables=rows.scaling_tables)

    def _warm_up(self) -> None:
        """Runs programs once on an empty batch, and slot updates, so that no request pays for a first call."""
        for bucket, sampler in self._programs.first_calls():
            self._run(StepPlan(), bucket, sampler)
        for bucket in self._programs.first_calls_of_many():
            self._run_many([StepPlan()] * self._programs.decode_steps, bucket)
        empty = empty_content(self.model.config, slot_rank=self.config.slot_rank, dtype=self.model.dtype)
        for _ in range(2):  # the second time into what a program has made, which may be another program
            (content,) = to_device(self.store.to_host([empty]))
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
          UnknownModelError: If one of its adapters is not loaded; nothing has changed then.
        """
        for adapter_id in request.adapters:
            if adapter_id not in self.store:
                raise not_loaded(adapter_id)
        tiers: list[Tier] = [self.adapter_status(adapter_id) for adapter_id in request.adapters]
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                self.tokenizer.backend_tokenizer, request.prompt_token_ids, request.sampling.stop
            )
        self.scheduler.add(request)
        self._is_idle = False
        self.metrics.observe_arrival(request)
        for tier in tiers:
            self.metrics.observe_lookup(tier)
        if detokenizer is not None:
            self._detokenizers[request.request_id] = detokenizer

    def abort(self, request_id: str) -> None:
        """Ends a request and releases what it owns; an unknown or finished one is ignored."""
        self._is_idle = False
        request = self.scheduler.abort(request_id)
        if request is not None:
            self._forget(request)
            self._observe()

    def forget_prefixes(self) -> None:
        """Lets every later request compute its prompt anew."""
        self.scheduler.block_pool.forget_contents()

    @property
    def has_work(self) -> bool:
        """True while a request is not finished or a step's tokens are not read."""
        return self.scheduler.has_work or self._in_flight is not None

    # Adapters

    def read_adapter(self, name: str, folder: Path) -> StoredAdapter:
        """Reads an adapter for `add_adapter`; any thread may call it, and it changes nothing.

        Raises:
          CheckpointError: If it cannot be read or does not fit the model.
          ValueError: If it is larger than the host tier.
        """
        return self.store.read(name, Path(folder))

    def add_adapter(self, adapter: StoredAdapter) -> str:
        """Lets requests use an adapter from now on; one that is known already stays as it is.

        Returns:
          Its id.

        Raises:
          ValueError: If it is larger than the host tier.
        """
        adapter_id = self.store.add(adapter, keep=self.slot_cache.pinned | self.loader.copying)
        self._observe()
        return adapter_id

    def remove_adapter(self, adapter_id: str) -> None:
        """Lets no new request use an adapter; its memory is free when the last of those that have it ends.

        Raises:
          UnknownModelError: If it is not loaded.
          InvalidRequestError: If it is an expert of a gated set; nothing has changed then.
        """
        if adapter_id not in self.store:
            raise not_loaded(adapter_id)
        if sets := [s.name for s in self.gated_sets if adapter_id in s.experts]:
            raise InvalidRequestError(
                f"adapter {adapter_name(adapter_id)!r} is an expert of the gated set {', '.join(map(repr, sets))}, "
                "which is served; it can be neither removed nor replaced while the server runs",
                param="lora_name",
            )
        self.store.retire(adapter_id)
        self._free_if_unused(adapter_id)
        self._observe()

    def adapter_status(self, adapter_id: str) -> Tier:
        """The fastest tier that has the adapter.

        Raises:
          UnknownModelError: If it is not loaded.
        """
        self.store.known(adapter_id)
        if adapter_id in self.slot_cache.resident:
            return "slots"
        return "host" if adapter_id in self.store.host or adapter_id in self.loader.staged else "disk"

    def _free_if_unused(self, adapter_id: str) -> None:
        """Frees all memory of a retired adapter that no request has any more."""
        scheduler = self.scheduler
        if adapter_id in scheduler.waiting_tally or adapter_id in scheduler.running_tally:
            return
        if self.store.known(adapter_id).root is None:  # one of other content may get its id, which is its name alone
            self.forget_prefixes()
        self.loader.drop(adapter_id)
        self.store.forget(adapter_id)
        if adapter_id in self.slot_cache.resident:
            self.slot_cache.remove(adapter_id)

    @property
    def is_waiting_for_adapters(self) -> bool:
        """True while a step would do nothing, until an adapter has been loaded or a request comes or goes."""
        return self._is_idle and self.loader.is_waiting

    def on_adapter_news(self, listener: Callable[[], None]) -> None:
        """Has `listener` called, by another thread, whenever `is_waiting_for_adapters` may have become False."""
        self.loader.on_news(listener)

    # One step

    def step(self) -> list[RequestOutput]:
        """Dispatches the next step, then reads the tokens of the step before; returns what is new.

        Where nothing waits and all rows are greedy, it may be several decode steps at once (`decode_steps`).

        Where nothing can run before an adapter is loaded, it waits for one, but not for long. A request whose adapter
        cannot be loaded ends with reason ERROR.

        If anything fails on the way, every running request ends with reason ERROR, the device's state is made anew
        where it was lost, and the exception goes on to the caller; waiting requests and later ones can run.
        """
        if self.is_waiting_for_adapters:
            self.loader.wait(_MAX_WAIT_S)
        plan = None
        try:
            outputs = self._take_loaded()
            if self._in_flight is None and not self.scheduler.num_running:
                self._load_ahead()  # nothing runs beside it: what is loaded at once is of use in this step
                outputs += self._take_loaded()
            plan = self.scheduler.plan(self._clock())
            outputs += self._carry_out(plan)
        except Exception:
            self._give_up(plan)
            raise
        self._observe()
        if not self.has_work:
            self.check_integrity()
        return outputs

    def _load_ahead(self) -> None:
        """Has adapters brought to the device for the waiting requests that the next steps may admit."""
        wanted = self.scheduler.wanted_adapters(self._clock(), _LOOK_AHEAD)
        self.loader.update(wanted, in_use=self.slot_cache.pinned)

    def _take_loaded(self) -> list[RequestOutput]:
        """Takes adapters that have come to the device; ends the requests for which that has failed."""
        outputs = []
        for adapter_id, error in self.loader.collect().items():
            self.metrics.observe_load_failure()
            for request in self.scheduler.waiting_for(adapter_id):
                self.scheduler.finish(request, FinishReason.ERROR)
                self._forget(request)
                outputs.append(_failed(request, error))
        return outputs

    def _carry_out(self, plan: StepPlan) -> list[RequestOutput]:
        self._load(plan.loads)
        dispatched = None
        if not plan.is_empty:
            dispatched = self._dispatch_many(plan) or self._dispatch(plan)
        self._load_ahead()  # while the device runs
        before, self._in_flight = self._in_flight, dispatched
        self._is_idle = before is None and plan.is_empty and not plan.loads
        return self._commit(before) if before is not None else []

    def _give_up(self, plan: StepPlan | None) -> None:
        """Ends what runs after a failure in `plan`, or in planning if it is None; makes lost device state anew."""
        self._in_flight = None
        self.loader.drop_staged()
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
        self._rows.update(plan.chunks, self.slot_cache.lookup, self._gated_set_ids)
        sampled = self._run(plan, self._bucket(plan), sampler_of(plan))
        for array in jax.tree.leaves(sampled):
            array.copy_to_host_async()
        self.scheduler.on_dispatched(plan)
        return _InFlight(plans=(plan,), sampled=sampled, dispatched_s=start_s)

    def _dispatch_many(self, plan: StepPlan) -> _InFlight | None:
        """Dispatches a decode step and those after it at once; None, and nothing has changed, if they must be apart."""
        decode_steps, start_s = self._programs.decode_steps, self._clock()
        if decode_steps == 1 or plan.has_scaling_pass or sampler_of(plan) is not Sampler.GREEDY:
            return None
        later = self.scheduler.plan_ahead(plan, decode_steps - 1, start_s)
        if not later:
            return None
        plans = (plan, *later)
        for step in plans:
            self._rows.update(step.chunks, self.slot_cache.lookup, self._gated_set_ids)
        tokens = self._run_many(plans, self._bucket(plan))
        tokens.copy_to_host_async()
        return _InFlight(plans=plans, sampled=SampledTokens(tokens, None, None, None), dispatched_s=start_s)

    def _bucket(self, plan: StepPlan) -> Bucket:
        # Those of running requests that the step leaves out are counted too: they are few, and counting is slow.
        return self.buckets.of(plan, self.slot_cache.num_pinned_slots)

    def _run(self, plan: StepPlan, bucket: Bucket, sampler: Sampler) -> SampledTokens:
        batch, tables = build_batch(plan, bucket), self._tables(bucket)
        result = self._programs.forward(bucket, self._cache, self._last_tokens, tables, batch)
        self._cache, self._last_tokens = result.cache, result.last_tokens
        self._last_tokens, sampled = self._programs.sample(sampler, result, tables, batch)
        return sampled

    def _run_many(self, plans: Sequence[StepPlan], bucket: Bucket) -> Int[Array, "num_steps num_seqs"]:
        batches = [build_batch(plan, bucket) for plan in plans]
        result = self._programs.forward_many(bucket, self._cache, self._last_tokens, self._tables(bucket), batches)
        self._cache, self._last_tokens = result.cache, result.last_tokens
        return result.tokens

    def _load(self, loads: Iterable[Load]) -> None:
        """Copies staged adapters into their slots; ordered on the device after the steps that read the slots before."""
        loads = tuple(loads)
        self.metrics.observe_loads(len(loads))
        for load in loads:
            contents = self.loader.take(load.adapter_id)
            for slot_id, content in zip(load.slot_ids, contents, strict=True):
                self._slots = write_slot(self._slots, slot_id, content)
        if not loads or not self.gated_sets:
            return
        resident = {name: self.slot_cache.lookup(name) or () for name in self.slot_cache.resident}
        if self._gates is not None:
            self._gates = place_experts(self._gates, self._plain_sets, resident)
        if self._xlora is not None:
            self._xlora = place_xlora_experts(self._xlora, self._xlora_sets, resident)

    # Reading a step's tokens

    def _commit(self, dispatched: _InFlight) -> list[RequestOutput]:
        sampled: SampledTokens = jax.tree.map(np.asarray, dispatched.sampled)
        plans, now_s = dispatched.plans, self._clock()
        outputs = []
        for plan, tokens in zip(plans, sampled.tokens.reshape(len(plans), -1).tolist(), strict=True):
            self.metrics.observe_step(plan, (now_s - dispatched.dispatched_s) / len(plans))
            outputs += self._commit_step(plan, tokens, sampled, now_s)
        self.metrics.observe_tokens(len(outputs))
        return outputs

    def _commit_step(
        self, plan: StepPlan, tokens: Sequence[int], sampled: SampledTokens, now_s: float
    ) -> list[RequestOutput]:
        outputs = []
        for i, chunk in enumerate(plan.chunks):
            if chunk.samples and not chunk.request.is_finished:
                request, logprobs = chunk.request, ()
                if request.sampling.logprobs is not None:
                    logprobs = (_token_logprob(request, i, sampled),)
                outputs.append(self._commit_token(request, tokens[i], logprobs, now_s))
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
        for adapter_id in self.store.retired & set(request.adapters):
            self._free_if_unused(adapter_id)

    def _observe(self) -> None:
        """Shows what is owned: at the start, after each step, and where something changes that no step may follow."""
        self.metrics.set_resources(
            num_resident=len(self.slot_cache.resident),
            num_loading=self.loader.num_loading,
            num_free_blocks=self.scheduler.block_pool.num_free,
        )
        host = self.store.host
        self.metrics.set_adapter_bytes(host=host.num_bytes, host_limit=host.max_bytes, staged=self.loader.staged_bytes)
        self.metrics.observe_reads(self.loader.num_reads - self._num_reads)
        self._num_reads = self.loader.num_reads

    def check_integrity(self) -> None:
        """Checks that every row, block, slot, pin and byte has one owner, and that what is retired is in use."""
        self.scheduler.check_integrity()
        self.store.check_integrity()
        self.loader.check_integrity()
        for adapter_id in self.slot_cache.resident:
            self.store.known(adapter_id)
        for adapter_id in self.store.retired:
            is_used = adapter_id in self.scheduler.waiting_tally or adapter_id in self.scheduler.running_tally
            assert is_used, f"adapter {adapter_id!r} is retired and nobody uses it"


def hand_over_quickly() -> None:
    """Has the threads of this process hand over Python's lock at once when the engine's thread wants it.

    By default one that computes keeps it for five milliseconds: a whole decode step, and as often in it as the engine's
    thread has let go of the lock.
    """
    sys.setswitchinterval(_LOCK_S)


def build_engine(
    model: LoadedModel,
    adapters: Sequence[tuple[str, Path]],
    gated_sets: Sequence[GatedSet],
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
    store = AdapterStore(
        split.config,
        slot_rank=config.slot_rank,
        dtype=split.dtype,
        max_rank=config.adapter_slots * config.slot_rank,
        host_bytes=config.adapter_host_bytes,
    )
    for name, folder in tqdm(adapters, desc="reading adapters", unit="adapter", disable=not progress or not adapters):
        store.add(store.read(name, folder))
    engine = Engine(split, model.tokenizer, store, gated_sets, config, metrics=metrics, loads_in_background=True)
    engine.compile(progress=progress)
    return engine


def _with_expert_ids(gated_set: GatedSet, store: AdapterStore) -> GatedSet:
    """The set with ids of adapters in place of their names."""
    ids = {expert: expert if expert in store else store.id_of(expert) for expert in gated_set.experts}
    if missing := [expert for expert, adapter_id in ids.items() if adapter_id is None]:
        raise ValueError(
            f"gated set {gated_set.name!r} uses the adapters {', '.join(missing)}, which are not loaded; add them with "
            "--adapters"
        )
    return dataclasses.replace(gated_set, experts=tuple(ids[expert] for expert in gated_set.experts))


def _failed(request: Request, error: str) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        finish_reason=FinishReason.ERROR,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        error=error,
    )


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


def _blocks_that_fit(model: SplitModel, config: EngineConfig, num_staging_slots: int) -> int:
    """KV blocks for the memory that weights, slots and staging leave; a fixed amount where the device does not tell."""
    bytes_per_block = block_bytes(model.config, block_size=config.block_size, dtype=model.dtype)
    device = next(iter(jax.tree.leaves(model.state)[0].devices()))
    stats: dict[str, int] | None = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return max(1, _CPU_CACHE_BYTES // bytes_per_block)
    staging_bytes = num_staging_slots * slot_bytes(model.config, config.slot_rank, model.dtype)
    free_bytes = int(stats["bytes_limit"] * (1 - _SPARE_FRACTION)) - stats["bytes_in_use"] - staging_bytes
    if free_bytes < bytes_per_block:
        slots_bytes = config.adapter_slots * slot_bytes(model.config, config.slot_rank, model.dtype)
        raise ValueError(
            f"weights and {slots_bytes / 1e9:.1f} GB of adapter slots leave no memory for a KV block on a device of "
            f"{stats['bytes_limit'] / 1e9:.1f} GB; lower --adapter-slots or --slot-rank"
        )
    return free_bytes // bytes_per_block


def _max_model_len(model: SplitModel, config: EngineConfig, num_blocks: int, num_caches: int) -> int:
    """The limit asked for, or as much of the model's own as one request can have in the KV blocks, in each cache."""
    room = num_blocks // num_caches * config.block_size
    if room == 0:
        raise ValueError(
            f"there is {num_blocks} KV block, but X-LoRA needs one in each of 2 caches; raise --num-blocks"
        )
    if config.max_model_len is None:
        return min(model.config.max_position, room)
    if config.max_model_len > model.config.max_position:
        raise ValueError(
            f"--max-model-len is {config.max_model_len}, but the model was made for {model.config.max_position} tokens"
        )
    if config.max_model_len > room:
        raise ValueError(
            f"--max-model-len is {config.max_model_len}, but the KV cache holds {room} tokens ({num_blocks} blocks of "
            f"{config.block_size}{', in two caches for X-LoRA' if num_caches > 1 else ''}); lower it or raise "
            "--num-blocks"
        )
    return config.max_model_len
