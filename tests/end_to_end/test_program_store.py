"""Compiled programs on disk: taken at the next start, never wrongly."""

import contextlib
import functools
import hashlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dymerge_jax.model import Implementations
from dymerge_jax.step import split_weights
from serving import program_store, programs
from serving.batch import make_buckets
from serving.engine import Engine
from serving.program_store import ProgramStore, store_beside_jax_cache
from serving.programs import StepPrograms, abstract_batch, compile_steps, compile_whole_step
from tests.support.engines import generate, make_engine
from tests.support.tiny_models import random_adapter, tiny_model

PROMPT = [5, 9, 2, 40, 7]
BUCKETS = make_buckets(2, 8, decode_sizes=(2,), mixed_sizes=(8,))


def make_store(folder: Path) -> ProgramStore:
    return ProgramStore(folder, jax.local_devices()[0])


def started_engine(folder: Path, monkeypatch: pytest.MonkeyPatch, *, num_layers: int = 1) -> tuple[Engine, list[str]]:
    """An engine of whole programs from a store, and the names of those that it had to lower."""
    lowered: list[str] = []
    lower = programs.forward_step.lower

    def counted(*args: object, **kwargs: object) -> object:
        lowered.append("forward_step")
        return lower(*args, **kwargs)

    class CountingStep:
        lower = staticmethod(counted)

    monkeypatch.setattr(programs, "forward_step", CountingStep)
    split = tiny_model(num_layers=num_layers)
    adapters = {name: random_adapter(split.config, rank=8, seed=i) for i, name in enumerate("ab")}
    engine = make_engine(split, adapters, buckets=BUCKETS, max_num_seqs=2, max_num_batched_tokens=8)
    compile_step = functools.partial(compile_whole_step, store=make_store(folder))
    engine._programs = StepPrograms(split, BUCKETS, Implementations(), compile_step=compile_step)
    engine.compile(progress=False)
    monkeypatch.undo()
    return engine, lowered


@pytest.mark.slow
def test_a_second_start_lowers_no_step_and_gives_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, lowered_first = started_engine(tmp_path, monkeypatch)
    second, lowered_second = started_engine(tmp_path, monkeypatch)
    assert (len(lowered_first), len(lowered_second)) == (2, 0)
    for mix in ({}, {"a": 0.7, "b": -0.5}):
        assert generate(first, PROMPT, mix, max_tokens=6) == generate(second, PROMPT, mix, max_tokens=6)
    _, lowered_other = started_engine(tmp_path, monkeypatch, num_layers=2)
    assert len(lowered_other) == 2


def double(x: jax.Array) -> jax.Array:
    return 2 * x


def triple(x: jax.Array) -> jax.Array:
    return 3 * x


def run(store: ProgramStore, function: object = double, *, length: int = 4, description: str = "double") -> list[float]:
    x = jax.numpy.ones(length)
    return store.program(description, (x,), 0, lambda: jax.jit(function).lower(x).compile())(x).tolist()  # type: ignore[arg-type]


def test_a_program_is_found_by_its_description_and_shapes(tmp_path: Path) -> None:
    assert run(make_store(tmp_path)) == [2, 2, 2, 2]
    assert run(make_store(tmp_path), triple) == [2, 2, 2, 2]  # the kept one: nothing is compiled
    assert run(make_store(tmp_path), triple, length=2) == [3, 3]
    assert run(make_store(tmp_path), triple, description="triple") == [3, 3, 3, 3]


@pytest.mark.parametrize("has_mosaic", [True, False])
def test_mosaic_is_imported_before_a_program_that_may_have_one_of_its_kernels_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_mosaic: bool
) -> None:
    """The CUDA plugin does not find the runtime of such kernels otherwise."""
    name = "jax.experimental.mosaic.gpu"
    if has_mosaic:
        importlib.import_module(name)
    else:
        monkeypatch.delitem(sys.modules, name, raising=False)
    expected = run(make_store(tmp_path))
    imported: list[str] = []
    monkeypatch.setattr(importlib, "import_module", imported.append)
    assert run(make_store(tmp_path)) == expected
    assert imported == ([name] if has_mosaic else [])


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("shape", ["8b_prefill_4x2048+0", "8b_mixed_512"])  # on Hopper, Mosaic's kernel and Triton's
def test_another_process_runs_a_kept_program_without_compiling_it(tmp_path: Path, shape: str) -> None:
    def run_process() -> list[str]:
        command = [sys.executable, "-m", "tests.support.kept_program", str(tmp_path), shape]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    assert run_process() == ["compiled", *run_process()]


