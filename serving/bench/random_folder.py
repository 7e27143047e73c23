"""Writes a model of random weights and its adapters as files, so that a server can be measured where no checkpoint is.

    python -m serving.bench.random_folder --shape 8b --out folder
    python -m dymerge_jax.serve --model folder/model --adapters folder/adapters --adapter-root folder/churn

The folder gets model/ (as Hugging Face lays it out), adapters/lora-0 and following, and churn/soak-churn, an adapter to
load and unload. Weights are pieces of one block of normals, at the scale of `random_model`: drawing 16 GB would take
minutes, writing them takes seconds.
"""

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from checkpoints.hf_config import hf_config_json
from checkpoints.names import HF_NAMES, expected_tensors, param_sources
from checkpoints.peft_header import Site
from checkpoints.peft_writer import adapter_config_json, write_peft_adapter
from checkpoints.writing import new_folder, safetensors_head, write_json
from dymerge_jax.config import PROJECTIONS, LlamaConfig
from serving.bench.bench_engine import EngineSpec
from serving.config import DTypeName

CHURN_ADAPTER = "soak-churn"

_BLOCK_SIZE = 8_388_593  # a prime: where a tensor repeats the block, its rows are cut from it at other places
_SHARD_BYTES = 1 << 30  # small enough that all cores write
_NORM_STD = 0.1  # around 1: norms differ, too
_B_STD = 0.3  # as `random_adapters` has it
_SPARE_BYTES = 1 << 30  # of the disk


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status is 1 if a flag is wrong or the folder cannot be written."""
    options = make_parser().parse_args(arguments)
    try:
        config = EngineSpec(shape=options.shape, dtype=options.dtype).config
        write_random_folder(
            options.out,
            config,
            dtype=options.dtype,
            num_adapters=options.adapters,
            rank=options.rank,
            seed=options.seed,
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def write_random_folder(
    out: Path, config: LlamaConfig, *, dtype: DTypeName, num_adapters: int, rank: int, seed: int = 0
) -> None:
    """Writes model/, adapters/ and churn/ into `out`; the same arguments give the same bytes.

    Args:
      out: the folder; made with its parents.
      config: shape of the model.
      dtype: of all stored tensors.
      num_adapters: in adapters/.
      rank: of each adapter.
      seed: of the weights.

    Raises:
      ValueError: If `out` holds something already, or a number is below 1.
      OSError: If the disk has too little room.
    """
    if num_adapters < 1 or rank < 1:
        raise ValueError(f"--adapters is {num_adapters} and --rank {rank}; both must be at least 1")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} exists and is not an empty folder; give a new or an empty one")
    out.mkdir(parents=True, exist_ok=True)
    itemsize = jnp.dtype(dtype).itemsize
    adapter_bytes = rank * itemsize * sum(map(sum, projection_shapes(config).values()))
    _check_room(out, config.num_params * itemsize + (num_adapters + 1) * adapter_bytes)
    rng = np.random.default_rng(seed)
    block = rng.standard_normal(_BLOCK_SIZE, np.float32)
    with new_folder(out / "model") as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        write_json(folder / "config.json", hf_config_json(config, dtype))
        write_tokenizer(folder, config.vocab)
        _write_weights(folder, config, block, rng, dtype, pool)
    start_s = time.perf_counter()
    scales = [0.5 + 0.5 * (i + 1) / num_adapters for i in range(num_adapters)]
    adapters = {out / "adapters" / f"lora-{i}": scale for i, scale in enumerate(scales)}
    adapters[out / "churn" / CHURN_ADAPTER] = 1.0

    def write(item: tuple[int, tuple[Path, float]]) -> None:
        number, (path, scale) = item
        _write_adapter(path, config, block, np.random.default_rng([seed, number]), rank=rank, scale=scale, dtype=dtype)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(write, enumerate(adapters.items())))
    total_bytes = len(adapters) * adapter_bytes
    _report(f"{len(adapters)} adapters of rank {rank}", total_bytes, time.perf_counter() - start_s)


def _check_room(out: Path, need_bytes: int) -> None:
    free_bytes = shutil.disk_usage(out).free
    if free_bytes < need_bytes + _SPARE_BYTES:
        raise OSError(
            f"--out {out} has {free_bytes / 1e9:.1f} GB free, but {need_bytes / 1e9:.1f} GB are to be written and "
            f"{_SPARE_BYTES / 1e9:.1f} GB to be left; give a folder on another disk or a smaller --shape"
        )


def _report(what: str, num_bytes: int, seconds: float) -> None:
    print(f"{what}: {num_bytes / 1e9:.2f} GB in {seconds:.1f} s", flush=True)


# Weights of the model


def _write_weights(
    folder: Path,
    config: LlamaConfig,
    block: Float[np.ndarray, " block_size"],
    rng: np.random.Generator,
    dtype: DTypeName,
    pool: ThreadPoolExecutor,
) -> None:
    """All shards at once, and their index."""
    tensors = expected_tensors(param_sources(config, HF_NAMES))
    starts = dict(zip(tensors, rng.choice(_BLOCK_SIZE, len(tensors), replace=False).tolist(), strict=True))
    moments = {name: _mean_and_std(name, shape) for name, shape in tensors.items()}
    blocks = {(mean, std): (mean + std * block).astype(jnp.dtype(dtype)) for mean, std in set(moments.values())}
    shards = split_into_shards(tensors, jnp.dtype(dtype).itemsize)
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]

    def write(file_name: str, shard: Mapping[str, tuple[int, ...]]) -> None:
        start_s = time.perf_counter()
        with (folder / file_name).open("wb") as file:
            file.write(safetensors_head(shard, dtype, {}))
            for name, shape in shard.items():
                for piece in repeated(blocks[moments[name]], starts[name], math.prod(shape)):
                    file.write(piece.view(np.uint8))
            num_bytes = file.tell()
        _report(file_name, num_bytes, time.perf_counter() - start_s)

    list(pool.map(write, files, shards))
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    total_bytes = config.num_params * jnp.dtype(dtype).itemsize
    write_json(
        folder / "model.safetensors.index.json", {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    )


def _mean_and_std(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Of a tensor's weights; matrices are [out_features, in_features], the embedding has a row for each token."""
    if name == HF_NAMES.embed:
        return 0.0, 1.0
    return (1.0, _NORM_STD) if len(shape) == 1 else (0.0, shape[1] ** -0.5)


