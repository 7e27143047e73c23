"""Which adapters a prompt asks for, from a few example prompts of each (LoraRetriever), which needs no second model.

A prompt is cut into pieces (sentences), each piece becomes a vector by the base model, or by another (`embedding`), and
one linear map, fitted to the pieces of all examples, scores every adapter for every piece. An adapter's score is that
of its best piece, so that a prompt that asks for two things finds the adapters of both. Fitting is a ridge regression
in closed form: what all adapters' examples share, such as the way their data are written, gets no weight.

Measured on the demo model with eight skills of three phrasings, 12 examples an adapter, words that no example had: of
prompts for one skill, for two, and for two in one sentence, the share whose adapters are found.

    whole prompts, cosine to an adapter's mean (LoraRetriever)   0.97  0.70  0.66
    whole prompts, ridge                                         0.99  0.89  0.84
    pieces, cosine                                               1.00  1.00  0.58
    pieces, ridge: what is done here                             1.00  1.00  0.93
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from dymerge_jax.embedding import ROW_LEN, TokenEmbedder
from dymerge_jax.model import SplitModel

WeightRule = Literal["equal", "softmax"]
AUTO = "auto"
"""What requests call the adapters that fit their prompt; with a colon behind it, it says how many and how weighed."""

MAX_PIECES = 16  # of a prompt; of a longer one the first and the last: instructions stand at the ends
MOST_THAT_FIT = 3  # adapters of a prompt where nobody says how many; LoraRetriever always takes as many
MAX_EXAMPLES = 32  # used of each adapter; LoraRetriever takes 20
_MAX_CHARACTERS = 8192  # of a prompt that are looked at, half of them at each end
_PREFIX = "Task: "  # measured: phrasings that no example had are found at 0.66 behind it, at 0.54 behind a begin token
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+|(?<=[。！？])")
# Shrinks the map, in units of the mean squared length of a vector. Measured: 1 to 10 are alike, 0.3 is worse.
_RIDGE = 3.0
# Of a softmax over scores, where an adapter's own examples have 1 on average and other adapters are near 0.
_TEMPERATURE = 0.2
# Of the best adapter's score: between that of a second adapter which the prompt asks for, too (0.9 of it in a sentence
# of its own, 0.6 in the same one), and that of one which it does not ask for (0.15 and 0.25).
_LEAST_FIT = 0.5


class Candidate(NamedTuple):
    """An adapter and how well it fits a prompt: about 1 as its own examples do, about 0 or less for others."""

    name: str
    score: float


def is_auto_name(name: str) -> bool:
    """True for a name that asks for retrieval, well written or not; nothing else may have it."""
    return name == AUTO or name.startswith(f"{AUTO}:")


def tokenized_pieces(tokenizer: Any, text: str) -> list[list[int]]:
    """The pieces of a prompt as token ids: sentences and lines, long ones cut.

    Args:
      tokenizer: a transformers tokenizer with a backend of `tokenizers`.
      text: a prompt; special tokens in it are left out.

    Returns:
      At most `MAX_PIECES` lists of 1 to `embedding.ROW_LEN` token ids; none for a text of blanks.
    """
    backend, special = tokenizer.backend_tokenizer, set(tokenizer.all_special_ids)
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[: _MAX_CHARACTERS // 2]}\n{text[-_MAX_CHARACTERS // 2 :]}"
    pieces: list[list[int]] = []
    for sentence in _SENTENCE_END.split(text):
        ids = backend.encode(sentence.strip(), add_special_tokens=False).ids
        ids = [token_id for token_id in ids if token_id not in special]
        pieces += [ids[i : i + ROW_LEN] for i in range(0, len(ids), ROW_LEN)]
    if len(pieces) > MAX_PIECES:
        pieces = pieces[: MAX_PIECES // 2] + pieces[-MAX_PIECES // 2 :]
    return pieces


def make_embedder(model: SplitModel, tokenizer: Any) -> TokenEmbedder:
    """Compiles what embeds pieces."""
    prefix = tokenizer.backend_tokenizer.encode(_PREFIX, add_special_tokens=True).ids
    return TokenEmbedder(model, prefix)


@dataclasses.dataclass(frozen=True)
class Scorer:
    """The map from the vector of a piece to a score of each adapter.

    Attributes:
      names: of the adapters.
      mean: [hidden] float32, the mean of the adapters' mean vectors, which is taken off.
      weights: [hidden, num_adapters] float32.
    """

    names: tuple[str, ...]
    mean: Float[np.ndarray, " hidden"]
    weights: Float[np.ndarray, "hidden num_adapters"]

    @classmethod
    def fit(cls, vectors: Mapping[str, Sequence[Float[np.ndarray, "_ hidden"]]]) -> "Scorer":
        """Fits the map.

        Args:
          vectors: by adapter, for each of its examples the vectors of its pieces; at least one piece an adapter.

        Raises:
          ValueError: If one is not finite, which would make every score of every adapter NaN.
        """
        names = tuple(vectors)
        stacked = [np.concatenate(list(vectors[name])).astype(np.float32) for name in names]
        if broken := [name for name, v in zip(names, stacked, strict=True) if not np.isfinite(v).all()]:
            raise ValueError(
                f"the examples of {', '.join(map(repr, broken))} have NaN or infinite vectors; expected finite ones: "
                "look for damage in the base model's weights, or give other examples"
            )
        mean = np.mean([v.mean(0) for v in stacked], axis=0)
        x = np.concatenate(stacked) - mean
        owners = np.repeat(np.arange(len(names)), [len(v) for v in stacked])
        scorer = cls(names, mean, _ridge(x, owners, len(names)))
        return dataclasses.replace(scorer, weights=scorer.weights * _scale(scorer, vectors))

    def scores(self, pieces: Float[np.ndarray, "num_pieces hidden"]) -> Float[np.ndarray, " num_adapters"]:
        """Each adapter's score for a prompt: that of the piece it fits best; 0 for a prompt without pieces."""
        if not len(pieces):
            return np.zeros(len(self.names), np.float32)
        return ((pieces - self.mean) @ self.weights).max(0)

    def top_k(self, pieces: Float[np.ndarray, "num_pieces hidden"], k: int) -> list[Candidate]:
        """The k adapters of the highest scores, best first; of equal ones the one that was added first."""
        scores = self.scores(pieces)
        return [Candidate(self.names[i], float(scores[i])) for i in np.argsort(-scores, kind="stable")[:k]]


