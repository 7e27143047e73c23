"""Imports of gated families: a whole set, or a refusal that names everything that is wrong, and nothing is written."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints.__main__ import main
from checkpoints.arrow import make_arrow, top_right_singular_vector
from checkpoints.errors import CheckpointError, MissingFileError
from checkpoints.gated_families import import_gated
from checkpoints.gated_set import load_gated_sets
from checkpoints.peft_adapter import collect_adapters, load_adapter
from dymerge_jax.config import PROJECTIONS, named_config
from dymerge_jax.demo import demo_adapters
from serving.admin import read_mixes
from tests.support.expert_checkpoints import (
    MLP,
    moe_peft_config,
    moe_peft_tensors,
    moelora_config,
    moelora_tensors,
    write_experts,
)
from tests.support.tiny_checkpoints import load_plain_set, write_adapter, write_json

TINY = named_config("tiny")
GATE = "mola.layers.1.mlp.up_proj.moe_gate.weight"
EXPERT = "mola.layers.0.self_attn.q_proj.experts.1.lora_A.weight"


def refusal(path: Path, kind: type[Exception] = CheckpointError) -> str:
    """What an import says, which must leave nothing behind."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(kind) as error:
        import_gated(path, path.parent / "out")
    assert sorted(path.parent.iterdir()) == before
    return str(error.value)


@pytest.fixture
def write_mola(tmp_path: Path) -> Callable[..., Path]:
    """Writes a MoLA folder of two experts; fields and tensors replace its own, and None takes them away."""

    def write(tensors: dict[str, Any] | None = None, **fields: Any) -> Path:
        config = moe_peft_config("mola", num_experts=2, rank=2) | fields
        all_tensors = moe_peft_tensors(TINY, "mola", num_experts=2, rank=2, seed=0) | (tensors or {})
        return write_experts(
            tmp_path / "mola",
            {k: v for k, v in config.items() if v is not None},
            {k: v for k, v in all_tensors.items() if v is not None},
        )

    return write


@pytest.fixture
def write_moelora(tmp_path: Path) -> Callable[..., Path]:
    """Writes a MOELoRA folder of two experts and three tasks in the same way."""

    def write(tensors: dict[str, Any] | None = None, *, shares_gate: bool = True, **fields: Any) -> Path:
        config = moelora_config(num_experts=2, num_tasks=2, rank=4, shares_gate=shares_gate)
        all_tensors = moelora_tensors(TINY, config, seed=0) | (tensors or {})
        return write_experts(
            tmp_path / "moelora", config | fields, {k: v for k, v in all_tensors.items() if v is not None}
        )

    return write


def test_mola_becomes_a_gated_set_with_its_experts_inside(write_mola: Callable[..., Path], tmp_path: Path) -> None:
    source = write_mola()
    tensors = load_file(source / "adapter_model.safetensors")
    lines = import_gated(source, tmp_path / "moe")
    assert "2 experts of rank 2, 14 gates" in lines[0]
    assert "--gated-sets" in lines[1]
    loaded = load_plain_set(tmp_path / "moe", TINY)
    assert (loaded.name, loaded.top_k, loaded.renormalize, loaded.is_absolute) == ("moe", 2, True, False)
    assert loaded.gated_projections == set(PROJECTIONS)
    np.testing.assert_array_equal(loaded.gates[1, "up_proj"], tensors[GATE])
    second = load_adapter(loaded.experts[1], TINY)
    assert {p.scale for p in second.projections.values()} == {2.0}
    np.testing.assert_array_equal(second.projections[0, "q_proj"].a, tensors[EXPERT])
    assert [Path(expert).name for expert in loaded.experts] == ["moe-0", "moe-1"]


def test_top_k_of_mola_is_2_where_its_config_says_none(write_mola: Callable[..., Path], tmp_path: Path) -> None:
    import_gated(write_mola(top_k=None), tmp_path / "moe")
    assert load_plain_set(tmp_path / "moe", TINY).top_k == 2


def test_loramoe_keeps_all_experts_and_has_its_lora_of_attention_in_the_first(tmp_path: Path) -> None:
    modules = ("q_proj", *MLP)
    tensors = moe_peft_tensors(TINY, "loramoe", num_experts=2, rank=2, seed=0, modules=modules)
    config = moe_peft_config("loramoe", num_experts=2, rank=2, modules=modules) | {"use_rslora": True}
    import_gated(write_experts(tmp_path / "source", config, tensors), tmp_path / "moe")
    loaded = load_plain_set(tmp_path / "moe", TINY)
    assert (loaded.top_k, loaded.renormalize, loaded.gated_projections) == (None, False, set(MLP))
    first, second = (load_adapter(expert, TINY) for expert in loaded.experts)
    assert {p for _, p in first.projections} == {"q_proj", *MLP}
    assert {p for _, p in second.projections} == set(MLP)
    assert first.projections[0, "q_proj"].scale == pytest.approx(4 / 2**0.5)


