"""The Orbax store: what was saved comes back, without the source."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from checkpoints.__main__ import main
from checkpoints.errors import CheckpointError, MissingFileError
from checkpoints.formats import ModelFormat, detect_model_format, load_model
from checkpoints.loaded_model import LoadedModel
from checkpoints.orbax_store import save_model
from dymerge_jax.config import named_config
from tests.support.tiny_checkpoints import write_json, write_tiny_llama

TINY = named_config("tiny")


def assert_same_model(actual: LoadedModel, expected: LoadedModel) -> None:
    assert (actual.config, actual.name, actual.dtype) == (expected.config, expected.name, expected.dtype)
    assert jax.tree.structure(actual.params) == jax.tree.structure(expected.params)
    jax.tree.map(np.testing.assert_array_equal, actual.params, expected.params)


@pytest.mark.parametrize(("dtype", "is_tied"), [("float32", False), ("bfloat16", True)])
def test_a_saved_model_comes_back_without_its_source(tmp_path: Path, dtype: Any, is_tied: bool) -> None:
    config = dataclasses.replace(TINY, tie_word_embeddings=is_tied, vocab=300, bos_token_id=1, eos_token_ids=(0, 2))
    source = write_tiny_llama(tmp_path / "base", config=config, dtype=dtype)
    loaded = load_model(source, progress=False)
    save_model(tmp_path / "a store, x=1", loaded)
    shutil.rmtree(source)
    restored = load_model(tmp_path / "a store, x=1", progress=False)
    assert_same_model(restored, loaded)
    assert loaded.tokenizer is not None
    assert restored.tokenizer is not None
    chat = [{"role": "user", "content": "Hi é 12"}]
    assert restored.tokenizer.apply_chat_template(chat) == loaded.tokenizer.apply_chat_template(chat)


def test_restoring_casts_to_the_requested_dtype(tmp_path: Path) -> None:
    loaded = load_model(write_tiny_llama(tmp_path / "base", tokenizer=False), progress=False)
    save_model(tmp_path / "store", loaded)
    restored = load_model(tmp_path / "store", dtype="bfloat16", progress=False)
    assert (restored.dtype, restored.tokenizer) == ("bfloat16", None)
    np.testing.assert_array_equal(restored.params["embed"], loaded.params["embed"].astype("bfloat16"))


def test_converting_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_tiny_llama(tmp_path / "base")
    target = tmp_path / "new" / "store"
    assert main(["convert", str(source), str(target), "--dtype", "bfloat16"]) == 0
    output = capsys.readouterr()
    assert "parameters, bfloat16, " in output.out
    assert "loading base: 100%" in output.err
    assert detect_model_format(target) is ModelFormat.ORBAX
    assert load_model(target, progress=False).dtype == "bfloat16"
    assert sorted(path.name for path in target.parent.iterdir()) == ["store"]


def test_the_command_line_refuses_an_existing_target_and_a_missing_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(write_tiny_llama(tmp_path / "base")), str(tmp_path)]) == 1
    assert "exists; give a folder that does not exist yet" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "nope"), str(tmp_path / "store")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_the_help_tells_what_can_be_converted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["convert", "--help"])
    text = capsys.readouterr().out
    assert all(part in text for part in ("'demo'", ".gguf", "--dtype", "must not exist", "examples:"))


def test_a_store_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(write_tiny_llama(tmp_path / "base"), progress=False)
    assert loaded.tokenizer is not None

    def fill_the_disk(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(loaded.tokenizer, "save_pretrained", fill_the_disk)
    with pytest.raises(OSError, match="no space left"):
        save_model(tmp_path / "store", loaded)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    save_model(tmp_path / "store", load_model(write_tiny_llama(tmp_path / "base"), progress=False))
    return tmp_path / "store"


def test_saving_over_an_existing_store_is_refused(store: Path) -> None:
    with pytest.raises(CheckpointError, match="exists; an Orbax store is written to a new folder"):
        save_model(store, load_model(store, progress=False))


def test_a_store_that_does_not_fit_its_config_is_refused_by_names(store: Path) -> None:
    config = write_tiny_llama(store.parent / "other", config=dataclasses.replace(TINY, num_layers=3, ffn=64))
    shutil.copy(config / "config.json", store / "config.json")
    with pytest.raises(CheckpointError) as error:
        load_model(store, progress=False)
    assert "missing tensors: layers.2.input_norm" in str(error.value)
    assert "layers.0.gate_up has (64, 256), expected (64, 128)" in str(error.value)


def test_a_damaged_store_is_refused(store: Path) -> None:
    (store / "params" / "_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be restored; convert the model again"):
        load_model(store, progress=False)


def test_a_store_without_weights_or_of_another_version_is_refused(store: Path) -> None:
    shutil.rmtree(store / "params")
    with pytest.raises(MissingFileError, match="params does not exist"):
        load_model(store, progress=False)
    write_json(store / "dymerge_store.json", {"version": 2})
    with pytest.raises(CheckpointError, match="version 2; expected 1"):
        load_model(store, progress=False)
