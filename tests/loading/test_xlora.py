"""Imports of X-LoRA as PEFT saves it, and its own form: a whole set, or a refusal that names everything wrong."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.__main__ import main
from checkpoints.errors import CheckpointError, MissingFileError
from checkpoints.gated_families import import_gated
from checkpoints.gated_set import load_gated_set, load_gated_sets
from dymerge_jax.config import PROJECTIONS, named_config
from dymerge_jax.xlora import XLoraRule, XLoraSetWeights
from tests.support.expert_checkpoints import write_experts
from tests.support.tiny_checkpoints import write_adapter, write_json

TINY = named_config("tiny")
KEY = "base_model.internal_xlora_classifier.layers"
MODULES = {"legal": ("q_proj", "down_proj"), "french": ("v_proj", "down_proj")}


def classifier(sizes: list[int], stride: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tensors = {}
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        tensors[f"{KEY}.{stride * i}.weight"] = rng.normal(size=(fan_out, fan_in)).astype(np.float32)
        tensors[f"{KEY}.{stride * i}.bias"] = rng.normal(size=fan_out).astype(np.float32)
    return tensors


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes an X-LoRA folder of two experts; fields replace its own, and None takes them away."""
    for i, (name, modules) in enumerate(MODULES.items()):
        write_adapter(tmp_path / "adapters" / name, TINY, rank=2, alpha=4, seed=i, modules=modules)

    def write_folder(tensors: dict[str, Any] | None = None, **fields: Any) -> Path:
        config = {
            "peft_type": "XLORA",
            "hidden_size": 64,
            "adapters": {"0": "../adapters/legal", "1": "../adapters/french"},
        } | fields
        config = {key: value for key, value in config.items() if value is not None}
        return write_experts(tmp_path / "source", config, classifier([64, 2]) if tensors is None else tensors)

    return write_folder


def refusal(path: Path, kind: type[Exception] = CheckpointError, **options: Any) -> str:
    """What an import says, which must leave nothing behind."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(kind) as error:
        import_gated(path, path.parent / "out", **options)
    assert sorted(path.parent.iterdir()) == before
    return str(error.value)


def loaded_xlora(path: Path) -> XLoraSetWeights:
    loaded = load_gated_set(path, TINY)
    assert isinstance(loaded, XLoraSetWeights)
    return loaded


def test_a_folder_becomes_a_gated_set_that_refers_to_its_experts(write: Callable[..., Path], tmp_path: Path) -> None:
    tensors = classifier([64, 2])
    lines = import_gated(write(tensors), tmp_path / "sets" / "moe")
    assert "X-LoRA, 2 experts, classifier of 1 linear layers, weights for all layers alike" in lines[0]
    assert "ask for it by model 'moe'" in lines[1]
    loaded = loaded_xlora(tmp_path / "sets" / "moe")
    folders = [tmp_path / "adapters" / name for name in MODULES]
    assert loaded.experts == (f"moe-0={folders[0]}", f"moe-1={folders[1]}")
    assert loaded.rule == XLoraRule()
    np.testing.assert_array_equal(loaded.layers[0][0], tensors[f"{KEY}.0.weight"])
    np.testing.assert_array_equal(loaded.layers[0][1], tensors[f"{KEY}.0.bias"])
    sets, adapters = load_gated_sets([tmp_path / "sets" / "moe"], TINY, [("legal", folders[0])])
    assert sets[0].experts == ("legal", "moe-1")
    assert adapters == [("legal", folders[0]), ("moe-1", folders[1])]


def test_every_field_of_the_rule_is_taken_over(write: Callable[..., Path], tmp_path: Path) -> None:
    fields = {
        "enable_softmax": False, "enable_softmax_topk": True, "softmax_temperature": 0.5, "top_k_lora": 2,
        "global_scaling_weight": -1.5, "scaling_pass_value": 0.25, "layerwise_scalings": True,
    }  # fmt: skip
    import_gated(write(classifier([64, 12]), **fields), tmp_path / "moe")
    rule = loaded_xlora(tmp_path / "moe").rule
    assert rule == XLoraRule(True, False, 0.5, 2, True, -1.5, 0.25)


def test_p5_what_a_config_leaves_out_has_the_defaults_of_peft(write: Callable[..., Path], tmp_path: Path) -> None:
    """xlora_size 2048; and xlora_dropout_p 0.2, so that the classifier's layers are numbered in steps of three."""
    import_gated(write(classifier([64, 2048, 2]), xlora_depth=2), tmp_path / "moe")
    assert [w.shape for w, _ in loaded_xlora(tmp_path / "moe").layers] == [(2048, 64), (2, 2048)]
    text = refusal(write(classifier([64, 2048, 2], stride=2), xlora_depth=2))
    assert f"missing tensors: {KEY}.3.weight, {KEY}.3.bias" in text
    assert f"unexpected tensors, which nothing would use: {KEY}.2.bias, {KEY}.2.weight" in text
    assert "numbers them in steps of 3; PEFT 0.21 leaves those out whose number is also the name of an expert" in text
    without = write(classifier([64, 16, 16, 2], stride=2), xlora_depth=3, xlora_size=16, xlora_dropout_p=0.0)
    import_gated(without, tmp_path / "no_dropout")
    assert len(loaded_xlora(tmp_path / "no_dropout").layers) == 3
    assert "hidden_size" not in json.loads((write(hidden_size=None) / "adapter_config.json").read_text())
    assert f"{KEY}.0.weight has (2, 64), expected (2, 4096)" in refusal(write(hidden_size=None))