def test_moelora_with_one_gate_becomes_experts_and_a_mix_a_task(
    write_moelora: Callable[..., Path], tmp_path: Path
) -> None:
    import_gated(write_moelora(), tmp_path / "moe")
    mixes = json.loads((tmp_path / "moe" / "mixes.json").read_text())
    assert list(mixes) == ["moe:0", "moe:1", "moe:2"]
    adapters = collect_adapters([tmp_path / "moe"])
    assert read_mixes(tmp_path / "moe" / "mixes.json", [name for name, _ in adapters]) == mixes
    assert all(set(mix) == {"moe-0", "moe-1"} and sum(mix.values()) == pytest.approx(1) for mix in mixes.values())
    assert {p.scale for p in load_adapter(tmp_path / "moe" / "moe-1", TINY).projections.values()} == {2.0}
    assert load_adapter(tmp_path / "moe" / "moe-1", TINY).rank == 2


def test_moelora_with_a_gate_a_layer_becomes_an_adapter_a_task(
    write_moelora: Callable[..., Path], tmp_path: Path
) -> None:
    lines = import_gated(write_moelora(shares_gate=False), tmp_path / "moe")
    assert "one adapter of rank 4 a task" in lines[0]
    mixes = json.loads((tmp_path / "moe" / "mixes.json").read_text())
    assert mixes == {f"moe:{task}": {f"moe-{task}": 1.0} for task in range(3)}
    assert load_adapter(tmp_path / "moe" / "moe-2", TINY).rank == 4


def test_importing_from_the_command_line(
    write_mola: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["import-gated", str(write_mola()), "--out", str(tmp_path / "new" / "moe")]
    assert main(arguments) == 0
    assert "ask for it by model 'moe'" in capsys.readouterr().out
    assert main(arguments) == 1
    assert "exists; give a folder that does not exist yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "MIXLORA"}, "after their SwiGLU"),
        ({"routing_strategy": "mixlora-dynamic"}, "no weighted sum of LoRA deltas"),
        ({"peft_type": "LORA"}, "make-arrow"),
        ({"peft_type": "IA3"}, "has peft_type 'IA3'; families that can be imported are MOLA and LORAMOE"),
        ({"peft_type": ["MOLA"]}, r"has peft_type \['MOLA'\]"),
        ({"num_experts": 0}, "num_experts is 0; an integer from 1 to 128"),
        ({"num_experts": True}, "num_experts is True"),
        ({"num_experts": 10**9}, "num_experts is 1000000000"),
        ({"top_k": 3}, "top_k is 3; an integer from 1 to 2"),
        ({"r": "2"}, "r is '2'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is .* not supported in a set of experts"),
    ],
)
def test_a_wrong_config_is_refused(write_mola: Callable[..., Path], fields: dict[str, Any], message: str) -> None:
    text = refusal(write_mola(**fields))
    assert pytest.raises(CheckpointError, match=message).matches(CheckpointError(text)), text


def test_everything_that_is_wrong_with_the_tensors_is_named_at_once(write_mola: Callable[..., Path]) -> None:
    wrong = {
        GATE: np.zeros((3, 64), np.float32),
        "mola.layers.0.mlp.up_proj.moe_gate.weight": None,
        EXPERT: np.zeros((4, 64), np.float32),
        EXPERT.replace("lora_A", "lora_B"): None,
        EXPERT.replace("experts.1", "experts.2"): np.zeros((2, 64), np.float32),
        EXPERT.replace("experts.1.", ""): np.zeros((2, 64), np.float32),
        "mola.layers.0.mlp.q_proj.moe_gate.weight": np.zeros((2, 64), np.float32),
        "classifier": np.zeros((2, 64), np.float32),
        "mola.layers.0.mlp.down_proj.moe_gate.weight": np.zeros((2, 128), np.int32),
    }
    text = refusal(write_mola(wrong))
    for part in (
        f"{GATE} has (3, 64), expected (2, 64)",
        "layer 0 has no up_proj",
        "experts without a gate: layers.0.up_proj",
        f"{EXPERT} has (4, 64), expected (2, 64)",
        "missing factors: lora_B of expert 1 in layers.0.q_proj",
        "experts beyond their number: mola.layers.0.self_attn.q_proj.experts.2.lora_A.weight",
        "are the same tensor by their names",
        "unexpected tensors, which nothing would use: classifier, mola.layers.0.mlp.q_proj.moe_gate.weight",
        "mola.layers.0.mlp.down_proj.moe_gate.weight is I32",
    ):
        assert part in text, part


