"""The compiled programs of an engine: a forward step for each bucket, and samplers for each number of sequences."""

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from dymerge_jax.kv_cache import KVCache
from dymerge_jax.layered_step import LayeredStep
from dymerge_jax.model import Implementations, SplitModel
from dymerge_jax.sampling import SampledTokens, SamplingParams, sample_step
from dymerge_jax.step import StepBatch, StepInputs, empty_batch, forward_step
from serving.batch import BatchArrays, Bucket, Buckets, make_buckets
from serving.plan import StepPlan


@dataclasses.dataclass(frozen=True)
class SamplerKind:
    """Which sampler program a step needs.

    Attributes:
      is_greedy: every row takes the likeliest token.
      with_logprobs: some row wants log probabilities.
    """

    is_greedy: bool
    with_logprobs: bool


SAMPLER_KINDS = (SamplerKind(True, False), SamplerKind(False, False), SamplerKind(False, True))


def sampler_kind(plan: StepPlan) -> SamplerKind:
    """The cheapest kind that serves every chunk of a plan."""
    sampling = [c.request.sampling for c in plan.chunks if c.samples]
    if any(s.logprobs is not None for s in sampling):
        return SamplerKind(is_greedy=False, with_logprobs=True)
    return SamplerKind(is_greedy=all(s.is_greedy for s in sampling), with_logprobs=False)


def pick_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> Buckets:
    """The buckets for this backend."""
    # On a CPU the time of a step grows with its tokens, padding included.
    decode_growth, mixed_growth = (4, 2) if _is_cpu() else (2, 4)
    return make_buckets(max_num_seqs, max_num_batched_tokens, decode_growth=decode_growth, mixed_growth=mixed_growth)


def _is_cpu() -> bool:
    return jax.default_backend() == "cpu"


class StepPrograms:
    """All programs that an engine ever runs; nothing compiles after `compile`.

    Args:
      model: weights on the device.
      buckets: sizes of the forward steps.
      implementations: of the ops.
    """

    def __init__(self, model: SplitModel, buckets: Buckets, implementations: Implementations) -> None:
        self._model = model
        self._buckets = buckets
        self._implementations = implementations
        self._forward: dict[Bucket, Callable[..., tuple[Float[Array, "num_seqs vocab"], KVCache]]] = {}
        self._sample: dict[tuple[int, SamplerKind], Callable[..., tuple[SampledTokens, Int[Array, " num_rows"]]]] = {}

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return len(self._forward) + len(self._sample)

    def compile(
        self,
        cache: KVCache,
        inputs_of: Callable[[StepBatch], StepInputs],
        sampling: SamplingParams,
        *,
        progress: bool,
    ) -> None:
        """Compiles a forward step for every bucket and every kind of sampler for every number of sequences.

        Args:
          cache: as every call of `forward` has it.
          inputs_of: likewise a step's inputs, for a batch.
          sampling: as every call of `sample` has it.
          progress: show a progress bar.
        """
        inputs = {bucket: inputs_of(_abstract_batch(bucket)) for bucket in self._buckets.all}
        last_tokens = next(iter(inputs.values())).last_tokens
        jobs = [functools.partial(self._compile_forward, b, cache, inputs[b]) for b in self._buckets.all]
        jobs += [
            functools.partial(self._compile_sampler, num_seqs, kind, last_tokens, sampling)
            for num_seqs in sorted({b.num_seqs for b in self._buckets.all})
            for kind in SAMPLER_KINDS
        ]
        # For a GPU, XLA times candidate kernels on the device as it compiles: two at once would disturb each other.
        num_threads = (os.cpu_count() or 1) if _is_cpu() else 1
        with concurrent.futures.ThreadPoolExecutor(max_workers=num_threads) as pool:
            futures = [pool.submit(job) for job in jobs]
            done = concurrent.futures.as_completed(futures)
            for future in tqdm(done, total=len(jobs), desc="compiling", unit="program", disable=not progress):
                future.result()

    def _compile_forward(self, bucket: Bucket, cache: KVCache, inputs: StepInputs) -> None:
        model = self._model
        if _is_cpu():
            self._forward[bucket] = LayeredStep(model, cache, inputs, self._implementations)
            return
        lowered = forward_step.lower(model.graph, model.state, cache, inputs, self._implementations)
        self._forward[bucket] = lowered.compile()

    def _compile_sampler(
        self, num_seqs: int, kind: SamplerKind, last_tokens: Int[Array, " num_rows"], sampling: SamplingParams
    ) -> None:
        ints, bools = (jax.ShapeDtypeStruct((num_seqs,), dtype) for dtype in (jnp.int32, jnp.bool_))
        logits = jax.ShapeDtypeStruct((num_seqs, self._model.config.vocab), jnp.float32)
        lowered = sample_step.lower(logits, last_tokens, ints, bools, sampling, ints, **dataclasses.asdict(kind))
        self._sample[num_seqs, kind] = lowered.compile()

    def first_calls(self) -> Iterator[tuple[Bucket, SamplerKind]]:
        """Calls that, made once, leave nothing for a request's first call to set up."""
        warm_samplers: set[int] = set()
        for bucket in self._buckets.all:
            if bucket.num_seqs not in warm_samplers:
                yield from ((bucket, kind) for kind in SAMPLER_KINDS)
                warm_samplers.add(bucket.num_seqs)
            elif not _is_cpu():  # a CPU has nothing to set up: a first call takes what any other does
                yield bucket, SAMPLER_KINDS[0]

    def forward(
        self, bucket: Bucket, cache: KVCache, inputs: StepInputs
    ) -> tuple[Float[Array, "num_seqs vocab"], KVCache]:
        """`forward_step` of this bucket; the cache is donated."""
        return self._forward[bucket](self._model.state, cache, inputs)

    def sample(
        self,
        kind: SamplerKind,
        logits: Float[Array, "num_seqs vocab"],
        last_tokens: Int[Array, " num_rows"],
        arrays: BatchArrays,
        sampling: SamplingParams,
    ) -> tuple[SampledTokens, Int[Array, " num_rows"]]:
        """`sample_step` of this kind; last_tokens is donated."""
        return self._sample[logits.shape[0], kind](
            logits, last_tokens, arrays.batch.rows, arrays.is_sampled, sampling, arrays.steps
        )


def _abstract_batch(bucket: Bucket) -> StepBatch:
    return jax.eval_shape(functools.partial(empty_batch, bucket.num_tokens, bucket.num_seqs))
