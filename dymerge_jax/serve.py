"""`python -m dymerge_jax.serve`: flags to configs, then the server. No logic of its own.

Without a flag it serves the demo model with its demo adapters on http://127.0.0.1:8000.
"""

import argparse
import dataclasses
import json
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from serving.config import DTypeName, EngineConfig, SchedulerName, parse_bytes
from serving.queue_bound import DEFAULT_MAX_WAITING

if TYPE_CHECKING:  # what needs jax or transformers is imported once the flags are known to be right
    from checkpoints.loaded_model import LoadedModel
    from serving.engine import Engine
    from serving.mixes import ModelRegistry
    from serving.retrieval import PromptIndex
    from serving.server import ServerConfig

logger = logging.getLogger("dymerge_jax.serve")

DEMO = "demo"
API_KEY_VARIABLE = "DYMERGE_API_KEY"
ADMIN_API_KEY_VARIABLE = "DYMERGE_ADMIN_API_KEY"
LOG_LEVELS = ("debug", "info", "warning", "error")
_EXAMPLES = """examples:
  python -m dymerge_jax.serve
  python -m dymerge_jax.serve --model Llama-3.1-8B-Instruct --adapters adapters/ --adapters legal=lora-v7 --port 9000
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = make_parser().parse_args(arguments)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    if options.log_level == "info":  # which backends jax did not find, and what Orbax does in detail, is no news
        for name in ("jax", "absl"):
            logging.getLogger(name).setLevel(logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # only its tokenizers are used: it misses no torch
    _handle_signals(_quit)
    try:
        serve(options)
    except (ValueError, TypeError, OSError) as error:
        logger.debug("start failed", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 1


def serve(options: argparse.Namespace) -> NoReturn:
    """Loads everything, serves until it is stopped, and ends the process.

    Raises:
      ValueError, OSError: If something given is wrong or missing; the message says what and what to do.
    """
    _refuse_contradictions(options)
    config = engine_config(options)
    server_config = make_server_config(options)
    with _listen(server_config) as bound:
        try:
            embedding_model = load_embedding_model(options)
            parts = build(options, config)
            run(*parts, server_config, bound, build_retrieval(options, *parts, embedding_model))
        except RuntimeError as error:  # jax's errors, of which one is no mistake of ours: memory is full
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise ValueError(
                f"the device's memory is full ({str(error).splitlines()[0]}); lower --adapter-slots, --slot-rank, "
                "--num-blocks or --max-num-seqs, or take a smaller --retrieval-model if there is one"
            ) from error
    # Past the interpreter's own end, which frees the compiled programs one by one: six seconds for the demo on a CPU.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def build(options: argparse.Namespace, config: EngineConfig) -> "tuple[Engine, LoadedModel, ModelRegistry]":
    """Loads the model and the adapters, builds the engine with all its programs compiled, and names what it serves."""
    import jax

    from checkpoints.formats import load_model
    from checkpoints.gated_set import load_gated_sets
    from checkpoints.peft_adapter import collect_adapters
    from serving.admin import adapter_entry, read_mixes
    from serving.engine import build_engine
    from serving.mixes import GatedSetEntry, ModelRegistry, check_names

    is_demo = options.model == DEMO
    if config.dtype is None and is_demo:
        config = dataclasses.replace(config, dtype="float32" if jax.default_backend() == "cpu" else "bfloat16")
    specs, folders = adapters_and_gated_sets(options, config)
    adapters = collect_adapters(specs)
    loaded = load_model(options.model, dtype=config.dtype, progress=True)
    gated_sets, adapters = load_gated_sets(folders, loaded.config, adapters)
    base_name = options.served_model_name or loaded.name
    mixes = {} if options.mixes is None else read_mixes(Path(options.mixes), [name for name, _ in adapters])
    check_names([base_name, *(name for name, _ in adapters), *(s.name for s in gated_sets), *mixes])  # before compiling
    engine = build_engine(loaded, adapters, gated_sets, config)
    registry = ModelRegistry(
        base_name,
        options.model,
        [adapter_entry(adapter) for adapter in engine.store.adapters],
        [GatedSetEntry(s.name, s.experts, folder) for s, folder in zip(gated_sets, folders, strict=True)],
        mixes,
        num_slots=config.adapter_slots,
        slot_rank=config.slot_rank,
    )
    return engine, loaded, registry


def load_embedding_model(options: argparse.Namespace) -> "LoadedModel | None":
    """The model that embeds prompts, if it is not to be the served one: before the engine counts the memory left."""
    from checkpoints.formats import load_model

    return None if options.retrieval_model is None else load_model(options.retrieval_model, progress=True)


def build_retrieval(
    options: argparse.Namespace,
    engine: "Engine",
    loaded: "LoadedModel",
    registry: "ModelRegistry",
    embedding_model: "LoadedModel | None" = None,
) -> "PromptIndex | None":
    """The index from which adapters are found for a prompt; None where no adapter has examples.

    Args:
      embedding_model: embeds in place of the served model.

    Raises:
      ValueError, OSError: If a file of examples cannot be used, or names an adapter that there is not.
    """
    from dymerge_jax.example_lines import read_prompts_by_adapter
    from dymerge_jax.model import model_from_params
    from serving.retrieval import build_index

    given = {} if options.retrieval_examples is None else read_prompts_by_adapter(Path(options.retrieval_examples))
    unknown = [name for name in given if name not in registry.adapters]
    if unknown and not options.adapter_root:
        raise ValueError(
            f"--retrieval-examples {options.retrieval_examples} names {', '.join(map(repr, unknown[:10]))}, not "
            "loaded; add --adapters"
        )
    folders = {name: Path(adapter.root) for name, adapter in registry.adapters.items()}
    if embedding_model is None:
        return build_index(loaded.tokenizer, engine.model, folders, given, is_wanted=options.retrieval)
    model = model_from_params(embedding_model.config, embedding_model.params)
    return build_index(embedding_model.tokenizer, model, folders, given, is_wanted=True)


def adapters_and_gated_sets(options: argparse.Namespace, config: EngineConfig) -> tuple[list[str], list[str]]:
    """What is given, or the demo's own with the demo model.

    Returns:
      Adapters, as `collect_adapters` takes them; folders of gated sets.
    """
    from dymerge_jax.demo import demo_adapters, demo_gated_sets

    specs, folders = options.adapters, options.gated_sets or []
    if specs is not None or options.model != DEMO or not config.adapter_slots:
        return specs or [], folders
    # The experts of its gated sets are its adapters: with others they would be loaded beside them, unasked.
    return [str(path) for path in demo_adapters()], folders or [str(path) for path in demo_gated_sets()]


def keep_compiled_programs() -> None:
    """Lets the next start take its programs from a folder: JAX_COMPILATION_CACHE_DIR, or one below the user's caches.

    For this process as a whole and before jax is imported, which reads its environment then.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(caches / "dymerge_jax" / "xla"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


def run(
    engine: "Engine",
    loaded: "LoadedModel",
    registry: "ModelRegistry",
    server_config: "ServerConfig",
    bound: socket.socket,
    retrieval: "PromptIndex | None" = None,
) -> None:
    """Serves on a bound socket until it is stopped."""
    from serving.async_engine import AsyncEngine
    from serving.engine import hand_over_quickly
    from serving.metrics import CONTENT_TYPE
    from serving.prompts import PromptEncoder
    from serving.queue_bound import QueueBound
    from serving.retrieval import Retriever
    from serving.server import Server, create_app

    encoder = PromptEncoder(loaded.tokenizer, vocab=loaded.config.vocab, max_model_len=engine.max_model_len)
    metrics = engine.metrics
    queue_bound = QueueBound(server_config.max_waiting, lambda count: metrics.observe_refused("queue_full", count))
    async_engine = AsyncEngine(engine, queue_bound)
    hand_over_quickly()
    retriever = None if retrieval is None else Retriever(retrieval, async_engine)
    app = create_app(
        async_engine, registry, encoder, lambda: (metrics.render(), CONTENT_TYPE), server_config, metrics, retriever
    )  # fmt: skip
    port = bound.getsockname()[1]

    def announce() -> None:
        print(welcome(registry, server_config, port, has_chat=bool(getattr(loaded.tokenizer, "chat_template", None))))
        sys.stdout.flush()

    server = Server(app, async_engine, server_config, announce)
    _handle_signals(_interrupt)
    try:
        server.run(sockets=[bound])
    except KeyboardInterrupt:  # uvicorn raises the signal again once everything has ended
        logger.info("stopped")
    if not async_engine.stop():
        logger.warning("a step of the engine is still running; ending without it")
    engine.close()


def welcome(registry: "ModelRegistry", config: "ServerConfig", port: int, *, has_chat: bool) -> str:
    """What a user sees when the server is ready: its address, its names and one request to paste."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{'127.0.0.1' if config.host in ('0.0.0.0', '::') else host}:{port}"
    names = list(registry.adapters)
    mix = {"sign": 1.0, "reverse": 1.0, "echo": -0.5} if {"sign", "reverse", "echo"} <= set(names) else {}
    mix = mix or dict(zip(names, (0.7, 0.3), strict=False))
    prompt = "Items: lamp, river, stone"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if has_chat else {"prompt": prompt}
    body |= {"adapter_mix": mix, "temperature": 0, "max_tokens": 32}
    route = "/v1/chat/completions" if has_chat else "/v1/completions"
    key = "" if config.api_key is None else f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"'
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return (
        f"\nServing {registry.base_name} on {url} with {len(names)} adapters: {shown or 'none'}\n"
        f"Try:\n  curl {url}{route}{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}\n"
    )


def _listen(config: "ServerConfig") -> socket.socket:
    from serving.server import listen

    try:
        return listen(config.host, config.port)
    except OSError as error:
        raise OSError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}; choose another --port or "
            "--host"
        ) from error


def _handle_signals(handler: Callable[[int, FrameType | None], object]) -> None:
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, handler)


def _quit(signal_number: int, frame: FrameType | None) -> NoReturn:
    """While loading there is nothing to save, and an exception would wait for the compiler's threads."""
    os.write(2, b"\nstopped while starting\n")
    os._exit(130)


def _interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
    _handle_signals(_leave)  # `uv run`, for one, passes on a Ctrl-C that its child has had from the terminal
    raise KeyboardInterrupt


def _leave(signal_number: int, frame: FrameType | None) -> NoReturn:
    """While everything is closed, after the last request has ended."""
    os._exit(0)


def _refuse_contradictions(options: argparse.Namespace) -> None:
    for name in ("retrieval_examples", "retrieval_model"):
        if options.retrieval is False and (given := getattr(options, name)) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} {given} is given with --no-retrieval, which finds no adapters for a "
                "prompt; leave out one of the two"
            )


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The engine's settings as given by flags."""
    names = [field.name for field in dataclasses.fields(EngineConfig) if hasattr(options, field.name)]
    return EngineConfig(**{name: getattr(options, name) for name in names})


