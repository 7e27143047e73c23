"""The rule for weights, shared by the library and the server."""

import math
import numbers


def check_weight(name: str, weight: object) -> float:
    """A mix weight as a float; any finite number, negative ones and those above 1 included.

    Raises:
      TypeError: If it is not a number.
      ValueError: If it is NaN or infinite.
    """
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
        raise TypeError(f"the weight of adapter {name!r} is {weight!r}; expected a number")
    if not math.isfinite(float(weight)):
        raise ValueError(f"the weight of adapter {name!r} is {weight!r}; expected a finite number")
    return float(weight)
