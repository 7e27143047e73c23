"""Imported MoLA, LoRAMoE and MOELoRA, and Arrow: what is served equals each family's formula in float64."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.arrow import make_arrow
from checkpoints.gated_families import import_gated
from checkpoints.gated_set import load_gated_sets
from checkpoints.peft_adapter import collect_adapters, load_adapter
from dymerge_jax.config import named_config
from dymerge_jax.gating import GatedSetWeights
from dymerge_jax.library import Model, pad_batch
from dymerge_jax.lora import AdapterWeights
from dymerge_jax.model import params_of
from dymerge_jax.xlora import GatedSet
from tests.support import numpy_llama
from tests.support.engines import generate, make_engine, make_request, run_to_end, token_ids
from tests.support.expert_checkpoints import (
    MLP,
    Family,
    arrow_delta,
    moe_peft_config,
    moe_peft_delta,
    moe_peft_tensors,
    moelora_config,
    moelora_delta,
    moelora_tensors,
    write_experts,
)
from tests.support.numpy_llama import Delta, static_delta
from tests.support.tiny_checkpoints import write_adapter
from tests.support.tiny_models import random_adapter, tiny_model

TINY = named_config("tiny")
STATIC = {"x": 0.7, "y": -0.5}
STATIC_RANKS = (("x", 4), ("y", 3), ("z", 6))
TOP_K, TEMPERATURE = 2, 0.5


@dataclasses.dataclass(frozen=True)
class Families:
    """Every family after its import: what an engine takes, and the formula of each row.

    Attributes:
      adapters: by name.
      sets: the gated sets.
      deltas: by what a row asks for: a set's name, or the name of a mix.
      mixes: static mixes by name.
    """

    adapters: dict[str, AdapterWeights]
    sets: list[GatedSet]
    deltas: dict[str, Delta | None]
    mixes: dict[str, dict[str, float]]

    def row(self, name: str) -> dict[str, float] | str:
        """A row of `Model.mix`."""
        return self.mixes.get(name, name)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    root = tmp_path_factory.mktemp("families")
    deltas: dict[str, Delta | None] = {}
    specs = []
    modules_of: dict[Family, tuple[str, ...]] = {
        "mola": ("q_proj", "o_proj", *MLP),
        "loramoe": ("q_proj", "v_proj", *MLP),
    }
    for family, modules in modules_of.items():
        config = moe_peft_config(family, num_experts=3, rank=4, modules=modules)
        tensors = moe_peft_tensors(TINY, family, num_experts=3, rank=4, seed=len(specs), modules=modules)
        import_gated(write_experts(root / "source" / family, config, tensors), root / family)
        deltas[family] = moe_peft_delta(config, tensors)
        specs.append(root / family)
    static = [write_adapter(root / name, TINY, rank=r, alpha=8, seed=i) for i, (name, r) in enumerate(STATIC_RANKS)]
    make_arrow([(path.name, path) for path in static], root / "arrow", top_k=TOP_K, temperature=TEMPERATURE)
    mixes = {"static": STATIC, "base": {}}
    sources = collect_adapters(static)
    for shares_gate, name in ((True, "shared"), (False, "linear")):
        config = moelora_config(num_experts=2, num_tasks=2, rank=4, shares_gate=shares_gate)
        tensors = moelora_tensors(TINY, config, seed=9)
        import_gated(write_experts(root / "source" / name, config, tensors), root / name)
        sources += collect_adapters([root / name])
        mixes |= json.loads((root / name / "mixes.json").read_text())
        deltas |= {f"{name}:{task}": moelora_delta(config, tensors, task) for task in range(3)}
    sets, sources = load_gated_sets([*specs, root / "arrow"], TINY, sources)
    adapters = {name: load_adapter(path, TINY) for name, path in sources}
    deltas["arrow"] = arrow_delta([adapters[n] for n, _ in STATIC_RANKS], top_k=TOP_K, temperature=TEMPERATURE)
    deltas |= {"static": static_delta(STATIC, adapters), "base": None}
    return Families(adapters, sets, deltas, mixes)


def test_one_batch_of_all_families_equals_their_formulas(families: Families, rng: np.random.Generator) -> None:
    split = tiny_model()
    model = Model(split, None, adapter_slots=24, slot_rank=4)
    for name, adapter in families.adapters.items():
        model.add_adapter(name, adapter)
    model.add_gated_sets(families.sets)
    prompt = rng.integers(0, TINY.vocab, 9).tolist()
    batch = pad_batch([prompt] * len(families.deltas))
    logits = np.asarray(model.logits(batch, model.mix([families.row(name) for name in families.deltas])))
    params = params_of(split)
    base = numpy_llama.logits(TINY, params, prompt)
    for row, (name, delta) in enumerate(families.deltas.items()):
        want = numpy_llama.logits(TINY, params, prompt, delta)
        np.testing.assert_allclose(logits[row], want, atol=2e-4, err_msg=name)
        assert (np.abs(want - base).max() > 0.1) == (delta is not None), name


@pytest.mark.slow
def test_a_batch_of_all_families_gives_each_request_what_it_gets_alone(
    families: Families, rng: np.random.Generator
) -> None:
    names = ["arrow", "mola", "loramoe", "static", "base", "shared:1"]
    engine = make_engine(
        tiny_model(), families.adapters, families.sets, adapter_slots=24, max_num_seqs=6, max_num_batched_tokens=128
    )
    prompts = {name: rng.integers(0, TINY.vocab, 20 + i).tolist() for i, name in enumerate(names)}

    def mix(name: str) -> dict[str, float] | str:
        row = families.row(name)
        return row if isinstance(row, str) else {str(engine.store.id_of(n)): w for n, w in row.items()}

    alone = {name: generate(engine, prompt, mix(name)) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        engine.add_request(make_request(engine, name, prompt, mix(name)))
    together = run_to_end(engine)
    assert {name: token_ids(together[name]) for name in names} == alone
    assert len({tuple(generate(engine, prompts["base"], mix(name))) for name in names}) > 3


@pytest.mark.slow
@pytest.mark.parametrize("length", [64, 65])
def test_a_prefill_does_not_walk_experts_that_no_token_of_a_tile_chose(length: int) -> None:
    split = tiny_model()
    model = Model(split, None, adapter_slots=4, slot_rank=4)
    for i, name in enumerate(("chosen", "never")):
        model.add_adapter(name, random_adapter(TINY, rank=4, seed=i))
    sites = {(layer, p): g.in_features for layer in range(2) for g in TINY.groups.values() for p in g.projections}
    # The size of a product is never below that with zeros, which loses every time.
    gates = {site: np.stack([np.ones(width), np.zeros(width)]).astype(np.float32) for site, width in sites.items()}
    model.add_gated_sets([GatedSetWeights("s", ("chosen", "never"), "projection", 1, True, gates, is_absolute=True)])
    groups = {
        name: dataclasses.replace(g, a=g.a.at[:, 1].set(jnp.nan), b=g.b.at[:, 1].set(jnp.nan))
        for name, g in model.slots.groups.items()
    }
    model.slots = dataclasses.replace(model.slots, groups=groups)
    logits = np.asarray(model.logits(pad_batch([[5] * length]), model.mix(["s"])))
    # One tile is not compacted, so that this test sees what it is about.
    assert np.isfinite(logits).all() == (length > 64)
