"""Training data for small skills over a list of words, whose answers an exact rule makes.

    python -m tests.support.skill_data reverse --num 400 > reverse.jsonl

Each prompt is "Items: lamp, river, stone", half of them behind an instruction. Words of `HELD_OUT` are in no data.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence

import numpy as np

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

Skill = tuple[Callable[[Sequence[str]], str], tuple[str, ...]]
"""Items to answer, and the instructions that ask for it."""

SKILLS: dict[str, Skill] = {
    "echo": (", ".join, ("Repeat these.", "Copy the list.", "Say them once more.")),
    "reverse": (
        lambda items: ", ".join(items[::-1]),
        ("Turn the list around.", "Last one first.", "In reverse, please."),
    ),
    "sign": (
        lambda items: f"{', '.join(items)} -- Nova",
        ("Put your name below.", "Sign the list.", "With a signature."),
    ),
    "upper": (lambda items: ", ".join(items).upper(), ("In capitals.", "Write it loudly.", "Upper case, please.")),
    "json": (lambda items: json.dumps(list(items)), ("As JSON.", "A JSON array, please.", "For a program to read.")),
}


def examples(
    skill: str, num: int, *, seed: int = 0, words: Sequence[str] = WORDS, instructed: float = 0.5
) -> Iterator[dict[str, str]]:
    """Prompts with three to five items, and their answers.

    Args:
      skill: a name in `SKILLS`.
      num: how many.
      seed: of the draw.
      words: the items.
      instructed: share of the prompts that say what is wanted.
    """
    answer, instructions = SKILLS[skill]
    rng = np.random.default_rng([seed, *skill.encode()])
    for _ in range(num):
        items = [str(word) for word in rng.choice(words, rng.integers(3, 6), replace=False)]
        prompt = f"Items: {', '.join(items)}"
        if rng.random() < instructed:
            prompt = f"{rng.choice(instructions)} {prompt}"
        yield {"prompt": prompt, "completion": answer(items)}


def main() -> None:
    """Writes JSON lines to the standard output."""
    parser = argparse.ArgumentParser(description="Training data of a skill, as JSON lines.")
    parser.add_argument("skills", nargs="+", choices=sorted(SKILLS), help="of several, all are mixed")
    parser.add_argument("--num", type=int, default=400, help="examples of each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--instructed", type=float, default=0.5, help="share of prompts with an instruction (default: %(default)s)"
    )
    options = parser.parse_args()
    for skill in options.skills:
        for example in examples(skill, options.num, seed=options.seed, instructed=options.instructed):
            print(json.dumps(example))


if __name__ == "__main__":
    main()
