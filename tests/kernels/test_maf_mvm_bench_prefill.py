"""The bench of maf_mvm in steps that read prompts runs from its command line, and says which results are wrong."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.maf_mvm import bench_prefill, pallas_triton
from pallas_kernels.maf_mvm.shapes import GROUPS
from tests.support.aot_h200 import H200, h200_target

ARGUMENTS = ["--shape", "tiny", "--num-tokens", "70", "--prompts", "1", "--decode-rows", "3", "--repeats", "1"]

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


@pytest.mark.slow
def test_all_block_sizes_are_timed_and_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_prefill, "NUM_CALLS", 2)
    out = tmp_path / "prefill.json"
    assert bench_prefill.main([*ARGUMENTS, "--out", str(out)]) == 0
    timings = json.loads(out.read_text())["timings"]
    assert {t["group"] for t in timings if t["what"] == "picked"} == set(GROUPS)
    assert any("swiglu" in t["what"] for t in timings)
    assert all(0 < t["p10_us"] <= t["median_us"] <= t["p90_us"] for t in timings)


@pytest.mark.slow
def test_a_wrong_result_ends_with_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def without_adapters(x: Any, slots: Any, segments: Any, base: Any, *_: Any, **options: Any) -> Any:
        return base[:, : base.shape[1] // 2] if options.get("ends_in_swiglu") else base

    monkeypatch.setattr(pallas_triton, "maf_mvm", without_adapters)
    assert bench_prefill.main(ARGUMENTS) == 1
    assert "qkv picked" in capsys.readouterr().err


def test_steps_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--prompts", "0"], ["--num-tokens", "16", "--decode-rows", "20"]):
        with pytest.raises(SystemExit):
            bench_prefill.main(flags)
        assert "expected at least one prompt" in capsys.readouterr().err


@pytest.fixture
def h200() -> Iterator[H200]:
    with h200_target() as target:
        yield target


def test_swiglu_alone_is_a_kernel_a_call(h200: H200) -> None:
    compiled = h200.lower(bench_prefill.swiglu_alone, jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)).compile()
    entry = str(compiled.as_text()).split("ENTRY")[1]
    assert entry.count(" fusion(") == 8