def test_a_missing_layer_is_named(write_mola: Callable[..., Path]) -> None:
    first = {key: None for key in moe_peft_tensors(TINY, "mola", num_experts=2, rank=2, seed=0) if ".layers.0." in key}
    assert "layers are missing: 0" in refusal(write_mola(first))


def test_a_set_without_gates_is_refused(write_mola: Callable[..., Path]) -> None:
    gates = {key: None for key in moe_peft_tensors(TINY, "mola", num_experts=2, rank=2, seed=0) if "moe_gate" in key}
    assert "there is no gate (moe_gate.weight)" in refusal(write_mola(gates))


def test_ordinary_lora_in_mola_is_refused(write_mola: Callable[..., Path]) -> None:
    keys = moe_peft_tensors(TINY, "mola", num_experts=2, rank=2, seed=0)
    q_proj = {key: None for key in keys if ".q_proj." in key}
    plain = {f"mola.layers.{layer}.self_attn.q_proj.lora_A.weight": np.zeros((2, 64), np.float32) for layer in (0, 1)}
    assert "ordinary LoRA where experts were expected: layers.0.q_proj" in refusal(write_mola(q_proj | plain))


@pytest.mark.parametrize("key", [GATE, EXPERT])
def test_weights_that_are_not_finite_are_refused(write_mola: Callable[..., Path], key: str) -> None:
    broken = moe_peft_tensors(TINY, "mola", num_experts=2, rank=2, seed=0)[key]
    broken[0, 0] = np.inf
    assert f"{key} holds NaN or infinite weights" in refusal(write_mola({key: broken}))


def test_a_pickle_is_refused_with_the_command_that_converts_it(write_mola: Callable[..., Path]) -> None:
    path = write_mola()
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    text = refusal(path)
    assert "which can run code when read; convert it where you trust it: python -c 'import torch" in text
    assert str(path / "adapter_model.safetensors") in text


def test_missing_and_damaged_files_are_named(write_mola: Callable[..., Path]) -> None:
    path = write_mola()
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "is no whole safetensors file" in refusal(path)
    weights.unlink()
    assert "holds no adapter_model.safetensors" in refusal(path, MissingFileError)
    (path / "adapter_config.json").write_text("[")
    assert "is not valid JSON" in refusal(path)
    (path / "adapter_config.json").unlink()
    assert "is no folder with adapter_config.json" in refusal(path, MissingFileError)


MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({"expert_num": 3}, {}, "r is 4, which expert_num 3 does not divide"),
        ({"expert_num": 1}, {}, "experts beyond their number"),
        ({"task_num": 5}, {}, r"expected (2, n) and (6, n) by expert_num and task_num"),
        ({"fan_in_fan_out": True}, {}, "fan_in_fan_out is True"),
        ({}, {"lora_gate.GateL.weight": None}, "the model has no gate of its gate"),
        ({}, {f"{MODULE}.lora_B.loraB.1.mlp.weight": np.zeros((64, 1), np.float32)}, "expected (64, 2)"),
        ({}, {f"{MODULE}.lora_A.loraA.0.weight": np.zeros((2, 64), np.float32)}, "saved twice with different values"),
        ({}, {"base_model.model.transformer.layers.0.attention.query_key_value.lora_A.loraA.0.mlp.weight":
              np.zeros((2, 64), np.float32)}, "unexpected tensors"),
    ],
)  # fmt: skip
def test_a_wrong_moelora_folder_is_refused(
    write_moelora: Callable[..., Path], fields: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    assert message in refusal(write_moelora(tensors, **fields))


def test_a_moelora_layer_without_a_gate_is_named(write_moelora: Callable[..., Path]) -> None:
    text = refusal(write_moelora({f"{MODULE}.lora_task_embedding.weight": None}, shares_gate=False))
    assert "layers.0.q_proj has no embedding of its gate" in text


def test_an_arrow_set_refers_to_the_adapters_where_they_are(tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / "adapters" / f"v{i}", TINY, rank=2 + i, alpha=4, seed=i) for i in range(2)]
    names = [("legal", folders[0]), ("french", folders[1])]
    lines = make_arrow(names, tmp_path / "sets" / "arrow", temperature=0.5)
    assert "14 gates, top 2, temperature 0.5" in lines[0]
    loaded = load_plain_set(tmp_path / "sets" / "arrow", TINY)
    assert (loaded.top_k, loaded.renormalize, loaded.is_absolute) == (2, True, True)
    assert loaded.experts == (f"legal={folders[0]}", f"french={folders[1]}")
    # Unit vectors in the file, divided by the temperature when they are read.
    np.testing.assert_allclose(np.linalg.norm(loaded.gates[0, "k_proj"], axis=1), 2, rtol=1e-6)
    sets, adapters = load_gated_sets([tmp_path / "sets" / "arrow"], TINY, [("old", folders[1])])
    assert sets[0].experts == ("legal", "old")
    assert adapters == [("old", folders[1]), ("legal", folders[0])]


