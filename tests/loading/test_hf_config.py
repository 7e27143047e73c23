"""config.json and generation_config.json: cases P of the trial list, and what is refused."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints.errors import CheckpointError, MissingFileError
from checkpoints.hf_config import hf_config_json, read_hf_config
from dymerge_jax.config import LlamaConfig, RopeConfig, named_config
from tests.support.tiny_checkpoints import tiny_llama_config_json, write_json

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALED = RopeConfig(10_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)

WriteConfig = Callable[..., Path]


@pytest.fixture
def write_config(tmp_path: Path) -> WriteConfig:
    """Writes the tiny model's config.json with some fields replaced; MISSING leaves a field out."""

    def write(generation: dict[str, Any] | None = None, **fields: Any) -> Path:
        content = tiny_llama_config_json(named_config("tiny"), rope_keys="old") | fields
        write_json(tmp_path / "config.json", {k: v for k, v in content.items() if v is not MISSING})
        if generation is not None:
            write_json(tmp_path / "generation_config.json", generation)
        return tmp_path

    return write


MISSING = object()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_scaling": None}, RopeConfig(10_000.0)),
        ({"rope_scaling": MISSING, "rope_theta": MISSING}, RopeConfig(10_000.0)),
        ({"rope_scaling": LLAMA3_ROPE}, SCALED),
        ({"rope_scaling": {("type" if k == "rope_type" else k): v for k, v in LLAMA3_ROPE.items()}}, SCALED),
        ({"rope_scaling": {"rope_type": "default"}, "rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}}, dataclasses.replace(SCALED, theta=5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "rope_scaling": None}, RopeConfig(1e5)),
        ({"rope_parameters": {"rope_theta": 1e5}, "rope_theta": MISSING}, RopeConfig(1e5)),
        ({"rope_parameters": LLAMA3_ROPE, "rope_scaling": LLAMA3_ROPE, "rope_theta": 5e5},
         dataclasses.replace(SCALED, theta=5e5)),
    ],
)  # fmt: skip
def test_p1_every_spelling_of_rope_is_read(
    write_config: WriteConfig, fields: dict[str, Any], expected: RopeConfig
) -> None:
    assert read_hf_config(write_config(**fields)).llama.rope == expected


@pytest.mark.parametrize("rope_type", ["yarn", "dynamic", "linear", "longrope", "su", "mrope", 3])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_p1_an_unknown_rope_type_is_refused_with_its_name(
    write_config: WriteConfig, key: str, rope_type: object
) -> None:
    folder = write_config(rope_scaling={key: rope_type, "factor": 2.0})
    with pytest.raises(CheckpointError, match=rf"rope_type is {rope_type!r}; supported are default, llama3 and null"):
        read_hf_config(folder)


def test_p1_missing_fields_of_llama3_rope_are_named(write_config: WriteConfig) -> None:
    folder = write_config(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": "1"})
    with pytest.raises(CheckpointError) as error:
        read_hf_config(folder)
    for name in ("low_freq_factor is '1'", "high_freq_factor is None", "original_max_position_embeddings is None"):
        assert name in str(error.value)


def test_p1_two_spellings_that_disagree_are_refused(write_config: WriteConfig) -> None:
    folder = write_config(rope_scaling=LLAMA3_ROPE, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    with pytest.raises(CheckpointError, match="rope_parameters and rope_scaling disagree"):
        read_hf_config(folder)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (5, {"eos_token_id": [3, 7]}, (3, 5, 7)),
        (3, {"eos_token_id": [3, 7]}, (3, 7)),
        ([3, 7], None, (3, 7)),
        (3, {}, (3,)),
        (None, {"eos_token_id": 7}, (7,)),
        (MISSING, None, ()),
    ],
)
def test_p2_a_generation_ends_at_the_ids_of_both_files(
    write_config: WriteConfig, in_config: object, in_generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    folder = write_config(generation=in_generation, eos_token_id=in_config)
    assert read_hf_config(folder).llama.eos_token_ids == expected


def test_p2_an_eos_id_outside_the_vocabulary_is_left_out_and_logged(
    write_config: WriteConfig, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_hf_config(write_config(eos_token_id=[2, 128009])).llama.eos_token_ids == (2,)
    assert "eos_token_id [128009] is outside the vocabulary of 128" in caplog.text


def test_optional_fields_get_the_defaults_of_transformers(write_config: WriteConfig) -> None:
    absent = ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
    config = read_hf_config(write_config(**dict.fromkeys(absent, MISSING))).llama
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.max_position, config.tie_word_embeddings) == (2048, False)


def test_every_problem_is_named_in_one_message(write_config: WriteConfig) -> None:
    folder = write_config(
        model_type="qwen3", hidden_act="gelu", attention_bias=True, mlp_bias=True, vocab_size=MISSING, hidden_size="64",
        quantization_config={"quant_method": "gptq"}, rope_scaling={"type": "yarn"}, rms_norm_eps=True,
        eos_token_id="</s>", partial_rotary_factor=0.5,
    )  # fmt: skip
    with pytest.raises(CheckpointError) as error:
        read_hf_config(folder)
    for part in (
        "config.json is refused", "model_type is 'qwen3'", "hidden_act is 'gelu'", "attention_bias is True",
        "mlp_bias is True", "vocab_size is missing", "hidden_size is '64'", "quant_method 'gptq'", "'yarn'",
        "rms_norm_eps is True", "eos_token_id is '</s>'", "partial_rotary_factor",
    ):  # fmt: skip
        assert part in str(error.value)


def test_sizes_that_do_not_fit_are_refused(write_config: WriteConfig) -> None:
    with pytest.raises(CheckpointError, match="4 query heads cannot share 3 KV heads evenly"):
        read_hf_config(write_config(num_key_value_heads=3))
    with pytest.raises(CheckpointError, match="num_layers is 0"):
        read_hf_config(write_config(num_hidden_layers=0))


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": ', "\udcff", "[" * 100_000])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_hf_config(tmp_path)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"holds no config\.json"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m", "llama-3.2-1b", "llama-3-8b", "llama-3.1-8b"])
def test_writing_a_config_and_reading_it_gives_it_back(tmp_path: Path, name: str) -> None:
    config = dataclasses.replace(named_config(name), bos_token_id=1, eos_token_ids=(0, 2))
    write_json(tmp_path / "config.json", hf_config_json(config, "bfloat16"))
    read = read_hf_config(tmp_path)
    assert read.llama == config
    assert read.dtype == "bfloat16"


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_both_spellings_of_dtype_are_read(write_config: WriteConfig, field: str) -> None:
    dtypes: dict[str, object] = {"dtype": MISSING, "torch_dtype": MISSING} | {field: "float16"}
    assert read_hf_config(write_config(**dtypes)).dtype == "float16"


def test_transformers_reads_the_config_alike(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config: LlamaConfig = named_config("llama-3.2-1b")
    write_json(tmp_path / "config.json", hf_config_json(config, "float32"))
    theirs = AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    assert theirs.rope_parameters == json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    assert (theirs.hidden_size, theirs.num_key_value_heads, theirs.head_dim) == (2048, 8, 64)
    assert math.isclose(theirs.rms_norm_eps, config.rms_norm_eps)
