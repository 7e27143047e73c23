"""A stand-in for the engine: a step gives every request one letter, which depends on prompt, mix, seed and position."""

import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from checkpoints.errors import CheckpointError, MissingFileError
from serving.request import FinishReason, Request, RequestOutput, TokenLogprob
from tests.support.waiting import PATIENCE_S


@dataclasses.dataclass(frozen=True)
class FakeAdapter:
    """A file named `weights` as an adapter; its first byte is the number of its slots, "0" makes it a bad one."""

    name: str
    root: Path
    id: str
    content_hash: str
    num_slots: int


class FakeEngine:
    """Like `serving.engine.Engine` from outside.

    Attributes:
      step_s: how long a step takes, in seconds.
      tokens_per_step: tokens that every request gets from a step.
      step_error: raised by every step while it is set.
      max_running: further requests wait, in order of arrival.
      added: every request there was, in order of arrival.
      held: requests the engine knows, by id, in order of arrival.
      aborted: ids of the requests that were aborted while held, in order.
      adapters: known adapters by id.
      read_s: how long reading an adapter takes, in seconds.
      may_read: while it is not set, reading waits.
      num_reads: adapters read so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, step_s: float = 0.0, max_running: int = 64) -> None:
        self.tokenizer = tokenizer
        self.step_s = step_s
        self.tokens_per_step = 1
        self.max_running = max_running
        self.step_error: Exception | None = None
        self.added: list[Request] = []
        self.held: dict[str, Request] = {}
        self.aborted: list[str] = []
        self.threads: set[int] = set()
        self.adapters: dict[str, FakeAdapter] = {}
        self.read_s = 0.0
        self.may_read = threading.Event()
        self.may_read.set()
        self.num_reads = 0

    @property
    def has_work(self) -> bool:
        return bool(self.held)

    is_waiting_for_adapters = False

    def on_adapter_news(self, listener: Callable[[], None]) -> None:
        """It never waits for adapters."""

    def read_adapter(self, name: str, folder: Path) -> FakeAdapter:
        self.num_reads += 1
        time.sleep(self.read_s)
        assert self.may_read.wait(PATIENCE_S)
        if not (folder / "weights").is_file():
            raise MissingFileError(f"adapter path {str(folder)!r} holds no weights")
        content = (folder / "weights").read_bytes()
        if content[:1] == b"0":
            raise CheckpointError(f"adapter {str(folder)!r} is refused:\n- no slots")
        content_hash = hashlib.sha256(content).hexdigest()
        return FakeAdapter(name, folder, f"{name}@{content_hash[:16]}", content_hash, int(content[:1]))

    def add_adapter(self, adapter: FakeAdapter) -> str:
        self.threads.add(threading.get_ident())
        self.adapters[adapter.id] = adapter
        return adapter.id

    def remove_adapter(self, adapter_id: str) -> None:
        self.threads.add(threading.get_ident())
        del self.adapters[adapter_id]

    def add_request(self, request: Request) -> None:
        self.threads.add(threading.get_ident())
        self.added.append(request)
        self.held[request.request_id] = request

    def abort(self, request_id: str) -> None:
        self.threads.add(threading.get_ident())
        if self.held.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def step(self) -> list[RequestOutput]:
        self.threads.add(threading.get_ident())
        time.sleep(self.step_s)
        if self.step_error is not None:
            raise self.step_error
        outputs = []
        for _ in range(self.tokens_per_step):
            advanced = [self._advance(r) for r in list(self.held.values())[: self.max_running]]
            for output in advanced:
                if output.finish_reason is not None:
                    del self.held[output.request_id]
            outputs += advanced
        return outputs

    def _advance(self, request: Request) -> RequestOutput:
        letters = answer(self.tokenizer, request, request.num_output_tokens + 1)
        token_id = self.token_id(letters[-1])
        request.output_token_ids.append(token_id)
        stop = next((s for s in request.sampling.stop if letters.endswith(s)), None)
        reason = FinishReason.STOP if stop else None
        if reason is None and request.num_output_tokens == request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        logprobs = ()
        if (num_top := request.sampling.logprobs) is not None:
            top = tuple((self.token_id(c), -1.0 - i) for i, c in enumerate("abcdefghij"[:num_top]))
            logprobs = (TokenLogprob(token_id, -0.5, top),)
        return RequestOutput(
            request.request_id, "" if stop else letters[-1], (token_id,), logprobs, reason,
            request.num_prompt_tokens, request.num_output_tokens,
        )  # fmt: skip

    def token_id(self, letter: str) -> int:
        token_id = self.tokenizer.convert_tokens_to_ids(letter)
        assert isinstance(token_id, int)
        return token_id


def answer(tokenizer: PreTrainedTokenizerFast, request: Request, num_tokens: int) -> str:
    """The first letters of the answer to a request."""
    seed = request.sampling.seed if request.sampling.temperature else None
    key = (request.prompt_token_ids, request.mix.entries, request.mix.gated_set, seed)
    return "".join(
        chr(97 + hashlib.sha256(f"{key}{i}".encode()).digest()[0] % 26) for i in range(num_tokens)
    )  # fmt: skip