def test_layerwise_outputs_go_to_the_linear_layers_that_experts_adapt(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    tensors = classifier([64, 12])
    lines = import_gated(write(tensors, layerwise_scalings=True), tmp_path / "moe")
    assert "weights for each of 6 linear layers" in lines[0]
    sites = json.loads((tmp_path / "moe" / "gated_set.json").read_text())["sites"]
    assert sites == [f"layers.{layer}.{p}" for layer in range(2) for p in ("q_proj", "v_proj", "down_proj")]
    ((weight, bias),) = loaded_xlora(tmp_path / "moe").layers
    assert weight.shape == (2 * 7 * 2, 64)
    for i, site in enumerate((0, 2, 6, 7, 9, 13)):
        np.testing.assert_array_equal(weight[2 * site : 2 * site + 2], tensors[f"{KEY}.0.weight"][2 * i : 2 * i + 2])
        np.testing.assert_array_equal(bias[2 * site : 2 * site + 2], tensors[f"{KEY}.0.bias"][2 * i : 2 * i + 2])
    assert PROJECTIONS[2] == "v_proj"
    assert (weight[2:4] == 0).all()
    text = refusal(write(classifier([64, 14]), layerwise_scalings=True))
    assert f"{KEY}.0.weight has (14, 64), expected (12, 64)" in text


def test_experts_that_adapt_what_the_classifier_does_not_know_are_refused(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    import_gated(write(classifier([64, 12]), layerwise_scalings=True), tmp_path / "moe")
    write_adapter(tmp_path / "adapters" / "french", TINY, rank=2, alpha=4, seed=9, modules=("v_proj", "up_proj"))
    with pytest.raises(CheckpointError, match=r"sites leaves out: layers\.0\.up_proj, layers\.1\.up_proj; use the"):
        load_gated_set(tmp_path / "moe", TINY)


def test_experts_given_by_name_must_adapt_what_the_classifier_knows_too(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    import_gated(write(classifier([64, 12]), layerwise_scalings=True), tmp_path / "moe")
    content = json.loads((tmp_path / "moe" / "gated_set.json").read_text())
    write_json(tmp_path / "moe" / "gated_set.json", content | {"experts": ["legal", "french"]})
    adapters = [(name, tmp_path / "adapters" / name) for name in MODULES]
    sets, found = load_gated_sets([tmp_path / "moe"], TINY, adapters)
    assert (sets[0].experts, found) == (("legal", "french"), adapters)
    write_adapter(tmp_path / "adapters" / "french", TINY, rank=2, alpha=4, seed=9, modules=("v_proj", "up_proj"))
    with pytest.raises(CheckpointError, match=r"sites leaves out: layers\.0\.up_proj, layers\.1\.up_proj; use the"):
        load_gated_sets([tmp_path / "moe"], TINY, adapters)


def test_experts_of_numbers_are_in_their_order_and_may_be_elsewhere(write: Callable[..., Path], tmp_path: Path) -> None:
    """PEFT sorts the names as text when it saves them: "10" stands before "2"."""
    names = [str(i) for i in (0, 1, 10, *range(2, 10))]
    for name in names:
        write_adapter(tmp_path / "adapters" / f"v{name}", TINY, rank=1, alpha=1, seed=0)
    source = write(classifier([64, 11]), adapters={name: f"../adapters/v{name}" for name in names})
    moved = write_adapter(tmp_path / "moved", TINY, rank=1, alpha=1, seed=1)
    command = ["import-gated", str(source), "--out", str(tmp_path / "moe"), "--experts", f"10={moved}"]
    assert main(command) == 0
    experts = loaded_xlora(tmp_path / "moe").experts
    assert [expert.partition("=")[0] for expert in experts] == [f"moe-{i}" for i in range(11)]
    folders = [Path(expert.partition("=")[2]) for expert in experts]
    assert folders == [*(tmp_path / "adapters" / f"v{i}" for i in range(10)), moved]


def test_a_missing_expert_is_named_with_what_to_do(write: Callable[..., Path], tmp_path: Path) -> None:
    source = write(adapters={"0": "../adapters/legal", "1": "someone/french-lora"})
    text = refusal(source, MissingFileError)
    assert "are no folders with adapter_config.json: 1 (" in text
    assert "say where an expert is by --experts NAME=FOLDER" in text
    assert "--experts names 2; adapters has 0, 1" in refusal(source, experts=[("2", tmp_path)])
    twice = write(adapters={"0": "../adapters/legal", "1": "../source/../adapters/legal"})
    assert "experts of one folder: 0, 1; each needs one of its own" in refusal(twice)


@pytest.mark.parametrize("spec", ["legal", "=x", "0="])
def test_a_wrong_experts_flag_is_refused(
    write: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], spec: str
) -> None:
    assert main(["import-gated", str(write()), "--out", str(tmp_path / "moe"), "--experts", spec]) == 1
    assert f"--experts has {spec!r}; NAME=FOLDER was expected" in capsys.readouterr().err


def test_experts_of_another_family_cannot_be_given(write: Callable[..., Path]) -> None:
    text = refusal(write(peft_type="MOLA"), experts=[("0", Path("x"))])
    assert "--experts is given, but" in text
    assert "is MOLA, which holds its experts itself" in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapters": None}, "adapters is None; an object of 1 to 128 names and folders"),
        ({"adapters": ["x"]}, "adapters is ['x']"),
        ({"adapters": {}}, "adapters is {}"),
        ({"adapters": {"0": 1}}, "adapters is {'0': 1}"),
        ({"enable_softmax": "yes"}, "enable_softmax is 'yes'; true or false was expected"),
        ({"top_k_lora": 3}, "top_k_lora is 3; null or 1 to the number of experts (2)"),
        ({"top_k_lora": True}, "top_k_lora is True"),
        ({"softmax_temperature": 0}, "softmax_temperature is 0; a number from 1e-6 to 1e6"),
        ({"global_scaling_weight": 1e300}, "global_scaling_weight is 1e+300; a finite number"),
        ({"scaling_pass_value": "0"}, "scaling_pass_value is '0'; a finite number"),
        ({"scaling_pass_value": 0.5, "top_k_lora": 1}, "are the top is left to chance"),
        ({"xlora_depth": 0}, "xlora_depth is 0; an integer from 1 to 64"),
        ({"xlora_size": "8"}, "xlora_size is '8'"),
        ({"xlora_dropout_p": -1}, "xlora_dropout_p is -1; a number from 0 to 1"),
        ({"hidden_size": 10**9}, "hidden_size is 1000000000"),
        ({"enable_magic": 7}, "enable_magic is 7; what it changes is not known"),
    ],
)
def test_a_wrong_config_is_refused(write: Callable[..., Path], fields: dict[str, Any], message: str) -> None:
    source = write()
    content = json.loads((source / "adapter_config.json").read_text()) | fields
    write_json(source / "adapter_config.json", content)
    text = refusal(source)
    assert message in text, text