def _ridge(
    x: Float[np.ndarray, "num_pieces hidden"], owners: Int[np.ndarray, " num_pieces"], num_adapters: int
) -> Float[np.ndarray, "hidden num_adapters"]:
    """Ridge regression of whose piece it is on its vector; by the smaller of the two systems of equations."""
    is_owner = np.eye(num_adapters, dtype=np.float32)[owners] - np.float32(1 / num_adapters)
    shrink = np.float32(_RIDGE * max(float((x * x).sum(1).mean()), 1e-12))
    num_pieces, hidden = x.shape
    if num_pieces <= hidden:
        return x.T @ np.linalg.solve(x @ x.T + shrink * np.eye(num_pieces, dtype=np.float32), is_owner)
    return np.linalg.solve(x.T @ x + shrink * np.eye(hidden, dtype=np.float32), x.T @ is_owner)


def _scale(scorer: Scorer, vectors: Mapping[str, Sequence[Float[np.ndarray, "_ hidden"]]]) -> np.float32:
    """What makes the mean score of an example for its own adapter 1, so that one temperature suits all models."""
    own = [
        float(scorer.scores(pieces)[i])
        for i, name in enumerate(scorer.names)
        for pieces in vectors[name]
        if len(pieces)
    ]
    mean = float(np.mean(own))
    return np.float32(1 / mean if mean > 1e-9 else 1)  # a single candidate has nothing to be told from


