"""Text to token ids for the HTTP routes, and the checks that need the tokenizer or the model's limits."""

from collections.abc import Sequence

import jinja2
import transformers

from serving.errors import InvalidRequestError
from serving.protocol import ChatMessage


class PromptEncoder:
    """Turns prompts and conversations into token ids.

    The tokenizer's backend is called directly: transformers' own call sets truncation anew each time, which fails
    while another thread (the engine's, decoding) reads the tokenizer.

    Attributes:
      tokenizer: of the base model; None where the model directory has none, then only token ids are accepted.
      vocab: ids are below it.
      max_model_len: most tokens of a prompt and its answer together.
    """

    def __init__(
        self, tokenizer: transformers.PreTrainedTokenizerFast | None, *, vocab: int, max_model_len: int
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab = vocab
        self.max_model_len = max_model_len
        if tokenizer is not None:
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text; `param` names the request's field in errors.

        Raises:
          InvalidRequestError: If there is no tokenizer, or it has tokens that the model lacks and the text uses one.
        """
        tokenizer = self._tokenizer(param)
        token_ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        self.check_token_ids(token_ids, param)
        return token_ids

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer."""
        tokenizer = self._tokenizer("messages")
        if not tokenizer.chat_template:
            raise InvalidRequestError(
                "the model has no chat template; use /v1/completions, or serve a model directory with one (--model)",
                param="messages",
            )
        try:
            text = tokenizer.apply_chat_template(
                [m.for_template() for m in messages], tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"the model's chat template refuses the messages: {error}", param="messages"
            ) from None
        assert isinstance(text, str)
        return self.encode(text, add_special_tokens=False, param="messages")  # the template writes them itself

    def decode_token(self, token_id: int) -> str:
        """The text of one token alone; incomplete characters read as U+FFFD."""
        return self._tokenizer("logprobs").backend_tokenizer.decode([token_id], skip_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, param: str = "echo") -> str:
        """The text of a prompt given as token ids; `param` names the field that asks for it, in errors."""
        return self._tokenizer(param).backend_tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab:
                raise InvalidRequestError(
                    f"{param} holds the token id {token_id}; the model's ids are 0 to {self.vocab - 1}", param=param
                )

    def max_tokens(self, num_prompt_tokens: int, requested: int | None, default: int | None, param: str) -> int:
        """Tokens that an answer may have.

        Args:
          num_prompt_tokens: length of the prompt.
          requested: what the client asked for, or None.
          default: where nothing was asked for, cut to what fits; None for all that fits.
          param: the prompt's field, for errors.

        Raises:
          InvalidRequestError: If the prompt is empty, or the two do not fit into the model's length.
        """
        room = self.max_model_len - num_prompt_tokens
        if num_prompt_tokens == 0:
            raise InvalidRequestError(f"{param} is empty; expected at least one token", param=param)
        if room < 1:
            raise InvalidRequestError(
                f"{param} has {num_prompt_tokens} tokens, but the limit for prompt and answer together is "
                f"{self.max_model_len}; shorten it or raise --max-model-len",
                param=param,
            )
        if requested is None:
            return room if default is None else min(default, room)
        if requested > room:
            raise InvalidRequestError(
                f"{param} has {num_prompt_tokens} tokens and max_tokens is {requested}, together "
                f"{num_prompt_tokens + requested}, but the limit is {self.max_model_len}; lower max_tokens to at most "
                f"{room} or raise --max-model-len",
                param="max_tokens",
            )
        return requested

    def _tokenizer(self, param: str) -> transformers.PreTrainedTokenizerFast:
        if self.tokenizer is None:
            raise InvalidRequestError(
                f"{param} needs a tokenizer and the model directory has none; send `prompt` as token ids to "
                "/v1/completions",
                param=param,
            )
        return self.tokenizer
