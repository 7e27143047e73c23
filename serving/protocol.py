"""The bodies of the routes: what a client may send, checked; every refusal names its field.

Three kinds of fields besides those below: some are harmless and ignored, some would change the answer in a way that is
not supported and are refused unless they hold their neutral value, and any other name is refused as unknown, because a
misspelt `adapter_mix` that is ignored would be answered by the wrong model.
"""

import difflib
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from serving.auto_mix import FORMS, AutoMix
from serving.errors import InvalidRequestError
from serving.mixes import parse_adapter_mix, parse_lora, parse_request_mix, shown
from serving.request import MAX_LOGPROBS

MAX_STOP_STRINGS = 16

IGNORED_FIELDS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "parallel_tool_calls", "prediction", "prompt_cache_key",
        "prompt_cache_retention", "safety_identifier",
    }
)  # fmt: skip
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
}


def parse_prompt(value: object) -> list[str] | list[list[int]]:
    """The field `prompt`: a text, texts, token ids or lists of token ids, as a list of prompts of one kind."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("expected a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise ValueError("the list is empty; expected at least one prompt")
    if all(isinstance(item, str) for item in value):
        return value
    prompts = value if all(isinstance(item, list) for item in value) else [value]
    for prompt in prompts:
        for token_id in prompt:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise ValueError(f"{shown(token_id)} is no token id; expected strings only, or integers only")
    return prompts


def parse_stop(value: object) -> tuple[str, ...]:
    """The field `stop`: None, a string or a list of strings."""
    strings = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise ValueError("expected a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"{len(strings)} strings are given; at most {MAX_STOP_STRINGS} are allowed")
    if "" in strings:
        raise ValueError("an empty string would stop at once; leave it out")
    return tuple(strings)


def parse_content(value: object) -> str:
    """A message's content: a string, or a list of text parts, which are joined by newlines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError('expected a string or a list of parts {"type": "text", "text": ...}')
    texts: list[str] = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f'the part {shown(kind)} is not supported; expected {{"type": "text", "text": ...}}')
        texts.append(part["text"])
    return "\n".join(texts)


class _Fields(pydantic.BaseModel):
    """Strict: no number is read from a string, no integer from a boolean, no NaN, no unknown field."""

    model_config = pydantic.ConfigDict(strict=True, allow_inf_nan=False, extra="forbid", frozen=True)


Weights = Annotated[
    dict[str, float] | None,
    pydantic.PlainValidator(parse_adapter_mix, json_schema_input_type=dict[str, float] | list[dict[str, Any]] | None),
]

RequestMix = Annotated[
    dict[str, float] | AutoMix | None,
    pydantic.PlainValidator(
        parse_request_mix, json_schema_input_type=dict[str, float] | list[dict[str, Any]] | str | None
    ),
]


class StreamOptions(_Fields):
    """How a stream is sent; `include_obfuscation` of OpenAI's API is accepted and has no effect."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class GenerationFields(_Fields):
    """What completions and chat share. None means the default named in the description."""

    model: str | None = Field(None, description="Base, adapter, gated set or named mix; the base where it is left out.")
    adapter_mix: RequestMix = Field(
        None,
        description="Weights by adapter, as an object or as a list of {adapter, weight}; {} is the base. Or the "
        f"adapters that fit the prompt: {FORMS}.",
    )
    lora: Annotated[
        list[tuple[int | str, float]] | None,
        pydantic.PlainValidator(parse_lora, json_schema_input_type=list[dict[str, Any]] | None),
    ] = Field(
        None, description="llama.cpp's form of adapter_mix: a list of {id, scale}; ids count /v1/models' adapters."
    )
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy; 1 where it is left out.")
    top_p: float | None = Field(None, gt=0, le=1, description="1 where it is left out.")
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="0 or -1, the default, keeps every token.")
    min_p: float | None = Field(None, ge=0, le=1, description="0 where it is left out.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="The same seed gives the same tokens.")
    n: int | None = Field(None, ge=1, description="Choices per prompt; 1 where it is left out.")
    max_tokens: int | None = Field(None, ge=1)
    stop: Annotated[
        tuple[str, ...], pydantic.PlainValidator(parse_stop, json_schema_input_type=str | list[str] | None)
    ] = Field((), description="Text that ends the answer; it is not part of it.")
    stop_token_ids: list[int] | None = Field(None, max_length=256)
    ignore_eos: bool | None = Field(None, description="Go on after the model's end tokens; false where it is left out.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @pydantic.model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationFields":
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is given but stream is not true", param="stream_options")
        return self

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationFields):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        list[str] | list[list[int]],
        pydantic.PlainValidator(
            parse_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
        ),
    ]  # fmt: skip
    echo: bool | None = Field(None, description="Begin the answer with the prompt.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1)

    @pydantic.model_validator(mode="after")
    def _check_combinations(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError(
                f"best_of is {self.best_of} and n is {self.n or 1}; choosing among more answers than are returned is "
                "not supported, leave best_of out",
                param="best_of",
            )
        if self.echo and self.logprobs is not None:
            raise InvalidRequestError("echo together with logprobs is not supported; leave one out", param="logprobs")
        return self

    @property
    def num_top_logprobs(self) -> int | None:
        """Alternatives returned a token; None returns no log probabilities."""
        return self.logprobs

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens


class ChatMessage(_Fields):
    """One message of a conversation; what the client got in an answer may be sent back as it is."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, pydantic.PlainValidator(parse_content, json_schema_input_type=str | list[dict[str, Any]])]
    name: str | None = None
    refusal: None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None
    tool_calls: list[Any] | None = Field(None, max_length=0)

    def for_template(self) -> dict[str, str]:
        """The message as chat templates read it; "developer" is OpenAI's newer word for "system"."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content}
        return message if self.name is None else message | {"name": self.name}


class ChatRequest(GenerationFields):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(
        None, ge=1, description="The newer name of max_tokens; to the context's end."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @pydantic.model_validator(mode="after")
    def _check_combinations(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs is given but logprobs is not true", param="top_logprobs")
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise InvalidRequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}; they say "
                "the same thing, use one",
                param="max_completion_tokens",
            )
        return self

    @property
    def num_top_logprobs(self) -> int | None:
        """Alternatives returned a token; None returns no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens


