"""Text of single tokens: characters across tokens, stop strings across tokens, and the whole against one decode."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from serving.detokenize import IncrementalDetokenizer

TEXTS = [
    "the river, the stone and the lamp",
    "Nova answers: stone, river, lamp -- done",
    "naïve café, jalapeño, Straße",
    "日本語のテキスト、中文文本",
    "emoji 😀😃 and family 👨‍👩‍👧 ok",
]
END = "<|im_end|>"


def _train_byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(END, special=True)],  # pyright: ignore[reportArgumentType]
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _metaspace() -> Tokenizer:
    """As Llama 2 has it: a word's leading space is a marker, dropped at the start of a text."""
    words = ["<unk>", "▁the", "▁river", "▁stone", "s", ","]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


BYTE_LEVEL = _train_byte_level()
SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=150)


def run(token_ids: Sequence[int], stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> tuple[list[str], bool]:
    """All texts in order, that of `finish` last, and whether a stop string was found by `push`."""
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, prompt, stop)
    texts, is_stopped = [], False
    for token_id in token_ids:
        text, is_stopped = detokenizer.push(token_id)
        texts.append(text)
        if is_stopped:
            break
    return [*texts, detokenizer.finish()], is_stopped


def ids(text: str) -> list[int]:
    return BYTE_LEVEL.encode(text).ids


def byte_ids(text: str) -> list[int]:
    """One token a byte, so that every character of several bytes is split."""
    by_byte = dict(zip(_byte_order(), sorted(pre_tokenizers.ByteLevel.alphabet()), strict=True))
    return [token_id(by_byte[byte]) for byte in text.encode()]


def token_id(token: str) -> int:
    found = BYTE_LEVEL.token_to_id(token)
    assert found is not None
    return found


def _byte_order() -> list[int]:
    """Bytes in the order of the characters that stand for them: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return printable + [byte for byte in range(256) if byte not in printable]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("encode", [ids, byte_ids], ids=["merged", "one token a byte"])
def test_texts_together_are_the_whole_text(text: str, encode):
    texts, _ = run(encode(text))
    assert "".join(texts) == text


def test_a_character_comes_out_whole_when_its_last_byte_has_come():
    texts, _ = run(byte_ids("é😀"))
    assert texts == ["", "é", "", "", "", "😀", ""]


def test_an_incomplete_character_at_the_end_comes_with_finish():
    texts, _ = run(byte_ids("a😀")[:-1])
    assert texts[0] == "a"
    assert texts[-1] == BYTE_LEVEL.decode(byte_ids("a😀")[:-1])[1:]
    assert "".join(texts).startswith("a�")


@SETTINGS
@given(st.lists(st.integers(0, 319), max_size=24), st.lists(st.integers(0, 319), max_size=12))
def test_any_tokens_give_the_text_of_one_decode(token_ids: list[int], prompt: list[int]):
    token_ids = [token_id for token_id in token_ids if token_id < BYTE_LEVEL.get_vocab_size()]
    prompt = [token_id for token_id in prompt if token_id < BYTE_LEVEL.get_vocab_size()]
    before = BYTE_LEVEL.decode(prompt)
    texts, _ = run(token_ids, prompt=prompt)
    if before.endswith("�"):
        assert "".join(texts) == BYTE_LEVEL.decode(token_ids)
    else:
        assert "".join(texts) == BYTE_LEVEL.decode(prompt + token_ids)[len(before) :]


@pytest.mark.parametrize("stop", ["stone", "ne, r", "--", ", ", "lamp -- done", "N", "one, ri"])
@pytest.mark.parametrize("encode", [ids, byte_ids], ids=["merged", "one token a byte"])
def test_a_stop_string_ends_the_text_before_it_wherever_tokens_are_cut(stop: str, encode):
    texts, is_stopped = run(encode(TEXTS[1]), [stop])
    assert is_stopped
    assert "".join(texts) == TEXTS[1].split(stop)[0]
    assert texts[-1] == ""


def test_text_that_may_be_the_start_of_a_stop_string_is_held_back():
    texts, is_stopped = run(byte_ids("a--b-"), ["---"])
    assert texts == ["a", "", "", "--b", "", "-"]
    assert not is_stopped


def test_the_first_of_several_stop_strings_to_be_complete_counts():
    for stop, text in [(["three", "two", "wo t"], "one "), (["one two", "tw"], "one "), (["wo", "two"], "one ")]:
        texts, is_stopped = run(byte_ids("one two three"), stop)
        assert is_stopped
        assert "".join(texts) == text


def test_a_stop_string_that_repeats_its_own_start_is_found():
    texts, is_stopped = run(byte_ids("xaaab"), ["aab"])
    assert is_stopped
    assert "".join(texts) == "xa"


def test_a_stop_string_of_characters_of_several_bytes_is_found():
    texts, is_stopped = run(byte_ids("日本語のテキスト"), ["のテ"])
    assert is_stopped
    assert "".join(texts) == "日本語"


@SETTINGS
@given(st.text(alphabet="ab é", max_size=20), st.lists(st.text(alphabet="ab é", min_size=1, max_size=4), max_size=3))
def test_the_text_is_cut_at_the_stop_string_that_is_complete_first(text: str, stop: list[str]):
    _, start = min(((text.find(s) + len(s), text.find(s)) for s in stop if s in text), default=(0, len(text)))
    for encode in (ids, byte_ids):
        texts, is_stopped = run(encode(text), stop)
        assert "".join(texts) == text[:start]
        assert is_stopped == any(string in text for string in stop)


def test_special_tokens_have_no_text():
    texts, _ = run([*ids("lamp"), token_id(END)])
    assert "".join(texts) == "lamp"


def test_nothing_comes_after_a_stop_string():
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, (), ["a"])
    assert detokenizer.push(byte_ids("a")[0]) == ("", True)
    assert detokenizer.finish() == ""
    with pytest.raises(AssertionError, match="comes after a stop string"):
        detokenizer.push(byte_ids("b")[0])


@pytest.mark.parametrize(("prompt", "text"), [([1], " river stones"), ([], "river stones")])
def test_the_prompt_decides_about_the_first_space(prompt: list[int], text: str):
    detokenizer = IncrementalDetokenizer(_metaspace(), prompt)
    assert "".join(detokenizer.push(token_id)[0] for token_id in [2, 3, 4]) + detokenizer.finish() == text


def test_a_prompt_that_ends_within_a_character_is_no_context():
    first, second = byte_ids("é")
    texts, _ = run([second, *ids("ok")], prompt=[first])
    assert "".join(texts) == "�ok"
