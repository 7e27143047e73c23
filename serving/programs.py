"""The compiled programs of an engine: a forward step for each bucket, several for decode buckets of a small model, and
samplers for each number of sequences.
"""

import concurrent.futures
import contextlib
import enum
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from tqdm import tqdm

from dymerge_jax.kv_cache import KVCache
from dymerge_jax.layered_step import LayeredStep
from dymerge_jax.model import Implementations, SplitModel
from dymerge_jax.sampling import SampledTokens
from dymerge_jax.step import (
    StepResult,
    StepsResult,
    StepTables,
    Weights,
    forward_step,
    forward_steps,
    sample_step,
    split_weights,
)
from dymerge_jax.step_batch import NUM_SEQ_FIELDS, PackedBatch, packed_len
from pallas_kernels.lora_linear.config import MANY_ROWS, MAX_TOKENS
from serving.batch import Bucket, Buckets, make_buckets
from serving.plan import StepPlan
from serving.program_store import ProgramStore, store_beside_jax_cache

CompiledStep = Callable[..., StepResult]
"""Called as (weights, cache, last_tokens, tables, batch), as `forward_step` is without its static arguments."""

CompiledSteps = Callable[..., StepsResult]
"""The same of `forward_steps`."""


class Sampler(enum.Enum):
    """What a step needs after its forward program, which has taken the likeliest tokens already."""

    GREEDY = enum.auto()  # nothing
    DRAW = enum.auto()  # some row draws
    LOGPROBS = enum.auto()  # some row wants log probabilities


SAMPLER_PROGRAMS = (Sampler.DRAW, Sampler.LOGPROBS)


def sampler_of(plan: StepPlan) -> Sampler:
    """The cheapest sampler that serves every chunk of a plan."""
    result = Sampler.GREEDY
    for chunk in plan.chunks:
        sampling = chunk.request.sampling
        if not chunk.samples or (sampling.temperature == 0 and sampling.logprobs is None):
            continue
        if sampling.logprobs is not None:
            return Sampler.LOGPROBS
        result = Sampler.DRAW
    return result


_SMALL_MODEL_BYTES = 6e9  # read in 1.4 ms
_DECODE_STEPS = 4
_NUM_LOADING_THREADS = 4  # one compiles and one lowers; more are of use to programs that are loaded
_LONG_PREFILL_TOKENS = 2048  # measured at 8192; at 512, it would save some launches of 256
_FEW_SLOTS = 8
_FEW_SLOTS_SEQS = (64,)  # on an H200, one adapter for all: 64 rows 5.65 ms against 5.74, 32 rows no gain, 1 row a loss


def decode_programs(num_seqs: int, num_slots: int, slot_rank: int) -> tuple[int | None, ...]:
    """`Bucket.max_slots` of the programs of one size of a decode step, for a slot array of `num_slots`.

    Where a step takes milliseconds, what it does in case there are many adapters can be seen: a step without adapters
    has a program of its own, and so have 64 rows that use few slots, and, in a large array, rows that use no more than
    what `lora_linear` takes for few.
    """
    if _is_cpu():
        return (None,)
    few = {_FEW_SLOTS} if num_seqs in _FEW_SLOTS_SEQS else set()
    if num_seqs <= MAX_TOKENS:
        few.add(MANY_ROWS // slot_rank)
    return (0, *sorted(n for n in few if 0 < n < num_slots), None)


def mixed_programs(num_tokens: int, *, largest: int) -> tuple[int | None, ...]:
    """The same of a mixed step of `num_tokens`, where the largest has `largest`.

    If long prompts fit into the largest, it has a second program for when nobody uses an adapter (on an H200, 8B, 4 x
    2048 tokens: 180.1 ms against 182.6).
    """
    return (0, None) if num_tokens == largest >= _LONG_PREFILL_TOKENS and not _is_cpu() else (None,)


def pick_decode_steps(model: SplitModel) -> int:
    """`EngineConfig.decode_steps` for this backend and model.

    On an H200's host a step takes the host 1.3 ms, which is more than a model of a billion parameters needs.
    """
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(model.state))
    return 1 if _is_cpu() or num_bytes > _SMALL_MODEL_BYTES else _DECODE_STEPS


