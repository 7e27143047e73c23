"""Reads LoRA adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors.

The tensors decide which projections are adapted; target_modules and exclude_modules only tell how they were chosen.
Everything is checked on the config and the tensors' header before any tensor is read, and a tensor that nothing would
use refuses the adapter: it is never half-loaded. A tokenizer saved with an adapter is not used (the base model's is),
and the log says so; saved token embeddings refuse the adapter, even if they equal the base model's.
"""

import dataclasses
import hashlib
import logging
import re
from pathlib import Path

import numpy as np

from checkpoints.errors import CheckpointError, MissingFileError, refuse_if
from checkpoints.files import FLOAT_DTYPES, SafetensorsReader, TensorInfo, open_safetensors, read_json
from checkpoints.lora_config import LoraConfig, read_lora_config
from dymerge_jax.config import PROJECTIONS, LlamaConfig
from dymerge_jax.lora import AdapterWeights, ProjectionWeights

_log = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_BLOCK_OF = {name: "self_attn" if name in PROJECTIONS[:4] else "mlp" for name in PROJECTIONS}
_EXPECTED_KEYS = (
    "expected base_model.model.model.layers.<layer>.<block>.<projection>.lora_A.weight and lora_B, "
    f"with self_attn.{{{', '.join(PROJECTIONS[:4])}}} and mlp.{{{', '.join(PROJECTIONS[4:])}}}"
)
# The prefix is the model's depth inside PeftModel; an adapter's name may stand before ".weight".
_LORA_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>(?:model\.)?layers\.(?P<layer>\d{1,6})\.(?P<block>\w+)\.(?P<projection>\w+))"
    r"\.lora_(?P<side>[AB])(?:\.(?P<name>[^.]+))?\.weight"
)
_OTHER_KEYS = (
    (re.compile(r".*\.lora_magnitude_vector\b.*"), "DoRA magnitude vectors, which are not supported"),
    (re.compile(r".*\.lora_embedding_[AB]\b.*"), "LoRA on token embeddings, which is not supported"),
    (re.compile(r".*\.lora_[AB](\.[^.]+)?\.bias"), "biases of lora_B, which are not supported"),
    (re.compile(r".*\.(embed_tokens|lm_head)\..*lora_[AB]\b.*"), "LoRA on embeddings or lm_head, which is not supported"),
    (re.compile(r".*\.trainable_tokens_.*"), "trained token embeddings, which are not supported"),
)  # fmt: skip
_EMBEDDING_KEY = re.compile(r"(.*\.)?(embed_tokens|lm_head)\.(modules_to_save\.)?([^.]+\.)?weight")


@dataclasses.dataclass(frozen=True)
class AdapterInfo:
    """What an adapter's config and header say; no tensor was read.

    Attributes:
      path: its folder.
      rank: the largest rank of any projection.
      num_bytes: of all tensors as stored.
      projections: names of the adapted projections, in the model's order.
      has_tokenizer: the folder holds a tokenizer, which is not used.
    """

    path: Path
    rank: int
    num_bytes: int
    projections: tuple[str, ...]
    has_tokenizer: bool


@dataclasses.dataclass(frozen=True)
class _Projection:
    """One adapted projection: the keys of its tensors, its rank and its scale."""

    a_key: str
    b_key: str
    rank: int
    scale: float


_Site = tuple[int, str]
"""(layer, projection name)."""


def inspect_adapter(path: str | Path, config: LlamaConfig, *, max_rank: int | None = None) -> AdapterInfo:
    """Checks an adapter without reading its tensors: cheap enough for thousands at start-up.

    Args:
      path: the adapter's folder.
      config: the base model.
      max_rank: largest rank that fits the slot array; None for no limit.

    Returns:
      Its rank and size.

    Raises:
      MissingFileError: If the folder or one of its two files is missing.
      CheckpointError: If the adapter is not supported, does not fit the model or is damaged; lists every reason.
    """
    path = Path(path)
    with open_safetensors(_weights_file(path)) as reader:
        projections = _checked_projections(path, config, reader, max_rank)
        num_bytes = sum(info.num_bytes for info in reader.header.values())
    names = {projection for _, projection in projections}
    return AdapterInfo(
        path=path,
        rank=max(p.rank for p in projections.values()),
        num_bytes=num_bytes,
        projections=tuple(name for name in PROJECTIONS if name in names),
        has_tokenizer=any((path / file).is_file() for file in ("tokenizer.json", "tokenizer.model")),
    )


