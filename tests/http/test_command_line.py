"""`python -m dymerge_jax.serve`: what it refuses at start, what it says, and how it ends."""

import contextlib
import dataclasses
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dymerge_jax import serve
from dymerge_jax.config import named_config
from dymerge_jax.serve import engine_config, main, make_parser, make_server_config, welcome
from serving.config import EngineConfig
from serving.mixes import GatedSetEntry, ModelRegistry
from serving.server import ServerConfig
from tests.http.conftest import make_entry
from tests.support.tiny_checkpoints import write_adapter, write_tiny_llama
from tests.support.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def own_signals() -> Iterator[None]:
    """`main` takes over SIGINT and SIGTERM."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny")


def refusal(capsys: pytest.CaptureFixture[str], *flags: object) -> str:
    """What main says when it refuses these flags: from "error: " on, without a traceback."""
    try:
        status = main([str(flag) for flag in flags])
    except SystemExit as end:  # argparse's way
        status = end.code
    assert status not in (0, None)
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error[error.index("error: ") :]


@pytest.mark.usefixtures("own_signals")
def test_what_is_missing_at_start_is_named(capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert str(nowhere) in refusal(capsys, "--port", 0, "--model", nowhere)
    assert str(nowhere) in refusal(capsys, "--port", 0, "--model", tiny, "--adapters", f"a={nowhere}")
    assert str(nowhere) in refusal(capsys, "--port", 0, "--model", tiny, "--adapters", nowhere)
    assert str(nowhere) in refusal(capsys, "--port", 0, "--model", tiny, "--gated-sets", nowhere)


@pytest.mark.usefixtures("own_signals")
def test_an_adapter_that_cannot_be_served_stops_the_start(
    capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path
) -> None:
    big = write_adapter(tmp_path / "big", named_config("tiny"), rank=9, alpha=9, seed=0)
    flags = ("--port", 0, "--model", tiny, "--adapters", big)
    assert "rank 9" in (text := refusal(capsys, *flags, "--slot-rank", 4, "--adapter-slots", 2))
    assert "--adapter-slots" in text


@pytest.mark.usefixtures("own_signals")
def test_two_things_of_one_name_are_refused_before_anything_is_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a", named_config("tiny"), rank=2, alpha=2, seed=0)
    monkeypatch.setattr("serving.engine.build_engine", None)
    text = refusal(capsys, "--port", 0, "--model", tiny, "--adapters", f"tiny={adapter}")
    assert "'tiny'" in text
    assert "--served-model-name" in text


@pytest.mark.usefixtures("own_signals")
def test_a_file_of_mixes_that_is_wrong_stops_the_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr("serving.engine.build_engine", None)  # found before anything is compiled
    path, adapter = (
        tmp_path / "mixes.json",
        write_adapter(tmp_path / "a", named_config("tiny"), rank=2, alpha=2, seed=0),
    )
    for content, words in (
        (None, "No such file"),
        ("{", "not valid JSON"),
        ('{"m": {"a": 1, "a": 2}}', "'a' is given more than once"),
        ("[]", "JSON object"),
        ('{"m": {"a": "1"}}', "mix 'm'.*finite number"),
        ('{"m": {"a": NaN}}', "mix 'm'.*finite number"),
        ('{"m": 3}', "mix 'm'.*expected an object"),
        ('{"m": null}', "mix 'm' is None"),
        ('{"m": {"nobody": 1}}', "mix 'm'.*'nobody'"),
        ('{"m": {}}', "mix 'm'.*no adapter"),
        ('{"tiny": {"a": 1}}', "'tiny'.*more than once"),
    ):
        if content is not None:
            path.write_text(content)
        text = refusal(capsys, "--port", 0, "--model", tiny, "--adapters", adapter, "--mixes", path)
        assert re.search(words, text), text
        assert content is None or "more than once among" in text or str(path) in text


@pytest.mark.usefixtures("own_signals")
def test_a_port_in_use_is_found_out_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port}" in refusal(capsys, "--port", port, "--model", tmp_path / "nowhere")


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--scheduler", "magic"], "--scheduler"),
        (["--theta", "-1"], "--theta"),
        (["--theta", "nan"], "--theta"),
        (["--adapter-slots", "-1"], "--adapter-slots"),
        (["--adapter-slots", "many"], "--adapter-slots"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--port", "70000"], "--port"),
        (["--drain-s", "-1"], "--drain-s"),
        (["--api-key", " "], "--api-key"),
        (["--admin-api-key", ""], "--admin-api-key"),
        (["--max-waiting", "0"], "--max-waiting"),
        (["--adapter-root", "nowhere at all"], "nowhere at all"),
        (["--no-retrieval", "--retrieval-model", "x"], "--retrieval-model x is given with --no-retr"),
        (["--no-retrieval", "--retrieval-examples", "x.jsonl"], "--retrieval-examples x.jsonl is given with --no-retr"),
        (["--dtype", "int8"], "--dtype"),
        (["--adapter", "x"], "--adapter"),
        (["extra"], "extra"),
    ],
)
def test_a_bad_flag_is_named(capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    assert words in refusal(capsys, *flags)


def test_flags_default_to_the_engines_config_and_the_key_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DYMERGE_API_KEY", raising=False)
    monkeypatch.delenv("DYMERGE_ADMIN_API_KEY", raising=False)
    options = make_parser().parse_args([])
    assert engine_config(options) == EngineConfig()
    assert not engine_config(make_parser().parse_args(["--no-prefix-cache"])).enable_prefix_cache
    assert make_server_config(options) == ServerConfig()
    monkeypatch.setenv("DYMERGE_API_KEY", "secret")
    assert make_server_config(options).api_key == "secret"
    assert make_server_config(make_parser().parse_args(["--api-key", "other"])).api_key == "other"
    monkeypatch.setenv("DYMERGE_ADMIN_API_KEY", "secret too")
    assert make_server_config(options).admin_api_key == "secret too"
    assert make_server_config(make_parser().parse_args(["--admin-api-key", "other"])).admin_api_key == "other"


def test_every_flag_tells_its_default() -> None:
    for action in make_parser()._actions:
        assert action.dest == "help" or "default:" in (action.help or ""), action.dest


def test_names_that_collide_or_experts_that_are_missing_are_refused() -> None:
    def registry(base: str, adapters: list[str], gated: dict[str, tuple[str, ...]]) -> ModelRegistry:
        entries = [make_entry(name) for name in adapters]
        sets = [GatedSetEntry(name, experts, name) for name, experts in gated.items()]
        return ModelRegistry(base, base, entries, sets, num_slots=4, slot_rank=8)

    with pytest.raises(ValueError, match=r"'a'.*--served-model-name"):
        registry("a", ["a"], {})
    with pytest.raises(ValueError, match="'b'"):
        registry("tiny", ["a", "b"], {"b": ("a",)})
    with pytest.raises(ValueError, match=r"'moe'.*'x'.*--adapters"):
        registry("tiny", ["a"], {"moe": ("a", "x")})


def test_the_welcome_shows_a_request_that_names_real_adapters() -> None:
    adapters = [make_entry(name) for name in ("echo", "reverse", "sign")]
    registry = ModelRegistry("demo", "demo", adapters, [], num_slots=64, slot_rank=8)
    text = welcome(registry, ServerConfig(host="0.0.0.0", api_key="secret"), 8000, has_chat=True)
    assert "http://127.0.0.1:8000/v1/chat/completions" in text
    assert "secret" not in text
    curl = next(line for line in text.splitlines() if "curl" in line)
    body = shlex.split(curl)[-1]
    assert '"adapter_mix": {"sign": 1.0, "reverse": 1.0, "echo": -0.5}' in body


@contextlib.contextmanager
def started(*flags: object) -> Iterator[subprocess.Popen[str]]:
    """`python -m dymerge_jax.serve` in a process of its own, which ends with the block, however that ends."""
    command = [sys.executable, "-m", "dymerge_jax.serve", "--port", "0", *map(str, flags)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # nothing, if it has ended


@contextlib.contextmanager
def serving(model: Path, *flags: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on a tiny model, and its URL."""
    sizes = ["--max-num-seqs", 2, "--max-num-batched-tokens", 16, "--max-model-len", 400, "--adapter-slots", 1]
    with started("--model", model, *sizes, *flags) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        url = next((m[0] for line in lines if (m := re.search(r"http://127.0.0.1:\d+", line))), None)
        assert url is not None, process.communicate(timeout=PATIENCE_S)
        yield process, url