def that_fit(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of candidates, best first, those that fit at least half as well as the best; if none fits, what is like the best.

    Measured as above, of the best three: exactly the right adapters for 192 of 192 prompts for one skill and 168 of 168
    for two, where each is a sentence; for 0.57 where one sentence asks for two, and 0.82 where one has skill and items.
    """
    least = candidates[0].score * (_LEAST_FIT if candidates[0].score > 0 else 1)
    return [candidate for candidate in candidates if candidate.score >= least]


def mix_weights(candidates: Sequence[Candidate], rule: WeightRule) -> dict[str, float]:
    """Weights that add up to 1: all equal, as LoraRetriever's mixture, or larger for a better fit."""
    if rule == "equal":
        return {c.name: 1 / len(candidates) for c in candidates}
    scores = np.asarray([c.score for c in candidates], np.float64) / _TEMPERATURE
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    return {c.name: float(weight) for c, weight in zip(candidates, weights, strict=True)}


class RetrievalIndex:
    """Adapters by example prompts, with the model that embeds; for use without a server."""

    def __init__(self, embedder: TokenEmbedder, tokenizer: Any, scorer: Scorer) -> None:
        self._embedder = embedder
        self._tokenizer = tokenizer
        self._scorer = scorer

    @classmethod
    def build(cls, model: SplitModel, tokenizer: Any, examples: Mapping[str, Sequence[str]]) -> "RetrievalIndex":
        """Embeds the examples and fits the scores to them.

        Args:
          model: the base model's weights on the device (`Model.split`), or another model's.
          tokenizer: of that model, a transformers tokenizer with a backend of `tokenizers`.
          examples: prompts by adapter, a dozen each, of the phrasings to expect; the first `MAX_EXAMPLES` are used.

        Raises:
          ValueError: If there is no adapter, or one has no prompt that is more than blanks, or no finite vectors.
        """
        if not examples:
            raise ValueError("there are no examples; give {adapter: [prompt, ...]} with at least one adapter")
        embedder = make_embedder(model, tokenizer)
        return cls(embedder, tokenizer, Scorer.fit(example_vectors(embedder, tokenizer, examples)))

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters that may be found."""
        return self._scorer.names

    def top_k(self, prompts: Sequence[str], k: int) -> list[list[Candidate]]:
        """For each prompt the k adapters that fit best, best first; all prompts in batches.

        Raises:
          ValueError: If k is below 1 or above the number of adapters.
        """
        if not 1 <= k <= len(self.names):
            raise ValueError(f"k is {k}; expected 1 to {len(self.names)}, the number of adapters with examples")
        pieces = [tokenized_pieces(self._tokenizer, prompt) for prompt in prompts]
        return [self._scorer.top_k(vectors, k) for vectors in embed_pieces(self._embedder, pieces)]

    def mixes(
        self, prompts: Sequence[str], k: int | None = None, weights: WeightRule = "equal"
    ) -> list[dict[str, float]]:
        """For each prompt a mix of its k best adapters, as `Model.mix` takes it; of those that fit, if k is None.

        Raises:
          ValueError: See `top_k`.
        """
        found = self.top_k(prompts, min(MOST_THAT_FIT, len(self.names)) if k is None else k)
        return [mix_weights(that_fit(candidates) if k is None else candidates, weights) for candidates in found]


def example_vectors(
    embedder: TokenEmbedder, tokenizer: Any, examples: Mapping[str, Sequence[str]], *, progress: bool = False
) -> dict[str, list[Float[np.ndarray, "_ hidden"]]]:
    """The vectors of each adapter's examples, each with those of its pieces; with a progress bar if asked for.

    Raises:
      ValueError: If an adapter has no example with a piece.
    """
    pieces = {name: example_pieces(tokenizer, name, texts) for name, texts in examples.items()}
    vectors = iter(embed_pieces(embedder, [p for of_name in pieces.values() for p in of_name], progress=progress))
    return {name: [next(vectors) for _ in of_name] for name, of_name in pieces.items()}


def example_pieces(tokenizer: Any, name: str, texts: Sequence[str]) -> list[list[list[int]]]:
    """The pieces of an adapter's examples, those without any left out.

    Raises:
      ValueError: If none is left.
    """
    found = [tokenized_pieces(tokenizer, text) for text in texts[:MAX_EXAMPLES]]
    found = [pieces for pieces in found if pieces]
    if not found:
        raise ValueError(f"the {len(texts)} examples of adapter {name!r} hold no text; expected at least one prompt")
    return found


def embed_pieces(
    embedder: TokenEmbedder, prompts: Sequence[Sequence[Sequence[int]]], *, progress: bool = False
) -> list[Float[np.ndarray, "_ hidden"]]:
    """The vectors of each prompt's pieces; a piece that many prompts share is embedded once."""
    places: dict[tuple[int, ...], int] = {}
    for piece in (piece for pieces in prompts for piece in pieces):
        places.setdefault(tuple(piece), len(places))
    vectors = embedder(list(places), progress=progress)
    return [
        vectors[np.asarray([places[tuple(piece)] for piece in pieces], np.int64)] if pieces else vectors[:0]
        for pieces in prompts
    ]