def split_into_shards(tensors: Mapping[str, tuple[int, ...]], itemsize: int) -> list[dict[str, tuple[int, ...]]]:
    """The tensors in their order, in files of about 1 GiB; a larger tensor has a file of its own."""
    shards: list[dict[str, tuple[int, ...]]] = []
    num_bytes = _SHARD_BYTES
    for name, shape in tensors.items():
        size_bytes = math.prod(shape) * itemsize
        if num_bytes + size_bytes > _SHARD_BYTES:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = shape
        num_bytes += size_bytes
    return shards


def repeated(block: np.ndarray, start: int, size: int) -> Iterator[np.ndarray]:
    """Slices of [block_size] `block`, from `start` on and again from its beginning: `size` values in all."""
    while size:
        piece = block[start : start + size]
        yield piece
        size -= len(piece)
        start = 0


# Adapters


def projection_shapes(config: LlamaConfig) -> dict[Site, tuple[int, int]]:
    """(out_features, in_features) of every projection of every layer."""
    by_name = {
        name: (width, group.in_features)
        for group in config.groups.values()
        for name, width in zip(group.projections, group.widths, strict=True)
    }
    return {(layer, name): by_name[name] for layer in range(config.num_layers) for name in PROJECTIONS}


def _write_adapter(
    path: Path,
    config: LlamaConfig,
    block: Float[np.ndarray, " block_size"],
    rng: np.random.Generator,
    *,
    rank: int,
    scale: float,
    dtype: DTypeName,
) -> None:
    def matrix(rows: int, columns: int, std: float) -> Float[np.ndarray, "rows columns"]:
        pieces = list(repeated(block, int(rng.integers(_BLOCK_SIZE)), rows * columns))
        return np.concatenate(pieces).reshape(rows, columns) * np.float32(std)

    shapes = projection_shapes(config)
    projections = (
        (site, matrix(rank, in_features, in_features**-0.5), matrix(out_features, rank, _B_STD))
        for site, (out_features, in_features) in shapes.items()
    )
    content = adapter_config_json(rank, PROJECTIONS, None) | {"lora_alpha": rank * scale}
    write_peft_adapter(path, content, shapes, projections, dtype=dtype, metadata={})


# Tokenizer


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A tokenizer with a text of its own for every id, by which answers can be told apart.

    The first ids are ASCII characters, which any ASCII prompt is split into; id 1000 is "<1000>".
    """
    space, newline = "Ġ", "Ċ"  # as byte-level tokenizers write them
    characters = [newline, space, *(chr(code) for code in range(33, 127))]
    tokens = [*characters, *(f"<{i}>" for i in range(len(characters), vocab))][:vocab]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", settings)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m serving.bench.random_folder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", default="8b", help="8b, 1b, tiny or a named model size (default: %(default)s)")
    add("--adapters", type=int, default=64, metavar="N", help="adapters lora-0 to lora-N-1 (default: %(default)s)")
    add("--rank", type=int, default=8, metavar="N", help="rank of the adapters (default: %(default)s)")
    add(
        "--dtype", choices=get_args(DTypeName), default="bfloat16",
        help="of model and adapters; a server takes it over unless told otherwise (default: %(default)s)",
    )  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="of the weights (default: %(default)s)")
    add("--out", type=Path, required=True, metavar="FOLDER", help="new or empty folder to write into (required)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