def end(process: subprocess.Popen[str], signal_number: int) -> tuple[int, str]:
    """Exit status, and what it logged since."""
    process.send_signal(signal_number)
    _, log = process.communicate(timeout=PATIENCE_S)
    return process.returncode, log


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_starting_ends_at_once(tiny: Path, signal_number: int) -> None:
    with started("--model", tiny) as process:
        assert process.stderr is not None
        log = ""
        while "compiling" not in log:  # the progress bar: many programs are left
            log += (chunk := os.read(process.stderr.fileno(), 4096).decode(errors="replace"))
            assert chunk, log
        status, rest = end(process, signal_number)
    assert status == 130
    assert "stopped while starting" in rest
    assert "Traceback" not in log + rest


def stream_for_long(url: str) -> Any:
    body = {"prompt": "x", "max_tokens": 60_000, "ignore_eos": True, "stream": True}
    return httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_ends(tiny: Path, signal_number: int) -> None:
    with serving(tiny, "--drain-s", 1) as (process, url):
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE_S).status_code == 200
        status, log = end(process, signal_number)
    assert status == 0
    assert "Traceback" not in log


def test_an_interrupt_while_everything_is_closed_ends_the_process_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        serve._handle_signals(serve._interrupt)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit) as end:
            signal.raise_signal(signal.SIGTERM)
        assert end.value.code == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    # An answer so long that it cannot end between the two interrupts.
    config = dataclasses.replace(named_config("tiny"), max_position=65_536)
    model = write_tiny_llama(tmp_path / "long", config=config)
    flags = ("--max-model-len", config.max_position, "--drain-s", 10 * PATIENCE_S)
    with serving(model, *flags) as (process, url), stream_for_long(url) as response:
        assert response.status_code == 200
        next(response.iter_lines())
        process.send_signal(signal.SIGINT)
        wait_until(lambda: not accepts_connections(url))
        status, log = end(process, signal.SIGINT)
    assert status == 130
    assert "Traceback" not in log


def accepts_connections(url: str) -> bool:
    """Only that: a server that has begun to end may accept a connection and close it without an answer."""
    address = httpx.URL(url)
    try:
        socket.create_connection((address.host, address.port or 0), timeout=PATIENCE_S).close()
    except ConnectionRefusedError:
        return False
    return True
