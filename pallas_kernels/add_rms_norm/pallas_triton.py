"""One Pallas program a token (Triton lowering); in interpret mode on a CPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

_WHOLE = pl.BlockSpec(memory_space=pl.ANY)


# An inner jit: the identical calls of a model's layers are traced and compiled once.
@functools.partial(jax.jit, static_argnames="eps")
def add_rms_norm(
    x: Float[Array, "num_tokens hidden"],
    delta: Float[Array, "num_partials num_tokens hidden"],
    weight: Float[Array, " hidden"],
    eps: float,
) -> tuple[Float[Array, "num_tokens hidden"], Float[Array, "num_tokens hidden"]]:
    """See `pallas_kernels.add_rms_norm.add_rms_norm`."""
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        grid=(x.shape[0],),
        in_specs=[_WHOLE] * 3,
        out_specs=[_WHOLE] * 2,
        out_shape=[out, out],
        compiler_params=plt.CompilerParams(num_warps=16, num_stages=1),
        interpret=jax.default_backend() != "gpu",
        name="add_rms_norm",
    )(x, delta, weight)


def _kernel(
    x_ref: Any,  # [num_tokens, hidden]
    delta_ref: Any,  # [num_partials, num_tokens, hidden]
    weight_ref: Any,  # [hidden]
    total_ref: Any,  # [num_tokens, hidden]
    normed_ref: Any,  # [num_tokens, hidden]
    *,
    eps: float,
) -> None:
    token = pl.program_id(0)
    num_partials, _, hidden = delta_ref.shape
    lanes = jnp.arange(pl.next_power_of_2(hidden), dtype=jnp.int32)
    is_lane = None if lanes.shape[0] == hidden else lanes < hidden

    def load(ref: Any, *index: Array | int) -> Array:
        return plt.load(ref.at[(*index, lanes)], mask=is_lane, other=None if is_lane is None else 0.0)

    # All loads before the first use: they wait for memory once.
    parts = [load(delta_ref, jnp.int32(p), token) for p in range(num_partials)]
    x, weight = load(x_ref, token), load(weight_ref)
    y = functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts])
    # Rounded where the separate operations would round.
    total = x + y.astype(x.dtype)
    wide = total.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.sum(wide * wide) / hidden + eps)
    plt.store(total_ref.at[token, lanes], total, mask=is_lane)
    plt.store(normed_ref.at[token, lanes], normed.astype(x.dtype) * weight, mask=is_lane)
