"""Which adapters a prompt asks for: vectors of pieces, scores fitted to examples, and what is chosen by them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from checkpoints.tokenizer import read_tokenizer
from dymerge_jax.config import named_config
from dymerge_jax.embedding import MAX_ROWS, ROW_LEN, TokenEmbedder
from dymerge_jax.model import SplitModel, params_of
from dymerge_jax.retrieval import (
    MAX_EXAMPLES,
    MAX_PIECES,
    Candidate,
    RetrievalIndex,
    Scorer,
    mix_weights,
    that_fit,
    tokenized_pieces,
)
from tests.support import numpy_llama
from tests.support.compiles import recorded_compiles
from tests.support.tiny_checkpoints import write_tokenizer
from tests.support.tiny_models import tiny_model

CONFIG = named_config("tiny")
PREFIX = (3, 1, 4, 1, 5, 9)  # as many tokens as the index has: the programs are shared
EXAMPLES = {
    "shout": ["Shout it. Items: a, b", "Shout it. Items: c, d", "All caps. Items: e, f"],
    "sign": ["Sign it. Items: g, h", "Your name, please. Items: i, j", "Sign it. Items: k"],
    "count": ["How many? Items: l, m", "How many? Items: n", "Count them. Items: o, p"],
}


@pytest.fixture(scope="module")
def model() -> SplitModel:
    return tiny_model(vocab=300)


@pytest.fixture(scope="module")
def embedder(model: SplitModel) -> TokenEmbedder:
    return TokenEmbedder(model, PREFIX)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, 300)
    return read_tokenizer(path, 300)


@pytest.fixture(scope="module")
def index(model: SplitModel, tokenizer: Any) -> RetrievalIndex:
    return RetrievalIndex.build(model, tokenizer, EXAMPLES)


def reference_state(model: SplitModel, tokens: Sequence[int]) -> np.ndarray:
    """State after the first half of the layers at the last of `tokens`, divided by its root mean square."""
    params = dict(params_of(model)) | {"lm_head": np.eye(CONFIG.hidden), "final_norm": np.ones(CONFIG.hidden)}
    half = dataclasses.replace(model.config, num_layers=model.config.num_layers // 2, tie_word_embeddings=False)
    return numpy_llama.logits(half, params, list(tokens))[-1]


def test_a_vector_is_the_mean_state_of_a_rows_own_tokens_in_the_middle_of_the_model(
    model: SplitModel, embedder: TokenEmbedder, rng: np.random.Generator
) -> None:
    row = rng.integers(0, 300, 7).tolist()
    vectors = embedder([row[:n] for n in range(1, 8)])
    sums = np.cumsum(np.ones(7))[:, None] * vectors
    for i, state in enumerate(np.diff(sums, axis=0, prepend=0)):
        root_mean_square = np.sqrt((state**2).mean())
        np.testing.assert_allclose(
            state / root_mean_square, reference_state(model, [*PREFIX, *row[: i + 1]]), atol=1e-4
        )


@pytest.mark.parametrize("num_rows", [1, 4, 5, MAX_ROWS, MAX_ROWS + 1, 2 * MAX_ROWS + 3])
def test_a_row_has_the_same_vector_in_every_batch(
    embedder: TokenEmbedder, rng: np.random.Generator, num_rows: int
) -> None:
    rows = [rng.integers(0, 300, rng.integers(1, ROW_LEN + 1)).tolist() for _ in range(num_rows)]
    vectors = embedder(rows)
    assert vectors.shape == (num_rows, CONFIG.hidden)
    for row, vector in zip(rows, vectors, strict=True):
        np.testing.assert_allclose(vector, embedder([row])[0], atol=1e-5)


def test_nothing_compiles_once_it_is_made(embedder: TokenEmbedder) -> None:
    with recorded_compiles() as compiles:
        for num_rows in range(1, MAX_ROWS + 1):
            embedder.dispatch([[num_rows] * num_rows] * num_rows)
    assert not compiles


def test_no_rows_have_no_vectors_and_a_prefix_must_fit(model: SplitModel, embedder: TokenEmbedder) -> None:
    assert embedder([]).shape == (0, CONFIG.hidden)
    with pytest.raises(ValueError, match="the prefix has 0 tokens"):
        TokenEmbedder(model, [])
    with pytest.raises(ValueError, match="at most the model's context of"):
        TokenEmbedder(model, PREFIX, row_len=CONFIG.max_position)


def test_a_prompt_is_cut_into_sentences_and_lines_without_special_tokens(tokenizer: Any) -> None:
    text = "<|im_start|>user\nShout it. Why not?!  As JSON 1.5\n\nItems: a, b<|im_end|>\n"
    pieces = [tokenizer.decode(piece) for piece in tokenized_pieces(tokenizer, text)]
    assert pieces == ["user", "Shout it.", "Why not?!", "As JSON 1.5", "Items: a, b"]
    assert tokenized_pieces(tokenizer, " \n . ") == [tokenizer.encode(".")]
    assert not tokenized_pieces(tokenizer, "")
    assert not tokenized_pieces(tokenizer, " \n ")


def test_a_long_sentence_is_cut_and_of_a_long_prompt_both_ends_count(tokenizer: Any) -> None:
    assert [len(piece) for piece in tokenized_pieces(tokenizer, "x" * 70)] == [ROW_LEN, ROW_LEN, 70 - 2 * ROW_LEN]
    long = "Shout it. " + "And so on. " * 5000 + "Sign it."
    pieces = [tokenizer.decode(piece) for piece in tokenized_pieces(tokenizer, long)]
    assert len(pieces) == MAX_PIECES
    assert (pieces[0], pieces[-1]) == ("Shout it.", "Sign it.")


def random_examples(rng: np.random.Generator, num_adapters: int, hidden: int = 16) -> dict[str, list[np.ndarray]]:
    """Examples of one to three pieces; the first is near a direction of the adapter's own."""
    own = rng.normal(size=(num_adapters, hidden)).astype(np.float32) * 3
    return {
        f"a{i}": [
            np.concatenate([own[i] + rng.normal(size=(1, hidden)), rng.normal(size=(int(n), hidden))]).astype(
                np.float32
            )
            for n in rng.integers(0, 3, 5)
        ]
        for i in range(num_adapters)
    }


