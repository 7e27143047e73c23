"""Programmatic dependent launch out of a Pallas-Triton kernel: lets the kernel after it start before it has ended."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plt
from jaxtyping import Int


def launch_dependents(x: Int[Array, ""]) -> Int[Array, ""]:
    """Returns `x`, and on the way says that the next kernel of the stream may start (compute capability 9.0 and up).

    Triton drops an instruction whose result nobody uses, and moves it to where the result is used: pass a scalar
    that the kernel needs first, such as a program id, and go on with what comes back. A kernel that was launched with
    programmatic dependency starts once all programs have called this or ended; it sees this kernel's writes only
    after its own `griddepcontrol.wait`, so the place of the call changes when it starts, never what it reads.

    Args:
      x: int32 scalar.
    """
    # Scalars do not lower: one element, which every thread holds, and its sum.
    [y] = plt.elementwise_inline_asm(
        "{ griddepcontrol.launch_dependents; mov.b32 $0, $1; }",
        args=[jnp.broadcast_to(x, (1,))],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,), x.dtype)],
    )
    return y.sum(dtype=x.dtype)
