"""Whole trainings: files in, a folder out."""

import dataclasses
import functools
import hashlib
import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from checkpoints.errors import CheckpointError
from checkpoints.formats import load_model
from checkpoints.gated_set import save_gated_set
from checkpoints.json_values import is_float32
from checkpoints.loaded_model import ModelDtype
from checkpoints.peft_adapter import adapter_sources, load_adapter
from checkpoints.trained_adapter import write_trained_adapter
from dymerge_jax.config import LlamaConfig
from dymerge_jax.gating import GatedSetWeights, Granularity
from dymerge_jax.model import model_from_params
from dymerge_jax.retrieval import is_auto_name
from dymerge_jax.train.adapter import adapter_loss, adapter_weights, new_factors, place_mates
from dymerge_jax.train.batches import BatchPlan
from dymerge_jax.train.curve import draw_curve
from dymerge_jax.train.data import Sample, read_samples
from dymerge_jax.train.forward import FrozenModel, differentiable_implementations, freeze_model
from dymerge_jax.train.gate import gate_loss, gated_set, new_gates, place_in_slots
from dymerge_jax.train.loop import Loss, TrainConfig, train
from dymerge_jax.train.work_folder import StepRecord, open_work_folder

_log = logging.getLogger(__name__)

CURVE = "loss.png"
OnStep = Callable[[StepRecord], None]