def test_scores_are_a_ridge_regression_of_the_owner_whichever_system_is_solved(rng: np.random.Generator) -> None:
    for num_adapters, hidden in ((3, 64), (6, 8)):  # fewer pieces than dimensions, and more
        examples = random_examples(rng, num_adapters, hidden)
        scorer = Scorer.fit(examples)
        x = np.concatenate([np.concatenate(e) for e in examples.values()]).astype(np.float64)
        owners = np.repeat(np.arange(num_adapters), [sum(map(len, e)) for e in examples.values()])
        x -= np.mean([x[owners == i].mean(0) for i in range(num_adapters)], axis=0)
        target = np.eye(num_adapters)[owners] - 1 / num_adapters
        shrink = 3.0 * (x**2).sum(1).mean()
        wanted = np.linalg.inv(x.T @ x + shrink * np.eye(hidden)) @ x.T @ target
        scale = scorer.weights / wanted
        np.testing.assert_allclose(scale, scale[0, 0], rtol=2e-2)
        own = [scorer.scores(e)[i] for i, name in enumerate(examples) for e in examples[name]]
        assert np.mean(own) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_examples_whose_vectors_are_not_finite_are_refused_by_adapter(rng: np.random.Generator, value: float) -> None:
    examples = random_examples(rng, 3)
    examples["a1"][-1][0, 5] = value
    with pytest.raises(ValueError, match="the examples of 'a1' have NaN or infinite vectors; expected finite ones"):
        Scorer.fit(examples)


def test_the_best_k_come_in_order_and_equal_ones_in_that_of_their_adding(rng: np.random.Generator) -> None:
    weights = np.asarray([[1, 2, 2, 0, 2]], np.float32)
    scorer = Scorer(("a", "b", "c", "d", "e"), np.zeros(1, np.float32), weights)
    pieces = np.asarray([[1.0], [0.5]], np.float32)
    assert scorer.top_k(pieces, 4) == [("b", 2.0), ("c", 2.0), ("e", 2.0), ("a", 1.0)]
    assert [c.name for c in scorer.top_k(pieces[:0], 2)] == ["a", "b"]  # nothing is asked for
    assert scorer.top_k(-pieces, 1) == [("d", 0.0)]


