"""What the kernels ask of the GPU."""

import jax

_HOPPER = "9.0"
_H200_MULTIPROCESSORS = 132
# Of one block, or CTA, by compute capability (CUDA C++ Programming Guide, technical specifications).
HOPPER_SHARED_BYTES = 227 * 1024
_SHARED_BYTES = {
    "8.0": 163 * 1024,
    "8.7": 163 * 1024,
    _HOPPER: HOPPER_SHARED_BYTES,
    "10.0": 227 * 1024,
    "10.3": 227 * 1024,
}
_OTHER_SHARED_BYTES = 99 * 1024  # 8.6, 8.9, 12.0


def max_shared_bytes() -> int:
    """Shared memory that one block may have; on a CPU, that of Hopper."""
    return _SHARED_BYTES.get(_compute_capability(), _OTHER_SHARED_BYTES)


def num_multiprocessors() -> int:
    """Of the GPU; on a CPU, those of an H200."""
    device = jax.devices()[0]
    return getattr(device, "core_count", _H200_MULTIPROCESSORS) if device.platform == "gpu" else _H200_MULTIPROCESSORS


def is_hopper() -> bool:
    """Whether there is wgmma. A CPU, which interprets, passes for Hopper."""
    return _compute_capability() == _HOPPER


def check_hopper(*, instead: str) -> None:
    """Raises NotImplementedError, naming `instead`, unless `is_hopper`."""
    if not is_hopper():
        raise NotImplementedError(
            f"compute capability {_compute_capability()} is not supported; wgmma exists on Hopper ({_HOPPER}) alone: "
            f"use {instead}"
        )


def _compute_capability() -> str:
    return getattr(jax.devices()[0], "compute_capability", _HOPPER)
