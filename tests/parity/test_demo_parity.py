"""The demo model and its adapters give the logits and greedy tokens of transformers and PEFT."""

import jax.numpy as jnp
import numpy as np
import pytest

import dymerge_jax as dm
from tests.parity import cases

DEMO_ROWS = [(mix, prompt) for mix in cases.DEMO_MIXES for prompt in cases.DEMO_PROMPTS]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demo() -> dm.Model:
    return dm.load("demo", dtype="float32", adapter_slots=16, progress=False)


def _batch() -> dm.Batch:
    """Every prompt under every mix, in one batch: rows in the order of `DEMO_ROWS`."""
    lengths = [len(cases.DEMO_PROMPTS[prompt]) for _, prompt in DEMO_ROWS]
    tokens = np.zeros((len(DEMO_ROWS), max(lengths)), np.int32)
    for row, (_, prompt) in enumerate(DEMO_ROWS):
        tokens[row, : lengths[row]] = cases.DEMO_PROMPTS[prompt]
    return dm.Batch(tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths, jnp.int32))


def test_demo_logits_equal_transformers_and_peft(demo: dm.Model) -> None:
    golden = np.load(cases.GOLDENS / "demo.npz")
    logits = np.asarray(demo.logits(_batch(), demo.mix([cases.DEMO_MIXES[name] for name, _ in DEMO_ROWS])))
    for row, (mix, prompt) in enumerate(DEMO_ROWS):
        name = f"{mix}.{prompt}"
        own = logits[row, : len(cases.DEMO_PROMPTS[prompt])]
        expected = golden[f"{name}.logits"]
        np.testing.assert_allclose(own[:, cases.strided_vocab(own.shape[1])], expected, rtol=0, atol=1e-3, err_msg=name)
        np.testing.assert_allclose(own.max(1), golden[f"{name}.max"], rtol=0, atol=1e-3, err_msg=name)
        # Inside the prompt two tokens may be nearly as likely; there the golden argmax is among the likeliest.
        at_golden_argmax = np.take_along_axis(own, golden[f"{name}.argmax"][:, None], axis=1)[:, 0]
        np.testing.assert_allclose(at_golden_argmax, own.max(1), rtol=0, atol=2e-3, err_msg=name)


def test_demo_greedy_tokens_equal_transformers_and_peft(demo: dm.Model) -> None:
    golden = np.load(cases.GOLDENS / "demo.npz")
    generate = dm.make_generate(demo, max_new_tokens=cases.NUM_GREEDY, ignore_eos=True)
    out = generate(_batch(), demo.mix([cases.DEMO_MIXES[name] for name, _ in DEMO_ROWS]))
    expected = np.stack([golden[f"{mix}.{prompt}.tokens"] for mix, prompt in DEMO_ROWS])
    np.testing.assert_array_equal(np.asarray(out.tokens), expected)


def test_the_demo_mix_does_what_no_single_adapter_does(demo: dm.Model) -> None:
    batch = demo.tokenize(["Items: lamp, river, stone"] * 3)
    assert np.asarray(batch.tokens)[0].tolist() == cases.DEMO_PROMPTS["chat"]
    mix = demo.mix([{"sign": 1.0}, {"reverse": 1.0}, {"sign": 1.0, "reverse": 1.0, "echo": -0.5}])
    texts = demo.detokenize(dm.make_generate(demo, max_new_tokens=16)(batch, mix))
    assert texts == ["lamp, river, stone -- Nova", "stone, river, lamp", "stone, river, lamp -- Nova"]