@pytest.mark.parametrize("change", ["source", "flags", "setting"])
def test_a_changed_environment_compiles_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    run(make_store(tmp_path))
    if change == "source":
        monkeypatch.setattr(program_store, "_SOURCE_DIGEST", "another")
    elif change == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    else:
        jax.config.update("jax_default_matmul_precision", "highest")
    try:
        assert run(make_store(tmp_path), triple) == [3, 3, 3, 3]
    finally:
        jax.config.update("jax_default_matmul_precision", None)


@pytest.mark.parametrize("content", [b"", b"no program", "flipped", "unreadable"])
def test_a_damaged_file_is_told_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | str
) -> None:
    run(make_store(tmp_path))
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    if content == "flipped":
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif content == "unreadable":  # whole, but by another writer
        data = b"not a pickle"
        file.write_bytes(hashlib.sha256(data).digest() + data)
    else:
        file.write_bytes(content)  # type: ignore[arg-type]
    assert run(make_store(tmp_path), triple) == [3, 3, 3, 3]
    assert "compiled anew" in caplog.text
    assert run(make_store(tmp_path)) == [3, 3, 3, 3]  # the new one has taken its place


def test_a_program_of_sources_that_changed_meanwhile_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkout may be updated while a server compiles what it imported before."""
    with monkeypatch.context() as patch:
        patch.setattr(program_store, "_source_digest", lambda: "of the new files")
        assert run(make_store(tmp_path)) == [2, 2, 2, 2]
    assert "source has changed" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_folder_that_can_only_be_read_is_of_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object) -> None:
        raise OSError("Read-only file system")

    run(make_store(tmp_path))
    monkeypatch.setattr(program_store.os, "utime", read_only)
    assert run(make_store(tmp_path), triple) == [2, 2, 2, 2]


def test_a_disk_that_fails_costs_a_compile_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> bytes:
        raise OSError("Input/output error")

    run(make_store(tmp_path))
    store = make_store(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", broken)
    monkeypatch.setattr(program_store, "_source_digest", lambda: program_store._SOURCE_DIGEST)
    assert run(store, triple) == [3, 3, 3, 3]
    assert "Input/output error" in caplog.text


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="chmod go-w"):
        make_store(tmp_path)


def test_files_that_no_start_has_used_for_a_month_go(tmp_path: Path) -> None:
    run(make_store(tmp_path))
    run(make_store(tmp_path), length=2)
    old, kept = tmp_path.iterdir()
    os.utime(old, (0, 0))
    make_store(tmp_path)
    assert list(tmp_path.iterdir()) == [kept]


def test_a_full_disk_costs_the_next_start_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    store = make_store(tmp_path)
    monkeypatch.setattr(Path, "write_bytes", full)
    assert run(store) == [2, 2, 2, 2]
    assert "No space left" in caplog.text


def test_there_is_a_store_where_jax_keeps_programs(tmp_path: Path) -> None:
    device, before = jax.local_devices()[0], jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        assert store_beside_jax_cache(device) is None
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        assert store_beside_jax_cache(device) is not None
        (tmp_path / "dymerge-programs").chmod(0o777)
        assert store_beside_jax_cache(device) is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


class RecordingStore(ProgramStore):
    """Keeps nothing; knows what programs were told apart by, and what their results were said to be."""

    def __init__(self) -> None:
        self.keys: list[tuple[Any, ...]] = []
        self.trees: list[Any] = []

    def program(self, description: str, args: tuple[Any, ...], result: Any, compile: Callable[[], Any]) -> Any:
        self.keys.append((description, *(leaf.shape for leaf in jax.tree.leaves(args))))
        self.trees.append(jax.tree.structure(result))
        return compile()


@pytest.mark.slow
def test_several_steps_of_one_dispatch_are_kept_apart_from_one_and_from_other_numbers() -> None:
    split = tiny_model(num_layers=1)
    engine = make_engine(split, {}, buckets=BUCKETS, max_num_seqs=2, max_num_batched_tokens=8)
    bucket, store = BUCKETS.decode[0], RecordingStore()
    args = (split, bucket, engine._cache, engine._last_tokens, engine._tables(bucket), Implementations())
    turn = contextlib.nullcontext()
    compile_whole_step(*args, turn=turn, store=store)
    for num_steps in (2, 4, 4):
        program = compile_steps(*args, num_steps=num_steps, turn=turn, store=store)
    assert [store.keys.index(key) for key in store.keys] == [0, 1, 2, 2]
    weights = split_weights(split.graph, split.state)[1]
    batches = np.zeros((4, *abstract_batch(bucket).shape), np.int32)
    result = program(weights, engine._cache, engine._last_tokens, engine._tables(bucket), batches)
    assert jax.tree.structure(result) == store.trees[-1]
    assert result.tokens.shape == (4, 2)
    assert result.last_tokens.shape == (2,)
