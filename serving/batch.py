"""StepPlan to device arrays: the one place where host lists become jax arrays.

What changes with every step (tokens, lengths) goes to the device with every step, as one array; so do block tables that
are not large. What else belongs to a row (mix, sampling) is kept there and uploaded again only after it changed.
"""

import dataclasses
import itertools
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Array, Int

from dymerge_jax.sampling import device_seed
from dymerge_jax.step_batch import PackedBatch, packed_batch, packed_rows
from serving.plan import Chunk, StepPlan
from serving.request import Request

BlockTables = Int[Array | np.ndarray, "num_rows blocks_per_seq"]
_MOST_HANDED_OVER = 256 << 10  # bytes that go to the device with every step's call


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The padded size of a step program.

    Attributes:
      num_tokens: flat tokens.
      num_seqs: sequences; equal to num_tokens for decode programs, less for the others.
      max_slots: adapter slots that its sequences may use together; None is any number.
      has_scaling_pass: its program runs X-LoRA's two passes.
    """

    num_tokens: int
    num_seqs: int
    max_slots: int | None = None
    has_scaling_pass: bool = False

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_seqs


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The step programs of an engine: all of them are compiled at start-up.

    Attributes:
      decode: for steps of one token a sequence; several of a size may differ in the slots that they are made for.
      mixed: for all others, likewise.
      two_pass: the same sizes again for steps with a row that uses an X-LoRA set; empty where there is no such set.
    """

    decode: tuple[Bucket, ...]
    mixed: tuple[Bucket, ...]
    two_pass: tuple[Bucket, ...] = ()

    @property
    def all(self) -> tuple[Bucket, ...]:
        return self.decode + self.mixed + self.two_pass

    def with_two_passes(self) -> "Buckets":
        """The same with programs for X-LoRA sets."""
        sizes = [bucket for bucket in self.decode + self.mixed if bucket.max_slots is None]
        two_pass = tuple(dataclasses.replace(bucket, has_scaling_pass=True) for bucket in sizes)
        return dataclasses.replace(self, two_pass=two_pass)

    def of(self, plan: StepPlan, num_slots: int) -> Bucket:
        """The smallest bucket that holds the plan, whose sequences use `num_slots` slots together."""
        decode, mixed = self.decode, self.mixed
        if self.two_pass and plan.has_scaling_pass:
            decode = [b for b in self.two_pass if b.is_decode]
            mixed = [b for b in self.two_pass if not b.is_decode]
        if plan.is_decode:
            fitting = [b for b in decode if b.num_seqs >= plan.num_seqs]
        else:
            fitting = [b for b in mixed if b.num_tokens >= plan.num_tokens and b.num_seqs >= plan.num_seqs]
        fitting = [b for b in fitting if num_slots <= _slots_of(b)]
        return min(fitting, key=lambda b: (b.num_tokens, _slots_of(b)))


def _slots_of(bucket: Bucket) -> float:
    return math.inf if bucket.max_slots is None else bucket.max_slots


def make_buckets(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    decode_sizes: Iterable[int],
    mixed_sizes: Iterable[int],
    decode_slots: Callable[[int], Sequence[int | None]] = lambda _: (None,),
    mixed_slots: Callable[[int], Sequence[int | None]] = lambda _: (None,),
) -> Buckets:
    """Buckets of the given sizes, up to the limits.

    A mixed bucket has more tokens than sequences, as one with as many is read as a decode step; so a small one cannot
    have all rows, and holds as many as the largest decode size below its tokens.

    Args:
      max_num_seqs: rows.
      max_num_batched_tokens: token budget of a step.
      decode_sizes, mixed_sizes: ascending, maybe endless; those below the limit are used, and the limit.
      decode_slots: `Bucket.max_slots` that a size of a decode step gets programs for; one of them is None.
      mixed_slots: the same for a size of a mixed step.
    """
    decode = _up_to(max_num_seqs, decode_sizes)
    mixed = _up_to(max(max_num_batched_tokens, max_num_seqs + 1), mixed_sizes)
    return Buckets(
        decode=tuple(Bucket(n, n, max_slots) for n in decode for max_slots in decode_slots(n)),
        mixed=tuple(
            Bucket(t, max(n for n in decode if n < t), max_slots)
            for t in mixed
            if t > decode[0]
            for max_slots in mixed_slots(t)
        ),
    )


def _up_to(last: int, sizes: Iterable[int]) -> list[int]:
    return [*itertools.takewhile(lambda size: size < last, sizes), last]


