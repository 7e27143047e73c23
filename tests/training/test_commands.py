"""`python -m dymerge_jax.train` from files to a folder that is served."""

import dataclasses
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import dymerge_jax as dm
from checkpoints.peft_adapter import load_adapter
from dymerge_jax.config import named_config
from dymerge_jax.retrieval import is_auto_name
from dymerge_jax.train.__main__ import main, make_parser
from dymerge_jax.train.commands import CURVE
from dymerge_jax.train.work_folder import StepRecord, read_losses, work_path
from tests.support.tiny_checkpoints import write_adapter, write_tiny_llama

ROOT = Path(__file__).parents[2]
TINY = dataclasses.replace(named_config("tiny"), num_layers=1, eos_token_ids=(2,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, data, and two adapters."""
    root = tmp_path_factory.mktemp("training")
    write_tiny_llama(root / "model", config=TINY)
    lines = [{"prompt": f"{i}", "completion": "abab"} for i in range(16)]
    (root / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for seed, name in enumerate(("a", "b")):
        write_adapter(root / name, TINY, rank=4, alpha=8, seed=seed)
    return root


def train(command: str, folder: Path, out: str, *flags: str) -> int:
    files = ["--model", folder / "model", "--data", folder / "data.jsonl", "--out", folder / out]
    return main([command, *map(str, files), "--quiet", "--batch-size", "4", *flags])


def losses(out: Path) -> list[StepRecord]:
    return read_losses(out / "losses.jsonl")


@pytest.mark.slow
def test_an_adapter_is_trained_beside_its_mates_and_served(folder: Path) -> None:
    flags = ["--steps", "40", "--lr", "2e-2", "--rank", "4", "--targets", "q_proj,v_proj,down_proj"]
    flags += ["--mates", f"m={folder / 'a'}:-0.5"]
    assert train("adapter", folder, "adapter", *flags) == 0
    out = folder / "adapter"
    assert losses(out)[-1].loss < 0.1 * losses(out)[0].loss
    assert (out / CURVE).read_bytes().startswith(b"\x89PNG")
    assert not work_path(out).exists()
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 16.0, "LORA")
    assert config["target_modules"] == ["q_proj", "v_proj", "down_proj"]
    weights = load_adapter(out, TINY)
    assert {(w.rank, w.scale) for w in weights.projections.values()} == {(4, 4.0)}

    model = dm.load(folder / "model", adapters=[out, f"m={folder / 'a'}"], adapter_slots=2, progress=False)
    generate = dm.make_generate(model, max_new_tokens=8)
    together, alone = generate(model.tokenize(["3", "5"]), model.mix([{"adapter": 1.0, "m": -0.5}, {}])).tokens
    assert model.tokenizer.decode(np.asarray(together)[:4]) == "abab"
    assert model.tokenizer.decode(np.asarray(alone)[:4]) != "abab"


@pytest.mark.slow
def test_two_runs_have_the_same_bits_and_another_seed_has_others(folder: Path) -> None:
    for name, seed in (("one", "7"), ("two", "7"), ("three", "8")):
        assert train("adapter", folder, name, "--steps", "4", "--seed", seed) == 0
    one, two, three = ((folder / name / "adapter_model.safetensors").read_bytes() for name in ("one", "two", "three"))
    assert one == two
    assert one != three
    assert losses(folder / "one") == losses(folder / "two")


@pytest.mark.slow
def test_a_killed_process_goes_on_to_the_same_bits(folder: Path) -> None:
    flags = ["--steps", "300", "--checkpoint-every", "5", "--save-dtype", "float16"]
    assert train("adapter", folder, "whole", *flags) == 0
    arguments = ["adapter", "--model", folder / "model", "--data", folder / "data.jsonl", "--out", folder / "killed"]
    command = [sys.executable, "-m", "dymerge_jax.train", *map(str, arguments), "--quiet", "--batch-size", "4", *flags]
    checkpoints = work_path(folder / "killed") / "checkpoints"
    deadline = time.monotonic() + 300
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            while not (checkpoints.is_dir() and any(p.name.isdigit() for p in checkpoints.iterdir())):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            process.kill()
        assert process.wait() == -signal.SIGKILL
    assert not (folder / "killed").exists(), "it was killed after its end; give it more steps"
    assert train("adapter", folder, "killed", *flags) == 0
    for file in ("adapter_model.safetensors", "losses.jsonl"):
        assert (folder / "killed" / file).read_bytes() == (folder / "whole" / file).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--balance", "0.01"), ("--granularity", "projection", "--top-k", "1")])
def test_a_gate_is_trained_over_adapters_and_served_as_a_model(folder: Path, flags: Sequence[str]) -> None:
    for i, name in enumerate(("x", "y")):
        answer = {"prompt": "say", "completion": "abab" if i == 0 else "cdcd"}
        (folder / f"{name}.jsonl").write_text(json.dumps(answer | {"prompt": name}) + "\n")
        if not (folder / name).exists():
            own = ["--data", str(folder / f"{name}.jsonl"), "--steps", "40", "--lr", "2e-2", "--batch-size", "1"]
            assert train("adapter", folder, name, *own) == 0
    both = folder / "both.jsonl"
    both.write_text((folder / "x.jsonl").read_text() + (folder / "y.jsonl").read_text())
    out = f"gated-{len(flags)}"
    experts = ["--adapters", f"x={folder / 'x'}", f"y={folder / 'y'}", "--data", str(both), "--batch-size", "2"]
    assert train("gate", folder, out, "--steps", "60", "--lr", "3e-2", "--name", "skills", *experts, *flags) == 0
    assert losses(folder / out)[-1].loss < 0.5 * losses(folder / out)[0].loss

    model = dm.load(folder / "model", adapters=[], gated_sets=[folder / out], adapter_slots=4, progress=False)
    assert model.gated_set_names == ("skills",)
    generated = dm.make_generate(model, max_new_tokens=8)(model.tokenize(["x", "y"]), model.mix(["skills"] * 2))
    assert model.detokenize(generated) == ["abab", "cdcd"]


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("adapter", ["--rank", "0"], "rank is 0; expected at least 1"),
        ("adapter", ["--alpha", "nan"], "alpha is nan; expected a finite number that is not 0"),
        ("adapter", ["--steps", "0"], "steps is 0; expected at least 1"),
        ("adapter", ["--targets", "qkv"], "target 'qkv' is unknown"),
        ("adapter", ["--max-len", "9999"], "max_len is 9999; the model's context is 512 tokens"),
        ("adapter", ["--mates", "m=nowhere:1"], "nowhere does not exist"),
        ("adapter", ["--mates", "m={root}/a:x"], "has weight 'x'; expected NAME=FOLDER:WEIGHT with a finite number"),
        ("adapter", ["--mates", "m={root}/a:1e300"], "has weight '1e300'; expected NAME=FOLDER:WEIGHT with a finite"),
        ("adapter", ["--mates", "m={root}/a", "m={root}/b"], "mates named twice: m"),
        ("adapter", ["--data", "nowhere"], "data file 'nowhere' does not exist"),
        ("adapter", ["--out", "{root}/a"], "exists; give --out a folder that does not exist yet"),
        ("gate", ["--adapters", "{root}/a"], "got 1 adapters; a gate chooses among at least 2"),
        ("gate", ["--adapters", "x={root}/a", "y={root}/b/../a", "{root}/b"], "adapters of one folder: x, y ("),
        ("gate", ["--adapters", "{root}/a", "{root}/b", "--name", "auto:2"], "the set's name is 'auto:2', which no"),
        ("gate", ["--adapters", "{root}/a", "{root}/b", "--out", "{root}/auto"], "the set's name is 'auto', which no"),
        ("gate", ["--adapters", "{root}/a", "{root}/b", "--top-k", "3"], "top_k is 3; expected 1 to 2 adapters"),
        (
            "gate",
            ["--adapters", "{root}/a", "{root}/b", "--balance", "1", "--granularity", "projection"],
            "balance is 1.0, which is for one gate a layer",
        ),
        (
            "gate",
            ["--adapters", "{root}/a", "{root}/b", "--top-k", "1", "--renormalize"],
            "top_k 1 renormalised is weight 1 whatever the gate says",
        ),
    ],
)
def test_wrong_arguments_are_told_and_leave_nothing(
    command: str, flags: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.iterdir())
    assert train(command, folder, "refused", *(flag.format(root=folder) for flag in flags)) == 1
    assert message in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("name", ["auto", "auto:", "auto:2:softmax", "auto:x"])
def test_names_that_the_server_keeps_for_itself_are_known_to_training(name: str) -> None:
    assert is_auto_name(name)


@pytest.mark.parametrize("name", ["automatic", "Auto", "an-auto", ""])
def test_other_names_are_free(name: str) -> None:
    assert not is_auto_name(name)


def test_the_commands_of_readme_are_commands() -> None:
    section = re.search(r"^## Train an adapter\n(.*?)^## ", (ROOT / "README.md").read_text(), re.M | re.S)
    assert section is not None
    commands = re.findall(r"^(?:uv run )?python -m dymerge_jax\.train (.*)$", section[1], re.M)
    assert len(commands) == 2
    for command in commands:
        make_parser().parse_args(shlex.split(command))
