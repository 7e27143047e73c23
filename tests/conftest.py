"""Strict numerics for every test: no silent dtype or rank promotion, warnings are errors (pyproject.toml).

jaxtyping's pytest plugin checks the shape annotations of the four packages during the run; tests/support/typecheck.py
says what is checked.
"""

import importlib.util
import os
from collections.abc import Iterator

import jax
import jaxtyping
import numpy as np
import pytest

import tests.support.typecheck  # noqa: F401  (named in addopts; must be imported before the packages are)

# Without this the CUDA plugin, there for its compiler only, looks for a driver and logs an error that there is none.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Compiling takes most of the time of most tests: a third less without LLVM's optimizations. Not where kernels are
# compiled for a GPU (tests/support/aot_h200.py), nor in .ci/run's stages on the newest JAX.
if jax.default_backend() == "cpu" and "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for processes that tests start


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the test's name only."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


@pytest.fixture
def unchecked_annotations() -> Iterator[None]:
    """Turns the annotation checks off: for tests of our own argument checks, which lie behind them, and of speed."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests that compile for an H200 or an L40 where XLA's GPU compiler is not installed."""
    if importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13"):
        return
    version = jax.__version__
    reason = f"needs pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"
    for item in items:
        if not {"h200", "l40"}.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.skip(reason=reason))
