"""Token ids to text, one token at a time: whole characters only, and never past a stop string."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

NUM_CONTEXT_TOKENS = 8  # more than one character or word-start marker ever spans
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # how a decoder shows bytes that are no whole character yet


class IncrementalDetokenizer:
    """The new text of each output token of one request.

    Text is held back while a character is incomplete, and while its end may be the start of a stop string. The texts
    of all `push` calls and of `finish` together are the decoded output, up to the stop string that is complete first
    (the longest, if several end there).

    The end of the prompt is the context of the first token, which decides e.g. whether its leading space is kept. If
    the prompt ends within a character, the output is decoded without context.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        """No output yet.

        Args:
          tokenizer: of the tokenizers library (`backend_tokenizer` of a transformers tokenizer).
          prompt_token_ids: tokens before the output.
          stop: strings, not empty, that end the output and are not part of it.
          skip_special_tokens: leave out special tokens such as the end of a turn.
        """
        assert all(stop), f"empty stop string in {stop}"
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip_special_tokens = skip_special_tokens
        self._context = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        self._context_text = self._decode(self._context)
        if self._context_text.endswith(_INCOMPLETE):
            self._context, self._context_text = [], ""
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._num_decoded_chars = 0  # of the output, as given out by the stream
        self._held = ""  # decoded, but maybe the start of a stop string
        self._is_stopped = False

    def push(self, token_id: int) -> tuple[str, bool]:
        """Takes the next output token.

        Returns:
          The text that is certain now, maybe empty, and whether a stop string ended the output.
        """
        assert not self._is_stopped, f"token {token_id} comes after a stop string"
        self._token_ids.append(token_id)
        text = self._stream.step(self._tokenizer, token_id) or ""
        self._num_decoded_chars += len(text)
        return self._release(text), self._is_stopped

    def finish(self) -> str:
        """The text still held back, for an output that ends here; nothing after a stop string."""
        if self._is_stopped:
            return ""
        output = self._decode(self._context + self._token_ids)[len(self._context_text) :]
        text = self._release(output[self._num_decoded_chars :])
        if self._is_stopped:
            return text
        held, self._held = self._held, ""
        return text + held

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _release(self, text: str) -> str:
        """Adds new text to what is held, and gives out what no stop string can touch any more."""
        if not self._stop:
            return text
        text = self._held + text
        found = [(text.find(string) + len(string), text.find(string)) for string in self._stop if string in text]
        if found:
            self._is_stopped = True
            self._held = ""
            _, start = min(found)  # the first to be complete, however the text is cut into tokens
            return text[:start]
        end = len(text) - _overlap(text, self._stop)
        self._held = text[end:]
        return text[:end]


def _overlap(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the start of one of the stop strings."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(string.startswith(text[-length:]) for string in stop):
            return length
    return 0
