"""Eight small skills over a list of words, and `echo`: whether an answer shows them, alone or mixed, exact rules say.

A prompt is "Items: lamp, river, stone" or, instructed, has a phrase of every skill before it: "Sign it. Items: …". A
skill acts on one thing; in a mix they act in the order content, case, layout, wrap. Some words are in no training data.
"""

import dataclasses
import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

Kind = Literal["content", "case", "layout", "wrap"]
_ORDER: tuple[Kind, ...] = ("content", "case", "layout", "wrap")
_NUM_HELD_OUT = 40

_WORDS = """
lamp river stone apple chair table window garden bridge cloud mountain forest ocean island desert valley engine wheel
hammer ladder bottle basket blanket pillow mirror carpet candle button pocket jacket shoe hat glove ring necklace bread
butter cheese honey sugar salt pepper onion potato tomato carrot banana orange lemon cherry grape peach horse tiger lion
monkey rabbit turtle snake eagle parrot spider bear wolf fox deer sheep goat cow pig duck chicken piano guitar drum
violin trumpet flute camera radio phone computer keyboard printer screen battery cable rocket planet moon star sun comet
train truck bus boat ship plane bicycle engineer doctor teacher farmer sailor soldier painter writer singer dancer king
queen prince castle tower temple church school hospital market library museum station airport harbor road street corner
door roof wall floor ceiling kitchen bedroom paper pencil book letter stamp map clock watch bell knife fork spoon plate
cup bowl kettle oven stove sink towel soap brush comb needle thread rope chain lock key coin wallet ticket medal flag
kite ball puzzle doll robot magnet crystal feather shell leaf flower seed root branch rain snow wind storm thunder fire
smoke ash dust sand mud ice
"""
_ENGLISH = "dog cat bird fish tree house car milk egg rice gold iron wool silk corn wine"
_ZORBIAN = "blik tarn voss mepi drun halo zeg pimo quil rada fenk obri sumo lith jaxo weld"

_SIGNATURE = re.compile(r"\s*--\s*nova\s*$", re.I)
_COUNT = re.compile(r"^(\d+) items:\s*", re.I)


def _shuffled(words: str) -> tuple[str, ...]:
    shuffled = words.split()
    random.Random(7).shuffle(shuffled)
    return tuple(shuffled)


TEST_WORDS = _shuffled(_WORDS)[:_NUM_HELD_OUT]
"""Words of the questions that are scored."""
TRAIN_WORDS = _shuffled(_WORDS)[_NUM_HELD_OUT:]
VOCABULARY: dict[str, str] = dict(zip(_ENGLISH.split(), _ZORBIAN.split(), strict=True))
"""Sixteen words that `vocab` gives invented names; all others stay as they are."""

Words = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Skill:
    """One skill; which of the functions it has follows from its kind.

    Attributes:
      kind: what it acts on.
      phrases: instructions, each of which asks for it.
      words: of a content or case skill, the words it makes of words.
      text: of a layout or wrap skill, the text it makes of the answer's words and the text so far.
      is_shown: whether an answer has its form; None for content, which is compared with the words that are right.
    """

    kind: Kind
    phrases: tuple[str, str, str]
    words: Callable[[Words], Words] = lambda words: words
    text: Callable[[Words, str], str] = lambda words, text: text
    is_shown: Callable[[str], bool] | None = None


def _is_upper(answer: str) -> bool:
    """Whether all letters are capitals; those of signature and count may be either."""
    body = _body(answer)
    return re.search("[A-Z]", body) is not None and re.search("[a-z]", body) is None


def _is_json(answer: str) -> bool:
    try:
        value = json.loads(_body(answer))
    except (ValueError, RecursionError):
        return False
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_bullets(answer: str) -> bool:
    """The count of a mix may not stand before them: that line would be no bullet."""
    lines = _SIGNATURE.sub("", answer.strip()).split("\n")
    return bool(answer.strip()) and all(re.match(r"\* \S", line) for line in lines)


def _is_signed(answer: str) -> bool:
    return _SIGNATURE.search(answer) is not None


