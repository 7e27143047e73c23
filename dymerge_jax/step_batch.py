"""What the host gives a step: its batch, and what belongs to the rows; packed for the way to the device.

A step costs the host time for every array it takes, so there are two that the host makes: a step's batch as one array
of integers (`PackedBatch`), and all that belongs to the rows but their block tables as another (`PackedRows`), which
is uploaded only when a row gets a new owner.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from dymerge_jax.sampling import SampleTargets, SamplingParams
from pallas_kernels.pytree import pytree_dataclass

NUM_SEQ_FIELDS = 7
"""Rows of `PackedBatch.seqs`."""
_ROW_FIELDS = 6  # of SamplingParams, and the gated set


@pytree_dataclass
class AdapterMix:
    """The mix of each row, by slot.

    Attributes:
      weights: [num_rows, num_slots] float32 weights of the static mixes; zero where a row does not use a slot.
      gated_set_ids: [num_rows] int32 row of the gate array; -1 for rows without a gated set, below that for X-LoRA's,
        see `XLoraArray`.
    """

    weights: Float[Array, "num_rows num_slots"]
    gated_set_ids: Int[Array, " num_rows"]


@pytree_dataclass
class StepBatch:
    """One step's work. Sequences that are not used have seq_lens 0.

    Attributes:
      tokens: [num_tokens] int32, new tokens of all sequences; padding between or after them may hold any valid id.
      rows: [num_seqs] int32, each sequence's row of `AdapterMix`, of the block tables and of `last_tokens`.
      seq_starts: [num_seqs] int32, flat index of each sequence's first new token.
      seq_lens: [num_seqs] int32, new tokens of each sequence.
      context_lens: [num_seqs] int32, tokens of each sequence that are in the cache already.
      use_last_token: [num_seqs] bool, the sequence's one new token is the last one sampled for its row: it never
        left the device.
    """

    tokens: Int[Array, " num_tokens"]
    rows: Int[Array, " num_seqs"]
    seq_starts: Int[Array, " num_seqs"]
    seq_lens: Int[Array, " num_seqs"]
    context_lens: Int[Array, " num_seqs"]
    use_last_token: Bool[Array, " num_seqs"]

    @property
    def is_decode(self) -> bool:
        """True for as many tokens as sequences: token i then belongs to sequence i."""
        return self.tokens.shape == self.rows.shape


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """One step's `StepBatch` and `SampleTargets` in one array on the host, and views to fill it through.

    Attributes:
      array: [num_tokens + 7 * num_seqs] int32, what the step takes; its length and num_seqs give num_tokens.
      tokens: [num_tokens] int32, see `StepBatch`.
      seqs: [7, num_seqs] int32, one column a sequence: row, seq_start, seq_len, context_len, use_last_token,
        is_sampled, step; flags are 0 or 1.
    """

    array: Int[np.ndarray, " packed_len"]
    tokens: Int[np.ndarray, " num_tokens"]
    seqs: Int[np.ndarray, "num_fields num_seqs"]


def packed_len(num_tokens: int, num_seqs: int) -> int:
    """Length of `PackedBatch.array`."""
    return num_tokens + NUM_SEQ_FIELDS * num_seqs


def packed_batch(num_tokens: int, num_seqs: int) -> PackedBatch:
    """A batch without work."""
    array = np.zeros(packed_len(num_tokens, num_seqs), np.int32)
    return PackedBatch(array, array[:num_tokens], array[num_tokens:].reshape(NUM_SEQ_FIELDS, num_seqs))


def unpack_batch(packed: Int[Array, " packed_len"], num_seqs: int) -> tuple[StepBatch, SampleTargets]:
    """What the host has put into a `PackedBatch`, from its array, for a program."""
    num_tokens = packed.shape[0] - NUM_SEQ_FIELDS * num_seqs
    seqs = packed[num_tokens:].reshape(NUM_SEQ_FIELDS, num_seqs)
    batch = StepBatch(
        tokens=packed[:num_tokens],
        rows=seqs[0],
        seq_starts=seqs[1],
        seq_lens=seqs[2],
        context_lens=seqs[3],
        use_last_token=seqs[4] != 0,
    )
    return batch, unpack_targets(seqs)


def unpack_targets(seqs: Int[Array, "num_fields num_seqs"]) -> SampleTargets:
    """For whom a step samples, from `PackedBatch.seqs`, for a program."""
    return SampleTargets(rows=seqs[0], is_sampled=seqs[5] != 0, steps=seqs[6])


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """`AdapterMix` and `SamplingParams` in one array on the host; views to be filled in.

    Attributes:
      array: [num_rows, num_slots + 6] int32, what the step takes: the bits of all fields.
      weights: [num_rows, num_slots] float32.
      gated_set_ids, top_k: [num_rows] int32.
      temperature, top_p, min_p: [num_rows] float32.
      seeds: [num_rows] uint32.
    """

    array: Int[np.ndarray, "num_rows row_len"]
    weights: Float[np.ndarray, "num_rows num_slots"]
    gated_set_ids: Int[np.ndarray, " num_rows"]
    temperature: Float[np.ndarray, " num_rows"]
    top_k: Int[np.ndarray, " num_rows"]
    top_p: Float[np.ndarray, " num_rows"]
    min_p: Float[np.ndarray, " num_rows"]
    seeds: UInt[np.ndarray, " num_rows"]


def packed_rows(num_rows: int, num_slots: int) -> PackedRows:
    """Rows on the base model, greedy."""
    array = np.zeros((num_rows, num_slots + _ROW_FIELDS), np.int32)
    floats, uints = array.view(np.float32), array.view(np.uint32)
    rows = PackedRows(
        array=array,
        weights=floats[:, _ROW_FIELDS:],
        gated_set_ids=array[:, 0],
        temperature=floats[:, 1],
        top_k=array[:, 2],
        top_p=floats[:, 3],
        min_p=floats[:, 4],
        seeds=uints[:, 5],
    )
    rows.gated_set_ids[:] = -1
    rows.top_p[:] = 1.0
    return rows


def unpack_rows(packed: Int[Array, "num_rows row_len"]) -> tuple[AdapterMix, SamplingParams]:
    """What the host has put into `PackedRows`, for a program."""

    def floats(x: Int[Array, "..."]) -> Float[Array, "..."]:
        return jax.lax.bitcast_convert_type(x, jnp.float32)

    mix = AdapterMix(weights=floats(packed[:, _ROW_FIELDS:]), gated_set_ids=packed[:, 0])
    return mix, SamplingParams(
        temperature=floats(packed[:, 1]),
        top_k=packed[:, 2],
        top_p=floats(packed[:, 3]),
        min_p=floats(packed[:, 4]),
        seeds=jax.lax.bitcast_convert_type(packed[:, 5], jnp.uint32),
    )
