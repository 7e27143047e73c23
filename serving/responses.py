"""Engine outputs in the shapes of OpenAI's API: answers, stream chunks, log probabilities, usage and errors."""

import abc
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from serving.errors import EngineError, OverloadedError, ServingError, UnauthorizedError, UnavailableError
from serving.prompts import PromptEncoder
from serving.request import FinishReason, RequestOutput, TokenLogprob

DONE_EVENT = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_MARK, _ENCODED_MARK = "\0", b'"\\u0000"'  # stands for the text in a frame
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say; OpenAI's value


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(content).encode() + b"\n\n"


def error_content(error: ServingError) -> dict[str, Any]:
    """The body of an error answer."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: ServingError) -> JSONResponse:
    """An error as an answer, with the headers that its status asks for."""
    headers = {}
    if isinstance(error, UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, OverloadedError):
        headers["retry-after"] = str(error.retry_after_s)
    return JSONResponse(error_content(error), error.status, headers)


def usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def raise_if_failed(output: RequestOutput) -> None:
    """An answer cut short by the server is an error, not an answer."""
    if output.finish_reason is FinishReason.ERROR:
        raise EngineError(output.error or "the engine failed")
    if output.finish_reason is FinishReason.ABORT:
        raise UnavailableError(output.error or "the request was aborted")


def merge(outputs: Iterable[RequestOutput]) -> RequestOutput:
    """All outputs of one request as one."""
    parts = list(outputs)
    return RequestOutput(
        request_id=parts[-1].request_id,
        text="".join(p.text for p in parts),
        token_ids=tuple(token_id for p in parts for token_id in p.token_ids),
        logprobs=tuple(logprob for p in parts for logprob in p.logprobs),
        finish_reason=parts[-1].finish_reason,
        num_prompt_tokens=parts[-1].num_prompt_tokens,
        num_output_tokens=parts[-1].num_output_tokens,
        num_cached_tokens=parts[-1].num_cached_tokens,
    )


class AnswerFormat(abc.ABC):
    """One route's shapes for one answer.

    Attributes:
      answer_id, created, model: as the client sees them; `created` in seconds since 1970.
      encoder: gives the texts of tokens for log probabilities.
      num_top_logprobs: alternatives a token; None for no log probabilities.
      mixes: by choice, the mix that was found for its prompt; a whole answer and the first chunk of a stream say it.
    """

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        encoder: PromptEncoder,
        num_top_logprobs: int | None,
        *,
        mixes: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        self.answer_id = answer_id
        self.created = created
        self.model = model
        self.encoder = encoder
        self.num_top_logprobs = num_top_logprobs
        self.mixes = mixes or {}
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # by choice: what stands around the text of an event

    def chunk_event(self, choices: Sequence[dict[str, Any]], *, has_usage: bool) -> bytes:
        """One event of a stream; the last one of those that tell usage is another, so it is null here."""
        content = self.envelope(choices, is_chunk=True)
        return event(content | {"usage": None} if has_usage else content)

    def output_event(self, index: int, output: RequestOutput, *, has_usage: bool) -> bytes:
        """The event of a choice's output.

        Nearly all bring text and nothing else: they differ in the text alone, and what is around it is made once, as
        building it for every token of every stream would take half of the event loop's time.
        """
        if not output.text or output.finish_reason is not None or self.num_top_logprobs is not None:
            return self.chunk_event([self.delta(index, output)], has_usage=has_usage)
        if index not in self._frames:
            marked = self.delta(index, RequestOutput(output.request_id, _MARK))
            before, _, after = self.chunk_event([marked], has_usage=has_usage).rpartition(_ENCODED_MARK)
            self._frames[index] = before, after
        before, after = self._frames[index]
        return before + _encode(output.text).encode() + after

    @abc.abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice that a stream begins with, before any token; None for none."""

    @abc.abstractmethod
    def delta(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """A choice of a stream chunk."""

    @abc.abstractmethod
    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """A choice of a whole answer; `output` holds all of it."""

    @abc.abstractmethod
    def envelope(self, choices: Sequence[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        """What stands around the choices."""

    def _with_mix(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        return choice | {"adapter_mix": self.mixes[index]} if index in self.mixes else choice

    def _token_text(self, token_id: int) -> str:
        return self.encoder.decode_token(token_id)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


class CompletionFormat(AnswerFormat):
    """Shapes of /v1/completions; `echoes` holds the prompt's text by choice where the client wants it back."""

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        encoder: PromptEncoder,
        num_top_logprobs: int | None,
        echoes: dict[int, str],
        *,
        mixes: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        super().__init__(answer_id, created, model, encoder, num_top_logprobs, mixes=mixes)
        self.echoes = echoes
        self._text_offsets: dict[int, int] = {}  # by choice: characters of its tokens so far

    def opening(self, index: int) -> dict[str, Any] | None:
        if index not in self.echoes and index not in self.mixes:
            return None
        return self._with_mix(index, self._choice(index, self.echoes.get(index, ""), None, None))

    def delta(self, index: int, output: RequestOutput) -> dict[str, Any]:
        return self._choice(index, output.text, self._logprobs(index, output.logprobs), output.finish_reason)

    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        logprobs = self._logprobs(index, output.logprobs)
        text = self.echoes.get(index, "") + output.text
        return self._with_mix(index, self._choice(index, text, logprobs, output.finish_reason))

    def envelope(self, choices: Sequence[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": list(choices),
        }

    def _choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: FinishReason | None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.num_top_logprobs is None:
            return None
        tokens, offsets = [], []
        for logprob in logprobs:
            tokens.append(self._token_text(logprob.token_id))
            offsets.append(self._text_offsets.get(index, 0))
            self._text_offsets[index] = offsets[-1] + len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(logprob.logprob) for logprob in logprobs],
            "top_logprobs": [self._top(logprob) for logprob in logprobs],
            "text_offset": offsets,
        }

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and, as OpenAI's API does, always the one that was taken."""
        top = (*logprob.top[: self.num_top_logprobs], (logprob.token_id, logprob.logprob))
        return {self._token_text(token_id): _finite(value) for token_id, value in top}


class ChatFormat(AnswerFormat):
    """Shapes of /v1/chat/completions."""

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return self._with_mix(index, {"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def delta(self, index: int, output: RequestOutput) -> dict[str, Any]:
        delta = {"content": output.text} if output.text else {}
        return self._choice(index, "delta", delta, output)

    def choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return self._with_mix(index, self._choice(index, "message", message, output))

    def envelope(self, choices: Sequence[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": "chat.completion.chunk" if is_chunk else "chat.completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": list(choices),
        }

    def _choice(self, index: int, key: str, content: dict[str, Any], output: RequestOutput) -> dict[str, Any]:
        logprobs = None
        if self.num_top_logprobs is not None:
            logprobs = {"content": [self._entry(logprob) for logprob in output.logprobs], "refusal": None}
        return {"index": index, key: content, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def _entry(self, logprob: TokenLogprob) -> dict[str, Any]:
        top = [self._token(*pair) for pair in logprob.top[: self.num_top_logprobs]]
        return {**self._token(logprob.token_id, logprob.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token_id)
        # A token may end inside a character: its bytes cannot be told from the text then, and null says so.
        return {"token": text, "logprob": _finite(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}
