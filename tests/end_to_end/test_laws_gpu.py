"""The laws once more, with compiled kernels: every test of test_laws.py on a GPU."""

import jax
import pytest

from tests.end_to_end.test_laws import *  # noqa: F403

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]
