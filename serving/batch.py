"""StepPlan to device arrays: the one place where host lists become jax arrays.

What changes with every step (tokens, lengths) is uploaded with every step; what belongs to a row (block table, mix,
sampling) is kept on the device and uploaded again only after it changed.
"""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from dymerge_jax.sampling import SamplingParams, device_seed
from dymerge_jax.step import AdapterMix, StepBatch
from serving.plan import Chunk, StepPlan
from serving.request import Request


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The padded size of a step program.

    Attributes:
      num_tokens: flat tokens.
      num_seqs: sequences; equal to num_tokens for decode programs, less for the others.
    """

    num_tokens: int
    num_seqs: int

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_seqs


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The step programs of an engine: all of them are compiled at start-up.

    Attributes:
      decode, mixed: by ascending size.
    """

    decode: tuple[Bucket, ...]
    mixed: tuple[Bucket, ...]

    @property
    def all(self) -> tuple[Bucket, ...]:
        return self.decode + self.mixed

    def of(self, plan: StepPlan) -> Bucket:
        """The smallest bucket that holds the plan."""
        if plan.is_decode:
            return next(b for b in self.decode if b.num_seqs >= plan.num_seqs)
        return next(b for b in self.mixed if b.num_tokens >= plan.num_tokens)


def make_buckets(max_num_seqs: int, max_num_batched_tokens: int, *, decode_growth: int, mixed_growth: int) -> Buckets:
    """Sizes that grow by a factor, up to the limits.

    Args:
      max_num_seqs: rows.
      max_num_batched_tokens: token budget of a step.
      decode_growth, mixed_growth: 2 wastes least; more means fewer programs to compile.
    """
    sizes = _sizes(1, max_num_seqs, decode_growth)
    # A mixed step has more tokens than rows: one with as many is read as a decode step.
    top = max(max_num_batched_tokens, max_num_seqs + 1)
    start = max(64, _power_of_two_above(max_num_seqs))
    mixed = [t for t in _sizes(min(start, top), top, mixed_growth) if t > max_num_seqs]
    return Buckets(decode=tuple(Bucket(n, n) for n in sizes), mixed=tuple(Bucket(t, max_num_seqs) for t in mixed))


def _power_of_two_above(n: int) -> int:
    return 1 << n.bit_length()


def _sizes(first: int, last: int, growth: int) -> list[int]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= growth
    return [*sizes, last]


