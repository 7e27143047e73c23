"""What benchmarks share."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.bench_report import kernel_durations_us, run_facts


def test_a_result_says_what_ran_where_and_of_which_commit() -> None:
    facts = run_facts("some.bench", ["--shape", "a b"])
    assert facts["command"] == "python -m some.bench --shape 'a b'"
    assert (facts["device"], facts["jax"]) == (jax.devices()[0].device_kind, jax.__version__)
    assert set(facts) == {"command", "commit", "device", "jax"}
    assert run_facts("some.bench", [], device="that of a server")["device"] == "that of a server"


def test_launches_of_one_name_lie_together_whatever_their_number(tmp_path: Path) -> None:
    with jax.profiler.trace(str(tmp_path)):
        for i in range(3):
            with jax.profiler.TraceAnnotation(f"double_{i}"):
                jnp.ones(8).block_until_ready()
    durations = kernel_durations_us(tmp_path, "/host:CPU")
    assert len(durations["double"]) == 3
    assert min(durations["double"]) > 0
    assert kernel_durations_us(tmp_path, "/device:GPU") == {}


def test_a_folder_without_a_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no \.xplane\.pb file; jax\.profiler\.trace and"):
        kernel_durations_us(tmp_path)
