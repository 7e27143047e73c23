"""What jaxtyping's import hook puts around every function of the four packages (addopts in pyproject.toml)."""

from collections.abc import Callable
from typing import Any

import beartype

_CHECK = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def checked[F: Callable[..., Any]](fn: F) -> F:
    """Wraps `fn` so that a call whose arguments or result break the annotations raises `jaxtyping.TypeCheckError`.

    Constructors are left alone: JAX rebuilds pytree dataclasses with whatever a transformation puts into the leaves
    (structs, None, an extra axis under vmap), and those that users reach check their values themselves. An int is
    accepted where a float is asked for, as Python does.
    """
    return fn if fn.__name__ == "__init__" else _CHECK(fn)
