"""The bench of linear layers in prefills runs from its command line, and says which results are wrong."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.lora_linear import bench_prefill, separate
from pallas_kernels.maf_mvm import bench_prefill as maf_bench_prefill
from pallas_kernels.maf_mvm.shapes import ModelShape

ARGUMENTS = [
    "--shape",
    "tiny",
    "--group",
    "gate_up",
    "--prompts",
    "2",
    "--decode-rows",
    "3",
    "--runs",
    "1",
    "--turns",
    "2",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bench_prefill, maf_bench_prefill):
        monkeypatch.setattr(module, "NUM_CALLS", 2)


def test_both_implementations_are_timed_and_right(tmp_path: Path) -> None:
    out = tmp_path / "swiglu.json"
    assert bench_prefill.main([*ARGUMENTS, "--num-tokens", "128", "256", "--out", str(out)]) == 0
    timings = json.loads(out.read_text())["timings"]
    assert len(timings) == 8
    assert {(t["num_tokens"], t["mixes"], t["implementation"]) for t in timings} == {
        (tokens, mixes, name)
        for tokens in (128, 256)
        for mixes in ("none", "3 each")
        for name in ("separate", "pallas_mosaic")
    }
    assert all(0 < t["min_us"] <= t["median_us"] <= t["max_us"] for t in timings)


def test_a_wrong_result_ends_with_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(x: jax.Array, w: jax.Array, *_: Any, **__: Any) -> jax.Array:
        return jnp.zeros((x.shape[0], w.shape[1] // 2), x.dtype)

    monkeypatch.setattr(separate, "lora_swiglu", wrong)
    assert bench_prefill.main([*ARGUMENTS, "--num-tokens", "128"]) == 1
    assert "implementation='separate'" in capsys.readouterr().err


def test_steps_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--num-tokens", "100"], ["--num-tokens", "128", "--decode-rows", "127"], ["--prompts", "0"]):
        with pytest.raises(SystemExit):
            bench_prefill.main([*ARGUMENTS, *flags])
        assert "expected a multiple of 128, and at least one prompt" in capsys.readouterr().err


def test_layers_without_swiglu_are_timed_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = ModelShape(hidden=128, q_width=128, kv_width=128, ffn=128, num_layers=2)
    for module in (bench_prefill, maf_bench_prefill):
        monkeypatch.setattr(module, "named_shapes", lambda: {"tiny": wide})
    assert bench_prefill.main([*ARGUMENTS, "--group", "qkv", "--num-tokens", "128"]) == 0
