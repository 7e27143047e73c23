"""Reads the header of an adapter's weights: which tensors adapt which projection, and what is wrong with them."""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from checkpoints.files import FLOAT_DTYPES, TensorInfo
from checkpoints.lora_config import LoraConfig
from dymerge_jax.config import PROJECTIONS, LlamaConfig

BLOCK_OF = {name: "self_attn" if name in PROJECTIONS[:4] else "mlp" for name in PROJECTIONS}
"""The block of a layer that holds a projection."""

_EXPECTED_KEYS = (
    "expected base_model.model.model.layers.<layer>.<block>.<projection>.lora_A.weight and lora_B, "
    f"with self_attn.{{{', '.join(PROJECTIONS[:4])}}} and mlp.{{{', '.join(PROJECTIONS[4:])}}}"
)
# The prefix is the model's depth inside PeftModel; an adapter's name may stand before ".weight".
LORA_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>(?:model\.)?layers\.(?P<layer>\d{1,6})\.(?P<block>\w+)\.(?P<projection>\w+))"
    r"\.lora_(?P<side>[AB])(?:\.(?P<name>[^.]+))?\.weight"
)
_OTHER_KEYS = (
    (re.compile(r".*\.lora_magnitude_vector\b.*"), "DoRA magnitude vectors, which are not supported"),
    (re.compile(r".*\.lora_embedding_[AB]\b.*"), "LoRA on token embeddings, which is not supported"),
    (re.compile(r".*\.lora_[AB](\.[^.]+)?\.bias"), "biases of lora_B, which are not supported"),
    (re.compile(r".*\.(embed_tokens|lm_head)\..*lora_[AB]\b.*"), "LoRA on an embedding, which is not supported"),
    (re.compile(r".*\.trainable_tokens_.*"), "trained token embeddings, which are not supported"),
)  # fmt: skip
_EMBEDDING_KEY = re.compile(r"(.*\.)?(embed_tokens|lm_head)\.(modules_to_save\.)?([^.]+\.)?weight")


@dataclasses.dataclass(frozen=True)
class ProjectionSource:
    """One adapted projection: the keys of its tensors, its rank and its scale."""

    a_key: str
    b_key: str
    rank: int
    scale: float


Site = tuple[int, str]
"""(layer, projection name)."""


@dataclasses.dataclass(frozen=True)
class BaseShapes:
    """What the tensors of an adapter must fit.

    Attributes:
      num_layers: of the base model.
      projections: (out_features, in_features) by projection.
      embedding: (vocab, hidden); None if it is not known.
    """

    num_layers: int
    projections: Mapping[str, tuple[int, int]]
    embedding: tuple[int, int] | None

    @staticmethod
    def of_model(config: LlamaConfig) -> "BaseShapes":
        """Those of a base model."""
        shapes = {
            projection: (width, group.in_features)
            for group in config.groups.values()
            for projection, width in zip(group.projections, group.widths, strict=True)
        }
        return BaseShapes(config.num_layers, shapes, (config.vocab, config.hidden))

    @staticmethod
    def of_adapters(headers: Iterable[Mapping[str, TensorInfo]]) -> "BaseShapes":
        """Those that adapters of one unknown base model share: of each projection the first that is found."""
        num_layers, features = 0, {}
        for header in headers:
            for key, info in header.items():
                match = LORA_KEY.fullmatch(key)
                if match is None or match["projection"] not in BLOCK_OF or len(info.shape) != 2:
                    continue
                num_layers = max(num_layers, int(match["layer"]) + 1)
                side = match["side"]
                features.setdefault((match["projection"], side), info.shape[0 if side == "B" else 1])
        shapes = {name: (features.get((name, "B"), 0), features.get((name, "A"), 0)) for name in PROJECTIONS}
        return BaseShapes(num_layers, shapes, None)


@dataclasses.dataclass(frozen=True)
class SiteKeys:
    """The LoRA keys of a file: by site and side ("A" or "B"), and each site's module path for PEFT's patterns."""

    tensors: dict[tuple[Site, str], str]
    modules: dict[Site, str]


def sorted_keys(header: dict[str, TensorInfo], base: BaseShapes) -> tuple[SiteKeys, list[str]]:
    """Sorts a file's keys into sites; what belongs to none is a problem, grouped by its kind."""
    keys = SiteKeys({}, {})
    names: set[str | None] = set()
    groups: dict[str, list[str]] = {}
    for key, info in header.items():
        match = LORA_KEY.fullmatch(key)
        problem = _key_problem(key, info, match, base)
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


def _key_problem(key: str, info: TensorInfo, match: re.Match[str] | None, base: BaseShapes) -> str | None:
    for pattern, kind in _OTHER_KEYS:
        if pattern.fullmatch(key):
            return kind
    if embedding := _EMBEDDING_KEY.fullmatch(key):
        own = "" if base.embedding is None else f" (the base model's is {base.embedding})"
        return f"saved {embedding[2]} of shape {info.shape}{own}; it is not supported"
    if match is None or BLOCK_OF.get(match["projection"]) != match["block"]:
        return f"unexpected tensors, which nothing would use ({_EXPECTED_KEYS})"
    if int(match["layer"]) >= base.num_layers:
        return f"layers outside the model, which has {base.num_layers}"
    if info.dtype not in FLOAT_DTYPES:
        return f"dtype {info.dtype}, where {', '.join(FLOAT_DTYPES)} are supported"
    return None


def resolve_projections(
    keys: SiteKeys, header: dict[str, TensorInfo], base: BaseShapes, lora: LoraConfig
) -> tuple[dict[Site, ProjectionSource], list[str]]:
    """Pairs A with B and compares their shapes with the base model's and with the config's ranks."""
    sites: dict[Site, ProjectionSource] = {}
    unpaired, misshaped, misranked = [], [], []
    for site, module in keys.modules.items():
        a_key, b_key = keys.tensors.get((site, "A")), keys.tensors.get((site, "B"))
        if a_key is None or b_key is None:
            unpaired.append(f"{a_key or b_key} has no lora_{'B' if a_key else 'A'}")
            continue
        rank = lora.rank(module)
        out_features, in_features = base.projections[site[1]]
        a, b = header[a_key].shape, header[b_key].shape
        if (a[1:], b[:1]) != ((in_features,), (out_features,)) or len(b) != 2 or a[0] != b[1]:
            expected = f"expected ({rank}, {in_features}) and ({out_features}, {rank})"
            misshaped.append(f"{module} has lora_A {a} and lora_B {b}, {expected}")
        elif a[0] != rank:
            misranked.append(f"{module} has rank {a[0]} in its tensors but {rank} by the config (r or rank_pattern)")
        sites[site] = ProjectionSource(a_key, b_key, rank, lora.scale(module))
    problems = [
        f"{kind}: {'; '.join(found)}"
        for kind, found in (("unpaired", unpaired), ("wrong shapes", misshaped), ("wrong ranks", misranked))
        if found
    ]
    outside = sorted(keys.tensors[key] for key in keys.tensors if not lora.has_layer(key[0][0]))
    if outside:
        problems.append(f"layers that layers_to_transform {list(lora.layers or ())} leaves out: {', '.join(outside)}")
    return sites, problems