@dataclasses.dataclass(frozen=True)
class Job:
    """What every training needs.

    Attributes:
      model: "demo" or a path, see `load_model`.
      data: JSON lines, see `read_samples`.
      out: folder of the result; must not exist.
      steps: updates; None to count in epochs.
      epochs: passes over the data, where `steps` is None.
      batch_size: samples of an update.
      max_len: tokens of the longest sample; longer ones are left out.
      seed: of initial values and of the samples' order.
      lr, warmup, max_grad_norm, weight_decay, checkpoint_every: see `TrainConfig`.
      dtype: of the frozen model; None is float32 on a CPU and bfloat16 elsewhere.
      plain_text: see `read_samples`.
      remat: see `hidden_states`.
      restart: begin anew though an earlier run could go on.
      progress: show progress bars.
    """

    model: str
    data: Path
    out: Path
    steps: int | None = None
    epochs: float = 3.0
    batch_size: int = 8
    max_len: int = 512
    seed: int = 0
    lr: float = TrainConfig.lr
    warmup: int = TrainConfig.warmup
    max_grad_norm: float = TrainConfig.max_grad_norm
    weight_decay: float = TrainConfig.weight_decay
    checkpoint_every: int = TrainConfig.checkpoint_every
    dtype: ModelDtype | None = None
    plain_text: bool = False
    remat: bool = False
    restart: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        for name, is_right, expected in (
            ("epochs", 0 < self.epochs < math.inf, "a positive number"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("max_len", self.max_len >= 2, "at least 2 tokens: a prompt's and an answer's"),
            ("seed", self.seed >= 0, "0 or more"),
        ):
            if not is_right:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {expected}")
        self.train_config(1)

    def train_config(self, steps_per_epoch: int) -> TrainConfig:
        """The loop's own settings."""
        steps = self.steps if self.steps is not None else max(1, round(self.epochs * steps_per_epoch))
        names = ("lr", "warmup", "max_grad_norm", "weight_decay", "checkpoint_every")
        return TrainConfig(steps=steps, **{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True)
class NamedAdapter:
    """An adapter's folder, what it is called here, and its weight where it is a mate."""

    name: str
    folder: Path
    weight: float = 1.0


def named_adapters(specs: Sequence[str], *, with_weight: bool) -> tuple[NamedAdapter, ...]:
    """The adapters that command-line words stand for: FOLDER, NAME=FOLDER, or a folder of folders.

    Args:
      specs: the words.
      with_weight: ":WEIGHT" may stand behind each.

    Raises:
      CheckpointError: If a folder does not exist or holds no adapter, or a weight is no finite number of float32.
    """
    found = []
    for spec in specs:
        weight = 1.0
        if with_weight and ":" in spec and not Path(spec).exists():
            spec, _, text = spec.rpartition(":")
            weight = _weight(spec, text)
        found += [NamedAdapter(name, folder, weight) for name, folder in adapter_sources(spec)]
    return tuple(found)


def _weight(spec: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not is_float32(weight):
        raise CheckpointError(
            f"mate {spec!r} has weight {text!r}; expected NAME=FOLDER:WEIGHT with a finite number of float32"
        )
    return weight


@dataclasses.dataclass(frozen=True)
class AdapterJob:
    """Attributes:
    job: what every training needs.
    rank, alpha: of the new adapter.
    targets: names of the projections that it adapts.
    mates: frozen adapters that are active beside it.
    save_dtype: of the stored tensors.
    """

    job: Job
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ()
    mates: tuple[NamedAdapter, ...] = ()
    save_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}; expected at least 1")
        if not math.isfinite(self.alpha) or self.alpha == 0:
            raise ValueError(f"alpha is {self.alpha}; expected a finite number that is not 0")
        _refuse_twice("mate", self.mates)


@dataclasses.dataclass(frozen=True)
class GateJob:
    """Attributes:
    job: what every training needs.
    experts: the frozen adapters.
    granularity: one gate a layer, or one a projection.
    top_k: experts that keep a weight; None keeps all.
    renormalize: whether the kept weights are divided by their sum; None does so from two kept experts on.
    name: of the set; None takes the folder's.
    balance: weight of the loss's term against the use of few experts; 0 leaves it out. For one gate a layer.
    """

    job: Job
    experts: tuple[NamedAdapter, ...]
    granularity: Granularity = "layer"
    top_k: int | None = None
    renormalize: bool | None = None
    name: str | None = None
    balance: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.balance < math.inf:
            raise ValueError(f"balance is {self.balance}; expected 0 or more")
        if self.balance and self.granularity != "layer":
            raise ValueError(f"balance is {self.balance}, which is for one gate a layer; leave out --granularity")
        if len(self.experts) < 2:
            raise ValueError(f"got {len(self.experts)} adapters; a gate chooses among at least 2")
        _refuse_twice("adapter", self.experts)
        _refuse_same_folder(self.experts)
        if is_auto_name(self.set_name):
            raise ValueError(
                f"the set's name is {self.set_name!r}, which no model can have, as requests ask by 'auto' for adapters "
                "that fit the prompt; choose another with --name"
            )
        if self.top_k is not None and not 1 <= self.top_k <= len(self.experts):
            raise ValueError(f"top_k is {self.top_k}; expected 1 to {len(self.experts)} adapters")
        if self.top_k == 1 and self.renormalize:
            raise ValueError(
                "top_k 1 renormalised is weight 1 whatever the gate says, so that it could not learn; leave out "
                "--renormalize, or keep 2 experts"
            )

    @property
    def set_name(self) -> str:
        return self.name or self.job.out.resolve().name

    def described(self) -> GatedSetWeights:
        """The set without its gates; its experts by name."""
        renormalize = (self.top_k or 0) >= 2 if self.renormalize is None else self.renormalize
        names = tuple(expert.name for expert in self.experts)
        return GatedSetWeights(self.set_name, names, self.granularity, self.top_k, renormalize, {})


@dataclasses.dataclass(frozen=True)
class Base:
    """A base model, frozen: read once for the trainings of a process that use it.

    Attributes:
      model: "demo" or its path.
      config: its shape.
      tokenizer: a transformers tokenizer, or None.
      frozen: its weights.
      dtype: of the weights.
    """

    model: str
    config: LlamaConfig
    tokenizer: Any
    frozen: FrozenModel
    dtype: str


def load_base(model: str, dtype: ModelDtype | None = None, *, progress: bool = True) -> Base:
    """Reads a base model.

    Args:
      model: "demo" or a path, see `load_model`.
      dtype: None is float32 on a CPU and bfloat16 elsewhere.
      progress: show a progress bar.
    """
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    loaded = load_model(model, dtype=dtype, progress=progress)
    frozen = freeze_model(model_from_params(loaded.config, loaded.params))
    return Base(model, loaded.config, loaded.tokenizer, frozen, dtype)


def train_adapter(
    adapter_job: AdapterJob, on_step: OnStep | None = None, *, base: Base | None = None
) -> list[StepRecord]:
    """Trains an adapter and writes it as a PEFT folder.

    Args:
      adapter_job: what to do.
      on_step: told of every step.
      base: the job's model, if it has been read already.

    Returns:
      What was recorded of every step, those before a resume included.

    Raises:
      CheckpointError: If a file is refused, or the result's folder exists.
      TrainingError: If the training diverges.
    """
    job, scale = adapter_job.job, adapter_job.alpha / adapter_job.rank
    mate_names = tuple(mate.name for mate in adapter_job.mates)
    inputs = _read(job, mate_names, base)
    mates = [load_adapter(mate.folder, inputs.base.config) for mate in adapter_job.mates]
    settings = _settings(inputs, job) | {
        "kind": "adapter",
        "rank": adapter_job.rank,
        "alpha": adapter_job.alpha,
        "targets": list(adapter_job.targets),
        "mates": [[m.name, w.content_hash, m.weight] for m, w in zip(adapter_job.mates, mates, strict=True)],
    }
    weights = {mate.name: mate.weight for mate in adapter_job.mates}
    plan = BatchPlan(inputs.samples, job.batch_size, job.seed, mate_names, weights)
    loss = _adapter_loss(scale, job.remat)
    placed = place_mates(inputs.base.config, mates, slot_rank=adapter_job.rank, dtype=inputs.base.dtype)
    factors = new_factors(inputs.base.config, adapter_job.targets, rank=adapter_job.rank, seed=job.seed)

    def write(folder: Path, trained: Any) -> None:
        adapter = adapter_weights(trained, scale=scale)
        write_trained_adapter(
            folder, adapter, alpha=adapter_job.alpha, base_model=job.model, dtype=adapter_job.save_dtype
        )

    return _run(job, inputs, plan, settings, loss, factors, placed, write, on_step)


@functools.cache  # equal settings, one function: what is compiled for it is found again
def _adapter_loss(scale: float, remat: bool) -> Loss:
    return functools.partial(adapter_loss, scale=scale, implementations=differentiable_implementations(), remat=remat)


@functools.cache
def _gate_loss(balance: float, remat: bool) -> Loss:
    return functools.partial(gate_loss, balance=balance, implementations=differentiable_implementations(), remat=remat)


def train_gate(gate_job: GateJob, on_step: OnStep | None = None, *, base: Base | None = None) -> list[StepRecord]:
    """Trains a gate over frozen adapters and writes it as a gated set, whose experts are paths from its folder.

    Args, returns and errors: as `train_adapter`.
    """
    job, described = gate_job.job, gate_job.described()
    inputs = _read(job, (), base)
    experts = {e.name: load_adapter(e.folder, inputs.base.config) for e in gate_job.experts}
    settings = _settings(inputs, job) | {
        "kind": "gate",
        "granularity": described.granularity,
        "top_k": described.top_k,
        "renormalize": described.renormalize,
        "balance": gate_job.balance,
        "experts": [[name, weights.content_hash] for name, weights in experts.items()],
    }
    plan = BatchPlan(inputs.samples, job.batch_size, job.seed)
    loss = _gate_loss(gate_job.balance, job.remat)
    slot_rank = max(expert.rank for expert in experts.values())
    gates = new_gates(inputs.base.config, len(experts), described.granularity, seed=job.seed)
    first = gated_set(gates, described)
    placed = place_in_slots(inputs.base.config, experts, first, slot_rank=slot_rank, dtype=inputs.base.dtype)

    def write(folder: Path, trained: Any) -> None:
        # From where the folder will be: it is written elsewhere and renamed.
        paths = [os.path.relpath(e.folder.resolve(), job.out.resolve()) for e in gate_job.experts]
        made = gated_set(trained, described)
        save_gated_set(folder, paths, made.gates, top_k=made.top_k, renormalize=made.renormalize, name=gate_job.name)

    return _run(job, inputs, plan, settings, loss, gates, placed, write, on_step)


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """A job's files, read."""

    base: Base
    samples: list[Sample]
    data_hash: str


def _read(job: Job, mates: Sequence[str], base: Base | None) -> _Inputs:
    if job.out.exists():  # asked again when its turn comes; here before the model is loaded
        raise CheckpointError(f"{job.out} exists; give --out a folder that does not exist yet, or remove it")
    base = base or load_base(job.model, job.dtype, progress=job.progress)
    if base.tokenizer is None:
        raise CheckpointError(f"model {job.model!r} has no tokenizer; training data are text and need one")
    config = base.config
    if job.max_len > config.max_position:
        raise ValueError(f"max_len is {job.max_len}; the model's context is {config.max_position} tokens")
    samples = read_samples(
        job.data,
        base.tokenizer,
        max_len=job.max_len,
        end_ids=config.eos_token_ids,
        plain_text=job.plain_text,
        mates=mates,
    )
    return _Inputs(base, samples, hashlib.sha256(job.data.read_bytes()).hexdigest())


def _settings(inputs: _Inputs, job: Job) -> dict[str, Any]:
    """What decides the result of any training, beside what it trains; the checkpoints' distance does not."""
    names = ("model", "batch_size", "max_len", "seed", "lr", "warmup", "max_grad_norm", "weight_decay", "plain_text")
    steps_per_epoch = -(-len(inputs.samples) // job.batch_size)
    return {name: getattr(job, name) for name in names} | {
        "steps": job.train_config(steps_per_epoch).steps,
        "model_config": dataclasses.asdict(inputs.base.config),
        "dtype": inputs.base.dtype,
        "data_sha256": inputs.data_hash,
    }


def _run(
    job: Job,
    inputs: _Inputs,
    plan: BatchPlan,
    settings: dict[str, Any],
    loss: Callable[..., jax.Array],
    trained: Any,
    placed: Any,
    write: Callable[[Path, Any], None],
    on_step: OnStep | None,
) -> list[StepRecord]:
    config = job.train_config(plan.steps_per_epoch)
    num_trained = sum(leaf.size for leaf in jax.tree.leaves(trained))
    _log.info(
        "training %d parameters on %d samples (%d tokens), %d steps of %d samples, %s",
        num_trained, len(plan.samples), sum(len(s.tokens) for s in plan.samples), config.steps, job.batch_size,
        inputs.base.dtype,
    )  # fmt: skip
    with open_work_folder(job.out, settings, restart=job.restart) as work:
        frozen = inputs.base.frozen, placed
        trained, records = train(loss, trained, frozen, plan, config, work, progress=job.progress, on_step=on_step)

        def publish(folder: Path) -> None:
            write(folder, trained)
            draw_curve(records, folder / CURVE, title=job.out.name)

        work.publish(job.out, publish)
    return records


def _refuse_twice(what: str, adapters: Sequence[NamedAdapter]) -> None:
    names = [adapter.name for adapter in adapters]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{what}s named twice: {', '.join(twice)}; give each its own name with NAME=FOLDER")


def _refuse_same_folder(experts: Sequence[NamedAdapter]) -> None:
    """The set refers to its experts by folder, where two of one folder are one expert twice."""
    names: dict[Path, list[str]] = {}
    for expert in experts:
        names.setdefault(expert.folder.resolve(), []).append(expert.name)
    if same := [f"{', '.join(found)} ({folder})" for folder, found in names.items() if len(found) > 1]:
        raise ValueError(f"adapters of one folder: {'; '.join(same)}; give each folder once")
