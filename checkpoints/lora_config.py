"""adapter_config.json of a LoRA adapter: what scales it, and every reason to refuse it."""

import dataclasses
import math
import re
from typing import Any

from checkpoints.json_values import is_int, is_number

_UNSUPPORTED = {
    "use_dora": "DoRA rescales each output by a learned magnitude",
    "modules_to_save": "it replaces whole modules of the base model",
    "trainable_token_indices": "it replaces rows of the token embedding",
    "lora_bias": "lora_B has a bias",
    "fan_in_fan_out": "the base model would be stored transposed",
    "layer_replication": "it repeats layers of the base model",
    "use_qalora": "QALoRA pools its inputs",
    "alora_invocation_tokens": "activated LoRA starts in the middle of a prompt",
    "megatron_config": "Megatron layers are not Llama's",
    "target_parameters": "it adapts parameters that are no linear projection",
    "use_bdlora": "its factors are block-diagonal",
    "arrow_config": "Arrow routes between adapters",
    "kasa_config": "KaSA changes the base weights and adds a diagonal",
    "monteclora_config": "MonteCLoRA samples its weights",
    "velora_config": "VeLoRA saves tensors of its training beside A and B",
}

_KNOWN_VARIANT_FIELDS = {
    # Settings of initialisations: the forward pass is plain LoRA.
    "use_rslora", "corda_config", "eva_config", "loftq_config", "lora_ga_config", "runtime_config",
}  # fmt: skip

_NEUTRAL_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
# Their training starts from changed base weights; PEFT writes True instead once an adapter is converted back.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """What the scale and rank of each adapted module follow from.

    Attributes:
      r: rank where no pattern matches.
      alpha: lora_alpha where no pattern matches.
      use_rslora: the scale is alpha / sqrt(rank) instead of alpha / rank.
      rank_pattern, alpha_pattern: exceptions, by regular expressions on the end of a module's path; the first match
        in the file's order counts, and one that matches nothing is no error.
      layers: layers_to_transform; None for all.
    """

    r: int
    alpha: float
    use_rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    layers: frozenset[int] | None

    def rank(self, module: str) -> int:
        """Rank of a module, such as "model.layers.0.self_attn.q_proj"."""
        return _first_match(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """What the product of the module's A and B is multiplied with."""
        rank = self.rank(module)
        return _first_match(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    def has_layer(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers


def read_lora_config(content: dict[str, Any]) -> tuple[LoraConfig | None, list[str]]:
    """Parses adapter_config.json.

    Args:
      content: the file's object.

    Returns:
      The config, None if its numbers cannot be used; and every reason to refuse the adapter.
    """
    problems = _unsupported_fields(content)
    value_problems = _value_problems(content)
    if value_problems:
        return None, problems + value_problems
    layers = content.get("layers_to_transform")
    layer_list: list[int] = layers if isinstance(layers, list) else [] if layers is None else [layers]
    config = LoraConfig(
        r=content["r"],
        alpha=float(content["lora_alpha"]),
        use_rslora=bool(content.get("use_rslora")),
        rank_pattern=content.get("rank_pattern") or {},
        alpha_pattern={key: float(value) for key, value in (content.get("alpha_pattern") or {}).items()},
        layers=frozenset(layer_list) or None,
    )
    return config, problems


def _unsupported_fields(content: dict[str, Any]) -> list[str]:
    peft_type = content.get("peft_type")
    if peft_type != "LORA":
        return [f"peft_type is {peft_type!r}; only 'LORA' is supported"]
    problems = [
        f"{field} is {content[field]!r}: {why}; this is not supported"
        for field, why in _UNSUPPORTED.items()
        if content.get(field)
    ]
    if content.get("bias", "none") not in ("none", None):
        problems.append(f"bias is {content['bias']!r}; trained biases are not supported, only 'none'")
    problems += _init_problems(content.get("init_lora_weights"))
    for field, value in content.items():
        is_variant = field.startswith("use_") or field.endswith("_config")
        if value and is_variant and field not in _UNSUPPORTED and field not in _KNOWN_VARIANT_FIELDS:
            problems.append(f"{field} is {value!r}; this LoRA variant is not known")
    return problems


def _init_problems(init: Any) -> list[str]:
    name = init.lower() if isinstance(init, str) else init
    if name in _NEUTRAL_INITS:
        return []
    if isinstance(name, str) and name.startswith(_BASE_CHANGING_INITS):
        return [
            f"init_lora_weights is {init!r}, whose training changes the base weights; save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion to make it a plain one"
        ]
    return [f"init_lora_weights is {init!r}; supported are true, false, 'gaussian', 'eva', 'orthogonal' and 'mica'"]


def _value_problems(content: dict[str, Any]) -> list[str]:
    problems = []
    if not _is_rank(content.get("r")):
        problems.append(f"r is {content.get('r')!r}; a rank of at least 1 was expected")
    if not is_number(content.get("lora_alpha")):
        problems.append(f"lora_alpha is {content.get('lora_alpha')!r}; a number was expected")
    if not isinstance(content.get("use_rslora") or False, bool):
        problems.append(f"use_rslora is {content['use_rslora']!r}; true or false was expected")
    layers = content.get("layers_to_transform")
    if layers is not None and not all(map(is_int, layers if isinstance(layers, list) else [layers])):
        problems.append(f"layers_to_transform is {layers!r}; an integer or a list of integers was expected")
    for field, is_valid, what in (
        ("rank_pattern", _is_rank, "ranks of at least 1"),
        ("alpha_pattern", is_number, "numbers"),
    ):
        problems += _pattern_problems(field, content.get(field) or {}, is_valid, what)
    return problems


def _pattern_problems(field: str, pattern: Any, is_valid: Any, what: str) -> list[str]:
    if not isinstance(pattern, dict):
        return [f"{field} is {pattern!r}; an object from module patterns to {what} was expected"]
    wrong = {key: value for key, value in pattern.items() if not is_valid(value)}
    problems = [f"{field} has {wrong}; {what} were expected"] if wrong else []
    for key in pattern:
        try:
            re.compile(_pattern_regex(key))
        except re.error as error:
            problems.append(f"{field} has {key!r}, which is no regular expression ({error})")
    return problems


def _pattern_regex(key: str) -> str:
    return rf"(.*\.)?({key})$"


def _first_match[T](pattern: dict[str, T], module: str, default: T) -> T:
    for key, value in pattern.items():
        if re.match(_pattern_regex(key), module):
            return value
    return default


def _is_rank(value: object) -> bool:
    return is_int(value) and value >= 1
