"""A request from arrival to its last token: what the client asked for, and how far the engine has come with it."""

import dataclasses
import enum
import math
from typing import NamedTuple, TypeGuard

from serving.errors import InvalidRequestError

MAX_LOGPROBS = 20  # as many alternatives a token as OpenAI's chat API allows
MAX_FLOAT32 = 3.4028234663852886e38  # weights are float32 on the device


class Phase(enum.StrEnum):
    """Where a request is. RUNNING owns a row, KV blocks and adapter pins; WAITING and FINISHED own nothing."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended: a stop token or string, its length limit, the client, or a failed step."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen; checked on construction.

    Attributes:
      max_tokens: most output tokens, at least 1.
      temperature: 0 is greedy; otherwise logits are divided by it.
      top_k: keep the k likeliest tokens; 0 keeps all.
      top_p: keep the likeliest tokens that together reach this probability, in (0, 1].
      min_p: drop tokens less likely than this share of the likeliest one, in [0, 1].
      seed: makes sampling repeatable; None draws a new one for each request.
      stop: strings that end the output and are not part of it.
      stop_token_ids: token ids that end the output, besides the model's own end tokens.
      ignore_eos: go on after the model's own end tokens (for benchmarks).
      logprobs: None for none, n for the log-probability of each token and its n likeliest alternatives.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, _is_int(self.max_tokens) and self.max_tokens >= 1, "an integer >= 1")
        _check("temperature", self.temperature, _in_range(self.temperature, 0, math.inf), "a finite number >= 0")
        _check("top_k", self.top_k, _is_int(self.top_k) and self.top_k >= 0, "an integer >= 0 (0 keeps all tokens)")
        _check("top_p", self.top_p, _in_range(self.top_p, 0, 1) and self.top_p > 0, "a number in (0, 1]")
        _check("min_p", self.min_p, _in_range(self.min_p, 0, 1), "a number in [0, 1]")
        has_seed = _is_int(self.seed) and -(2**63) <= self.seed < 2**63
        _check("seed", self.seed, self.seed is None or has_seed, "an integer of 64 bits, or nothing")
        is_stop = isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop)
        _check("stop", self.stop, is_stop, "strings that are not empty")
        is_ids = isinstance(self.stop_token_ids, tuple) and all(_is_int(i) and i >= 0 for i in self.stop_token_ids)
        _check("stop_token_ids", self.stop_token_ids, is_ids, "token ids >= 0")
        has_logprobs = _is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS
        _check("logprobs", self.logprobs, self.logprobs is None or has_logprobs, f"an integer in 0..{MAX_LOGPROBS}")

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature == 0.0


@dataclasses.dataclass(frozen=True)
class Mix:
    """The adapters of a request with their weights; equal mixes give equal outputs, whatever order they came in.

    The constructor sorts the entries and drops zero weights, so `Mix` is usable as a key: two requests may share KV
    blocks only if their mixes are equal.

    Attributes:
      entries: (adapter key, weight) pairs by ascending key. Weights are finite, may be negative or above 1, never 0,
        and multiply the adapter's own scaling. A key names adapter *and* content, so that a replaced adapter differs.
      gated_set: key of the gated set that computes further weights on the device, or None.
    """

    entries: tuple[tuple[str, float], ...] = ()
    gated_set: str | None = None

    def __post_init__(self) -> None:
        keys = [key for key, _ in self.entries]
        for key, weight in self.entries:
            if not _in_range(weight, -MAX_FLOAT32, MAX_FLOAT32):
                raise InvalidRequestError(
                    f"adapter_mix gives adapter {key!r} the weight {weight!r}, expected a finite float32 number",
                    param="adapter_mix",
                )
            if keys.count(key) > 1:
                raise InvalidRequestError(
                    f"adapter_mix names adapter {key!r} {keys.count(key)} times; give each adapter once",
                    param="adapter_mix",
                )
        entries = tuple(sorted((key, float(weight)) for key, weight in self.entries if weight != 0))
        object.__setattr__(self, "entries", entries)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Keys of the adapters with a weight, ascending; those of the gated set are not among them."""
        return tuple(key for key, _ in self.entries)

    @property
    def is_base(self) -> bool:
        """True if the request runs on the base model alone."""
        return not self.entries and self.gated_set is None


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """One request. The client's part is fixed; the rest is the scheduler's and the engine's.

    Positions: the tokens of a request are its prompt followed by its output, at positions 0, 1, …. Those below
    `num_computed_tokens` have their keys and values in KV blocks, or will have when the dispatched steps are done.

    Tokens in flight: the engine plans a step before it has read the tokens of the step before. Such a token counts in
    `num_in_flight` from the dispatch of the step that samples it (`Scheduler.on_dispatched`) until the engine has read
    it (`commit_token`); meanwhile it is on the device only, at position `num_known_tokens`.

    Attributes:
      request_id: unique among the requests in the engine.
      prompt_token_ids: at least one token.
      sampling: how output tokens are chosen.
      mix: adapters and weights, or a gated set.
      adapters: ids of all adapters that must be in slots while the request runs, those of a gated set included.
      arrival_s: when the request came, on the clock of `Scheduler.plan`; preemption does not change it.
      output_token_ids: tokens read from the device, in order.
      phase: WAITING, RUNNING or FINISHED.
      finish_reason: None until FINISHED.
      num_computed_tokens: leading tokens whose keys and values are written, counting dispatched steps.
      num_in_flight: tokens sampled by dispatched steps and not read yet.
      row: the engine row it owns while RUNNING, in 0..max_num_seqs-1; None otherwise.
      num_caches: KV caches that each of its tokens is written to: 2 with an X-LoRA set, whose scaling pass has one of
        its own, else 1. Set by `Scheduler.add`.
      block_table: the KV blocks it owns while RUNNING, in order of position; empty otherwise. The leading ones may
        have further owners; see `PrefixCache`. With two caches, a position has one block after the other: first that of
        the pass that gives the answer.
      num_registered_blocks: leading blocks of the table that others can find; those with further owners among them.
      block_keys: what `PrefixCache` knows its leading blocks by, as far as that was needed yet.
      num_cached_tokens: prompt tokens that its first admission found computed.
      has_overtaken: it was admitted past a claimant, which it must leave its blocks; see `Scheduler`. False unless
        RUNNING.
      epoch: how often it was admitted; each epoch computes the positions that it does not find computed, in order.
        See `Scheduler`.
      first_token_s: when its first output token was read; None before.
      sequence_number: order of arrival in the scheduler; breaks ties of `arrival_s`. Set by `Scheduler.add`.
      token_limit: most tokens, prompt and output together. Set by `Scheduler.add`.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    mix: Mix
    arrival_s: float
    adapters: tuple[str, ...] = ()
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    phase: Phase = Phase.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    row: int | None = None
    num_caches: int = 1
    block_table: list[int] = dataclasses.field(default_factory=list)
    num_registered_blocks: int = 0
    block_keys: list[bytes] = dataclasses.field(default_factory=list)
    num_cached_tokens: int = 0
    has_overtaken: bool = False
    epoch: int = 0
    first_token_s: float | None = None
    sequence_number: int = -1
    token_limit: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that the host has read."""
        return len(self.output_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Tokens that the host knows: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_total_tokens(self) -> int:
        """Known tokens and those in flight."""
        return self.num_known_tokens + self.num_in_flight

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens still to run before the next one can be sampled: 1 for a decode row, more in prefill."""
        # Spelled out, as the properties above cost a call each: every step asks this of every running request.
        num_known = len(self.prompt_token_ids) + len(self.output_token_ids)
        return num_known + self.num_in_flight - self.num_computed_tokens

    @property
    def arrival_order(self) -> tuple[float, int]:
        """Sort key: earlier arrivals first, no two requests equal."""
        return (self.arrival_s, self.sequence_number)

    @property
    def is_finished(self) -> bool:
        """True once the request has a finish reason; tokens that still arrive for it are dropped."""
        return self.phase is Phase.FINISHED

    def token_id(self, position: int) -> int:
        """The known token at `position`, prompt or output."""
        num_prompt = len(self.prompt_token_ids)
        return (
            self.prompt_token_ids[position] if position < num_prompt else self.output_token_ids[position - num_prompt]
        )

    def token_ids(self, start: int, stop: int) -> list[int]:
        """The known tokens at positions [start, stop)."""
        num_prompt = len(self.prompt_token_ids)
        output = self.output_token_ids[max(start - num_prompt, 0) : max(stop - num_prompt, 0)]
        return self.prompt_token_ids[start:stop] + output

    def commit_token(self, token_id: int) -> None:
        """Takes the oldest token in flight as read: it becomes the next output token."""
        assert self.num_in_flight > 0, f"request {self.request_id} has no token in flight"
        self.num_in_flight -= 1
        self.output_token_ids.append(token_id)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.phase}, prompt {self.num_prompt_tokens}, "
            f"output {self.num_output_tokens}+{self.num_in_flight}, computed {self.num_computed_tokens})"
        )


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one output token, and the likeliest tokens at its position.

    Attributes:
      token_id: the token taken.
      logprob: its natural log-probability, before temperature and filters.
      top: (token id, log-probability) of the likeliest tokens, likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RequestOutput(NamedTuple):
    """What is new for one request since its last output. A tuple, as it is made for each token.

    Attributes:
      request_id: the request.
      text: new text; may be empty while a character or a possible stop string is incomplete.
      token_ids: new tokens.
      logprobs: one for each of `token_ids` if the request asked for them, else empty.
      finish_reason: set in the last output of a request.
      num_prompt_tokens: tokens of the prompt.
      num_output_tokens: output tokens so far.
      num_cached_tokens: prompt tokens that were found computed.
      error: what went wrong, for FinishReason.ERROR.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    error: str | None = None


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _in_range(value: object, low: float, high: float) -> bool:
    """True for a finite number in [low, high]; bool is no number here."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high and value != math.inf


def _check(name: str, value: object, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise InvalidRequestError(f"{name} is {value!r}, expected {expected}", param=name)
