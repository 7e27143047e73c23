"""Trains the adapters and the gate that the benchmark measures, and that the demo ships, by the project's own trainer.

OUT/
  adapters/SKILL        each alone; examples.jsonl beside the weights are its prompts for retrieval
  cotrained/SKILL       trained while adapters of other skills were active
  gated/demo-gated      a gate over the adapters, trained on their tasks mixed
  data/                 what they were trained on

What is there is left as it is, so that a run that was stopped goes on.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from checkpoints.loaded_model import ModelDtype
from dymerge_jax.config import PROJECTIONS
from dymerge_jax.example_lines import EXAMPLES_FILE
from dymerge_jax.gating import Granularity
from dymerge_jax.quality.data import chat_line, check_share, cotraining_lines, draw_questions, prompt_line, write_lines
from dymerge_jax.quality.skills import EIGHT_SKILLS, SHARED_SKILL, check_skills
from dymerge_jax.train.commands import (
    AdapterJob,
    GateJob,
    Job,
    NamedAdapter,
    load_base,
    train_adapter,
    train_gate,
)

_log = logging.getLogger(__name__)

ADAPTERS, COTRAINED, GATED, DATA = "adapters", "cotrained", "gated", "data"
GATED_SET = "demo-gated"
NUM_EXAMPLES = 24

MATES: Mapping[str, tuple[str, ...]] = {
    "json": ("upper", "reverse", "vocab", "firsttwo", "sign"),
    "bullets": ("upper", "sign"),
    "count": ("upper", "reverse"),
    "sign": ("upper", "reverse", "vocab"),
    "upper": ("reverse",),
}
"""Mates of the co-trained adapters: each pair of `PAIRS` has one half that knows the other."""


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """What is trained, and how.

    Attributes:
      model: "demo" or a path.
      out: folder of the results; what is in it stays.
      skills: of the adapters.
      cotrained: skills that are co-trained, too; each needs a mate among `skills`.
      has_gate: train a gate over the adapters of all skills but `echo`.
      rank, alpha: of the adapters.
      steps, lr, batch_size: of an adapter.
      gate_steps, gate_lr: of the gate; as the demo's gate over four skills was trained (benchmarks/RESULTS.md).
      gate_top_k: experts that keep a weight; None keeps all.
      granularity: one gate a layer, or one a projection.
      balance: see `GateJob`.
      instructed: share of an adapter's prompts that say what is wanted; all of the gate's do.
      seed: of data, initial values and order.
      dtype: of the frozen model; None is float32 on a CPU and bfloat16 elsewhere.
      save_dtype: of the stored adapters.
      progress: show progress bars.
    """

    out: Path
    model: str = "demo"
    skills: tuple[str, ...] = (SHARED_SKILL, *EIGHT_SKILLS)
    cotrained: tuple[str, ...] = tuple(MATES)
    has_gate: bool = True
    rank: int = 8
    alpha: float = 16.0
    steps: int = 100
    lr: float = 2e-3
    batch_size: int = 8
    gate_steps: int = 600
    gate_lr: float = 2e-2
    gate_top_k: int | None = None
    granularity: Granularity = "layer"
    balance: float = 0.0
    instructed: float = 0.5
    seed: int = 0
    dtype: ModelDtype | None = None
    save_dtype: Literal["float32", "float16", "bfloat16"] = "float16"
    progress: bool = True

    def __post_init__(self) -> None:
        check_skills([*self.skills, *self.cotrained])
        if not self.skills:
            raise ValueError("no skill is given; expected at least one")
        check_share("instructed", self.instructed)
        if unknown := [skill for skill in self.cotrained if not self.mates(skill)]:
            raise ValueError(
                f"{', '.join(unknown)} cannot be co-trained without an adapter of one of its mates "
                f"({'; '.join(f'{skill}: {", ".join(mates)}' for skill, mates in MATES.items())}); add it to the skills"
            )
        if self.has_gate and len(self.gate_skills) < 2:
            raise ValueError(f"a gate chooses among at least 2 skills, got {len(self.gate_skills)}; turn it off")

    def mates(self, skill: str) -> tuple[str, ...]:
        """The mates of a co-trained adapter: those whose adapters there are."""
        return tuple(mate for mate in MATES.get(skill, ()) if mate in self.skills)

    @property
    def gate_skills(self) -> tuple[str, ...]:
        return tuple(skill for skill in self.skills if skill != SHARED_SKILL)

    def adapter(self, skill: str) -> Path:
        """Where the adapter of a skill goes."""
        return self.out / ADAPTERS / skill


def train_all(config: TrainingConfig) -> list[Path]:
    """Trains what is not there yet.

    Returns:
      The folders that were made.

    Raises:
      CheckpointError: If a file is refused, or a training that was stopped had other settings.
      TrainingError: If a training diverges.
    """
    wanted: dict[Path, AdapterJob | GateJob] = {
        config.adapter(skill): _adapter_job(config, skill) for skill in config.skills
    }
    wanted |= {config.out / COTRAINED / skill: _cotraining_job(config, skill) for skill in config.cotrained}
    if config.has_gate:
        wanted[config.out / GATED / GATED_SET] = _gate_job(config)
    missing = {folder: job for folder, job in wanted.items() if not folder.exists()}
    for folder in wanted.keys() - missing.keys():
        _log.info("%s is there and stays as it is", folder)
    base = load_base(config.model, config.dtype, progress=config.progress) if missing else None
    for number, (folder, job) in enumerate(missing.items(), start=1):
        _log.info("%d of %d: %s", number, len(missing), folder)
        _write_data(config, folder, job)
        if isinstance(job, AdapterJob):
            train_adapter(job, base=base)
        else:
            train_gate(job, base=base)
    for skill in config.skills:
        write_examples(config.adapter(skill), skill, seed=config.seed)
    return list(missing)


def write_examples(adapter: Path, skill: str, *, seed: int, num: int = NUM_EXAMPLES) -> None:
    """Puts example prompts, all of them instructed, beside an adapter's weights, for retrieval; some there stay."""
    path = adapter / EXAMPLES_FILE
    if not path.exists():
        write_lines(path, map(prompt_line, draw_questions([[skill]], num, seed=seed + 1, instructed=1.0)))


