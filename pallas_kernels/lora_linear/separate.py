"""The library's GEMM, then `maf_mvm` onto its output: any backend, any shape; the fast form of a prefill."""

from jaxtyping import Array, Float, Int

from pallas_kernels.maf_mvm import ProjectionSlots, maf_mvm, maf_swiglu, swiglu
from pallas_kernels.matmul import matmul
from pallas_kernels.segments import Segments


def lora_linear(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features out_features"],
    slots: ProjectionSlots,
    segments: Segments | None,
    layer: Int[Array, ""],
    *,
    maf_implementation: str | None = None,
) -> Float[Array, "num_tokens out_features"]:
    """See `pallas_kernels.lora_linear.lora_linear`; one sum, in the dtype of x."""
    base = matmul(x, w)
    if segments is None:
        return base
    return maf_mvm(x, slots, segments, base, layer=layer, implementation=maf_implementation)  # pyright: ignore[reportArgumentType]


def lora_swiglu(
    x: Float[Array, "num_tokens in_features"],
    w: Float[Array, "in_features two_ffn"],
    slots: ProjectionSlots,
    segments: Segments | None,
    layer: Int[Array, ""],
    *,
    maf_implementation: str | None = None,
) -> Float[Array, "num_tokens ffn"]:
    """See `pallas_kernels.lora_linear.lora_swiglu`."""
    base = matmul(x, w)
    if segments is None:
        return swiglu(base)
    return maf_swiglu(x, slots, segments, base, layer=layer, implementation=maf_implementation)  # pyright: ignore[reportArgumentType]
