"""The training loop: optimizer, jitted step, checkpoints, progress."""

import collections
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Array, Float
from tqdm import tqdm

from dymerge_jax.train.batches import BatchPlan
from dymerge_jax.train.forward import TrainBatch
from dymerge_jax.train.work_folder import StepRecord, WorkFolder
from pallas_kernels.pytree import pytree_dataclass

_log = logging.getLogger(__name__)

Loss = Callable[[Any, Any, TrainBatch], Float[Array, ""]]
"""Mean loss of a batch, from what is trained and what is frozen; hashable."""


class TrainingError(RuntimeError):
    """A training cannot go on; the message says what to change."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How something is trained.

    Attributes:
      steps: updates in all, at least 1.
      lr: highest learning rate: reached after the warm-up, followed by a cosine down to 0.
      warmup: steps of the linear warm-up from 0; cut to half of `steps`.
      max_grad_norm: the gradient is scaled down to this global norm.
      weight_decay: of AdamW.
      checkpoint_every: steps between checkpoints.
    """

    steps: int
    lr: float = 1e-3
    warmup: int = 20
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    checkpoint_every: int = 50

    def __post_init__(self) -> None:
        for name, is_right, expected in (
            ("steps", self.steps >= 1, "at least 1"),
            ("lr", 0 < self.lr < math.inf, "a positive number"),
            ("warmup", self.warmup >= 0, "0 or more steps"),
            ("max_grad_norm", 0 < self.max_grad_norm < math.inf, "a positive number"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more"),
            ("checkpoint_every", self.checkpoint_every >= 1, "at least 1 step"),
        ):
            if not is_right:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {expected}")

    def optimizer(self) -> optax.GradientTransformation:
        """Clipping, then AdamW."""
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.0 if self.warmup else self.lr,
            peak_value=self.lr,
            warmup_steps=min(self.warmup, self.steps // 2),
            decay_steps=self.steps + 1,  # the last update still has a rate above 0
        )
        return optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm), optax.adamw(schedule, weight_decay=self.weight_decay)
        )


@pytree_dataclass
class TrainState:
    """Attributes:
    trained: float32 arrays.
    optimizer: state of the optimizer.
    """

    trained: Any
    optimizer: Any


@pytree_dataclass
class StepMetrics:
    """Attributes:
    loss: mean loss of the batch before the update, in nats.
    grad_norm: global norm of the gradient before clipping.
    """

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]


@functools.partial(jax.jit, static_argnames=("loss", "config"), donate_argnames="state")
def train_step(
    state: TrainState, frozen: Any, batch: TrainBatch, *, loss: Loss, config: TrainConfig
) -> tuple[TrainState, StepMetrics]:
    """One update; it donates the state, and compiles once for each shape of the batch, loss and config.

    Trainings in one process share what is compiled where their losses are equal.
    """
    value, gradient = jax.value_and_grad(loss)(state.trained, frozen, batch)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to the power of its int32 count
        updates, optimizer_state = config.optimizer().update(gradient, state.optimizer, state.trained)
    new = TrainState(optax.apply_updates(state.trained, updates), optimizer_state)
    return new, StepMetrics(value, optax.tree.norm(gradient))


def train(
    loss: Loss,
    trained: Any,
    frozen: Any,
    plan: BatchPlan,
    config: TrainConfig,
    work: WorkFolder,
    *,
    progress: bool = True,
    on_step: Callable[[StepRecord], None] | None = None,
) -> tuple[Any, list[StepRecord]]:
    """Trains from the newest checkpoint of the work folder, or from the beginning, to the end.

    A run that was stopped anywhere and goes on gives the same bits as one that was not: a step's batch follows from its
    number, and all else that it depends on is in the checkpoint.

    Args:
      loss: what is made small.
      trained: initial values, float32; donated.
      frozen: the loss's second argument.
      plan: the batches.
      config: how.
      work: where checkpoints and losses go.
      progress: show a progress bar.
      on_step: told of every step.

    Returns:
      The trained values, and what was recorded of all steps.

    Raises:
      TrainingError: If a loss or gradient is not finite; the checkpoint before it stays.
    """
    optimizer = config.optimizer()
    start, state = work.restore(TrainState(trained, optimizer.init(trained)))
    records = work.begin_losses(start)
    if start:
        _log.info("going on after step %d of %d", start, config.steps)
    rate = _Rate()
    with tqdm(total=config.steps, initial=start, desc="training", unit="step", disable=not progress) as bar:
        pending: tuple[int, StepMetrics, int] | None = None

        def settle() -> None:
            """Waits for the step under way and records it: one step late, so that the device never waits for it."""
            nonlocal pending
            if pending is None:
                return
            record = _record(*pending)
            pending = None
            records.append(record)
            work.add_loss(record)
            bar.set_postfix_str(f"loss {record.loss:.4f}, {rate.after(record.num_tokens):,.0f} tokens/s", refresh=False)
            bar.update()
            if on_step is not None:
                on_step(record)

        for number in range(start + 1, config.steps + 1):
            batch = plan.batch(number - 1)
            state, metrics = train_step(state, frozen, batch, loss=loss, config=config)
            settle()
            pending = number, metrics, int(np.sum(batch.lengths))
            if number % config.checkpoint_every == 0 or number == config.steps:
                settle()
                work.save(number, state)
    return state.trained, records


def _record(number: int, metrics: StepMetrics, num_tokens: int) -> StepRecord:
    record = StepRecord(number, float(metrics.loss), float(metrics.grad_norm), num_tokens)
    if not (math.isfinite(record.loss) and math.isfinite(record.grad_norm)):
        raise TrainingError(
            f"step {number} has loss {record.loss} and gradient norm {record.grad_norm}; expected finite numbers: "
            "lower --lr, or lengthen --warmup"
        )
    return record


class _Rate:
    """Tokens per second over the last steps."""

    def __init__(self) -> None:
        self._steps: collections.deque[tuple[float, int]] = collections.deque([(time.monotonic(), 0)], maxlen=20)

    def after(self, num_tokens: int) -> float:
        """The rate with a step that has just ended."""
        self._steps.append((time.monotonic(), num_tokens))
        first_s = self._steps[0][0]
        return sum(n for _, n in list(self._steps)[1:]) / max(self._steps[-1][0] - first_s, 1e-9)
