"""Listens to XLA: what compiles while a test runs."""

import contextlib
from collections.abc import Iterator

import jax.monitoring


@contextlib.contextmanager
def recorded_compiles() -> Iterator[list[str]]:
    """A list that grows by a line for every program compiled inside the context."""
    compiles: list[str] = []

    def listen(event: str, duration_secs: float, **details: str | int | float) -> None:
        if "backend_compile" in event:
            compiles.append(f"{event} {details}")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiles
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
