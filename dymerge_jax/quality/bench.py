"""Asks every question of every task under every way, rows of all of them mixed in one batch, and scores the answers."""

import dataclasses
import itertools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dymerge_jax.compose.search import SearchResult
from dymerge_jax.generate import Batch
from dymerge_jax.library import MixSpec, Model, make_generate
from dymerge_jax.quality.data import draw_questions
from dymerge_jax.quality.inventory import Inventory, RunConfig, take_inventory
from dymerge_jax.quality.materials import Materials, make_materials
from dymerge_jax.quality.scores import Prompts, Result, Share, StreamRow, Task, result_of, stream_rows
from dymerge_jax.quality.skills import EIGHT_SKILLS, TEST_WORDS, Question
from dymerge_jax.quality.ways import PROMPT_WAYS

_MIN_NEW_TOKENS = 48  # of an answer; more if a right one has more
_INSTRUCTED: dict[Prompts, float] = {"neutral": 0.0, "instructed": 1.0}


@dataclasses.dataclass(frozen=True)
class Trial:
    """A task's questions, to be answered by one way.

    Attributes:
      task, way, prompts: see `Result`.
      questions: the same for all ways.
      mixes: of each question.
    """

    task: Task
    way: str
    prompts: Prompts
    questions: Sequence[Question]
    mixes: Sequence[MixSpec]


@dataclasses.dataclass(frozen=True)
class Retrieval:
    """How often an index finds just the adapters of a task.

    Attributes:
      task, prompts: see `Result`.
      share: of the prompts for which it does.
    """

    task: Task
    prompts: Prompts
    share: Share


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All that was measured.

    Attributes:
      results: in the order of tasks, kinds of prompts and ways.
      stream: single skills, the adapters being chosen by the prompt.
      retrieval: see `Retrieval`; empty without the way.
      searches: by pair.
      inventory: what it ran on.
      seconds: of the answers, compiling included.
      num_rows: how many answers there are.
      batch_size: that were generated together.
      device, dtype: of the model.
    """

    results: Sequence[Result]
    stream: Sequence[StreamRow]
    retrieval: Sequence[Retrieval]
    searches: dict[Task, SearchResult]
    inventory: Inventory
    seconds: float
    num_rows: int
    batch_size: int
    device: str
    dtype: str


def run_benchmark(config: RunConfig) -> Outcome:
    """Measures everything.

    Raises:
      ValueError, CheckpointError: See `take_inventory` and `make_materials`.
    """
    inventory = take_inventory(config)
    materials = make_materials(config, inventory)
    trials = _trials(config, inventory, materials)
    start_s = time.perf_counter()
    batch_size = config.batch_size or (32 if jax.default_backend() == "cpu" else 256)
    answers = iter(_answers(config, materials.model, trials, batch_size))
    seconds = time.perf_counter() - start_s
    results = [
        result_of(t.task, t.way, t.prompts, t.questions, list(itertools.islice(answers, len(t.questions))))
        for t in trials
    ]
    prompt_ways = [way for way in inventory.ways if way.partition(":")[0] in PROMPT_WAYS]
    return Outcome(
        results,
        stream_rows(results, ["base", *prompt_ways], EIGHT_SKILLS),
        _retrieval(config, inventory, materials),
        dict(materials.searches),
        inventory,
        seconds,
        num_rows=sum(len(trial.questions) for trial in trials),
        batch_size=batch_size,
        device=jax.devices()[0].device_kind,
        dtype=str(materials.model.split.dtype),
    )


def _questions(config: RunConfig, task: Task, prompts: Prompts) -> list[Question]:
    return draw_questions([task], config.n, seed=config.seed, words=TEST_WORDS, instructed=_INSTRUCTED[prompts])


def _trials(config: RunConfig, inventory: Inventory, materials: Materials) -> list[Trial]:
    trials = []
    for task, prompts in itertools.product(inventory.tasks, config.prompts):
        questions = _questions(config, task, prompts)
        for way in inventory.ways_of(task):
            mixes = materials.composer.mixes(way, task, questions)
            trials.append(Trial(task, way, prompts, questions, mixes))
    return trials


def _answers(config: RunConfig, model: Model, trials: Sequence[Trial], batch_size: int) -> list[str]:
    """The answers to all questions of all trials, greedy, in batches of one shape."""
    questions = [question for trial in trials for question in trial.questions]
    mixes = [mix for trial in trials for mix in trial.mixes]
    tokenizer = model.require_tokenizer()
    targets = {question.target for question in questions}
    longest = max(len(tokenizer.encode(target, add_special_tokens=False)) for target in targets)
    generate = make_generate(model, max_new_tokens=max(_MIN_NEW_TOKENS, longest + 1))
    prompts = model.tokenize([question.prompt for question in questions])
    tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
    # Mixed, so that what is measured is what is served: rows of different mixes and gates in one batch.
    order = np.random.default_rng(config.seed).permutation(len(questions))
    answers = [""] * len(questions)
    with tqdm(total=len(order), desc="answering", unit="answer", disable=not config.progress) as bar:
        for ids in np.split(order, range(batch_size, len(order), batch_size)):
            rows = np.resize(ids, batch_size)  # the last batch is filled up with rows that do not count
            batch = Batch(tokens=jnp.asarray(tokens[rows]), lengths=jnp.asarray(lengths[rows]))
            texts = model.detokenize(generate(batch, model.mix([mixes[i] for i in rows])))
            for i, text in zip(ids, texts[: len(ids)], strict=True):
                answers[i] = text
            bar.update(len(ids))
    return answers


def _retrieval(config: RunConfig, inventory: Inventory, materials: Materials) -> list[Retrieval]:
    if materials.composer.index is None:
        return []
    found = []
    for task, prompts in itertools.product(inventory.tasks, config.prompts):
        names = materials.composer.retrieved(task, _questions(config, task, prompts))
        found.append(Retrieval(task, prompts, Share(sum({*n} == {*task} for n in names), len(names))))
    return found