def test_everything_that_is_wrong_with_the_classifier_is_named_at_once(write: Callable[..., Path]) -> None:
    tensors = classifier([64, 8, 3]) | {
        f"{KEY}.0.bias": np.zeros(8, np.int32),
        f"{KEY}.9.weight": np.zeros((1, 1), np.float32),
        "base_model.model.lm_head.weight": np.zeros((1, 1), np.float32),
    }
    del tensors[f"{KEY}.3.bias"]
    text = refusal(write(tensors, xlora_depth=2, xlora_size=16))
    for part in (
        f"missing tensors: {KEY}.3.bias",
        f"unexpected tensors, which nothing would use: {KEY}.9.weight, base_model.model.lm_head.weight",
        f"{KEY}.3.weight has (3, 8), expected (2, 8)",
        f"{KEY}.0.bias is I32",
        f"{KEY}.0.weight has (8, 64), expected 16 rows by xlora_size",
    ):
        assert part in text, text
    assert "missing tensors" in refusal(write({}))
    two = classifier([64, 2]) | {key.replace("base_model.", "x."): w for key, w in classifier([64, 2]).items()}
    assert "several classifiers in one file: base_model.internal_xlora_classifier., x." in refusal(write(two))


def test_weights_that_are_not_finite_are_refused(write: Callable[..., Path]) -> None:
    tensors = classifier([64, 2])
    tensors[f"{KEY}.0.bias"][1] = np.nan
    assert f"NaN or infinite weights: {KEY}.0.bias" in refusal(write(tensors))


