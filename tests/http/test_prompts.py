"""Text to token ids: special tokens once, and no id that the model lacks."""

import pytest
from transformers import PreTrainedTokenizerFast

from serving.errors import InvalidRequestError
from serving.prompts import PromptEncoder
from serving.protocol import ChatMessage
from tests.http.conftest import MAX_MODEL_LEN, VOCAB


def conversation(text: str) -> list[ChatMessage]:
    return [ChatMessage.model_validate({"role": "user", "content": text})]


def encoder_of(tokenizer: PreTrainedTokenizerFast, vocab: int = VOCAB) -> PromptEncoder:
    return PromptEncoder(tokenizer, vocab=vocab, max_model_len=MAX_MODEL_LEN)


def test_a_text_and_a_conversation_begin_with_one_special_token(tokenizer_with_bos: PreTrainedTokenizerFast) -> None:
    encoder = encoder_of(tokenizer_with_bos)
    text = encoder.encode("Hello", add_special_tokens=True, param="prompt")
    assert text == [0, *encoder.encode("Hello", add_special_tokens=False, param="prompt")]
    chat = encoder.encode_chat(conversation("Hello"))
    assert chat[0] == 0
    assert chat.count(0) == 1


def test_c2_tokens_that_the_model_lacks_are_refused_in_texts_too(tokenizer: PreTrainedTokenizerFast) -> None:
    """A tokenizer with added tokens beside a model without rows for them."""
    encoder = encoder_of(tokenizer, vocab=100)
    assert max(encoder.encode("Hello", add_special_tokens=True, param="prompt")) < 100
    with pytest.raises(InvalidRequestError, match=r"prompt holds the token id \d+; the model's ids are 0 to 99"):
        encoder.encode("é", add_special_tokens=True, param="prompt")
    with pytest.raises(InvalidRequestError, match="messages holds the token id"):
        encoder.encode_chat(conversation("é"))
