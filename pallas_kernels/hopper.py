"""What the Mosaic kernels run on."""

import jax

MAX_SHARED_BYTES = 227 * 1024  # of one CTA
_HOPPER = "9.0"


def check_hopper(*, instead: str) -> None:
    """Raises NotImplementedError, naming `instead`, on a GPU without wgmma. A CPU, which interprets, passes."""
    capability = getattr(jax.devices()[0], "compute_capability", _HOPPER)
    if capability != _HOPPER:
        raise NotImplementedError(
            f"compute capability {capability} is not supported; wgmma exists on Hopper ({_HOPPER}) alone: use {instead}"
        )
