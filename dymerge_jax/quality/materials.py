"""Makes what the ways need: adapters in slots, searched weights, merged adapters, gated sets, an index of prompts."""

import dataclasses
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax
from tqdm import tqdm

from checkpoints.arrow import make_arrow
from checkpoints.gated_set import load_gated_sets
from checkpoints.peft_adapter import load_adapter
from dymerge_jax.compose.batched_loss import BatchedCrossEntropy
from dymerge_jax.compose.examples import Example, read_examples
from dymerge_jax.compose.merge import merge_adapters
from dymerge_jax.compose.search import SearchResult, search_weights
from dymerge_jax.example_lines import EXAMPLES_FILE, read_prompts
from dymerge_jax.library import Model, load
from dymerge_jax.lora import AdapterWeights
from dymerge_jax.quality.data import chat_line, draw_questions, write_lines
from dymerge_jax.quality.inventory import Inventory, RunConfig
from dymerge_jax.quality.scores import Task
from dymerge_jax.quality.skills import SHARED_SKILL
from dymerge_jax.quality.ways import (
    ARROW,
    MERGED_WAYS,
    RETRIEVED,
    RETRIEVED_1,
    Composer,
    cotrained_name,
    merge_config,
    merged_name,
    task_name,
)
from dymerge_jax.retrieval import MAX_EXAMPLES, RetrievalIndex

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Materials:
    """Attributes:
    model: with everything in its slots.
    composer: makes the mixes.
    searches: by pair.
    """

    model: Model
    composer: Composer
    searches: Mapping[Task, SearchResult]


def make_materials(config: RunConfig, inventory: Inventory) -> Materials:
    """Loads, merges and searches whatever the inventory's ways need.

    Raises:
      CheckpointError: If a file is refused, or adapters cannot be merged.
    """
    base = load(config.model, adapters=(), dtype=config.dtype, adapter_slots=1, slot_rank=1, progress=config.progress)
    singles = {name: load_adapter(path, base.config) for name, path in inventory.adapters.items()}
    others = {cotrained_name(name): path for name, path in inventory.cotrained.items()}
    with tempfile.TemporaryDirectory() as folder:
        others |= _merged(config, inventory, Path(folder))
        gated = list(inventory.gated.values())
        if ARROW in inventory.ways:
            gated.append(Path(folder) / ARROW)
            experts = [(name, path) for name, path in inventory.adapters.items() if name != SHARED_SKILL]
            make_arrow(experts, gated[-1])
        sets, known = load_gated_sets(gated, base.config, [*inventory.adapters.items(), *others.items()])
        loaded = {name: load_adapter(path, base.config) for name, path in known if name not in singles}
    slot_rank = max(adapter.rank for adapter in singles.values())
    num_slots = sum(adapter.num_slots(slot_rank) for adapter in [*singles.values(), *loaded.values()])
    model = Model(base.split, base.tokenizer, adapter_slots=num_slots, slot_rank=slot_rank)
    _add(model, singles)
    searches = _searches(config, inventory, model) if "searched" in inventory.ways else {}
    index = _index(inventory, model) if {RETRIEVED, RETRIEVED_1} & {*inventory.ways} else None
    _add(model, loaded)
    model.add_gated_sets(sets)
    searched = {task: {k: w for k, w in result.weights.items() if w} for task, result in searches.items()}
    return Materials(model, Composer(searched, list(inventory.cotrained), index), searches)


def _add(model: Model, adapters: Mapping[str, AdapterWeights]) -> None:
    for name, adapter in adapters.items():
        model.add_adapter(name, adapter)


def _merged(config: RunConfig, inventory: Inventory, folder: Path) -> dict[str, Path]:
    wanted = [(way, pair) for pair in inventory.pairs for way in inventory.ways if way in MERGED_WAYS]
    made = {}
    for way, pair in tqdm(wanted, desc="merging", unit="adapter", disable=not config.progress):
        path = folder / way / task_name(pair)
        path.parent.mkdir(exist_ok=True)
        halves = [(name, inventory.adapters[name]) for name in pair]
        settings = merge_config(way, density=config.density, seed=config.seed)
        merge_adapters(halves, [1.0, 1.0], path, settings, progress=False)
        made[merged_name(way, pair)] = path
    return made


def _searches(config: RunConfig, inventory: Inventory, model: Model) -> dict[Task, SearchResult]:
    """Searches the weights of every pair over all single adapters, from questions of training words."""
    examples = {pair: _examples(config, pair, model) for pair in inventory.pairs}
    num_tokens = max((len(example) for group in examples.values() for example in group), default=0)
    num_targets = max((len(example.target) for group in examples.values() for example in group), default=0)
    # Of a batch, padding included: the logits of all its targets are in memory, 14 GB with 16384 tokens of the demo.
    max_tokens = 4096 if jax.default_backend() == "cpu" else 16384
    results = {}
    for pair, group in tqdm(examples.items(), desc="searching", unit="pair", disable=not config.progress):
        cross_entropy = BatchedCrossEntropy(
            model,
            group,
            batch_mixes=config.search.population,
            max_tokens=max_tokens,
            min_row_len=num_tokens,
            min_targets=num_targets,
        )
        results[pair] = search_weights(model.adapter_names, cross_entropy, config.search, progress=False)
        found = {name: weight for name, weight in results[pair].weights.items() if weight}
        _log.info("searched for %s in %.1f s: %s", task_name(pair), results[pair].seconds, found)
    return results


def _examples(config: RunConfig, pair: Task, model: Model) -> list[Example]:
    questions = draw_questions([pair], config.search_examples, seed=config.seed + 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "examples.jsonl"
        write_lines(path, map(chat_line, questions))
        return read_examples(path, model.require_tokenizer(), max_len=model.config.max_position)


def _index(inventory: Inventory, model: Model) -> RetrievalIndex:
    examples = {
        name: read_prompts(path / EXAMPLES_FILE, max_prompts=MAX_EXAMPLES) for name, path in inventory.adapters.items()
    }
    return RetrievalIndex.build(model.split, model.require_tokenizer(), examples)