class RowTables:
    """Host mirror of what belongs to the rows, and its copy on the device.

    Args:
      num_rows: most running requests.
      blocks_per_seq: width of the block table.
      num_slots: slots of the device's adapter array.
    """

    def __init__(self, num_rows: int, blocks_per_seq: int, num_slots: int) -> None:
        self._owners: list[tuple[Request, int] | None] = [None] * num_rows
        self._num_blocks = [0] * num_rows
        self._block_tables = np.zeros((num_rows, blocks_per_seq), np.int32)
        self._weights = np.zeros((num_rows, num_slots), np.float32)
        self._gated_set_ids = np.full(num_rows, -1, np.int32)
        self._temperature = np.zeros(num_rows, np.float32)
        self._top_k = np.zeros(num_rows, np.int32)
        self._top_p = np.ones(num_rows, np.float32)
        self._min_p = np.zeros(num_rows, np.float32)
        self._seeds = np.zeros(num_rows, np.uint32)
        self._upload_block_tables()
        self._upload_rows()

    # Copies: on a CPU, jax may share numpy's memory, which the next change would write into a running step. Made by
    # numpy, as jnp.array runs a program of its own to copy, compiled anew for each shape.

    def _upload_block_tables(self) -> None:
        self.block_tables: Int[Array, "num_rows blocks_per_seq"] = jax.device_put(self._block_tables.copy())

    def _upload_rows(self) -> None:
        arrays = (self._weights, self._gated_set_ids)
        self.mix = AdapterMix(*jax.device_put([array.copy() for array in arrays]))
        arrays = (self._temperature, self._top_k, self._top_p, self._min_p, self._seeds)
        self.sampling = SamplingParams(*jax.device_put([array.copy() for array in arrays]))

    def update(
        self,
        chunks: Sequence[Chunk],
        slots_of_adapter: Mapping[str, Sequence[int]],
        gated_set_ids: Mapping[str, int],
    ) -> None:
        """Brings the rows of the chunks' requests up to date, on the host and then on the device.

        Args:
          chunks: of the step to come.
          slots_of_adapter: slots of every adapter the requests use.
          gated_set_ids: row of the gate array by gated set.
        """
        rows_changed = tables_changed = False
        for chunk in chunks:
            request, row = chunk.request, chunk.row
            if self._owners[row] != (request, chunk.epoch):  # requests compare by identity
                self._owners[row] = (request, chunk.epoch)
                self._num_blocks[row] = 0
                self._set_row(row, request, slots_of_adapter, gated_set_ids)
                rows_changed = True
            known = self._num_blocks[row]
            if len(request.block_table) > known:
                self._block_tables[row, known : len(request.block_table)] = request.block_table[known:]
                self._num_blocks[row] = len(request.block_table)
                tables_changed = True
        if rows_changed:
            self._upload_rows()
        if tables_changed:
            self._upload_block_tables()

    def _set_row(
        self,
        row: int,
        request: Request,
        slots_of_adapter: Mapping[str, Sequence[int]],
        gated_set_ids: Mapping[str, int],
    ) -> None:
        self._weights[row] = 0.0
        for name, weight in request.mix.entries:
            self._weights[row, list(slots_of_adapter[name])] = weight
        gated_set = request.mix.gated_set
        self._gated_set_ids[row] = -1 if gated_set is None else gated_set_ids[gated_set]
        s = request.sampling
        self._temperature[row] = min(s.temperature, np.finfo(np.float32).max)
        self._top_k[row] = min(s.top_k, np.iinfo(np.int32).max)
        self._top_p[row] = s.top_p
        self._min_p[row] = s.min_p
        # Without a seed, a fresh one for every admission: nobody can tell.
        self._seeds[row] = device_seed(secrets.randbits(32) if s.seed is None else s.seed)


@dataclasses.dataclass(frozen=True)
class BatchArrays:
    """A step's arrays on the device.

    Attributes:
      batch: what the forward step takes.
      is_sampled: [num_seqs] bool, chunks that end with their request's last token.
      steps: [num_seqs] int32, index of the output token each chunk samples.
    """

    batch: StepBatch
    is_sampled: Bool[Array, " num_seqs"]
    steps: Int[Array, " num_seqs"]


def build_batch(plan: StepPlan, bucket: Bucket) -> BatchArrays:
    """Packs the chunks one after another and pads them to the bucket."""
    tokens = np.zeros(bucket.num_tokens, np.int32)
    rows, starts, lens, contexts, steps = (np.zeros(bucket.num_seqs, np.int32) for _ in range(5))
    use_last, is_sampled = (np.zeros(bucket.num_seqs, bool) for _ in range(2))
    if bucket.is_decode:
        starts[:] = np.arange(bucket.num_seqs)
    start = 0
    for i, chunk in enumerate(plan.chunks):
        request = chunk.request
        if chunk.start >= request.num_known_tokens:
            use_last[i] = True  # its token was sampled by a step whose result the host has not read
        else:
            tokens[start : start + chunk.num_tokens] = request.token_ids(chunk.start, chunk.stop)
        rows[i], starts[i], lens[i], contexts[i] = chunk.row, start, chunk.num_tokens, chunk.start
        is_sampled[i], steps[i] = chunk.samples, chunk.stop - request.num_prompt_tokens
        start += chunk.num_tokens
    arrays = jax.device_put((tokens, rows, starts, lens, contexts, use_last, is_sampled, steps))
    return BatchArrays(batch=StepBatch(*arrays[:6]), is_sampled=arrays[6], steps=arrays[7])
