"""`python -m dymerge_jax.quality train` and `run`, end to end on a tiny model."""

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dymerge_jax as dm
from checkpoints.gated_set import save_gated_set
from checkpoints.peft_adapter import load_adapter
from dymerge_jax.config import named_config
from dymerge_jax.example_lines import read_prompts
from dymerge_jax.quality.__main__ import main, make_parser
from dymerge_jax.quality.report import JSON_FILE, TABLE_FILE
from dymerge_jax.quality.training import TrainingConfig, write_examples
from dymerge_jax.quality.ways import MERGED_WAYS, PAIR_WAYS, SKILL_WAYS
from tests.support.compiles import recorded_compiles
from tests.support.tiny_checkpoints import write_adapter, write_tiny_llama

ROOT = Path(__file__).parents[2]
TINY = dataclasses.replace(named_config("tiny"), num_layers=1, eos_token_ids=(2,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, random adapters for four skills, a co-trained one and a gated set."""
    root = tmp_path_factory.mktemp("quality")
    write_tiny_llama(root / "model", config=TINY)
    for seed, name in enumerate(("echo", "json", "reverse", "sign")):
        write_adapter(root / "adapters" / name, TINY, rank=2, alpha=4, seed=seed)
        write_examples(root / "adapters" / name, name, seed=0, num=4)
    write_adapter(root / "cotrained" / "sign", TINY, rank=2, alpha=4, seed=9)
    gated = root / "gated" / "demo-gated"
    gated.mkdir(parents=True)
    gates = {(0, "layer"): np.random.default_rng(0).standard_normal((2, TINY.hidden)).astype(np.float32)}
    save_gated_set(gated, ["../../adapters/sign", "../../adapters/json"], gates, top_k=None, renormalize=False)
    return root


def run(folder: Path, out: str, *flags: str) -> int:
    files = ["--model", folder / "model", "--adapters", folder / "adapters", "--out", folder / out]
    return main(["run", *map(str, files), "--quick", "--quiet", "--search-population", "3", *flags])


def content(folder: Path, out: str) -> dict[str, Any]:
    return json.loads((folder / out / JSON_FILE).read_text())


@pytest.mark.slow
def test_every_way_is_measured_and_what_fails_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "all", "--skills", "sign", "json", "--pairs", "sign+reverse") == 0
    found = content(folder, "all")
    assert found["device"] == "cpu"
    assert found["settings"]["n"] == 4
    assert found["left_out"] == {}
    gate = "gate:demo-gated"
    ways = {tuple(r["task"]): [] for r in found["results"]}
    for r in found["results"]:
        ways[tuple(r["task"])].append(r["way"])
        assert all(0 <= s["low"] <= s["share"] <= s["high"] <= 1 and s["n"] == 4 for s in r["scores"].values())
    expected = [gate if way == "gate" else way for way in PAIR_WAYS]
    assert sorted(ways["sign", "reverse"]) == sorted(expected * 2), "each with neutral and with instructed prompts"
    assert sorted(ways[("json",)]) == sorted([gate if way == "gate" else way for way in SKILL_WAYS] * 2)
    assert {row["way"] for row in found["stream"]} == {"base", "retrieved", "arrow", gate}
    assert {row["skill"] for row in found["stream"]} == {"sign", "json", "all"}
    assert [(tuple(r["task"]), r["prompts"]) for r in found["retrieval"]][-1] == (("sign", "reverse"), "instructed")
    assert set(found["searches"]["sign+reverse"]["weights"]) == {"echo", "json", "reverse", "sign"}
    for name in ("skills.png", "pairs.png"):
        assert (folder / "all" / name).read_bytes().startswith(b"\x89PNG")

    table = (folder / "all" / TABLE_FILE).read_text()
    for way in expected:
        assert f"| {way} | 0.00 |" in table, "a random adapter answers nothing, and the row stays"
        assert f"| sign+reverse | {way} | 0.00 (0.00–0.49) |" in table
    shown = capsys.readouterr().out
    assert "| merged-cat | 0.00 |" in shown
    assert shown.endswith(f"{folder / 'all'}\n")

    # Merged by cat is the sum; other ways answer something else.
    answers = {r["way"]: r["example"]["answer"] for r in found["results"] if len(r["task"]) == 2}
    assert answers["merged-cat"] == answers["1/1"]
    assert len({*answers.values()}) > 5


@pytest.mark.slow
def test_answers_do_not_depend_on_the_rows_beside_them(folder: Path) -> None:
    ways = ["--ways", "base", "single", "1/1", "gate", "arrow", "cotrained", "--prompts", "instructed"]
    for out, size in (("together", "40"), ("apart", "3")):
        assert run(folder, out, *ways, "--skills", "sign", "--pairs", "sign+reverse", "--batch-size", size) == 0
    together, apart = content(folder, "together"), content(folder, "apart")
    assert (together["batch_size"], apart["batch_size"]) == (40, 3)
    assert together["results"] == apart["results"]
    assert len({r["example"]["answer"] for r in apart["results"]}) > 5

    model = dm.load(folder / "model", adapters=[folder / "adapters"], adapter_slots=4, slot_rank=2, progress=False)
    single = next(r for r in apart["results"] if r["way"] == "single")
    batch = model.tokenize([single["example"]["prompt"]])
    out = dm.make_generate(model, max_new_tokens=48)(batch, model.mix([{"sign": 1.0}]))
    assert model.detokenize(out)[0][:48] == single["example"]["answer"][:48]


@pytest.mark.slow
def test_training_makes_what_run_takes_and_leaves_what_is_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "trained"
    flags = ["--model", str(folder / "model"), "--out", str(out), "--quiet", "--rank", "2"]
    flags += ["--steps", "1", "--gate-steps", "1", "--skills", "sign", "reverse", "echo"]
    assert main(["train", *flags, "--batch-size", "2"]) == 0
    made = ["adapters/sign", "adapters/reverse", "adapters/echo", "cotrained/sign", "gated/demo-gated"]
    assert capsys.readouterr().out.splitlines() == [str(out / name) for name in made]
    assert load_adapter(out / "adapters" / "sign", TINY).rank == 2
    assert len(read_prompts(out / "adapters" / "sign" / "examples.jsonl", max_prompts=64)) == 24
    mates = [json.loads(line)["mates"] for line in (out / "data" / "cotrained-sign.jsonl").read_text().splitlines()]
    assert all(set(mate) <= {"reverse"} for mate in mates)
    assert len(mates) == 2
    content = json.loads((out / "gated" / "demo-gated" / "gated_set.json").read_text())
    assert content["experts"] == ["../../adapters/sign", "../../adapters/reverse"]

    before = {path: path.read_bytes() for path in out.rglob("*.safetensors")}
    (out / "adapters" / "echo" / "adapter_model.safetensors").unlink()
    (out / "adapters" / "echo").rename(out / "gone")
    assert main(["train", *flags, "--batch-size", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(out / "adapters" / "echo")]
    assert {path: path.read_bytes() for path in before} == before, "a seed gives the same adapter again"

    files = ["--model", str(folder / "model"), "--adapters", str(out / "adapters"), "--out", str(folder / "of-trained")]
    assert main(["run", *files, "--quick", "--quiet", "--skills", "sign", "--pairs", "--ways", "single", "gate"]) == 0
    found = json.loads((folder / "of-trained" / JSON_FILE).read_text())
    assert {r["way"] for r in found["results"]} == {"single", "gate:demo-gated"}


@pytest.mark.slow
def test_adapters_of_one_shape_share_what_is_compiled(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "model", config=TINY)
    flags = ["--model", str(tmp_path / "model"), "--quiet", "--no-gate", "--cotrained", "--steps", "2", "--rank", "3"]
    with recorded_compiles() as compiles:
        assert main(["train", "--out", str(tmp_path / "one"), "--skills", "sign", *flags]) == 0
        assert _of_the_loop(compiles)
        compiles.clear()
        assert main(["train", "--out", str(tmp_path / "two"), "--skills", "sign", *flags]) == 0
        assert not _of_the_loop(compiles)


def _of_the_loop(compiles: list[str]) -> list[str]:
    return [compiled for compiled in compiles if str(Path("train", "loop.py")) in compiled]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--skills", "dance"], "unknown skills: dance; expected some of echo, reverse"),
        (["--skills", "upper"], "no adapter for upper in"),
        (
            ["--pairs", "sign+count"],
            "sign and count both act on the wrap; expected skills that act on different things",
        ),
        (["--pairs", "upper+sign"], "no adapter for upper in"),
        (["--n", "0"], "n is 0; expected at least 1"),
        (["--batch-size", "0"], "batch_size is 0; expected at least 1"),
        (["--density", "0"], "density is 0.0; expected a share above 0, at most 1"),
        (["--adapters", "nowhere"], "nowhere does not exist"),
        (["--out", "{root}/model"], "exists; give a folder that does not exist yet"),
        (["--pairs", "--skills", "sign", "--ways", "1/1"], "none of the ways 1/1 is one for sign"),
    ],
)
def test_wrong_flags_of_run_are_told_and_leave_nothing(
    flags: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.iterdir())
    assert run(folder, "refused", *(flag.format(root=folder) for flag in flags)) == 1
    assert message in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--skills", "dance"], "unknown skills: dance"),
        (
            ["--skills", "sign", "--cotrained", "sign"],
            "sign cannot be co-trained without an adapter of one of its mates",
        ),
        (["--skills", "sign", "--gate"], "a gate chooses among at least 2 skills, got 1"),
        (["--skills", "sign", "--rank", "0"], "rank is 0; expected at least 1"),
        (["--skills", "sign", "--steps", "0"], "steps is 0; expected at least 1"),
        (["--skills", "sign", "--instructed", "2"], "instructed is 2.0; expected a share from 0 to 1"),
    ],
)
def test_wrong_flags_of_train_are_told_and_leave_nothing(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--out", str(tmp_path / "out"), *flags]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_commands_of_readme_are_commands() -> None:
    commands = re.findall(r"python -m dymerge_jax\.quality (\w[^`\n]*)", (ROOT / "README.md").read_text())
    assert {command.split()[0] for command in commands} == {"data", "train", "run"}
    for command in commands:
        make_parser().parse_args(shlex.split(command))


def test_by_default_all_skills_are_trained() -> None:
    config = TrainingConfig(Path())
    assert len(config.skills) == 9
    assert len(config.gate_skills) == 8
    assert config.mates("count") == ("upper", "reverse")
    assert MERGED_WAYS["merged-cat"] == "cat"
