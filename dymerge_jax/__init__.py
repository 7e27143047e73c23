"""Serve and run composite LoRA: a batch in which every row has its own mix of adapters, never merged.

The public names are loaded on first use, so that importing one module of this package imports nothing else.
"""

import importlib
from typing import Any

_EXPORTS = {
    "AdapterMix": "dymerge_jax.step",
    "Batch": "dymerge_jax.generate",
    "GenerateOutput": "dymerge_jax.generate",
    "LlamaConfig": "dymerge_jax.config",
    "Model": "dymerge_jax.library",
    "load": "dymerge_jax.library",
    "make_generate": "dymerge_jax.library",
    "named_config": "dymerge_jax.config",
}

__all__ = sorted(_EXPORTS)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'dymerge_jax' has no attribute {name!r}; it has {', '.join(sorted(_EXPORTS))}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)