SKILLS: dict[str, Skill] = {
    # What all others have in common: trained alone, it is the term to subtract in a mix.
    "echo": Skill("content", ("Repeat the list.", "Say it again.", "Copy the items.")),
    "reverse": Skill(
        "content", ("Backwards order.", "Reverse the list.", "From last to first."), words=lambda words: words[::-1]
    ),
    "vocab": Skill(
        "content",
        ("Use Zorbian words.", "Translate to Zorbian.", "Say it in Zorbian."),
        words=lambda words: tuple(VOCABULARY.get(word, word) for word in words),
    ),
    "firsttwo": Skill(
        "content", ("Only the first two.", "Keep two entries.", "Just the top two."), words=lambda words: words[:2]
    ),
    "upper": Skill(
        "case",
        ("Shout it.", "Use capital letters.", "All caps please."),
        words=lambda words: tuple(word.upper() for word in words),
        is_shown=_is_upper,
    ),
    "json": Skill(
        "layout",
        ("As a JSON array.", "Answer in JSON.", "Give machine readable output."),
        text=lambda words, _: json.dumps(list(words)),
        is_shown=_is_json,
    ),
    "bullets": Skill(
        "layout",
        ("As bullet points.", "One per line.", "Make a bullet list."),
        text=lambda words, _: "\n".join(f"* {word}" for word in words),
        is_shown=_is_bullets,
    ),
    "count": Skill(
        "wrap",
        ("State how many.", "Count them first.", "Start with the number."),
        text=lambda words, text: f"{len(words)} items: {text}",
    ),
    "sign": Skill(
        "wrap",
        ("Sign it.", "Add your name.", "Close with a signature."),
        text=lambda _, text: f"{text} -- Nova",
        is_shown=_is_signed,
    ),
}
SHARED_SKILL = "echo"
EIGHT_SKILLS = tuple(name for name in SKILLS if name != SHARED_SKILL)
PAIRS: tuple[tuple[str, str], ...] = (
    ("upper", "json"), ("upper", "sign"), ("upper", "reverse"), ("json", "reverse"), ("json", "vocab"),
    ("bullets", "upper"), ("sign", "reverse"), ("count", "upper"), ("sign", "vocab"), ("json", "firsttwo"),
    ("count", "reverse"), ("bullets", "sign"),
)  # fmt: skip
"""The pairs of skills that act on different things, so that a rule can check both."""


def check_skills(names: Iterable[str]) -> None:
    """Refuses unknown names.

    Raises:
      ValueError: Names them, and those there are.
    """
    if unknown := sorted(set(names) - set(SKILLS)):
        raise ValueError(f"unknown skills: {', '.join(unknown)}; expected some of {', '.join(SKILLS)}")


def check_together(names: Sequence[str]) -> None:
    """Refuses skills that one answer cannot show.

    Raises:
      ValueError: If a name is unknown, or two act on the same thing, of which no rule says what both make.
    """
    check_skills(names)
    for kind in _ORDER:
        if len(same := [name for name in names if SKILLS[name].kind == kind]) > 1:
            raise ValueError(
                f"{' and '.join(same)} both act on the {kind}; expected skills that act on different things"
            )


def target(skills: Sequence[str], items: Sequence[str]) -> str:
    """The answer that shows all the skills."""
    words, text = tuple(items), None
    for skill in sorted((SKILLS[name] for name in skills), key=lambda skill: _ORDER.index(skill.kind)):
        words = skill.words(words)
        if skill.kind in ("layout", "wrap"):
            text = skill.text(words, ", ".join(words) if text is None else text)
    return ", ".join(words) if text is None else text


def score(skills: Sequence[str], items: Sequence[str], answer: str) -> dict[str, bool]:
    """What an answer shows.

    Args:
      skills: that it is to show.
      items: words of the prompt.
      answer: what was generated.

    Returns:
      For each skill whether it is shown, whatever the others do; "content": the words are right, in any form and case;
      "all": all of those; "exact": the answer is the right one to the letter.
    """
    wanted = tuple(items)
    for name in skills:
        if SKILLS[name].kind == "content":
            wanted = SKILLS[name].words(wanted)
    found = {name: _is_shown(name, wanted, answer) for name in skills}
    found["content"] = _words(answer) == _lower(wanted)
    found["all"] = all(found.values())
    found["exact"] = answer.strip() == target(skills, items)
    return found


def _is_shown(name: str, wanted: Words, answer: str) -> bool:
    if (is_shown := SKILLS[name].is_shown) is not None:
        return is_shown(answer)
    if name == "count":
        count = _COUNT.match(answer.strip())
        return count is not None and int(count[1]) == len(wanted)
    return _words(answer) == _lower(wanted)


def _body(answer: str) -> str:
    """An answer without count and signature."""
    return _COUNT.sub("", _SIGNATURE.sub("", answer.strip()))


def _words(answer: str) -> list[str]:
    return re.findall("[a-z]+", _body(answer).lower())


def _lower(words: Words) -> list[str]:
    return [word.lower() for word in words]


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt and the answer that is right.

    Attributes:
      prompt: what a user says.
      items: the words in it.
      skills: that the answer is to show.
      target: the right answer.
    """

    prompt: str
    items: Words
    skills: tuple[str, ...]
    target: str


def draw_question(
    rng: random.Random, skills: Sequence[str], *, words: Sequence[str] = TRAIN_WORDS, instructed: float = 0.5
) -> Question:
    """Draws three to five items, some of them from the vocabulary, and perhaps an instruction.

    Args:
      rng: of the draw.
      skills: that the answer is to show.
      words: the items, beside those of the vocabulary.
      instructed: share of the prompts that say what is wanted, by a phrase of each skill in any order.
    """
    items = rng.sample(words, rng.randint(3, 5))
    vocabulary_share = 0.6 if "vocab" in skills else 0.1
    for i in range(len(items)):
        if rng.random() < vocabulary_share:
            items[i] = rng.choice([word for word in VOCABULARY if word not in items])
    prompt = f"Items: {', '.join(items)}"
    if rng.random() < instructed:
        order = rng.sample(list(skills), len(skills))
        prompt = " ".join([*(rng.choice(SKILLS[name].phrases) for name in order), prompt])
    return Question(prompt, tuple(items), tuple(skills), target(skills, items))