def pick_buckets(max_num_seqs: int, max_num_batched_tokens: int, num_slots: int, slot_rank: int) -> Buckets:
    """The buckets for this backend and a slot array of `num_slots`, of `slot_rank` each.

    On a GPU each program is some seconds of the start (2.2 for the 8B shape on an H200), so sizes are where padding
    costs time. A decode step reads all weights whatever its size (8B, batch 1: 4.14 ms, 32: 4.44), so small sizes are
    few. A mixed step is bound by the weights, too, up to some 150 tokens; beyond, each token of padding costs what a
    token does (25 us), so sizes grow by halves or less: an arriving prompt of 220 tokens beside 25 decode rows takes
    256, two of them 512, where 250 tokens in 512 would cost each decode row 6 ms. 64 is for prompts that the prefix
    cache has most of. By default (32 rows, 512 tokens) that makes 8 decode programs and 5 mixed ones; 256 rows, 15
    and 5. With several steps a dispatch, there are twice as many decode programs.
    """
    # On a CPU the time of a step grows with its tokens, padding included, and programs compile fast.
    if _is_cpu():
        decode_sizes, mixed_sizes = _powers(1, 4), _powers(64, 2)
        return make_buckets(max_num_seqs, max_num_batched_tokens, decode_sizes=decode_sizes, mixed_sizes=mixed_sizes)
    return make_buckets(
        max_num_seqs,
        max_num_batched_tokens,
        decode_sizes=itertools.chain((1, 4, 16), _powers(32, 2)),
        mixed_sizes=itertools.chain((64, 128), (n for size in _powers(256, 2) for n in (size, size * 3 // 2))),
        decode_slots=functools.partial(decode_programs, num_slots=num_slots, slot_rank=slot_rank),
        mixed_slots=functools.partial(mixed_programs, largest=max(max_num_batched_tokens, max_num_seqs + 1)),
    )


def _powers(first: int, factor: int) -> Iterator[int]:
    """`first` and what follows by a factor, without end."""
    while True:
        yield first
        first *= factor


def _is_cpu() -> bool:
    return jax.default_backend() == "cpu"


def compile_whole_step(
    model: SplitModel,
    bucket: Bucket,
    cache: KVCache,
    last_tokens: Int[Array, " num_rows"],
    tables: StepTables,
    implementations: Implementations,
    *,
    turn: contextlib.AbstractContextManager[object],
    store: ProgramStore | None = None,
) -> CompiledStep:
    """The forward step of a bucket as one program: from `store`, or compiled, once it is lowered, inside of `turn`."""
    result = StepResult(last_tokens=last_tokens, cache=cache, logits=last_tokens, tokens=last_tokens)
    args = cache, last_tokens, tables, abstract_batch(bucket)
    return _compile(forward_step, "forward_step", model, bucket, args, result, implementations, turn=turn, store=store)


def compile_steps(
    model: SplitModel,
    bucket: Bucket,
    cache: KVCache,
    last_tokens: Int[Array, " num_rows"],
    tables: StepTables,
    implementations: Implementations,
    *,
    num_steps: int,
    turn: contextlib.AbstractContextManager[object],
    store: ProgramStore | None = None,
) -> CompiledSteps:
    """So many decode steps of a bucket as one program, made or taken as `compile_whole_step` does it."""
    result = StepsResult(last_tokens=last_tokens, cache=cache, tokens=last_tokens)
    batches = jax.ShapeDtypeStruct((num_steps, *abstract_batch(bucket).shape), jnp.int32)
    args = cache, last_tokens, tables, batches
    return _compile(
        forward_steps, "forward_steps", model, bucket, args, result, implementations, turn=turn, store=store
    )


def _compile(
    function: Any,
    name: str,
    model: SplitModel,
    bucket: Bucket,
    args: tuple[Any, ...],
    result: Any,
    implementations: Implementations,
    *,
    turn: contextlib.AbstractContextManager[object],
    store: ProgramStore | None,
) -> jax.stages.Compiled:
    structure, weights = split_weights(model.graph, model.state)
    statics = {"num_seqs": bucket.num_seqs, "max_slots": bucket.max_slots, "implementations": implementations}

    def compile() -> jax.stages.Compiled:
        lowered = function.lower(structure, weights, *args, **statics)
        with turn:
            return lowered.compile()

    if store is None:
        return compile()
    description = f"{name} {model.config} {structure.state} {sorted(statics.items())}"
    return store.program(description, (weights, *args), result, compile)


def compile_layered_step(
    model: SplitModel,
    bucket: Bucket,
    cache: KVCache,
    last_tokens: Int[Array, " num_rows"],
    tables: StepTables,
    implementations: Implementations,
    *,
    turn: contextlib.AbstractContextManager[object],
) -> CompiledStep:
    """The same as one small program a stage, all inside of `turn`."""
    sizes = {"num_seqs": bucket.num_seqs, "implementations": implementations}
    with turn:
        return LayeredStep(model, cache, last_tokens, tables, abstract_batch(bucket), **sizes)


def abstract_batch(bucket: Bucket) -> jax.ShapeDtypeStruct:
    """Shape of the bucket's packed batch."""
    return jax.ShapeDtypeStruct((packed_len(bucket.num_tokens, bucket.num_seqs),), jnp.int32)


class StepPrograms:
    """All programs that an engine ever runs; nothing compiles after `compile`.

    Args:
      model: weights on the device.
      buckets: sizes of the forward steps.
      implementations: of the ops.
      decode_steps: decode steps of one call of `forward_many`; with 1 there is none.
      compile_step: makes a bucket's forward step; None picks the way that suits the backend, and takes whole programs
        from JAX's cache folder, if it has one.
    """

    def __init__(
        self,
        model: SplitModel,
        buckets: Buckets,
        implementations: Implementations,
        *,
        decode_steps: int = 1,
        compile_step: Callable[..., CompiledStep] | None = None,
    ) -> None:
        self._model = model
        self._weights = split_weights(model.graph, model.state)[1]
        self._buckets = buckets
        self.implementations = implementations
        self._store = None
        if not _is_cpu():
            (device,) = cast(Array, self._weights[0]).devices()
            self._store = store_beside_jax_cache(device)
        whole_step = functools.partial(compile_whole_step, store=self._store)
        self._compile_step = compile_step or (compile_layered_step if _is_cpu() else whole_step)
        self.decode_steps = decode_steps
        self._forward: dict[Bucket, CompiledStep] = {}
        self._forward_many: dict[Bucket, CompiledSteps] = {}
        # For a GPU, XLA times candidate kernels on the device as it compiles: two at once would disturb each other.
        # Lowering, which Python does, goes on beside it.
        self._turn = contextlib.nullcontext() if _is_cpu() else threading.Lock()
        self._sample: dict[tuple[int, Sampler], Callable[..., tuple[Int[Array, " num_rows"], SampledTokens]]] = {}

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return len(self._forward) + len(self._forward_many) + len(self._sample)

    def compile(
        self,
        cache: KVCache,
        last_tokens: Int[Array, " num_rows"],
        tables: Callable[[Bucket], StepTables],
        *,
        progress: bool,
    ) -> None:
        """Compiles a forward step for every bucket, several in one, and samplers for every number of sequences.

        Args:
          cache, last_tokens: as every call of `forward` has them.
          tables: what calls of `forward` with a bucket have.
          progress: show a progress bar.
        """
        jobs = [
            functools.partial(self._compile_forward, bucket, cache, last_tokens, tables(bucket))
            for bucket in self._buckets.all
        ]
        jobs += [
            functools.partial(self._compile_forward_many, bucket, cache, last_tokens, tables(bucket))
            for bucket in self._buckets_of_many
        ]
        jobs += [
            functools.partial(self._compile_sampler, num_seqs, sampler, last_tokens, tables(self._buckets.all[0]))
            for num_seqs in sorted({b.num_seqs for b in self._buckets.all})
            for sampler in SAMPLER_PROGRAMS
        ]
        num_threads = (os.cpu_count() or 1) if _is_cpu() else _NUM_LOADING_THREADS
        with concurrent.futures.ThreadPoolExecutor(max_workers=num_threads) as pool:
            futures = [pool.submit(job) for job in jobs]
            done = concurrent.futures.as_completed(futures)
            for future in tqdm(done, total=len(jobs), desc="compiling", unit="program", disable=not progress):
                future.result()

    def _compile_forward(
        self, bucket: Bucket, cache: KVCache, last_tokens: Int[Array, " num_rows"], tables: StepTables
    ) -> None:
        self._forward[bucket] = self._compile_step(
            self._model, bucket, cache, last_tokens, tables, self.implementations, turn=self._turn
        )

    @property
    def _buckets_of_many(self) -> tuple[Bucket, ...]:
        return self._buckets.decode if self.decode_steps > 1 else ()

    def _compile_forward_many(
        self, bucket: Bucket, cache: KVCache, last_tokens: Int[Array, " num_rows"], tables: StepTables
    ) -> None:
        if _is_cpu():  # where a step takes much longer than the host's part, one after another will do
            self._forward_many[bucket] = functools.partial(self._one_after_another, bucket)
            return
        args = self._model, bucket, cache, last_tokens, tables, self.implementations
        sizes = {"num_steps": self.decode_steps, "turn": self._turn, "store": self._store}
        self._forward_many[bucket] = compile_steps(*args, **sizes)

    def _one_after_another(
        self,
        bucket: Bucket,
        weights: Weights,
        cache: KVCache,
        last_tokens: Int[Array, " num_rows"],
        tables: StepTables,
        batches: Int[np.ndarray, "num_steps packed_len"],
    ) -> StepsResult:
        tokens = []
        for batch in batches:
            result = self._forward[bucket](weights, cache, last_tokens, tables, batch)
            cache, last_tokens = result.cache, result.last_tokens
            tokens.append(np.asarray(result.tokens))
        return StepsResult(last_tokens, cache, jax.device_put(np.stack(tokens)))

    def _compile_sampler(
        self, num_seqs: int, sampler: Sampler, last_tokens: Int[Array, " num_rows"], tables: StepTables
    ) -> None:
        logits = jax.ShapeDtypeStruct((num_seqs, self._model.config.vocab), jnp.float32)
        seqs = jax.ShapeDtypeStruct((NUM_SEQ_FIELDS, num_seqs), jnp.int32)
        with_logprobs = sampler is Sampler.LOGPROBS
        lowered = sample_step.lower(logits, last_tokens, tables.rows, seqs, with_logprobs=with_logprobs)
        with self._turn:
            self._sample[num_seqs, sampler] = lowered.compile()

    def first_calls(self) -> Iterator[tuple[Bucket, Sampler]]:
        """Calls that, made once, leave nothing for a request's first call to set up."""
        warm_samplers: set[int] = set()
        for bucket in self._buckets.all:
            if bucket.num_seqs not in warm_samplers:
                yield from ((bucket, sampler) for sampler in SAMPLER_PROGRAMS)
                warm_samplers.add(bucket.num_seqs)
            elif not _is_cpu():  # a CPU has nothing to set up: a first call takes what any other does
                yield bucket, Sampler.GREEDY

    def first_calls_of_many(self) -> tuple[Bucket, ...]:
        """The same for `forward_many`."""
        return () if _is_cpu() else self._buckets_of_many

    def forward(
        self,
        bucket: Bucket,
        cache: KVCache,
        last_tokens: Int[Array, " num_rows"],
        tables: StepTables,
        batch: PackedBatch,
    ) -> StepResult:
        """`forward_step` of this bucket; cache and last_tokens are donated."""
        return self._forward[bucket](self._weights, cache, last_tokens, tables, batch.array)

    def forward_many(
        self,
        bucket: Bucket,
        cache: KVCache,
        last_tokens: Int[Array, " num_rows"],
        tables: StepTables,
        batches: Sequence[PackedBatch],
    ) -> StepsResult:
        """`forward_steps` of a decode bucket, for `decode_steps` batches; cache and last_tokens are donated."""
        arrays = np.stack([batch.array for batch in batches])
        return self._forward_many[bucket](self._weights, cache, last_tokens, tables, arrays)

    def sample(
        self, sampler: Sampler, result: StepResult, tables: StepTables, batch: PackedBatch
    ) -> tuple[Int[Array, " num_rows"], SampledTokens]:
        """The new last_tokens, in the memory of those of `result`, and what a step samples."""
        if sampler is Sampler.GREEDY:
            return result.last_tokens, SampledTokens(result.tokens, None, None, None)
        program = self._sample[batch.seqs.shape[1], sampler]
        return program(result.logits, result.last_tokens, tables.rows, batch.seqs)
