"""Rotary frequencies equal those of transformers, for every spelling of config.json (case P1)."""

from pathlib import Path

import numpy as np
import pytest

from checkpoints.hf_config import read_hf_config
from dymerge_jax.config import named_config
from dymerge_jax.layers import rope_frequencies
from tests.parity import cases
from tests.support.tiny_checkpoints import tiny_llama_config_json, write_json


@pytest.mark.parametrize("name", cases.ROPES)
def test_p1_frequencies_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    fields = cases.ROPES[name]
    write_json(tmp_path / "config.json", tiny_llama_config_json(named_config("tiny"), rope_keys="old") | fields)
    config = read_hf_config(tmp_path).llama
    expected = np.load(cases.GOLDENS / "rope.npz")[name]
    np.testing.assert_allclose(rope_frequencies(config.head_dim, config.rope), expected, rtol=1e-6)


def test_p1_the_goldens_hold_every_band() -> None:
    """Kept, interpolated and stretched frequencies, or the test above would prove less than it says."""
    ratio = np.load(cases.GOLDENS / "rope.npz")["llama-3.2-1b"] * 5e5 ** (np.arange(0, 64, 2) / 64)
    assert ((ratio > 1.05 / 32) & (ratio < 0.95)).any()
    np.testing.assert_allclose([ratio[0], ratio[-1]], [1, 1 / 32], rtol=1e-5)
