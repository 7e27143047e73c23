"""How a request asks for adapters that fit its prompt: "auto", "auto:2", "auto:3:softmax", as adapter_mix or model."""

import dataclasses
import re
from typing import Literal

from dymerge_jax.retrieval import MOST_THAT_FIT
from serving.errors import InvalidRequestError

FORMS = '"auto", "auto:K" or "auto:K:softmax"'
_PATTERN = re.compile(r"auto(?::(?P<k>[0-9]{1,9}))?(?::(?P<weights>equal|softmax))?")


@dataclasses.dataclass(frozen=True)
class AutoMix:
    """A mix that is found for the prompt.

    Attributes:
      k: how many adapters, at least 1; None for those that fit (`dymerge_jax.retrieval.that_fit`), three at most.
      weights: all equal, or larger for a better fit; they add up to 1.
    """

    k: int | None = None
    weights: Literal["equal", "softmax"] = "equal"

    def num_adapters(self, num_candidates: int, param: str) -> int:
        """How many adapters it is at most, where so many may be found.

        Raises:
          InvalidRequestError: If it asks for more.
        """
        if self.k is None:
            return min(MOST_THAT_FIT, num_candidates)
        if self.k > num_candidates:
            raise InvalidRequestError(
                f"{param} asks for the {self.k} adapters that fit best, but only {num_candidates} have example "
                "prompts; ask for fewer, or give more adapters an examples.jsonl",
                param=param,
            )
        return self.k


def parse_auto_mix(text: str, param: str) -> AutoMix:
    """A mix that is to be found.

    Raises:
      InvalidRequestError: If it has another form, or k is 0.
    """
    match = _PATTERN.fullmatch(text)
    if match is None or (match["k"] is not None and int(match["k"]) == 0):
        shown = text if len(text) <= 80 else f"{text[:80]}..."
        raise InvalidRequestError(f"{param} is {shown!r}; expected {FORMS}, K being 1 or more", param=param)
    k = None if match["k"] is None else int(match["k"])
    return AutoMix(k, "softmax" if match["weights"] == "softmax" else "equal")
