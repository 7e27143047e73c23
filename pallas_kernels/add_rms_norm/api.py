"""The public op: checks shapes, picks an implementation, calls it."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.add_rms_norm import reference

Implementation = Literal["reference", "pallas_triton"]


def add_rms_norm(
    x: Float[Array, "num_tokens hidden"],
    delta: Float[Array, "num_partials num_tokens hidden"],
    weight: Float[Array, " hidden"],
    *,
    eps: float,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "num_tokens hidden"], Float[Array, "num_tokens hidden"]]:
    """Adds partial sums to the residual stream and normalises the result.

    Semantics: y = sum over p of delta[p], in float32 and in order, rounded to the dtype of x; r = x + y, rounded;
    n = r / sqrt(mean(r^2) + eps) in float32, rounded, times weight.

    Args:
      x: [num_tokens, hidden] residual stream, bfloat16 or float32.
      delta: [num_partials, num_tokens, hidden] in the dtype of x or float32.
      weight: [hidden] in the dtype of x.
      eps: added to the mean square.
      implementation: "reference" or "pallas_triton"; None picks the kernel on a GPU: XLA makes two to three launches
        of the same, with twice the bytes.

    Returns:
      r and n, both [num_tokens, hidden] in the dtype of x.

    Raises:
      ValueError: If shapes disagree.
      TypeError: If dtypes do.
    """
    if delta.ndim != 3 or delta.shape[0] < 1 or delta.shape[1:] != x.shape or weight.shape != x.shape[1:]:
        raise ValueError(
            f"x has shape {x.shape}, delta {delta.shape} and weight {weight.shape}; expected [num_tokens, hidden], "
            "[num_partials, num_tokens, hidden] with at least one partial sum, and [hidden]"
        )
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"x is {x.dtype}; expected float32 or bfloat16")
    if weight.dtype != x.dtype or delta.dtype not in (x.dtype, jnp.float32):
        raise TypeError(
            f"x is {x.dtype}, delta {delta.dtype} and weight {weight.dtype}; expected one dtype, or delta in float32"
        )
    match implementation or _pick():
        case "reference":
            return reference.add_rms_norm(x, delta, weight, eps)
        case "pallas_triton":
            return _kernel(eps, x, delta, weight)
        case unknown:
            raise ValueError(f"implementation {unknown!r} is unknown; expected 'reference' or 'pallas_triton'")


def _pick() -> Implementation:
    return "pallas_triton" if jax.default_backend() == "gpu" else "reference"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernel(
    eps: float,
    x: Float[Array, "num_tokens hidden"],
    delta: Float[Array, "num_partials num_tokens hidden"],
    weight: Float[Array, " hidden"],
) -> tuple[Float[Array, "num_tokens hidden"], Float[Array, "num_tokens hidden"]]:
    """The Triton kernel, with the gradient of the reference."""
    from pallas_kernels.add_rms_norm import pallas_triton  # the GPU backend is imported where it is used only

    return pallas_triton.add_rms_norm(x, delta, weight, eps)


def _forward(eps: float, x: Array, delta: Array, weight: Array) -> tuple[Any, tuple[Array, ...]]:
    return _kernel(eps, x, delta, weight), (x, delta, weight)


def _backward(eps: float, args: tuple[Array, ...], gradients: Any) -> tuple[Array, ...]:
    return jax.vjp(functools.partial(reference.add_rms_norm, eps=eps), *args)[1](gradients)


_kernel.defvjp(_forward, _backward)
