"""Folders of random weights: what is in them, and that the project's own readers take them."""

from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints.formats import load_model
from checkpoints.names import HF_NAMES, expected_tensors, param_sources
from checkpoints.peft_adapter import load_adapter
from dymerge_jax.config import named_config
from serving.bench import random_folder
from serving.config import DTypeName

TINY = named_config("tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny float32 model with two adapters of rank 4, and that to be loaded and unloaded."""
    path = tmp_path_factory.mktemp("random")
    random_folder.write_random_folder(path, TINY, dtype="float32", num_adapters=2, rank=4)
    return path


def test_a_model_of_random_weights_is_loaded_with_every_tensor_another_one(folder: Path):
    loaded = load_model(folder / "model", progress=False)
    assert loaded.config == TINY
    tensors = [np.asarray(leaf) for leaf in jax.tree.leaves(loaded.params)]
    assert len(tensors) == len(param_sources(TINY, HF_NAMES))
    assert all(tensor.dtype == np.float32 and np.isfinite(tensor).all() for tensor in tensors)
    assert len({tensor.tobytes()[:256] for tensor in tensors}) == len(tensors)
    np.testing.assert_allclose(loaded.params["embed"].std(), 1, atol=0.05)
    np.testing.assert_allclose(loaded.params["lm_head"].std(), TINY.hidden**-0.5, rtol=0.05)


def test_every_id_has_a_text_of_its_own(folder: Path):
    tokenizer = load_model(folder / "model", progress=False).tokenizer
    assert tokenizer is not None
    assert len(tokenizer) == TINY.vocab
    texts = [tokenizer.decode([i]) for i in range(TINY.vocab)]
    assert len(set(texts)) == TINY.vocab
    assert texts[-1] == f"<{TINY.vocab - 1}>"
    assert tokenizer.decode(tokenizer.encode("Items: a lamp,\na river <1>")) == "Items: a lamp,\na river <1>"


def test_adapters_of_random_weights_are_loaded_and_differ(folder: Path):
    folders = [*sorted((folder / "adapters").iterdir()), folder / "churn" / "soak-churn"]
    assert [path.name for path in folders] == ["lora-0", "lora-1", "soak-churn"]
    adapters = [load_adapter(path, TINY) for path in folders]
    assert len({adapter.content_hash for adapter in adapters}) == len(adapters)
    assert [len(adapter.projections) for adapter in adapters] == [7 * TINY.num_layers] * len(adapters)
    assert [{p.scale for p in adapter.projections.values()} for adapter in adapters] == [{0.75}, {1.0}, {1.0}]
    factors = [np.asarray(side) for a in adapters for p in a.projections.values() for side in (p.a, p.b)]
    assert len({factor.tobytes()[:256] for factor in factors}) == len(factors)


def test_the_same_flags_give_the_same_bytes_in_shards_of_any_size(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = load_model(folder / "model", progress=False).params
    monkeypatch.setattr(random_folder, "_SHARD_BYTES", 50_000)
    random_folder.write_random_folder(tmp_path, TINY, dtype="float32", num_adapters=1, rank=4)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "model", progress=False).params, whole)


@pytest.mark.parametrize(
    ("shape", "dtype"), [("llama-3-8b", "bfloat16"), ("llama-3-8b", "float32"), ("tiny", "float32")]
)
def test_shards_hold_every_tensor_once_in_at_most_4_gb(shape: str, dtype: DTypeName):
    tensors = expected_tensors(param_sources(named_config(shape), HF_NAMES))
    itemsize = np.dtype(dtype).itemsize
    shards = random_folder.split_into_shards(tensors, itemsize)
    assert [name for shard in shards for name in shard] == list(tensors)
    assert max(sum(np.prod(s, dtype=np.int64) for s in shard.values()) for shard in shards) * itemsize < 4e9


@pytest.mark.parametrize(("start", "size"), [(0, 0), (0, 5), (3, 2), (3, 3), (4, 12)])
def test_a_block_is_repeated_from_anywhere_for_as_long_as_is_asked(start: int, size: int):
    pieces = list(random_folder.repeated(np.arange(5), start, size))
    np.testing.assert_array_equal(np.concatenate([np.empty(0, int), *pieces]), (start + np.arange(size)) % 5)


def test_a_folder_that_holds_something_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]):
    before = sorted(folder.rglob("*"))
    assert random_folder.main(["--shape", "tiny", "--out", str(folder)]) == 1
    assert "is not an empty folder; give a new or an empty one" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shape", "9b"], "no model size is named '9b'"),
        (["--shape", "tiny", "--adapters", "0"], "--adapters is 0 and --rank 8; both must be at least 1"),
        (["--shape", "8b", "--adapters", "1000000000"], "GB are to be written"),
    ],
)
def test_flags_that_cannot_work_are_refused(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert random_folder.main([*flags, "--out", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
