"""What a value that was read from JSON is: an untrusted file may hold anything in any place."""

import sys
from typing import TypeGuard

import numpy as np

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def is_int(value: object) -> TypeGuard[int]:
    """True for an integer of any size."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """True for a number that is finite as a float64; an integer may be too large for any float."""
    return _is_at_most(value, sys.float_info.max)


def is_float32(value: object) -> bool:
    """True for a number that is finite as a float32."""
    return _is_at_most(value, _MAX_FLOAT32)


def _is_at_most(value: object, largest: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= largest