class RowTables:
    """Host mirror of what belongs to the rows, and its copy on the device.

    Args:
      num_rows: most running requests.
      blocks_per_seq: width of the block table.
      num_slots: slots of the device's adapter array.
      has_two_caches: a request may have a second KV cache, for which there is a second block table.
    """

    def __init__(self, num_rows: int, blocks_per_seq: int, num_slots: int, *, has_two_caches: bool = False) -> None:
        self._owners: list[tuple[Request, int] | None] = [None] * num_rows
        self._num_blocks = [0] * num_rows
        # One for each cache: [num_rows, blocks_per_seq].
        self._block_tables = np.zeros((2 if has_two_caches else 1, num_rows, blocks_per_seq), np.int32)
        self._rows = packed_rows(num_rows, num_slots)
        self.block_tables: BlockTables = _hand_over(self._block_tables[0])
        self.scaling_tables: BlockTables | None = None
        if has_two_caches:
            self.scaling_tables = _hand_over(self._block_tables[1])
        self.rows: Int[Array, "num_rows row_len"] = _upload(self._rows.array)

    def update(
        self,
        chunks: Sequence[Chunk],
        slots_of: Callable[[str], Sequence[int] | None],
        gated_set_ids: Mapping[str, int],
    ) -> None:
        """Brings the rows of the chunks' requests up to date, on the host and then on the device.

        Args:
          chunks: of the step to come.
          slots_of: slots of an adapter; asked for those of requests that are new in their rows.
          gated_set_ids: of each gated set, see `AdapterMix`.
        """
        rows_changed = tables_changed = scaling_changed = False
        for chunk in chunks:
            request, row = chunk.request, chunk.row
            if self._owners[row] != (request, chunk.epoch):  # requests compare by identity
                self._owners[row] = (request, chunk.epoch)
                self._num_blocks[row] = 0
                self._set_row(row, request, slots_of, gated_set_ids)
                rows_changed = True
            known, block_table = self._num_blocks[row], request.block_table
            if len(block_table) > known:
                num_caches = request.num_caches
                for cache in range(num_caches):
                    part = block_table[known + cache :: num_caches]
                    first = known // num_caches
                    self._block_tables[cache, row, first : first + len(part)] = part
                self._num_blocks[row] = len(block_table)
                tables_changed = True
                scaling_changed |= num_caches > 1
        if rows_changed:
            self.rows = _upload(self._rows.array)
        if tables_changed:
            self.block_tables = _hand_over(self._block_tables[0])
        if scaling_changed:
            self.scaling_tables = _hand_over(self._block_tables[1])

    def _set_row(
        self,
        row: int,
        request: Request,
        slots_of: Callable[[str], Sequence[int] | None],
        gated_set_ids: Mapping[str, int],
    ) -> None:
        rows, s = self._rows, request.sampling
        rows.weights[row] = 0.0
        for name, weight in request.mix.entries:
            rows.weights[row, list(slots_of(name) or ())] = weight
        gated_set = request.mix.gated_set
        rows.gated_set_ids[row] = -1 if gated_set is None else gated_set_ids[gated_set]
        rows.temperature[row] = min(s.temperature, np.finfo(np.float32).max)
        rows.top_k[row] = min(s.top_k, np.iinfo(np.int32).max)
        rows.top_p[row] = s.top_p
        rows.min_p[row] = s.min_p
        # Without a seed, a fresh one for every admission: nobody can tell.
        rows.seeds[row] = device_seed(secrets.randbits(32) if s.seed is None else s.seed)


def _hand_over(tables: Int[np.ndarray, "num_rows blocks_per_seq"]) -> BlockTables:
    """As a step is to get them.

    With 32 rows, some row gets a new block in nearly every step, and the call of a program brings small arrays to the
    device in less of the host's time than `jax.device_put`, which takes 0.25 ms on an H200's host.
    """
    return tables.copy() if tables.nbytes <= _MOST_HANDED_OVER else _upload(tables)


def _upload(array: Int[np.ndarray, "num_rows width"]) -> Int[Array, "num_rows width"]:
    # A copy: on a CPU, jax may share numpy's memory, which the next change would write into a running step. Made by
    # numpy, as jnp.array runs a program of its own to copy, compiled anew for each shape.
    return jax.device_put(array.copy())


def build_batch(plan: StepPlan, bucket: Bucket) -> PackedBatch:
    """Packs the chunks one after another and pads them to the bucket.

    The arrays stay on the host: handed to a compiled program, they get to the device faster than by `jax.device_put`.
    """
    batch = packed_batch(bucket.num_tokens, bucket.num_seqs)
    columns = []
    start = 0
    for chunk in plan.chunks:
        request, num_tokens = chunk.request, chunk.num_tokens
        # A token that the host does not know was sampled by a step whose result it has not read.
        is_on_device = chunk.start >= request.num_known_tokens
        if not is_on_device:
            batch.tokens[start : start + num_tokens] = request.token_ids(chunk.start, chunk.stop)
        step = chunk.stop - request.num_prompt_tokens
        columns.append((chunk.row, start, num_tokens, chunk.start, is_on_device, chunk.samples, step))
        start += num_tokens
    if columns:
        batch.seqs[:, : len(columns)] = np.array(columns, np.int32).T
    if bucket.is_decode:
        batch.seqs[1] = np.arange(bucket.num_seqs)  # seq_starts: token i belongs to sequence i, padding included
    return batch