def test_a_prompt_that_asks_for_two_adapters_finds_both(rng: np.random.Generator) -> None:
    examples = random_examples(rng, 5)
    scorer = Scorer.fit(examples)
    for first, second in (("a0", "a3"), ("a4", "a1")):
        both = np.concatenate([examples[first][0][:1], examples[second][1][:1]])
        assert {c.name for c in scorer.top_k(both, 2)} == {first, second}


def test_one_adapter_alone_is_found_by_everything(rng: np.random.Generator) -> None:
    scorer = Scorer.fit(random_examples(rng, 1))
    found = scorer.top_k(rng.normal(size=(2, 16)).astype(np.float32), 1)
    assert [c.name for c in found] == ["a0"]
    assert math.isfinite(found[0].score)
    assert mix_weights(found, "softmax") == {"a0": 1.0}


def test_weights_are_equal_or_a_softmax_and_add_up_to_one() -> None:
    found = [Candidate("a", 1.0), Candidate("b", 0.8), Candidate("c", -500.0)]
    assert mix_weights(found, "equal") == {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}
    softmax = mix_weights(found, "softmax")
    assert softmax["a"] / softmax["b"] == pytest.approx(math.e)
    assert softmax["c"] == 0
    assert sum(softmax.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("scores", "num_left"),
    [((1.0, 0.5, 0.49), 2), ((0.2, 0.11, 0.1, 0.09), 3), ((1.0, -0.1), 1), ((0.0, 0.0), 2), ((-0.1, -0.1, -0.3), 2)],
)
def test_what_fits_less_than_half_as_well_as_the_best_does_not_fit(scores: tuple[float, ...], num_left: int) -> None:
    candidates = [Candidate(str(i), score) for i, score in enumerate(scores)]
    assert that_fit(candidates) == candidates[:num_left]


def test_an_index_finds_the_adapter_whose_example_a_prompt_repeats(index: RetrievalIndex) -> None:
    assert index.names == tuple(EXAMPLES)
    prompts = [text for texts in EXAMPLES.values() for text in texts]
    found = index.top_k(prompts, 1)
    assert [f[0].name for f in found] == [name for name, texts in EXAMPLES.items() for _ in texts]
    alone = [index.top_k([prompt], 3)[0] for prompt in prompts]
    for together, single in zip(index.top_k(prompts, 3), alone, strict=True):
        assert [c.name for c in together] == [c.name for c in single]
        np.testing.assert_allclose([c.score for c in together], [c.score for c in single], atol=1e-4)


def test_an_index_gives_mixes_of_k_adapters(index: RetrievalIndex) -> None:
    (mix,) = index.mixes(["Sign it. Items: z"], 2)
    assert set(mix.values()) == {0.5}
    assert "sign" in mix
    (mix,) = index.mixes(["Sign it. Items: z"], 3, "softmax")
    assert max(mix, key=lambda name: mix[name]) == "sign"
    one, two = index.mixes(["Sign it. Items: g, h", "Sign it.\nHow many?"])
    assert one == {"sign": 1.0}
    assert two == {"sign": 0.5, "count": 0.5}
    assert index.top_k([], 1) == []


def test_an_index_refuses_a_k_that_it_has_not_and_examples_without_text(
    index: RetrievalIndex, model: SplitModel, tokenizer: Any
) -> None:
    for k in (0, 4):
        with pytest.raises(ValueError, match=f"k is {k}; expected 1 to 3, the number of adapters with examples"):
            index.top_k(["a"], k)
    with pytest.raises(ValueError, match="there are no examples"):
        RetrievalIndex.build(model, tokenizer, {})
    with pytest.raises(ValueError, match="the 2 examples of adapter 'b' hold no text"):
        RetrievalIndex.build(model, tokenizer, {"a": ["x"], "b": [" ", "\n"]})


def test_the_first_examples_of_an_adapter_count(model: SplitModel, tokenizer: Any) -> None:
    many = {"a": ["Shout it."] * MAX_EXAMPLES, "b": ["Sign it."]}
    first = RetrievalIndex.build(model, tokenizer, many).top_k(["Shout it."], 2)
    many["a"] = [*many["a"], "Sign it.", "Sign it."]
    assert RetrievalIndex.build(model, tokenizer, many).top_k(["Shout it."], 2) == first
