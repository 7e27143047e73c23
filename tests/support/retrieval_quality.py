"""How often retrieval finds the right adapters, on prompts that say in words which of eight skills they want.

    JAX_PLATFORMS=cpu python -m tests.support.retrieval_quality

An adapter's examples and the prompts that are tried share no word of the lists. Prints one JSON object: for each way to
look at a prompt, hits, tries and the 95 % Wilson interval of their share.
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import dymerge_jax.library
from dymerge_jax.embedding import TokenEmbedder
from dymerge_jax.library import Model
from dymerge_jax.retrieval import RetrievalIndex, Scorer, embed_pieces, make_embedder, tokenized_pieces

# The phrasings of realmodel/skills.py beside this project.
PHRASES = {
    "reverse": ("Backwards order.", "Reverse the list.", "From last to first."),
    "vocab": ("Use Zorbian words.", "Translate to Zorbian.", "Say it in Zorbian."),
    "firsttwo": ("Only the first two.", "Keep two entries.", "Just the top two."),
    "upper": ("Shout it.", "Use capital letters.", "All caps please."),
    "json": ("As a JSON array.", "Answer in JSON.", "Give machine readable output."),
    "bullets": ("As bullet points.", "One per line.", "Make a bullet list."),
    "count": ("State how many.", "Count them first.", "Start with the number."),
    "sign": ("Sign it.", "Add your name.", "Close with a signature."),
}
_HELD_OUT = """
anchor barrel canyon dagger eagle fossil grape harbor igloo jungle kettle lizard mango nutmeg oyster pepper quartz
raven saddle tulip
"""
_WORDS = """
lamp river stone apple chair table window garden bridge cloud mountain forest ocean island desert valley engine
wheel hammer ladder bottle basket blanket pillow mirror carpet candle button pocket jacket shoe glove ring bread
butter cheese honey sugar salt onion potato tomato carrot lemon cherry peach horse tiger monkey rabbit turtle snake
spider bear wolf fox deer sheep goat cow duck piano guitar drum violin flute camera radio phone printer screen
rocket planet moon star comet train truck boat bicycle doctor teacher farmer painter king queen castle tower school
market museum road corner roof wall floor paper pencil book letter map clock watch bell knife fork spoon plate cup
bowl towel soap brush needle thread chain key coin ticket flag ball puzzle robot feather leaf flower seed root
branch rain snow wind storm fire smoke sand
"""
HELD_OUT, WORDS = tuple(_HELD_OUT.split()), tuple(_WORDS.split())
PAIRS = tuple(itertools.combinations(PHRASES, 2))
EXAMPLES_A_PHRASING = 4


class Asked(NamedTuple):
    """A prompt and the skills that it asks for."""

    prompt: str
    skills: frozenset[str]


def items(rng: np.random.Generator, words: Sequence[str]) -> str:
    return f"Items: {', '.join(rng.choice(words, rng.integers(3, 6), replace=False))}"


def examples(*, left_out: int | None = None, num_neutral: int = 0) -> dict[str, list[str]]:
    """Example prompts by skill: all phrasings but one, and some prompts that say nothing of the skill."""
    rng = np.random.default_rng(1)
    return {
        skill: [
            f"{phrase} {items(rng, WORDS)}"
            for i, phrase in enumerate(phrases)
            for _ in range(EXAMPLES_A_PHRASING)
            if i != left_out
        ]
        + [items(rng, WORDS) for _ in range(num_neutral)]
        for skill, phrases in PHRASES.items()
    }


def single(*, num: int, only: int | None = None, in_one_sentence: bool = False) -> Iterator[Asked]:
    """Prompts for one skill each: `num` of every phrasing, a sentence of its own or one with the items."""
    rng = np.random.default_rng(2)
    for skill, phrases in PHRASES.items():
        for i, phrase in enumerate(phrases):
            for _ in range(num if only in (None, i) else 0):
                text = f"{phrase} {items(rng, HELD_OUT)}"
                if in_one_sentence:
                    text = text.replace(". Items: ", ": ")
                yield Asked(text, frozenset({skill}))


def pairs(*, num: int, joined: str | None = None) -> Iterator[Asked]:
    """Prompts for two skills each, in either order: `num` of every pair, as two sentences or `joined` to one."""
    rng = np.random.default_rng(3)
    for pair in PAIRS:
        for _ in range(num):
            first, second = (str(rng.choice(PHRASES[pair[i]])) for i in rng.permutation(2))
            text = f"{first} {second}"
            if joined is not None:
                text = f"{first[:-1]}{joined}{second[0].lower()}{second[1:]}"
            yield Asked(f"{text} {items(rng, HELD_OUT)}", frozenset(pair))


def is_right(names: Sequence[str], asked: Asked) -> bool:
    return set(names[: len(asked.skills)]) == asked.skills


def share(hits: Sequence[bool]) -> dict[str, Any]:
    """Hits, tries and the 95 % Wilson interval of their share."""
    n, p, z = len(hits), sum(hits) / len(hits), 1.96
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = ((middle + sign * half) / (1 + z * z / n) for sign in (-1, 1))
    return {"hits": int(sum(hits)), "n": n, "share": round(p, 3), "wilson_95": [round(low, 3), round(high, 3)]}


def hits(index: RetrievalIndex, asked: Sequence[Asked]) -> list[bool]:
    found = index.top_k([a.prompt for a in asked], 2)
    return [is_right([c.name for c in f], a) for f, a in zip(found, asked, strict=True)]


def exactly_found(index: RetrievalIndex) -> dict[str, Any]:
    """How often "auto", where nobody says how many adapters it is, takes those of the prompt and no others."""
    tried = {
        "single": single(num=8), "single, in one sentence with the items": single(num=8, in_one_sentence=True),
        "pairs": pairs(num=6), "pairs, joined by and": pairs(num=6, joined=" and "),
        "pairs, joined by a comma": pairs(num=6, joined=", "),
    }  # fmt: skip
    result = {}
    for kind, asked in ((kind, list(asked)) for kind, asked in tried.items()):
        mixes = index.mixes([a.prompt for a in asked])
        result[kind] = share([mix.keys() == a.skills for mix, a in zip(mixes, asked, strict=True)])
    return result


def held_out_phrasings(model: Model) -> list[bool]:
    """For each phrasing, whether most prompts with it find their skill if no example has it."""
    found = []
    for i in range(3):
        asked = list(single(num=3, only=i))
        right = hits(RetrievalIndex.build(model.split, model.tokenizer, examples(left_out=i)), asked)
        found += [sum(right[j : j + 3]) >= 2 for j in range(0, len(right), 3)]
    return found


Vectors = Sequence[np.ndarray]


def cosine_names(vectors: Mapping[str, Vectors]) -> Callable[[np.ndarray], list[str]]:
    """LoraRetriever's own rule: cosine to the mean of an adapter's examples, here less the mean of all adapters."""
    centres = np.stack([np.concatenate(list(v)).mean(0) for v in vectors.values()])
    mean = centres.mean(0)
    centres = (centres - mean) / np.linalg.norm(centres - mean, axis=1, keepdims=True)

    def names(pieces: np.ndarray) -> list[str]:
        away = pieces - mean
        scores = (away / np.linalg.norm(away, axis=1, keepdims=True) @ centres.T).max(0)
        return [list(vectors)[i] for i in np.argsort(-scores)]

    return names


def compare(model: Model, embedder: TokenEmbedder, *, whole: bool, ridge: bool) -> dict[str, Any]:
    """The same prompts with other parts: the prompt as one piece, or cosines in place of the fitted map."""

    def vectors_of(texts: Sequence[str]) -> Vectors:
        pieces = [tokenized_pieces(model.tokenizer, text) for text in texts]
        if whole:
            pieces = [[[t for piece in p for t in piece][: embedder.row_len]] for p in pieces]
        return embed_pieces(embedder, pieces)

    by_skill = {skill: vectors_of(texts) for skill, texts in examples().items()}
    scorer = Scorer.fit(by_skill)
    names = (lambda v: [c.name for c in scorer.top_k(v, 2)]) if ridge else cosine_names(by_skill)
    result = {}
    tried = {"single": single(num=8), "pairs": pairs(num=6), "pairs, joined by a comma": pairs(num=6, joined=", ")}
    for kind, asked in ((kind, list(asked)) for kind, asked in tried.items()):
        found = vectors_of([a.prompt for a in asked])
        result[kind] = share([is_right(names(v), a) for v, a in zip(found, asked, strict=True)])
    return result


def measure(model: Model) -> dict[str, Any]:
    """All numbers."""
    start_s = time.perf_counter()
    index = RetrievalIndex.build(model.split, model.tokenizer, examples())
    build_s = time.perf_counter() - start_s
    neutral = RetrievalIndex.build(model.split, model.tokenizer, examples(num_neutral=12))
    one, two = list(single(num=8)), list(pairs(num=6))
    start_s = time.perf_counter()
    result: dict[str, Any] = {"single": share(hits(index, one)), "pairs": share(hits(index, two))}
    result["s_a_prompt"] = round((time.perf_counter() - start_s) / (len(one) + len(two)), 4)
    result["build_s"] = round(build_s, 1)
    result["single, in one sentence with the items"] = share(hits(index, list(single(num=8, in_one_sentence=True))))
    for name, joined in (("pairs, joined by and", " and "), ("pairs, joined by a comma", ", ")):
        result[name] = share(hits(index, list(pairs(num=6, joined=joined))))
    result["exactly those of the prompt by auto"] = exactly_found(index)
    result["half of the examples neutral"] = {
        "single": share(hits(neutral, one)), "pairs": share(hits(neutral, two)),
    }  # fmt: skip
    result["phrasings that no example has"] = share(held_out_phrasings(model))
    for kind, asked in (("single", one), ("pairs", two)):
        mixes = index.mixes([a.prompt for a in asked], 3, "softmax")
        right = [sum(mix.get(skill, 0.0) for skill in a.skills) for mix, a in zip(mixes, asked, strict=True)]
        result[f"weight of the right ones by auto:3:softmax, {kind}"] = {
            "mean": round(float(np.mean(right)), 3), "least": round(min(right), 3),
        }  # fmt: skip
    embedder = make_embedder(model.split, model.tokenizer)
    for whole, ridge in ((True, False), (True, True), (False, False)):
        kind = f"{'whole prompts' if whole else 'pieces'}, {'ridge' if ridge else 'cosine'}"
        result[kind] = compare(model, embedder, whole=whole, ridge=ridge)
    return result


if __name__ == "__main__":
    print(json.dumps(measure(dymerge_jax.library.load("demo", adapters=[], progress=False)), indent=1))
