"""A server for the load benchmark's tests that answers each request after a known time, with tokens of its own."""

import asyncio
import dataclasses

from serving.bench.clients import Clock
from serving.bench.records import Record, ServerCounts
from serving.bench.workloads import TraceRequest, prompt_token_ids


@dataclasses.dataclass
class FakeServer:
    """A `Client` whose server gives a token every `token_s` seconds, to any number of requests at once.

    Attributes:
      vocab: token ids of prompts are below it.
      token_s: seconds of a token.
      stuck: prompts that are never answered, by index.
      failing: prompts that are refused, by index.
      depends_on_load: gives other tokens while other requests run, as a server must not.
      running: requests in it now.
      most_running: most at once.
      vanished: indices of the requests whose client left.
      num_sent: requests so far.
      free_blocks: blocks that it says are free.
      blocks_lost: how many fewer they are each time.
    """

    vocab: int = 100
    token_s: float = 0.001
    stuck: frozenset[int] = frozenset()
    failing: frozenset[int] = frozenset()
    depends_on_load: bool = False
    running: int = 0
    most_running: int = 0
    vanished: list[int] = dataclasses.field(default_factory=list)
    num_sent: int = 0
    free_blocks: int = 100
    blocks_lost: int = 0

    async def generate(self, request: TraceRequest, record: Record, clock: Clock, *, seed: int) -> None:
        self.num_sent += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if record.index in self.failing:
                record.error = "no"
                return
            first = sum(prompt_token_ids(record.index, request.prompt_len, self.vocab, seed=seed))
            for i in range(request.output_len):
                await asyncio.sleep(3600 if record.index in self.stuck else self.token_s)
                record.output_times_s.append(clock.elapsed_s())
                record.num_tokens += 1
                record.token_ids.append(first + i + (self.running > 1 if self.depends_on_load and i else 0))
            record.is_done = True
        except asyncio.CancelledError:
            self.vanished.append(record.index)
            raise
        finally:
            self.running -= 1

    async def num_free_blocks(self) -> int | None:
        self.free_blocks -= self.blocks_lost
        return self.free_blocks

    async def settle(self) -> None:
        while self.running:
            await asyncio.sleep(0.001)

    async def forget_prefixes(self) -> None:
        pass

    async def counts(self) -> ServerCounts:
        return ServerCounts(steps=self.num_sent)
