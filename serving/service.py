"""The two generation routes apart from HTTP: a checked body becomes a job, a job becomes an answer or a stream."""

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from dymerge_jax.example_lines import asked_text
from dymerge_jax.retrieval import AUTO
from serving.adapter_ids import adapter_name
from serving.async_engine import AsyncEngine, Generation
from serving.auto_mix import AutoMix
from serving.errors import InvalidRequestError, ServingError
from serving.mixes import ModelRegistry
from serving.prompts import PromptEncoder
from serving.protocol import ChatRequest, CompletionRequest, GenerationFields
from serving.request import Mix, Request, RequestOutput, SamplingParams
from serving.responses import (
    DONE_EVENT,
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    error_content,
    event,
    merge,
    raise_if_failed,
    usage,
)
from serving.retrieval import Retriever, Vectors, no_candidates

logger = logging.getLogger(__name__)

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked request: one engine request for each choice, in the order of the choices.

    Attributes:
      requests: for the engine.
      shapes: how its answer looks.
      num_prompt_tokens: of all prompts, each counted once.
      num_choices: of each prompt; those of one prompt stand side by side.
      is_stream: answer by server-sent events.
      includes_usage: end a stream with the token counts.
    """

    requests: list[Request]
    shapes: AnswerFormat
    num_prompt_tokens: int
    num_choices: int
    is_stream: bool
    includes_usage: bool


class OpenAIService:
    """What the two generation routes do, apart from HTTP."""

    def __init__(
        self,
        engine: AsyncEngine,
        registry: ModelRegistry,
        encoder: PromptEncoder,
        *,
        max_choices: int,
        retriever: Retriever | None = None,
    ) -> None:
        self.engine = engine
        self.registry = registry
        self.encoder = encoder
        self.max_choices = max_choices
        self.retriever = retriever

    def is_auto(self, fields: GenerationFields) -> bool:
        """True if making its job has to wait for the engine.

        Raises:
          ServingError: If it selects adapters in two ways.
        """
        return self._auto(fields) is not None

    async def completion_job(self, fields: CompletionRequest) -> Job:
        self._check(fields, len(fields.prompt), "prompt")
        prompts = await asyncio.to_thread(self._tokenize, fields.prompt)
        max_tokens = self._max_tokens(fields, prompts, COMPLETION_MAX_TOKENS, "prompt")
        found = await self._embed(fields, lambda: [self._text(given) for given in fields.prompt])
        requests = self._requests("cmpl", fields, prompts, max_tokens, found)
        echoes = self._echoes(fields, prompts) if fields.echo else {}
        mixes = self._found_mixes(fields, requests)
        shapes = CompletionFormat(
            *self._header(requests, fields), self.encoder, fields.num_top_logprobs, echoes, mixes=mixes
        )
        return self._job(fields, requests, shapes, prompts)

    async def chat_job(self, fields: ChatRequest) -> Job:
        self._check(fields, 1, "messages")
        prompts = [await asyncio.to_thread(self.encoder.encode_chat, fields.messages)]
        max_tokens = self._max_tokens(fields, prompts, None, "messages")
        found = await self._embed(fields, lambda: [asked_text([m.for_template() for m in fields.messages])])
        requests = self._requests("chatcmpl", fields, prompts, max_tokens, found)
        mixes = self._found_mixes(fields, requests)
        shapes = ChatFormat(*self._header(requests, fields), self.encoder, fields.num_top_logprobs, mixes=mixes)
        return self._job(fields, requests, shapes, prompts)

    async def answer(self, job: Job, generation: Generation) -> dict[str, Any]:
        """Runs a job to its end; the whole answer."""
        parts: dict[str, list[RequestOutput]] = {r.request_id: [] for r in job.requests}
        await generation.wait_accepted()
        async for output in generation:
            raise_if_failed(output)
            parts[output.request_id].append(output)
        answers = [merge(p) for p in parts.values()]
        num_output_tokens = sum(a.num_output_tokens for a in answers)
        log_end(job, num_output_tokens)
        content = job.shapes.envelope([job.shapes.choice(i, a) for i, a in enumerate(answers)], is_chunk=False)
        num_cached_tokens = sum(a.num_cached_tokens for a in answers[:: job.num_choices])
        return content | {"usage": usage(job.num_prompt_tokens, num_output_tokens, num_cached_tokens)}

    async def events(self, job: Job, generation: Generation) -> AsyncIterator[bytes]:
        """The stream of a job that the engine has accepted."""
        indices = {r.request_id: i for i, r in enumerate(job.requests)}
        num_output_tokens, num_cached_tokens = dict.fromkeys(indices, 0), dict.fromkeys(indices, 0)
        for index in indices.values():
            if (opening := job.shapes.opening(index)) is not None:
                yield job.shapes.chunk_event([opening], has_usage=job.includes_usage)
        try:
            async for output in generation:
                raise_if_failed(output)
                num_output_tokens[output.request_id] = output.num_output_tokens
                num_cached_tokens[output.request_id] = output.num_cached_tokens
                if output.text or output.logprobs or output.finish_reason:
                    index = indices[output.request_id]
                    yield job.shapes.output_event(index, output, has_usage=job.includes_usage)
        except ServingError as error:
            yield event(error_content(error))
        else:
            log_end(job, sum(num_output_tokens.values()))
            if job.includes_usage:
                cached = sum(list(num_cached_tokens.values())[:: job.num_choices])
                counts = usage(job.num_prompt_tokens, sum(num_output_tokens.values()), cached)
                yield event(job.shapes.envelope([], is_chunk=True) | {"usage": counts})
        yield DONE_EVENT

    def _auto(self, fields: GenerationFields) -> tuple[AutoMix, str] | None:
        return self.registry.auto_mix(fields.model, fields.adapter_mix, fields.lora)

    def _check(self, fields: CompletionRequest | ChatRequest, num_prompts: int, param: str) -> None:
        """Refuses what can be refused before the prompt is looked at."""
        num_choices = fields.n or 1
        if num_prompts * num_choices > self.max_choices:
            raise InvalidRequestError(
                f"{num_prompts} prompts with n = {num_choices} make {num_prompts * num_choices} choices; at most "
                f"{self.max_choices} are allowed in one request",
                param="n" if num_choices > 1 else param,
            )
        self.encoder.check_token_ids(fields.stop_token_ids or (), "stop_token_ids")
        auto = self._auto(fields)
        if auto is None:
            self._resolve(fields)
        elif self.retriever is None:
            raise no_candidates(auto[1])
        else:
            self.retriever.check(*auto)

    def _resolve(self, fields: GenerationFields) -> Mix:
        assert not isinstance(fields.adapter_mix, AutoMix)
        return self.registry.resolve(fields.model, fields.adapter_mix, fields.lora)

    async def _embed(self, fields: GenerationFields, texts: Callable[[], list[str]]) -> list[Vectors] | None:
        """Vectors of each prompt's text, from which its adapters are found; None where the request names them."""
        if self._auto(fields) is None:
            return None
        assert self.retriever is not None
        return await self.retriever.embed_prompts(await asyncio.to_thread(texts))

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.encoder.decode(prompt, param="prompt")

    def _mixes(self, fields: GenerationFields, found: list[Vectors] | None, num_prompts: int) -> list[Mix]:
        """The mix of each prompt."""
        auto = self._auto(fields)
        if auto is None or found is None:
            return [self._resolve(fields)] * num_prompts
        assert self.retriever is not None
        weights = [self.retriever.weights(auto[0], vectors, auto[1]) for vectors in found]
        try:
            return [self.registry.resolve(None, mix) for mix in weights]
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{error}; ask for {AUTO}:K with a smaller K", param=auto[1]) from error

    def _found_mixes(self, fields: GenerationFields, requests: Sequence[Request]) -> dict[int, dict[str, float]]:
        """By choice, what was found for its prompt, as the client would name it."""
        if self._auto(fields) is None:
            return {}
        return {i: {adapter_name(key): weight for key, weight in r.mix.entries} for i, r in enumerate(requests)}

    def _tokenize(self, prompts: list[str] | list[list[int]]) -> list[list[int]]:
        result = []
        for prompt in prompts:
            if isinstance(prompt, str):
                if not prompt:
                    raise InvalidRequestError("prompt is empty; expected at least one token", param="prompt")
                prompt = self.encoder.encode(prompt, add_special_tokens=True, param="prompt")
            else:
                self.encoder.check_token_ids(prompt, "prompt")
            result.append(prompt)
        return result

    def _max_tokens(
        self, fields: CompletionRequest | ChatRequest, prompts: list[list[int]], default: int | None, param: str
    ) -> list[int]:
        """The limit of each prompt's answers; refuses prompts that leave no room for one."""
        asked = fields.requested_max_tokens
        return [self.encoder.max_tokens(len(prompt), asked, default, param) for prompt in prompts]

    def _requests(
        self,
        prefix: str,
        fields: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        max_tokens: list[int],
        found: list[Vectors] | None,
    ) -> list[Request]:
        answer_id = f"{prefix}-{uuid.uuid4().hex}"
        # Again: an adapter may have been replaced while the prompt was tokenized.
        mixes = self._mixes(fields, found, len(prompts))
        arrival_s = time.monotonic()
        requests = []
        for prompt, limit, mix in zip(prompts, max_tokens, mixes, strict=True):
            adapters = self.registry.adapters_of(mix)
            for choice in range(fields.n or 1):
                sampling = sampling_params(fields, limit, choice)
                request_id = f"{answer_id}-{len(requests)}"
                requests.append(Request(request_id, list(prompt), sampling, mix, arrival_s, adapters))
        return requests

    def _echoes(self, fields: CompletionRequest, prompts: list[list[int]]) -> dict[int, str]:
        texts = [
            given if isinstance(given, str) else self.encoder.decode(token_ids)
            for given, token_ids in zip(fields.prompt, prompts, strict=True)
        ]
        return dict(enumerate(text for text in texts for _ in range(fields.n or 1)))

    def _header(self, requests: list[Request], fields: GenerationFields) -> tuple[str, int, str]:
        """Id, time and model of an answer."""
        answer_id = requests[0].request_id.rpartition("-")[0]
        return answer_id, int(time.time()), self.registry.base_name if fields.model is None else fields.model

    def _job(
        self, fields: GenerationFields, requests: list[Request], shapes: AnswerFormat, prompts: list[list[int]]
    ) -> Job:
        num_prompt_tokens, num_choices = sum(map(len, prompts)), len(requests) // len(prompts)
        return Job(requests, shapes, num_prompt_tokens, num_choices, bool(fields.stream), fields.includes_usage)


def sampling_params(fields: CompletionRequest | ChatRequest, max_tokens: int, choice: int) -> SamplingParams:
    """Sampling of one choice; with a seed, each further choice of the same prompt has the next one."""
    seed = None if fields.seed is None else (fields.seed + choice + 2**63) % 2**64 - 2**63
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if fields.temperature is None else float(fields.temperature),
        top_k=max(fields.top_k or 0, 0),
        top_p=1.0 if fields.top_p is None else float(fields.top_p),
        min_p=float(fields.min_p or 0),
        seed=seed,
        stop=fields.stop,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=fields.num_top_logprobs,
    )


def log_end(job: Job, num_output_tokens: int) -> None:
    first = job.requests[0]
    logger.info(
        "%s: %d choices, %d prompt tokens, %d output tokens, %.3f s, mix %s",
        first.request_id.rpartition("-")[0], len(job.requests), job.num_prompt_tokens, num_output_tokens,
        time.monotonic() - first.arrival_s, first.mix.gated_set or dict(first.mix.entries) or "base",
    )  # fmt: skip
