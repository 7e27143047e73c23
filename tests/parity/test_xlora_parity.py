"""An imported X-LoRA folder gives the logits and greedy tokens of PEFT, which recomputes all tokens in every step.

Ours are made with two KV caches: all at once, and as the engine makes them, in prefill chunks and token by token.
"""

from collections.abc import Iterable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import dymerge_jax as dm
from checkpoints.__main__ import main
from checkpoints.gated_set import load_gated_sets
from checkpoints.peft_adapter import load_adapter
from dymerge_jax.kv_cache import empty_cache
from dymerge_jax.library import pad_batch
from dymerge_jax.step import StepTables, forward_step, split_weights
from dymerge_jax.step_batch import packed_batch, packed_rows
from tests.parity import cases
from tests.support.engines import generate, make_engine, make_request, run_to_end, token_ids

PROMPT = cases.xlora_prompt()
GOLDEN = np.load(cases.GOLDENS / "xlora.npz")
TOLERANCE = 1e-3
BLOCK_SIZE, NUM_BLOCKS = 4, 24


def imported(root: Path, names: Iterable[str]) -> list[Path]:
    """Imports cases; the folders of the gated sets."""
    cases.write_tiny_adapters(root / "adapters")
    cases.write_arrow_adapters(root / "adapters")
    for name in names:
        source = cases.write_xlora(root / "source" / name, cases.XLORA_CASES[name], "../../adapters")
        assert main(["import-gated", str(source), "--out", str(root / name)]) == 0
    return [root / name for name in names]


def load(root: Path, names: Iterable[str]) -> dm.Model:
    """The model with cases as gated sets."""
    folder = cases.write_tiny_model(root / "model", cases.TINY_MODELS[cases.XLORA_MODEL])
    sets = imported(root, names)
    return dm.load(folder, adapters=[], gated_sets=sets, dtype="float32", adapter_slots=24, slot_rank=4, progress=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dm.Model:
    """With every case."""
    return load(tmp_path_factory.mktemp("xlora"), cases.XLORA_CASES)


def sequence(name: str) -> list[int]:
    """Prompt and greedy tokens."""
    return [*PROMPT, *GOLDEN[f"{name}.tokens"].tolist()]


def test_logits_equal_those_of_peft(tmp_path: Path) -> None:
    names = ["layerwise", "scaling_pass"]
    small = load(tmp_path, names)
    logits = np.asarray(small.logits(pad_batch([sequence(name) for name in names]), small.mix(names)))
    for row, name in enumerate(names):
        np.testing.assert_allclose(logits[row], GOLDEN[f"{name}.logits"], rtol=0, atol=TOLERANCE, err_msg=name)


@pytest.mark.slow
def test_logits_and_greedy_tokens_of_one_batch_of_all_cases_equal_those_of_peft(model: dm.Model) -> None:
    names = list(cases.XLORA_CASES)
    logits = np.asarray(model.logits(pad_batch([sequence(name) for name in names]), model.mix(names)))
    for row, name in enumerate(names):
        np.testing.assert_allclose(logits[row], GOLDEN[f"{name}.logits"], rtol=0, atol=TOLERANCE, err_msg=name)
    base = np.asarray(model.logits(pad_batch([sequence(names[0])]), model.mix([{}])))[0]
    assert np.abs(base - GOLDEN[f"{names[0]}.logits"]).max() > 0.5
    generated = dm.make_generate(model, max_new_tokens=cases.XLORA_GREEDY, ignore_eos=True)(
        pad_batch([PROMPT] * len(names)), model.mix(names)
    )
    np.testing.assert_array_equal(np.asarray(generated.tokens), np.stack([GOLDEN[f"{n}.tokens"] for n in names]))


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.XLORA_CASES)
def test_logits_of_chunks_and_decode_steps_equal_those_of_peft(model: dm.Model, name: str) -> None:
    split, tokens = model.split, sequence(name)
    structure, weights = split_weights(split.graph, split.state)
    rows = packed_rows(2, model.slots.num_slots)
    rows.gated_set_ids[1] = np.asarray(model.mix([name]).gated_set_ids)[0]
    blocks = np.random.default_rng(0).permutation(NUM_BLOCKS).reshape(2, 1, -1)  # of no order, as in a server
    tables, scaling_tables = (jnp.asarray(np.broadcast_to(ids, (2, ids.shape[1])), jnp.int32) for ids in blocks)
    tables = StepTables(model.slots, model.gates, jnp.asarray(rows.array), tables, model.xlora, scaling_tables)
    cache = empty_cache(split.config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=split.dtype)
    last_tokens = jnp.zeros((2,), jnp.int32)
    start = 0
    for num_tokens in (8, 8, 5, *[1] * cases.XLORA_GREEDY):
        batch = packed_batch(8 if num_tokens > 1 else 1, 1)
        batch.tokens[:num_tokens] = tokens[start : start + num_tokens]
        batch.seqs.T[0] = [1, 0, num_tokens, start, 0, 1, 0]
        result = forward_step(structure, weights, cache, last_tokens, tables, batch.array, num_seqs=1)
        cache, last_tokens = result.cache, result.last_tokens
        start += num_tokens
        expected = GOLDEN[f"{name}.logits"][start - 1]
        np.testing.assert_allclose(result.logits[0], expected, rtol=0, atol=TOLERANCE, err_msg=f"position {start - 1}")


@pytest.mark.slow
def test_an_engine_gives_the_greedy_tokens_of_peft_alone_and_in_one_batch(model: dm.Model, tmp_path: Path) -> None:
    sets, sources = load_gated_sets(imported(tmp_path, cases.XLORA_CASES), model.config, [])
    adapters = {name: load_adapter(folder, model.config) for name, folder in sources}
    engine = make_engine(model.split, adapters, sets, adapter_slots=24, max_num_batched_tokens=8)
    for name in cases.XLORA_CASES:
        tokens = generate(engine, PROMPT, name, max_tokens=cases.XLORA_GREEDY)
        np.testing.assert_array_equal(tokens, GOLDEN[f"{name}.tokens"], err_msg=name)
    for name in cases.XLORA_CASES:
        engine.add_request(make_request(engine, name, PROMPT, name, max_tokens=cases.XLORA_GREEDY))
    for name, outputs in run_to_end(engine).items():
        np.testing.assert_array_equal(token_ids(outputs), GOLDEN[f"{name}.tokens"], err_msg=name)
