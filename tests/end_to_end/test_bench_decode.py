"""The benchmarks of decoding run, and say what they are to say."""

import argparse
import json
import re
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dymerge_jax.step_batch import unpack_batch
from serving.bench import decode, step


@pytest.mark.slow
def test_the_decode_benchmark_reports_every_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    flags = ["--shape", "tiny", "--batches", "1,2", "--prompt-len", "8", "--output-len", "16", "--dtype", "float32"]
    flags += ["--prefill", "2x24", "--max-num-batched-tokens", "64"]
    monkeypatch.setattr(sys, "argv", ["decode", *flags, "--out", str(out)])
    decode.main()
    result = json.loads(out.read_text())
    names = [(row["workload"], row["batch"], row["active_adapters"]) for row in result["rows"]]
    assert names == [
        ("base", 1, 0),
        ("one adapter for all", 1, 1),
        ("3 each", 1, 3),
        ("base", 2, 0),
        ("one adapter for all", 2, 1),
        ("1 each, 2 distinct", 2, 2),
        ("3 each, 6 distinct", 2, 6),
    ]
    prefills = [(row["workload"], row["active_adapters"]) for row in result["prefill"]]
    assert prefills == [("prefill, base", 0), ("prefill, 3 each", 6)]
    assert all(row["tokens_repeat"] and row["tokens_per_s"] > 0 for row in result["prefill"])
    assert all(row["tokens_repeat"] and row["tpot_ms_median"] > 0 for row in result["rows"])
    assert result["logits_error"]["max_abs_difference"] < 1e-4 < result["logits_error"]["max_change_by_adapters"]
    header, *rows = capsys.readouterr().out.splitlines()[-10:-2]
    assert all(len(row.rsplit(None, 1)[0]) == len(header.removesuffix("same twice").rstrip()) for row in rows)


@pytest.mark.slow
def test_the_step_benchmark_reports_every_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "result.json"
    flags = ["--shape", "tiny", "--batches", "2", "--context", "24", "--repeats", "2", "--dtype", "float32"]
    flags += ["--max-slots", "4", "--prefill", "1x6+2"]
    monkeypatch.setattr(sys, "argv", ["step", *flags, "--out", str(out)])
    step.main()
    rows = json.loads(out.read_text())["rows"]
    programs = [(row["active_adapters"], row["max_slots"]) for row in rows]
    decode_programs = [(0, 0), (0, 4), (0, None), (1, 4), (1, None), (2, 4), (2, None), (6, None)]
    assert programs == [*decode_programs, (0, 0), (0, None), (9, None)]
    assert all(0 < row["step_ms_min"] <= row["step_ms_median"] <= row["step_ms_max"] for row in rows)


def test_the_rows_of_a_workload_hold_its_mixes() -> None:
    workload = decode.Workload("w", batch=3, mix_size=2, num_adapters=4)
    weights = step.packed_mixes(workload, 5)[:, 6:].view(np.float32)
    assert weights.tolist() == [[0.5, 0.5, 0, 0, 0], [0, 0, 0.5, 0.5, 0], [0.5, 0.5, 0, 0, 0]]


def test_the_batch_of_the_step_benchmark_is_one_token_of_each_row() -> None:
    batch, targets = unpack_batch(jnp.asarray(step.StepSize(0, 0, 3).batch(24)), 3)
    assert batch.rows.tolist() == batch.seq_starts.tolist() == [0, 1, 2]
    assert batch.seq_lens.tolist() == [1, 1, 1]
    assert batch.context_lens.tolist() == [23, 23, 23]
    assert batch.use_last_token.all()
    assert targets.is_sampled.all()


def test_a_mixed_step_of_the_benchmark_has_its_decode_rows_first() -> None:
    size = step.StepSize.of("2x5+3")
    assert (size.num_tokens, size.num_seqs, str(size)) == (13, 5, "2 x 5 + 3 x 1")
    batch, _ = unpack_batch(jnp.asarray(size.batch(24)), 5)
    assert batch.tokens.shape == (13,)
    assert batch.seq_starts.tolist() == [0, 1, 2, 3, 8]
    assert batch.seq_lens.tolist() == [1, 1, 1, 5, 5]
    assert batch.context_lens.tolist() == [23, 23, 23, 0, 0]
    assert batch.use_last_token.tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("text", ["", "4", "0x8", "4x", "4x8+", "-1x8", "4x2048,1x512"])
def test_a_size_that_is_none_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(repr(text))):
        step.StepSize.of(text)