def load_adapter(path: str | Path, config: LlamaConfig, *, max_rank: int | None = None) -> AdapterWeights:
    """Reads an adapter to the host.

    Args:
      path: the adapter's folder.
      config: the base model.
      max_rank: largest rank that fits the slot array; None for no limit.

    Returns:
      A and B of every adapted projection, in the stored dtype, with their scales.

    Raises:
      MissingFileError: If the folder or one of its two files is missing.
      CheckpointError: If the adapter is not supported, does not fit the model, is damaged or holds NaN or infinite
        weights; lists every reason.
    """
    path = Path(path)
    with open_safetensors(_weights_file(path)) as reader:
        sites = _checked_projections(path, config, reader, max_rank)
        projections = {
            site: ProjectionWeights(a=reader.read(p.a_key), b=reader.read(p.b_key), scale=p.scale)
            for site, p in sorted(sites.items())
        }
    _refuse_non_finite(path, sites, projections)
    if any((path / file).is_file() for file in ("tokenizer.json", "tokenizer.model")):
        _log.info("adapter %s brings a tokenizer; the base model's is used instead", path)
    return AdapterWeights(projections, _content_hash(projections))


def _weights_file(path: Path) -> Path:
    """The adapter's safetensors file, its config being there too."""
    if not path.exists():
        raise MissingFileError(f"adapter path {str(path)!r} does not exist; expected a folder with {CONFIG_FILE}")
    if not path.is_dir():
        raise MissingFileError(f"adapter path {str(path)!r} is a file; expected a folder with {CONFIG_FILE}")
    if not (path / CONFIG_FILE).is_file():
        is_base = (path / "config.json").is_file()
        hint = "; it is a base model directory, not an adapter" if is_base else ""
        raise MissingFileError(f"adapter path {str(path)!r} holds no {CONFIG_FILE}{hint}")
    weights = path / WEIGHTS_FILE
    if not weights.is_file() and (path / "adapter_model.bin").is_file():
        raise CheckpointError(
            f"adapter {str(path)!r} has its weights as a pickle (adapter_model.bin), which can run code when read; "
            'convert it where you trust it: python -c "import torch, safetensors.torch as s; '
            f"s.save_file(torch.load('{path / 'adapter_model.bin'}', weights_only=True), '{weights}')\""
        )
    if not weights.is_file():
        raise MissingFileError(f"adapter path {str(path)!r} holds no {WEIGHTS_FILE}")
    return weights


def _checked_projections(
    path: Path, config: LlamaConfig, reader: SafetensorsReader, max_rank: int | None
) -> dict[_Site, _Projection]:
    """All checks that need no tensor data; every problem of config and header goes into one error."""
    lora, problems = read_lora_config(read_json(path / CONFIG_FILE))
    keys, key_problems = _sorted_keys(reader.header, config)
    problems += key_problems
    sites: dict[_Site, _Projection] = {}
    if lora is not None:
        sites, site_problems = _resolve(keys, reader.header, config, lora)
        problems += site_problems
    rank = max((p.rank for p in sites.values()), default=0)
    if max_rank is not None and rank > max_rank:
        problems.append(f"rank {rank} is above the limit of {max_rank}; raise --adapter-slots or --slot-rank")
    refuse_if(problems, f"adapter {str(path)!r}")
    return sites


@dataclasses.dataclass(frozen=True)
class _Keys:
    """The LoRA keys of a file: by site and side ("A" or "B"), and each site's module path for PEFT's patterns."""

    tensors: dict[tuple[_Site, str], str]
    modules: dict[_Site, str]


def _sorted_keys(header: dict[str, TensorInfo], config: LlamaConfig) -> tuple[_Keys, list[str]]:
    """Sorts a file's keys into sites; what belongs to none is a problem, grouped by its kind."""
    keys = _Keys({}, {})
    names: set[str | None] = set()
    groups: dict[str, list[str]] = {}
    for key, info in header.items():
        match = _LORA_KEY.fullmatch(key)
        problem = _key_problem(key, info, match, config)
        if problem is None and match is not None:
            site = (int(match["layer"]), match["projection"])
            if (site, match["side"]) in keys.tensors:
                problem = "a projection that another key names already"
            names.add(match["name"])
            keys.tensors[site, match["side"]] = key
            keys.modules[site] = match["module"]
        if problem is not None:
            groups.setdefault(problem, []).append(key)
    problems = [f"{kind}: {', '.join(sorted(found))}" for kind, found in groups.items()]
    if len(names) > 1:
        problems.append(f"tensors of several adapters in one file: {', '.join(sorted(map(str, names)))}")
    if not keys.tensors:
        problems.append(f"no LoRA tensor for this model; {_EXPECTED_KEYS}")
    return keys, problems