class LoadAdapterRequest(_Fields):
    """Body of POST /v1/load_lora_adapter: vLLM's, and `expected_generation`."""

    lora_name: str = ""  # empty or left out is answered in vLLM's words
    lora_path: str = Field("", description="Folder below an --adapter-root, relative to it or absolute.")
    load_inplace: bool = Field(False, description="Replace the adapter of this name, if there is one.")
    is_3d_lora_weight: Literal[False] | None = Field(None, description="vLLM's; only false is supported.")
    expected_generation: str | None = Field(
        None, description="Replace only if the adapter's generation (/v1/models) is this one; 409 otherwise."
    )


class UnloadAdapterRequest(_Fields):
    """Body of POST /v1/unload_lora_adapter: vLLM's, and `expected_generation`."""

    lora_name: str = ""
    lora_int_id: int | None = Field(None, description="Of older clients of vLLM; the name alone counts.")
    expected_generation: str | None = Field(
        None, description="Unload only if the adapter's generation (/v1/models) is this one; 409 otherwise."
    )


class MixRequest(_Fields):
    """Body of POST /v1/mixes."""

    name: str = Field(description="What requests give as `model`.")
    adapter_mix: Weights = Field(description="Weights by adapter, as an object or as a list of {adapter, weight}.")
    replace: bool = Field(False, description="Replace the mix of this name, if there is one.")


def parse_body[T: GenerationFields](kind: type[T], body: bytes) -> T:
    """Reads the body of a generation route.

    Raises:
      InvalidRequestError: With the field's name, where one is to blame, in `param`.
    """
    fields = parse_json_object(body)
    fields = {name: value for name, value in fields.items() if name not in IGNORED_FIELDS}
    for name in NEUTRAL_VALUES.keys() & fields.keys():
        value = fields.pop(name)
        if value is not None and value not in NEUTRAL_VALUES[name]:
            raise InvalidRequestError(
                f"{name} is {shown(value)}, but {name} is not supported; leave it out", param=name
            )
    return _validate(kind, fields, [*NEUTRAL_VALUES, *IGNORED_FIELDS])


def parse_admin_body[T: LoadAdapterRequest | UnloadAdapterRequest | MixRequest](kind: type[T], body: bytes) -> T:
    """Reads the body of a route that changes the server.

    Raises:
      InvalidRequestError: With the field's name, where one is to blame, in `param`.
    """
    return _validate(kind, parse_json_object(body))


def _validate[T: _Fields](kind: type[T], fields: dict[str, Any], other_names: Sequence[str] = ()) -> T:
    """Checked fields; `other_names` are known beside them, for hints."""
    if unknown := sorted(fields.keys() - kind.model_fields.keys()):
        raise _unknown_field(unknown[0], kind, other_names)
    try:
        return kind.model_validate(fields)
    except pydantic.ValidationError as error:
        raise _invalid_field(error) from None


def parse_json_object(body: bytes, what: str = "the body") -> dict[str, Any]:
    """An object without repeated keys; `what` it is, for errors.

    Raises:
      InvalidRequestError: If it is something else.
    """
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_unique_keys)
        if b"\\u" in body:  # an escaped half of a surrogate pair is no text, and no tokenizer takes it
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        detail = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequestError(f"{what} is not valid JSON: {detail}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what} is {shown(value)}; expected a JSON object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two weights under one name would otherwise become the last one, silently."""
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"the key {repeated[0]!r} is given more than once in one object")
    return result


def _unknown_field(name: str, kind: type[_Fields], other_names: Sequence[str]) -> InvalidRequestError:
    close = difflib.get_close_matches(name, [*kind.model_fields, *other_names], n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"the fields are {', '.join(kind.model_fields)}"
    return InvalidRequestError(f"the field {shown(name)} is unknown; {hint}", param=name)


def _invalid_field(error: pydantic.ValidationError) -> InvalidRequestError:
    """The first error that pydantic found, in the client's terms."""
    first = error.errors(include_url=False)[0]
    if isinstance(cause := first.get("ctx", {}).get("error"), InvalidRequestError):
        return cause
    param = ""
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    if first["type"] == "missing":
        return InvalidRequestError(f"{param} is missing", param=param)
    problem = first["msg"].removeprefix("Value error, ")
    return InvalidRequestError(f"{param} is {shown(first['input'])}: {problem[:1].lower()}{problem[1:]}", param=param)
