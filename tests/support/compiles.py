"""Listens to XLA: what compiles while a test runs."""

import contextlib
import threading
import traceback
from collections.abc import Iterator

import jax.monitoring


@contextlib.contextmanager
def recorded_compiles() -> Iterator[list[str]]:
    """A list that grows by an entry, with its stack, for every program that this thread compiles inside the context.

    JAX tells its listeners of the whole process: what another thread compiles meanwhile is none of this one's doing.
    """
    compiles: list[str] = []
    thread = threading.get_ident()

    def listen(event: str, duration_secs: float, **details: str | int | float) -> None:
        if "backend_compile" in event and threading.get_ident() == thread:
            compiles.append(f"{event} {details}\n{''.join(traceback.format_stack(limit=40))}")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiles
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