def _key_problem(key: str, info: TensorInfo, match: re.Match[str] | None, config: LlamaConfig) -> str | None:
    for pattern, kind in _OTHER_KEYS:
        if pattern.fullmatch(key):
            return kind
    if embedding := _EMBEDDING_KEY.fullmatch(key):
        base = (config.vocab, config.hidden)
        return f"saved {embedding[2]} of shape {info.shape} (the base model's is {base}); it is not supported"
    if match is None or _BLOCK_OF.get(match["projection"]) != match["block"]:
        return f"unexpected tensors, which nothing would use ({_EXPECTED_KEYS})"
    if int(match["layer"]) >= config.num_layers:
        return f"layers outside the model, which has {config.num_layers}"
    if info.dtype not in FLOAT_DTYPES:
        return f"dtype {info.dtype}, where {', '.join(FLOAT_DTYPES)} are supported"
    return None


def _resolve(
    keys: _Keys, header: dict[str, TensorInfo], config: LlamaConfig, lora: LoraConfig
) -> tuple[dict[_Site, _Projection], list[str]]:
    """Pairs A with B and compares their shapes with the model and with the config's ranks."""
    shapes = {
        projection: (width, group.in_features)
        for group in config.groups.values()
        for projection, width in zip(group.projections, group.widths, strict=True)
    }
    sites: dict[_Site, _Projection] = {}
    unpaired, misshaped, misranked = [], [], []
    for site, module in keys.modules.items():
        a_key, b_key = keys.tensors.get((site, "A")), keys.tensors.get((site, "B"))
        if a_key is None or b_key is None:
            unpaired.append(f"{a_key or b_key} has no lora_{'B' if a_key else 'A'}")
            continue
        rank = lora.rank(module)
        out_features, in_features = shapes[site[1]]
        a, b = header[a_key].shape, header[b_key].shape
        if (a[1:], b[:1]) != ((in_features,), (out_features,)) or len(b) != 2 or a[0] != b[1]:
            expected = f"expected ({rank}, {in_features}) and ({out_features}, {rank})"
            misshaped.append(f"{module} has lora_A {a} and lora_B {b}, {expected}")
        elif a[0] != rank:
            misranked.append(f"{module} has rank {a[0]} in its tensors but {rank} by the config (r or rank_pattern)")
        sites[site] = _Projection(a_key, b_key, rank, lora.scale(module))
    problems = [
        f"{kind}: {'; '.join(found)}"
        for kind, found in (("unpaired", unpaired), ("wrong shapes", misshaped), ("wrong ranks", misranked))
        if found
    ]
    outside = sorted(keys.tensors[key] for key in keys.tensors if not lora.has_layer(key[0][0]))
    if outside:
        problems.append(f"layers that layers_to_transform {list(lora.layers or ())} leaves out: {', '.join(outside)}")
    return sites, problems


def _refuse_non_finite(
    path: Path, sites: dict[_Site, _Projection], projections: dict[_Site, ProjectionWeights]
) -> None:
    broken = [
        key
        for site, weights in projections.items()
        for key, tensor in ((sites[site].a_key, weights.a), (sites[site].b_key, weights.b))
        if not np.isfinite(tensor).all()
    ]
    refuse_if([f"NaN or infinite weights: {', '.join(broken)}"] if broken else [], f"adapter {str(path)!r}")


def _content_hash(projections: dict[_Site, ProjectionWeights]) -> str:
    """SHA-256 over sites, shapes, scales and values as float32: equal weights hash alike whatever their dtype."""
    digest = hashlib.sha256()
    for (layer, projection), weights in sorted(projections.items()):
        digest.update(f"{layer}.{projection} {weights.a.shape} {weights.b.shape} {weights.scale!r}\n".encode())
        for tensor in (weights.a, weights.b):
            digest.update(np.ascontiguousarray(tensor, np.float32).data)
    return digest.hexdigest()
