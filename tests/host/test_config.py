"""EngineConfig refuses what cannot work, naming the flag."""

from typing import Any

import pytest

from serving.config import EngineConfig, parse_bytes


def test_the_defaults_are_valid():
    config = EngineConfig()
    assert (config.adapter_slots, config.slot_rank, config.max_num_seqs, config.block_size) == (64, 8, 32, 16)
    assert (config.scheduler, config.theta_s, config.max_num_batched_tokens) == ("lag", 0.5, 512)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapter_slots": -1}, "--adapter-slots is -1, expected an integer >= 0"),
        ({"slot_rank": 0}, "--slot-rank is 0"),
        ({"max_num_seqs": 0}, "--max-num-seqs is 0"),
        ({"max_model_len": 1}, "--max-model-len is 1, expected an integer >= 2"),
        ({"block_size": 24}, "--block-size is 24, expected a power of two"),
        ({"block_size": 0}, "--block-size is 0"),
        ({"num_blocks": 0}, "--num-blocks is 0"),
        ({"adapter_host_bytes": -1}, "--adapter-host-bytes is -1, expected an integer >= 0"),
        ({"max_num_batched_tokens": 16}, "--max-num-batched-tokens is 16, less than the 32 rows of --max-num-seqs"),
        ({"scheduler": "lru"}, "--scheduler is 'lru', expected one of lag, fifo, random, least-first"),
        ({"theta_s": -0.1}, "--theta is -0.1"),
        ({"theta_s": float("nan")}, "--theta is nan"),
        ({"dtype": "float16"}, "--dtype is 'float16', expected one of bfloat16, float32"),
    ],
)
def test_a_bad_value_is_refused_with_the_name_of_its_flag(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)


@pytest.mark.parametrize("fields", [{"adapter_slots": 2.5}, {"max_num_seqs": True}, {"theta_s": "soon"}])
def test_a_bad_type_is_refused(fields: dict[str, Any]):
    with pytest.raises(TypeError, match=r"--.* is .*, expected"):
        EngineConfig(**fields)


@pytest.mark.parametrize(
    "fields", [{"adapter_slots": 0}, {"theta_s": 0}, {"theta_s": float("inf")}, {"max_num_batched_tokens": 32}]
)
def test_border_values_are_valid(fields: dict[str, Any]):
    EngineConfig(**fields)


def test_sizes_are_read_as_people_write_them():
    sizes = {"123": 123, "1KiB": 1024, "8GiB": 8 << 30, "500 MB": 500_000_000, "1.5gib": 3 << 29, "2TB": 2 * 10**12}
    assert {text: parse_bytes(text) for text in sizes} == sizes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8 GiB more", "8Gi", "1e9", "nan"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(ValueError, match=r"is no size; expected bytes, or a number with a unit such as 8GiB"):
        parse_bytes(text)