def test_pickles_are_refused_with_the_command_that_converts_them(write: Callable[..., Path]) -> None:
    source = write()
    expert = source.parent / "adapters" / "legal"
    for folder in (expert, source):
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
        text = refusal(source)
        assert "convert it where you trust it: python -c 'import torch" in text
        (folder / "adapter_model.bin").rename(folder / "adapter_model.safetensors")


def test_experts_that_cannot_be_served_are_refused(write: Callable[..., Path], tmp_path: Path) -> None:
    source = write()
    folder = tmp_path / "adapters" / "french"
    write_adapter(
        folder, TINY, rank=2, alpha=4, seed=0, extra_tensors={"other": np.zeros(2, np.float32)},
        config_overrides={"use_dora": True},
    )  # fmt: skip
    text = refusal(source)
    assert "expert 1: use_dora is True" in text
    assert "expert 1: unexpected tensor other, which nothing would use" in text


def test_the_format_of_x_loras_own_repository_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    write_json(tmp_path / "source" / "xlora_config.json", {"hidden_size": 64})
    text = refusal(tmp_path / "source")
    assert "holds xlora_config.json, of the format of X-LoRA's own repository" in text
    assert "only PEFT's format is read" in text


def test_a_user_who_gives_a_peft_folder_as_a_gated_set_is_told_to_import_it(write: Callable[..., Path]) -> None:
    with pytest.raises(MissingFileError, match=r"holds no gated_set\.json; import what .* checkpoints import-gated"):
        load_gated_set(write(), TINY)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"granularity": "layer"}, "unknown fields: granularity; known are kind, name, experts, sites"),
        ({"experts": []}, "experts is []"),
        ({"experts": ["a", "a"]}, "experts named twice: a"),
        ({"name": 3}, "name is 3"),
        ({"softmax": 1}, "softmax is 1; true or false was expected"),
        ({"top_k": 0}, "top_k is 0"),
        ({"pass_value": 1.0, "top_k": 1}, "pass_value is 1.0 and top_k is 1"),
        ({"sites": "layers.0.q_proj"}, "sites is 'layers.0.q_proj'; a list of names"),
        ({"sites": ["layers.0.q_proj", "layers.0.q_proj"]}, "each once, was expected"),
        ({"sites": ["layers.0.norm"]}, "sites is ['layers.0.norm']"),
        ({"sites": ["layers.2.q_proj"]}, "sites outside the model, which has 2 layers: layers.2.q_proj"),
        ({"sites": ["layers.0.q_proj", "layers.1.q_proj"]}, "classifier.0.weight has (2, 64), expected (4, 64)"),
    ],
)
def test_a_wrong_set_of_our_own_form_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write_json(tmp_path / "gated_set.json", {"kind": "xlora", "experts": ["a", "b"]} | fields)
    tensors = {key.replace(f"{KEY}.", "classifier."): w for key, w in classifier([64, 2]).items()}
    save_file(tensors, tmp_path / "gate.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_gated_set(tmp_path, TINY)
    assert message in str(error.value)


def test_a_set_of_our_own_form_with_damaged_tensors_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "gated_set.json", {"kind": "xlora", "experts": ["a", "b"]})
    save_file({"classifier.0.weight": np.full((2, 64), np.inf, np.float32)}, tmp_path / "gate.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensors: classifier\.0\.bias"):
        load_gated_set(tmp_path, TINY)
    full = load_file(tmp_path / "gate.safetensors") | {"classifier.0.bias": np.zeros(2, np.float32)}
    save_file(full, tmp_path / "gate.safetensors")
    with pytest.raises(CheckpointError, match=r"NaN or infinite weights: classifier\.0\.weight"):
        load_gated_set(tmp_path, TINY)
