"""What one step runs: the scheduler writes a StepPlan, the engine carries it out without deciding anything."""

import dataclasses
from typing import NamedTuple

from serving.request import Request


@dataclasses.dataclass(frozen=True)
class Load:
    """One adapter to copy into slots before the step runs.

    Attributes:
      adapter_id: the adapter.
      slot_ids: the slots it owns from now on, in order of its rank rows.
      evicted: adapters that lost their slots for it; some of those slots may stay free.
    """

    adapter_id: str
    slot_ids: tuple[int, ...]
    evicted: tuple[str, ...]


class Chunk(NamedTuple):
    """Consecutive tokens of one request in one step: a prefill chunk, or the one token of a decode row.

    A tuple, as every step makes one for each row, and a frozen dataclass takes three times as long to make.

    Attributes:
      request: the request; its block table covers every position of the chunk.
      row: the request's engine row in this step. The request may have lost it when the step's tokens are read.
      epoch: the request's epoch in this step.
      start: position of the first token.
      num_tokens: at least 1.
      samples: True if the chunk ends with the last token of the request, so that the step samples the next one.
    """

    request: Request
    row: int
    epoch: int
    start: int
    num_tokens: int
    samples: bool

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One step of the engine.

    Attributes:
      chunks: decode rows first, then prefill chunks; at most one for each request.
      loads: adapters to copy into slots before the step, in this order (a later one may reuse a slot of an earlier
        one's evicted adapter, never a slot that the step reads).
      preempted: requests that lost their row, blocks and pins to older ones; they wait again.
    """

    chunks: tuple[Chunk, ...] = ()
    loads: tuple[Load, ...] = ()
    preempted: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, without padding."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_seqs(self) -> int:
        """Requests of the step."""
        return len(self.chunks)

    @property
    def is_decode(self) -> bool:
        """True if every chunk is a single token: the step can use the decode program."""
        return all(chunk.num_tokens == 1 for chunk in self.chunks)

    @property
    def has_scaling_pass(self) -> bool:
        """True if a request of the step has a second KV cache: the step needs X-LoRA's program."""
        return any(chunk.request.num_caches > 1 for chunk in self.chunks)

    @property
    def adapters(self) -> set[str]:
        """All adapters that the step's requests use."""
        return {name for chunk in self.chunks for name in chunk.request.adapters}

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to run, e.g. because every running request waits for its last token."""
        return not self.chunks
