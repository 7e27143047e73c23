"""Events that are made from a frame are those that would be built anew."""

import pytest
from transformers import PreTrainedTokenizerFast

from serving.prompts import PromptEncoder
from serving.request import FinishReason, RequestOutput, TokenLogprob
from serving.responses import AnswerFormat, ChatFormat, CompletionFormat, event
from tests.http.conftest import MAX_MODEL_LEN, VOCAB

TEXTS = ("a", ' "quoted"', "\\", "\n\t", "\0", "ünï 漢字 🎉", "\u2028", '"\\u0000"', "data: [DONE]\n\n")


@pytest.mark.parametrize("has_usage", [False, True])
@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("model", ["tiny", "\0", 'x "y" \\ ü'])
def test_a_framed_event_is_the_one_that_is_built(
    tokenizer: PreTrainedTokenizerFast, kind: str, model: str, has_usage: bool
) -> None:
    def shapes(num_top: int | None = None) -> AnswerFormat:
        header = ("id-1", 1_700_000_000, model, PromptEncoder(tokenizer, vocab=VOCAB, max_model_len=MAX_MODEL_LEN))
        return ChatFormat(*header, num_top) if kind == "chat" else CompletionFormat(*header, num_top, {})

    def built(format: AnswerFormat, index: int, output: RequestOutput) -> bytes:
        content = format.envelope([format.delta(index, output)], is_chunk=True)
        return event(content | {"usage": None} if has_usage else content)

    framed = shapes()
    for index in (0, 1, 0):
        for text in TEXTS:
            output = RequestOutput("r", text, (5,), num_output_tokens=3)
            assert framed.output_event(index, output, has_usage=has_usage) == built(shapes(), index, output)
    for output in (RequestOutput("r", "x", finish_reason=FinishReason.STOP), RequestOutput("r", "")):
        assert framed.output_event(0, output, has_usage=has_usage) == built(shapes(), 0, output)
    output = RequestOutput("r", "x", (5,), (TokenLogprob(5, -0.5, ((5, -0.5),)),))
    assert shapes(1).output_event(0, output, has_usage=has_usage) == built(shapes(1), 0, output)