def _job(config: TrainingConfig, folder: Path) -> Job:
    is_gate = folder.parent.name == GATED
    return Job(
        config.model,
        data=config.out / DATA / f"{folder.parent.name}-{folder.name}.jsonl",
        out=folder,
        steps=config.gate_steps if is_gate else config.steps,
        batch_size=config.batch_size,
        seed=config.seed,
        lr=config.gate_lr if is_gate else config.lr,
        dtype=config.dtype,
        progress=config.progress,
    )


def _adapter_job(config: TrainingConfig, skill: str) -> AdapterJob:
    job = _job(config, config.adapter(skill))
    return AdapterJob(job, config.rank, config.alpha, PROJECTIONS, save_dtype=config.save_dtype)


def _cotraining_job(config: TrainingConfig, skill: str) -> AdapterJob:
    job = _job(config, config.out / COTRAINED / skill)
    # All that any skill has: each line of the data names the one that is active, and equal shapes compile once.
    placed = dict.fromkeys(mate for cotrained in config.cotrained for mate in config.mates(cotrained))
    mates = tuple(NamedAdapter(mate, config.adapter(mate)) for mate in placed)
    return AdapterJob(job, config.rank, config.alpha, PROJECTIONS, mates, config.save_dtype)


def _gate_job(config: TrainingConfig) -> GateJob:
    return GateJob(
        _job(config, config.out / GATED / GATED_SET),
        tuple(NamedAdapter(skill, config.adapter(skill)) for skill in config.gate_skills),
        config.granularity,
        config.gate_top_k,
        balance=config.balance,
    )


def _write_data(config: TrainingConfig, folder: Path, job: AdapterJob | GateJob) -> None:
    """New samples for every step; those of a run that was stopped are the same, or it is not gone on with."""
    assert job.job.steps is not None
    num = job.job.steps * job.job.batch_size
    if isinstance(job, GateJob):
        tasks: Sequence[Sequence[str]] = [(skill,) for skill in config.gate_skills]
        lines = map(chat_line, draw_questions(tasks, num, seed=config.seed, instructed=1.0))
    elif job.mates:
        mates = config.mates(folder.name)
        lines = cotraining_lines(folder.name, mates, num, seed=config.seed, instructed=config.instructed)
    else:
        lines = map(chat_line, draw_questions([[folder.name]], num, seed=config.seed, instructed=config.instructed))
    job.job.data.unlink(missing_ok=True)
    write_lines(job.job.data, lines)
