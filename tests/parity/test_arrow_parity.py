"""A gated set that `make-arrow` makes of plain adapters gives the logits and greedy tokens of PEFT's Arrow."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import dymerge_jax as dm
from checkpoints.__main__ import main
from tests.parity import cases

PROMPTS = cases.tiny_prompts(cases.TINY_MODELS[cases.ARROW_MODEL])


def _load(path: Path) -> dm.Model:
    folder = cases.write_tiny_model(path / "model", cases.TINY_MODELS[cases.ARROW_MODEL])
    adapters = map(str, cases.write_arrow_adapters(path / "adapters"))
    flags = ["--top-k", str(cases.ARROW_TOP_K), "--temperature", str(cases.ARROW_TEMPERATURE)]
    assert main(["make-arrow", *adapters, "--out", str(path / "arrow"), *flags]) == 0
    return dm.load(
        folder,
        adapters=[],
        gated_sets=[path / "arrow"],
        dtype="float32",
        adapter_slots=4,
        slot_rank=4,
        progress=False,
    )


def _batch() -> dm.Batch:
    tokens = np.zeros((len(PROMPTS), max(map(len, PROMPTS))), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    return dm.Batch(tokens=jnp.asarray(tokens), lengths=jnp.asarray([len(p) for p in PROMPTS], jnp.int32))


def test_logits_equal_those_of_arrow_in_peft(tmp_path: Path) -> None:
    loaded = _load(tmp_path)
    logits = np.asarray(loaded.logits(_batch(), loaded.mix(["arrow"] * len(PROMPTS))))
    golden = np.load(cases.GOLDENS / "arrow.npz")
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(logits[row, : len(prompt)], golden[f"{row}.logits"], rtol=0, atol=1e-3)
    base = np.load(cases.GOLDENS / f"{cases.ARROW_MODEL}.npz")["base.2.logits"]
    assert np.abs(golden["2.logits"] - base).max() > 0.5


@pytest.mark.slow
def test_greedy_tokens_equal_those_of_arrow_in_peft(tmp_path: Path) -> None:
    loaded = _load(tmp_path)
    out = dm.make_generate(loaded, max_new_tokens=cases.NUM_GREEDY)(_batch(), loaded.mix(["arrow"] * len(PROMPTS)))
    golden = np.load(cases.GOLDENS / "arrow.npz")
    np.testing.assert_array_equal(np.asarray(out.tokens), np.stack([golden[f"{i}.tokens"] for i in range(3)]))
