"""Every command of README is run, here or by .ci/run, and every name in it exists."""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import dymerge_jax.quality.__main__ as quality
import dymerge_jax.train.__main__ as train
from dymerge_jax.serve import make_parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
START_TIMEOUT_S = 300

SERVE = "pip install uv && uv run python -m dymerge_jax.serve"
TEST = (
    "python3.12 -m venv .venv-test && .venv-test/bin/pip install --no-deps -r requirements.lock && "
    ".venv-test/bin/python -m pytest -n 2"
)
HOT_LOADING = "curl http://127.0.0.1:8000/v1/load_lora_adapter "
ADAPTER_ROOT = ("--adapter-root", "dymerge_jax/demo/adapters")
GPU_SERVE = "uv run --extra cuda13 python -m dymerge_jax.serve"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def _pinned(package: str) -> str:
    pins = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    return re.findall(rf"^{package}==(\S+)", pins, re.MULTILINE)[0]


def test_every_command_block_is_one_that_is_checked() -> None:
    serve, curl, auto, gpu_serve, hot_loading, test, plugin = (block.strip() for block in _blocks("bash"))
    assert serve == SERVE
    for block in (curl, auto):
        assert block.startswith("curl http://127.0.0.1:8000/v1/chat/completions ")
    assert gpu_serve.startswith(GPU_SERVE)
    assert hot_loading.startswith(HOT_LOADING)
    assert test == TEST
    version = _pinned("jax")
    assert plugin == (
        f".venv-test/bin/pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"
    )  # fmt: skip


@pytest.mark.parametrize(
    "start",
    ["python3.12 -m venv .venv-test &&", "pip install uv && uv run", ".venv-test/bin/pip install --no-deps jax-cuda13"],
)
def test_ci_takes_the_command_from_readme(start: str) -> None:
    assert f"readme_line '{start}" in CI
    assert sum(line.startswith(start) for line in README.splitlines()) == 1


def test_the_command_for_a_gpu_has_flags_and_an_extra_that_exist() -> None:
    block = next(block for block in _blocks("bash") if block.startswith(GPU_SERVE))
    options = make_parser().parse_args(shlex.split(block.removeprefix(GPU_SERVE)))
    assert options.adapters == ["adapters/", "legal=lora-v7"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"cuda12", "cuda13", "demo", "test", "compose", "bench", "dev"} == set(project["optional-dependencies"])


def test_every_flag_that_readme_names_exists() -> None:
    flags = set(re.findall(r"`(--[a-z-]+)", README))
    known = {"--extra"}  # uv's
    for parser in (make_parser(), train.make_parser(), quality.make_parser()):
        known |= _flags(parser)
    assert flags <= known


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    """The flags of a command and of those below it."""
    flags = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            flags |= set().union(*map(_flags, action.choices.values()))
    return flags


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_lock_satisfies_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["demo"]]
    names = [re.split(r"[<>=\[ ]", requirement)[0] for requirement in wanted]
    assert not [name for name in names if not _pinned(name)]


@pytest.mark.slow
def test_the_python_block_runs_as_it_stands() -> None:
    (block,) = _blocks("python")
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    (text,) = names["text"]  # pyright: ignore[reportGeneralTypeIssues]
    assert isinstance(text, str)
    assert text


@pytest.fixture
def demo_server(tmp_path: Path) -> Iterator[str]:
    """URL of a demo server started as README does, with the interpreter of the tests, a free port and README's root."""
    log = tmp_path / "log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "dymerge_jax.serve", "--port", "0", *ADAPTER_ROOT]
        server = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield _wait_for_url(server, log)
    finally:
        server.terminate()
        server.wait(timeout=60)


def _wait_for_url(server: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(START_TIMEOUT_S):
        served = re.search(r"^Serving .* on (http\S+) ", log.read_text(encoding="utf-8"), re.MULTILINE)
        if served:
            return served[1]
        try:
            server.wait(timeout=1)
        except subprocess.TimeoutExpired:
            continue
        break
    raise AssertionError(f"the server did not start:\n{log.read_text(encoding='utf-8')}")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_commands_answer_with_the_mixed_behaviour(demo_server: str) -> None:
    def answer_to(block: str) -> str:
        command = ["bash", "-ec", block.replace("http://127.0.0.1:8000", demo_server)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout

    mixed, auto = [block for block in _blocks("bash") if block.startswith("curl ") and "/chat/" in block.split("\n")[0]]
    assert "stone, river, lamp -- Nova" in answer_to(mixed)
    for model in ("auto:1", "demo-gated"):
        answer = json.loads(answer_to(auto.replace("auto:1", model)))
        assert answer["choices"][0]["message"]["content"] == '["lamp", "river", "stone"]'
    hot_loading = next(block for block in _blocks("bash") if block.startswith(HOT_LOADING))
    answer = answer_to(hot_loading)
    parts = (
        "added successfully",
        '"name":"signed"',
        "stone, river, lamp -- Nova",
        '"deleted":true',
        "removed successfully",
    )
    assert [answer.index(part) for part in parts] == sorted(answer.index(part) for part in parts)
    assert " ".join(ADAPTER_ROOT) in README
