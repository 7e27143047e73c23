"""Streams foreign tensors to the device, one parameter at a time."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from tqdm import tqdm

from checkpoints.names import ParamPath, ParamSource

Params = dict[str, Any]
"""Nested dict of arrays: embed, layers (by int), final_norm and, unless tied, lm_head."""


def load_params(
    sources: list[ParamSource], read: Callable[[str], np.ndarray], *, dtype: DTypeLike, progress: bool, title: str
) -> Params:
    """Builds the parameters on the default device; the host never holds more than one of them.

    Args:
      sources: what to build, see `names.param_sources`.
      read: gives a foreign tensor by name, in any float dtype.
      dtype: of the parameters.
      progress: shows a progress bar in parameters.
      title: before the bar.

    Returns:
      The parameters, matrices as [in_features, out_features].
    """
    params: Params = {}
    total = sum(math.prod(shape) for source in sources for shape in source.tensors.values())
    with tqdm(total=total, desc=title, unit=" params", unit_scale=True, disable=not progress) as bar:
        for source in sources:
            parts = [read(name) for name in source.tensors]
            set_param(params, source.path, _to_device(parts, jnp.dtype(dtype), source.is_transposed))
            bar.update(sum(part.size for part in parts))
    return params


def set_param(params: Params, path: ParamPath, value: Any) -> None:
    """Puts a leaf into the nested dict, making the dicts on its path."""
    node: dict[Any, Any] = params
    for key in path[:-1]:
        node = node.setdefault(key, {})
    node[path[-1]] = value


def _to_device(parts: list[np.ndarray], dtype: np.dtype, is_transposed: bool) -> jax.Array:
    arrays = [jax.device_put(part) for part in parts]
    if len(arrays) > 1 or is_transposed or arrays[0].dtype != dtype:
        return _assemble(arrays, dtype=dtype, is_transposed=is_transposed).block_until_ready()
    return arrays[0].block_until_ready()  # waits, so that the host's copies do not pile up


@functools.partial(jax.jit, static_argnames=("dtype", "is_transposed"))
def _assemble(parts: list[jax.Array], *, dtype: np.dtype, is_transposed: bool) -> jax.Array:
    # On the device: it casts and transposes at memory speed, numpy does not.
    whole = jnp.concatenate([part.astype(dtype) for part in parts])
    return whole.T if is_transposed else whole