def make_server_config(options: argparse.Namespace) -> "ServerConfig":
    """The server's settings as given by flags and environment."""
    from serving.server import ServerConfig

    key = os.environ.get(API_KEY_VARIABLE) if options.api_key is None else options.api_key
    admin_key = os.environ.get(ADMIN_API_KEY_VARIABLE) if options.admin_api_key is None else options.admin_api_key
    return ServerConfig(
        host=options.host,
        port=options.port,
        api_key=key,
        admin_api_key=admin_key,
        adapter_roots=tuple(options.adapter_root or ()),
        max_waiting=options.max_waiting,
        drain_s=options.drain_s,
    )


def make_parser() -> argparse.ArgumentParser:
    """The command line; the engine's defaults are those of `EngineConfig`."""
    parser = argparse.ArgumentParser(
        prog="python -m dymerge_jax.serve",
        description="Serves a Llama-architecture model with LoRA adapters, a different mix of them in every request,\n"
        "by OpenAI's HTTP API.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_model_flags(parser)
    _add_engine_flags(parser)
    _add_server_flags(parser)
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and adapters")
    group.add_argument(
        "--model",
        default=DEMO,
        metavar="PATH",
        help="'demo', a Hugging Face Llama directory, a .gguf file or an Orbax store (default: demo)",
    )
    group.add_argument(
        "--adapters",
        action="append",
        metavar="SPEC",
        help="a PEFT LoRA folder, a folder of such folders, or NAME=FOLDER; may be repeated (default: the demo's "
        "adapters with the demo model, none with another)",
    )
    group.add_argument(
        "--gated-sets",
        action="append",
        metavar="FOLDER",
        help="a folder with gated_set.json and gate.safetensors; may be repeated; one of kind xlora doubles the "
        "programs to compile, and its requests' KV blocks (default: the demo's with the demo model and its adapters, "
        "none otherwise)",
    )
    group.add_argument(
        "--mixes",
        metavar="FILE",
        help='a JSON file of named mixes, {"legal-french": {"legal": 0.7, "french": 0.3}}, each of which requests may '
        "give as model (default: none)",
    )
    group.add_argument(
        "--retrieval-examples",
        metavar="FILE",
        help='JSON lines {"adapter": "legal", "prompt": "..."}: what prompts for each adapter look like, from which '
        '"adapter_mix": "auto" finds the adapters of a request; they count in place of the examples.jsonl in the '
        "adapter's folder (default: those files alone)",
    )
    group.add_argument(
        "--retrieval-model",
        metavar="PATH",
        help="another model that compares prompts with examples, given as --model is; a small one disturbs the steps "
        "of a large served model less, and takes memory of its own (default: the served model, with half its layers)",
    )
    group.add_argument(
        "--retrieval",
        action=argparse.BooleanOptionalAction,
        help="find adapters by example prompts; --retrieval also where only adapters that are loaded later over HTTP "
        "have some, --no-retrieval never (default: if an adapter has some at the start)",
    )
    group.add_argument(
        "--adapter-root",
        action="append",
        metavar="FOLDER",
        help="allow /v1/load_lora_adapter to load adapters below this folder; may be repeated (default: none, loading "
        "over HTTP is refused)",
    )
    group.add_argument(
        "--served-model-name", metavar="NAME", help="what requests call the base model (default: its folder's name)"
    )
    group.add_argument(
        "--dtype",
        choices=get_args(DTypeName),
        default=EngineConfig.dtype,
        help="dtype of weights and KV cache (default: the checkpoint's own; for the demo float32 on a CPU and bfloat16 "
        "on a GPU)",
    )


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")

    def add(
        flag: str, field: str, kind: Callable[[str], object], metavar: str, text: str, default: str = "%(default)s"
    ) -> None:
        group.add_argument(
            flag,
            dest=field,
            type=kind,
            metavar=metavar,
            default=getattr(EngineConfig, field),
            help=f"{text} (default: {default})",
        )

    add("--adapter-slots", "adapter_slots", int, "N", "slots of the device's adapter array; 0 serves the base only")
    add("--slot-rank", "slot_rank", int, "N", "rank rows of a slot; an adapter of rank r takes ceil(r / N) slots")
    add(
        "--adapter-host-bytes", "adapter_host_bytes", _size, "SIZE",
        "host memory for adapters that are not in slots, such as 8GiB; those beyond it are read again from disk",
        "a quarter of the machine's memory",
    )  # fmt: skip
    add("--max-num-seqs", "max_num_seqs", int, "N", "requests that run at once; more wait")
    add(
        "--max-model-len", "max_model_len", int, "N", "most tokens of a prompt and its answer together",
        "the model's own, or what fits into the KV blocks",
    )  # fmt: skip
    add("--max-num-batched-tokens", "max_num_batched_tokens", int, "N", "most tokens of one step")
    add(
        "--decode-steps", "decode_steps", int, "N",
        "tokens of a request that one dispatch computes while nothing waits and all requests are greedy: less of the "
        "host's time a token, and tokens come N at a time",
        "4 on a GPU for a model of less than 6 GB, which the host would slow down, else 1",
    )  # fmt: skip
    add("--block-size", "block_size", int, "N", "tokens of a KV block, a power of two")
    group.add_argument(
        "--prefix-cache",
        dest="enable_prefix_cache",
        action=argparse.BooleanOptionalAction,
        default=EngineConfig.enable_prefix_cache,
        help="let a request share the KV blocks of a prompt that began alike with the same mix (default: on)",
    )
    add("--num-blocks", "num_blocks", int, "N", "KV blocks", "what the device's memory allows")
    group.add_argument(
        "--scheduler",
        choices=get_args(SchedulerName),
        default=EngineConfig.scheduler,
        help="who runs next: lag (fewest adapters to load first, bounded by --theta), fifo, random or least-first "
        "(default: %(default)s)",
    )
    add("--theta", "theta_s", float, "SECONDS", "lag: whoever has waited this long goes first; 0 is fifo")
    add("--scheduler-seed", "scheduler_seed", int, "N", "seed of --scheduler random")


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default: %(default)s)")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"ask for this key on every route but /health; also read from {API_KEY_VARIABLE}, which other users of "
        "the machine cannot see (default: no key)",
    )
    group.add_argument(
        "--admin-api-key",
        metavar="KEY",
        help="ask for this key on the routes that change the server (loading and unloading adapters, mixes); it opens "
        f"all others too; also read from {ADMIN_API_KEY_VARIABLE} (default: the key of --api-key; without that, these "
        "routes answer only to clients on this machine that call it by a loopback address)",
    )
    group.add_argument(
        "--max-waiting",
        type=int,
        default=DEFAULT_MAX_WAITING,
        metavar="N",
        help="requests that may wait for their first token; more are refused with 429 and Retry-After (default: "
        "%(default)s)",
    )
    group.add_argument(
        "--drain-s",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="time that running requests get to end after Ctrl-C; a second Ctrl-C ends at once (default: %(default)s)",
    )
    group.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="(default: %(default)s)")


if __name__ == "__main__":
    keep_compiled_programs()
    sys.exit(main())
