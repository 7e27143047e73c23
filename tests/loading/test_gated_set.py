"""Gated sets: every gate is read, or the set is refused with every name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.errors import CheckpointError, MissingFileError
from checkpoints.gated_set import load_gated_sets
from dymerge_jax.config import PROJECTIONS, named_config
from tests.support.tiny_checkpoints import load_plain_set, projection_shape, write_adapter, write_gated_set, write_json

TINY = named_config("tiny")


def test_a_set_with_a_gate_a_layer_is_read(tmp_path: Path) -> None:
    path = write_gated_set(tmp_path / "moe", TINY, ["a", "b", "c"], top_k=2, renormalize=True)
    loaded = load_plain_set(path, TINY)
    assert (loaded.name, loaded.experts, loaded.granularity) == ("moe", ("a", "b", "c"), "layer")
    assert (loaded.top_k, loaded.renormalize) == (2, True)
    stored = load_file(path / "gate.safetensors")
    assert set(loaded.gates) == {(0, "layer"), (1, "layer")}
    for (layer, _), gate in loaded.gates.items():
        np.testing.assert_array_equal(gate, stored[f"layers.{layer}.gate.weight"])


def test_a_set_with_a_gate_a_projection_is_read(tmp_path: Path) -> None:
    loaded = load_plain_set(write_gated_set(tmp_path, TINY, ["a", "b"], granularity="projection", name="x"), TINY)
    assert loaded.name == "x"
    assert set(loaded.gates) == {(layer, projection) for layer in range(2) for projection in PROJECTIONS}
    assert all(gate.shape == (2, projection_shape(TINY, p)[1]) for (_, p), gate in loaded.gates.items())


def test_optional_fields_have_defaults(tmp_path: Path) -> None:
    path = write_gated_set(tmp_path / "moe", TINY, ["a", "b"])
    write_json(path / "gated_set.json", {"experts": ["a", "b"]})
    loaded = load_plain_set(path, TINY)
    assert (loaded.name, loaded.granularity, loaded.top_k, loaded.renormalize) == ("moe", "layer", None, False)


def test_gates_may_be_absolute_of_some_projections_and_divided_by_a_temperature(tmp_path: Path) -> None:
    path = write_gated_set(tmp_path / "moe", TINY, ["a", "b"], granularity="projection")
    stored = {key: gate for key, gate in load_file(path / "gate.safetensors").items() if ".up_proj." in key}
    save_file(stored, path / "gate.safetensors")
    fields = {"granularity": "projection", "projections": ["up_proj"], "absolute": True, "temperature": 4}
    write_json(path / "gated_set.json", {"experts": ["a", "b"]} | fields)
    loaded = load_plain_set(path, TINY)
    assert (loaded.is_absolute, loaded.gated_projections) == (True, {"up_proj"})
    np.testing.assert_array_equal(loaded.gates[1, "up_proj"], stored["layers.1.up_proj.gate.weight"] / 4)


def test_a_gate_that_a_small_temperature_makes_infinite_is_refused(tmp_path: Path) -> None:
    path = write_gated_set(tmp_path / "moe", TINY, ["a", "b"])
    large = {key: np.full_like(gate, 1e35) for key, gate in load_file(path / "gate.safetensors").items()}
    save_file(large, path / "gate.safetensors")
    write_json(path / "gated_set.json", {"experts": ["a", "b"], "temperature": 1e-5})
    with pytest.raises(CheckpointError, match="NaN or infinite weights"):
        load_plain_set(path, TINY)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gates_become_float32(tmp_path: Path, dtype: str) -> None:
    path = write_gated_set(tmp_path, TINY, ["a", "b"])
    stored = {key: gate.astype(jnp.dtype(dtype)) for key, gate in load_file(path / "gate.safetensors").items()}
    save_file(stored, path / "gate.safetensors")
    gates = load_plain_set(path, TINY).gates
    assert {gate.dtype.name for gate in gates.values()} == {"float32"}
    np.testing.assert_array_equal(gates[0, "layer"], stored["layers.0.gate.weight"].astype(np.float32))


def test_experts_may_be_folders_relative_to_the_set(tmp_path: Path) -> None:
    inside = write_adapter(tmp_path / "moe" / "inside", TINY, rank=2, alpha=2, seed=0)
    beside = write_adapter(tmp_path / "beside", TINY, rank=2, alpha=2, seed=0)
    path = write_gated_set(tmp_path / "moe", TINY, ["inside", "../beside", "by-name"])
    assert load_plain_set(path, TINY).experts == (str(inside), str(beside), "by-name")
    path = write_gated_set(tmp_path / "moe2", TINY, [str(beside), "../moe/inside"])
    assert load_plain_set(path, TINY).experts == (str(beside), str(inside))


def test_one_expert_by_two_paths_is_refused(tmp_path: Path) -> None:
    beside = write_adapter(tmp_path / "beside", TINY, rank=2, alpha=2, seed=0)
    path = write_gated_set(tmp_path / "moe", TINY, ["../beside", "a", str(beside)])
    with pytest.raises(ValueError, match=r"'moe' has an expert twice: .*beside"):
        load_plain_set(path, TINY)


def test_experts_get_names_and_folders_that_are_no_adapters_yet_become_some(tmp_path: Path) -> None:
    known = write_adapter(tmp_path / "known", TINY, rank=2, alpha=2, seed=0)
    new = write_adapter(tmp_path / "new", TINY, rank=2, alpha=2, seed=1)
    same_name = write_adapter(tmp_path / "moe" / "known", TINY, rank=2, alpha=2, seed=2)
    first = write_gated_set(tmp_path / "moe", TINY, ["../known", "../new", "known", "by-name"])
    second = write_gated_set(tmp_path / "other", TINY, ["../new", "alias"])
    served = [("alias", known), ("by-name", tmp_path / "elsewhere")]
    sets, adapters = load_gated_sets([first, second], TINY, served)
    assert [s.experts for s in sets] == [("alias", "new", "known", "by-name"), ("new", "alias")]
    assert adapters == [*served, ("new", new), ("known", same_name)]
    _, adapters = load_gated_sets([first], TINY, [("known", known)])
    assert adapters == [("known", known), ("new", new), ("moe/known", same_name)]


def test_an_expert_by_name_and_by_folder_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "beside", TINY, rank=2, alpha=2, seed=0)
    path = write_gated_set(tmp_path / "moe", TINY, ["../beside", "a"])
    with pytest.raises(ValueError, match="'moe' has an expert twice: a"):
        load_gated_sets([path], TINY, [("a", folder)])


@pytest.mark.parametrize("expert", ["./nope", "../nope", "/nope"])
def test_a_missing_expert_folder_is_named(tmp_path: Path, expert: str) -> None:
    with pytest.raises(MissingFileError, match=rf"expert '{expert}' is no folder with adapter_config\.json"):
        load_plain_set(write_gated_set(tmp_path, TINY, ["a", expert]), TINY)


@pytest.fixture
def write_fields(tmp_path: Path) -> Callable[..., Path]:
    """Writes a set of two experts with some fields of its JSON file replaced."""

    def write(**fields: Any) -> Path:
        path = write_gated_set(tmp_path, TINY, ["a", "b"])
        write_json(path / "gated_set.json", {"experts": ["a", "b"]} | fields)
        return path

    return write


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts": []}, r"experts is \[\]"),
        ({"experts": "a"}, "experts is 'a'"),
        ({"experts": ["a", 1]}, "experts is "),
        ({"experts": ["a", "a"]}, "experts named twice: a"),
        ({"granularity": "token"}, "granularity is 'token'; expected 'layer' or 'projection'"),
        ({"top_k": 0}, "top_k is 0; expected 1 to the number of experts"),
        ({"top_k": 3}, "top_k is 3"),
        ({"top_k": True}, "top_k is True"),
        ({"renormalize": 1}, "renormalize is 1"),
        ({"name": ""}, "name is ''"),
        ({"absolute": "yes"}, "absolute is 'yes'"),
        ({"temperature": 0}, "temperature is 0; a number from 1e-6 to 1e6"),
        ({"temperature": True}, "temperature is True"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"granularity": "projection", "projections": []}, r"projections is \[\]; a list of some of q_proj"),
        ({"granularity": "projection", "projections": ["q_proj", "q_proj"]}, "each once"),
        ({"granularity": "projection", "projections": ["lm_head"]}, "projections is "),
        ({"projections": ["q_proj"]}, "projections is given with granularity 'layer'"),
        ({"topk": 1}, "unknown fields: topk; known are name, experts, granularity, top_k, renormalize"),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    write_fields: Callable[..., Path], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_plain_set(write_fields(**fields), TINY)


def test_every_wrong_gate_is_named_at_once(tmp_path: Path) -> None:
    path = write_gated_set(tmp_path, TINY, ["a", "b"])
    save_file(
        {"layers.0.gate.weight": np.zeros((3, 64), np.float32), "layers.2.gate.weight": np.zeros((2, 64), np.float32)},
        path / "gate.safetensors",
    )
    with pytest.raises(CheckpointError) as error:
        load_plain_set(path, TINY)
    for part in ("missing tensors: layers.1", "unexpected tensors", "layers.2", "has (3, 64), expected (2, 64)"):
        assert part in str(error.value)


def test_a_gate_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    path = write_gated_set(tmp_path, TINY, ["a", "b"])
    gates = load_file(path / "gate.safetensors")
    gates["layers.1.gate.weight"][0, 0] = np.nan
    save_file(gates, path / "gate.safetensors")
    with pytest.raises(CheckpointError, match=r"NaN or infinite weights: layers\.1\.gate\.weight"):
        load_plain_set(path, TINY)


@pytest.mark.parametrize("file", ["gated_set.json", "gate.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, file: str) -> None:
    (write_gated_set(tmp_path, TINY, ["a"]) / file).unlink()
    with pytest.raises(MissingFileError, match=f"holds no {file}"):
        load_plain_set(tmp_path, TINY)
