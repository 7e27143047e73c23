"""The loop and its work folder, on a model of one matrix: what is stopped goes on, bit for bit."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.errors import CheckpointError
from dymerge_jax.train.batches import BatchPlan
from dymerge_jax.train.data import Sample
from dymerge_jax.train.forward import TrainBatch
from dymerge_jax.train.loop import TrainConfig, TrainingError, train
from dymerge_jax.train.work_folder import StepRecord, open_work_folder, read_losses, work_path

CONFIG = TrainConfig(steps=10, lr=0.05, warmup=3, checkpoint_every=2)


class Killed(Exception):
    """Stands for a process that ends."""


def loss(trained: dict[str, jax.Array], frozen: jax.Array, batch: TrainBatch) -> jax.Array:
    logits = (trained["w"] * frozen)[batch.tokens.reshape(-1)[batch.sources]]
    of_target = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets[:, None], axis=1)
    return -jnp.where(batch.is_target, of_target[:, 0], 0.0).mean()


def run(
    out: Path,
    *,
    config: TrainConfig = CONFIG,
    settings: dict[str, Any] | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
    frozen: float = 1.0,
    restart: bool = False,
) -> np.ndarray:
    rng = np.random.default_rng(0)
    samples = [Sample(rng.integers(0, 8, 6).astype(np.int32), np.arange(6) > 0, i) for i in range(7)]
    plan = BatchPlan(samples, batch_size=2, seed=1)
    with open_work_folder(out, settings or {}, restart=restart) as work:
        start = {"w": jnp.zeros((8, 8), jnp.float32)}
        trained, _ = train(loss, start, jnp.float32(frozen), plan, config, work, progress=False, on_step=on_step)
        w = np.asarray(trained["w"])
        work.publish(out, lambda folder: np.save(folder / "w.npy", w))
    return w


def kill_at(step: int) -> Callable[[StepRecord], None]:
    def on_step(record: StepRecord) -> None:
        if record.step == step:
            raise Killed

    return on_step


def test_a_run_killed_twice_ends_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    for step in (5, 8):
        with pytest.raises(Killed):
            run(tmp_path / "killed", on_step=kill_at(step))
        assert not (tmp_path / "killed").exists()
    steps: list[int] = []
    assert run(tmp_path / "killed", on_step=lambda r: steps.append(r.step)).tobytes() == whole.tobytes()
    assert steps == [7, 8, 9, 10], "the checkpoint of step 6 was the last"
    losses = [(tmp_path / name / "losses.jsonl").read_text() for name in ("whole", "killed")]
    assert losses[0] == losses[1]
    records = read_losses(tmp_path / "whole" / "losses.jsonl")
    assert [r.step for r in records] == list(range(1, 11))
    assert records[-1].loss < records[0].loss
    assert not work_path(tmp_path / "killed").exists()


@pytest.mark.slow
def test_a_run_killed_while_it_writes_its_result_writes_it_again(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    out = tmp_path / "out"
    with contextlib.suppress(Killed):
        run(out, on_step=kill_at(10))
    (work_path(out) / "result").mkdir()
    (work_path(out) / "result" / "half").write_text("")
    assert run(out).tobytes() == whole.tobytes()
    assert sorted(p.name for p in out.iterdir()) == ["losses.jsonl", "w.npy"]


@pytest.mark.slow
def test_a_run_with_other_settings_does_not_go_on_unless_it_begins_anew(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Killed):
        run(out, settings={"lr": 1, "data": "a"}, on_step=kill_at(5))
    with pytest.raises(CheckpointError, match=r"other settings: lr was 1 and is 2; give the same .* --restart"):
        run(out, settings={"lr": 2, "data": "a"})
    steps: list[int] = []
    run(out, settings={"lr": 2, "data": "a"}, restart=True, on_step=lambda r: steps.append(r.step))
    assert steps[0] == 1


def test_a_folder_that_exists_or_is_in_use_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "out")
    before = (tmp_path / "out" / "w.npy").read_bytes()
    with pytest.raises(CheckpointError, match="exists; give --out a folder that does not exist yet"):
        run(tmp_path / "out")
    assert (tmp_path / "out" / "w.npy").read_bytes() == before
    with (
        open_work_folder(tmp_path / "other", {}, restart=False),
        pytest.raises(CheckpointError, match="in use by another training"),
        open_work_folder(tmp_path / "other", {}, restart=False),
    ):
        pass


def test_a_loss_that_is_not_finite_stops_the_run_and_is_never_in_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(TrainingError, match=r"step 1 has loss nan .* lower --lr"):
        run(out, frozen=float("nan"))
    assert not out.exists()
    assert not [p for p in (work_path(out) / "checkpoints").iterdir() if p.is_dir()]


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Killed):
        run(out, on_step=kill_at(5))
    for file in (work_path(out) / "checkpoints" / "4").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"checkpoint of step 4 .* cannot be restored .* --restart"):
        run(out)


def test_a_line_of_losses_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    record = {"step": 1, "loss": 1.0, "grad_norm": 1.0, "num_tokens": 3}
    (tmp_path / "l").write_text(json.dumps(record) + "\n" + json.dumps(record | {"step": 2})[:20])
    assert read_losses(tmp_path / "l") == [StepRecord(1, 1.0, 1.0, 3)]


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"lr": 0.0}, {"lr": float("inf")}, {"warmup": -1}])
def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*; expected"):
        TrainConfig(**{"steps": 5} | wrong)


def test_the_learning_rate_warms_up_and_falls_to_the_end() -> None:
    optimizer = TrainConfig(steps=40, lr=0.1, warmup=10, max_grad_norm=1e9).optimizer()
    params = jnp.zeros(())
    state = optimizer.init(params)
    sizes = []
    for _ in range(40):
        with jax.numpy_dtype_promotion("standard"):
            update, state = optimizer.update(jnp.float32(1), state, params)
        sizes.append(-float(jnp.asarray(update)))
    assert sizes[0] == 0
    assert np.argmax(sizes) == 10
    np.testing.assert_allclose(max(sizes), 0.1, rtol=1e-3)
    assert 0 < sizes[-1] < 0.002