def test_the_prototype_is_the_top_right_singular_vector(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((4, 24)).astype(np.float32), rng.standard_normal((16, 4)).astype(np.float32)
    expected = np.linalg.svd(b.astype(np.float64) @ a.astype(np.float64))[2][0]
    assert abs(top_right_singular_vector(a, b) @ expected) == pytest.approx(1, abs=1e-6)
    assert not top_right_singular_vector(a, np.zeros_like(b)).any()


def test_arrow_refuses_adapters_that_differ_in_their_projections(tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "a", TINY, rank=2, alpha=4, seed=0)
    second = write_adapter(tmp_path / "b", TINY, rank=2, alpha=4, seed=1, modules=PROJECTIONS[1:])
    third = write_adapter(tmp_path / "c", dataclasses.replace(TINY, hidden=32), rank=2, alpha=4, seed=1)
    with pytest.raises(CheckpointError) as error:
        make_arrow([("a", first), ("b", second), ("c", third)], tmp_path / "arrow")
    assert "b and a differ in layers.0.q_proj, layers.1.q_proj" in str(error.value)
    assert "c and a differ in layers.0.gate_proj" in str(error.value)
    assert not (tmp_path / "arrow").exists()


@pytest.mark.parametrize(("flags", "message"), [(["--top-k", "2"], "--top-k is 2"), (["--temperature", "0"], "is 0.0")])
def test_wrong_arrow_flags_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    adapter = write_adapter(tmp_path / "a", TINY, rank=2, alpha=4, seed=0)
    assert main(["make-arrow", f"x={adapter}", "--out", str(tmp_path / "arrow"), *flags]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_in_readme_makes_an_arrow_set_of_the_demo(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    (command,) = re.findall(
        r"`python -m checkpoints (make-arrow .*) --out demo-arrow`", (root / "README.md").read_text()
    )
    specs = [str(root / spec) for spec in command.split()[1:]]
    assert main(["make-arrow", *specs, "--out", str(tmp_path / "demo-arrow")]) == 0
    loaded = load_plain_set(tmp_path / "demo-arrow", named_config("smollm2-135m"))
    assert [expert.partition("=")[0] for expert in loaded.experts] == [path.name for path in demo_adapters()]


def test_arrow_names_what_is_wrong_with_an_adapter(tmp_path: Path) -> None:
    b_key = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    path = write_adapter(
        tmp_path / "a", TINY, rank=2, alpha=4, seed=0, without_tensors=[b_key],
        extra_tensors={"other": np.zeros(2, np.float32)}, config_overrides={"use_dora": True},
    )  # fmt: skip
    with pytest.raises(CheckpointError) as error:
        make_arrow([("a", path)], tmp_path / "arrow")
    for part in ("unexpected tensors, which nothing would use: other", "layers.0.up_proj has", "use_dora is True"):
        assert part in str(error.value)


def test_an_expert_may_be_a_name_with_a_folder(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "moe" / "v7", TINY, rank=2, alpha=4, seed=0)
    odd = write_adapter(tmp_path / "a=b", TINY, rank=2, alpha=4, seed=1)
    make_arrow([("legal", folder), ("a=b", odd)], tmp_path / "moe2")
    assert load_plain_set(tmp_path / "moe2", TINY).experts == (f"legal={folder}", str(odd))
    content = json.loads((tmp_path / "moe2" / "gated_set.json").read_text())
    write_json(tmp_path / "moe2" / "gated_set.json", content | {"experts": ["legal=../moe/nope", "a"]})
    with pytest.raises(MissingFileError, match=r"expert 'legal=\.\./moe/nope' is no folder"):
        load_plain_set(tmp_path / "moe2", TINY)
