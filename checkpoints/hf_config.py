"""config.json and generation_config.json of a Llama, to LlamaConfig and back."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError, MissingFileError, refuse_if
from checkpoints.files import read_json
from checkpoints.json_values import is_int, is_number
from dymerge_jax.config import LlamaConfig, RopeConfig

_log = logging.getLogger(__name__)

_REQUIRED_INTS = {
    "vocab_size": "vocab",
    "hidden_size": "hidden",
    "intermediate_size": "ffn",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_q_heads",
}
_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_ROPE_TYPES = ("default", "llama3")


@dataclasses.dataclass(frozen=True)
class HfConfig:
    """A config.json.

    Attributes:
      llama: what the forward pass needs.
      dtype: the stated dtype ("float32", "bfloat16", "float16"), None where the file states none.
    """

    llama: LlamaConfig
    dtype: str | None


def read_hf_config(folder: Path) -> HfConfig:
    """Reads config.json and, where present, generation_config.json.

    A generation ends at every end-of-sequence id of either file. Missing optional fields get the defaults of
    transformers' LlamaConfig; both spellings of rope and dtype (transformers 4 and 5) are read.

    Raises:
      MissingFileError: If there is no config.json.
      CheckpointError: If it is no Llama that this project computes exactly; the message lists every reason.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise MissingFileError(f"{folder} holds no config.json, so it is no Hugging Face model directory")
    content = read_json(path)
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    fields = _Fields(content)
    _refuse_other_architectures(fields)
    values: dict[str, int] = {ours: fields.integer(theirs) for theirs, ours in _REQUIRED_INTS.items()}
    heads = max(values["num_q_heads"], 1)
    values["num_kv_heads"] = fields.integer("num_key_value_heads", default=heads)
    values["head_dim"] = fields.integer("head_dim", default=values["hidden"] // heads)
    values["max_position"] = fields.integer("max_position_embeddings", default=2048)
    epsilon = fields.number("rms_norm_eps", default=1e-6)
    is_tied = fields.boolean("tie_word_embeddings", default=False)
    rope = _read_rope(fields)
    bos = fields.token_ids("bos_token_id", content)
    eos = [*fields.token_ids("eos_token_id", content), *fields.token_ids("eos_token_id", generation)]
    refuse_if(fields.problems, str(path))
    try:
        llama = LlamaConfig(
            **values, rms_norm_eps=epsilon, rope=rope, tie_word_embeddings=is_tied,
            bos_token_id=bos[0] if bos else None, eos_token_ids=_known_ids(eos, values["vocab"], path),
        )  # fmt: skip
    except ValueError as error:
        raise CheckpointError(f"{path} is refused:\n- {error}") from error
    return HfConfig(llama, _stated_dtype(content))


def hf_config_json(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """The config.json of `config`, in transformers 5's spelling; `read_hf_config` gives `config` back."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope.theta}
    if config.rope.factor is not None:
        values = (
            config.rope.factor,
            config.rope.low_freq_factor,
            config.rope.high_freq_factor,
            config.rope.original_max_position,
        )
        rope |= {"rope_type": "llama3"} | dict(zip(_LLAMA3_FIELDS, values, strict=True))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        **{theirs: getattr(config, ours) for theirs, ours in _REQUIRED_INTS.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }


class _Fields:
    """Typed look-ups in a JSON object that gather problems instead of raising at the first."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self.problems: list[str] = []

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.content.get(name)
        if value is None and default is not None:
            return default
        if is_int(value):
            return value
        self.problems.append(f"{name} is {self._shown(name)}; an integer was expected")
        return 0

    def number(self, name: str, default: float) -> float:
        value = self.content.get(name)
        if value is None:
            return default
        if not is_number(value):
            self.problems.append(f"{name} is {value!r}; a number was expected")
            return default
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.content.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"{name} is {value!r}; true or false was expected")
        return bool(value)

    def token_ids(self, name: str, content: dict[str, Any]) -> list[int]:
        value = content.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(is_int(i) for i in ids):
            self.problems.append(f"{name} is {value!r}; an integer or a list of integers was expected")
            return []
        return ids

    def _shown(self, name: str) -> str:
        return repr(self.content[name]) if name in self.content else "missing"


def _refuse_other_architectures(fields: _Fields) -> None:
    content = fields.content
    if content.get("model_type") != "llama":
        fields.problems.append(f"model_type is {content.get('model_type')!r}; only 'llama' is supported")
    if content.get("hidden_act", "silu") not in ("silu", "swish"):
        fields.problems.append(f"hidden_act is {content['hidden_act']!r}; only 'silu' is supported")
    for name in ("attention_bias", "mlp_bias"):
        if content.get(name):
            fields.problems.append(f"{name} is {content[name]!r}; projections with a bias are not supported")
    if content.get("quantization_config"):
        method = content["quantization_config"]
        method = method.get("quant_method") if isinstance(method, dict) else method
        fields.problems.append(
            f"quantization_config is set (quant_method {method!r}); quantized weights are not supported: "
            "use the model's bfloat16 or float32 checkpoint"
        )


def _read_rope(fields: _Fields) -> RopeConfig:
    """rope_theta with rope_scaling (transformers 4), or rope_parameters (5), or both if they agree."""
    content = fields.content
    given: dict[str, dict[str, Any]] = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = content.get(name)
        if isinstance(value, dict):
            given[name] = value
        elif value is not None:
            fields.problems.append(f"{name} is {value!r}; an object or null was expected")
    types = {name: value.get("rope_type", value.get("type")) or "default" for name, value in given.items()}
    if len(set(types.values())) > 1:
        fields.problems.append(f"rope_parameters and rope_scaling disagree: {types}")
    scaling: dict[str, Any] = {}
    for value in given.values():
        scaling = value | scaling
    theta = scaling.get("rope_theta", content.get("rope_theta"))
    theta = 10_000.0 if theta is None else theta
    if not is_number(theta):
        fields.problems.append(f"rope_theta is {theta!r}; a number was expected")
        return RopeConfig()
    if scaling.get("partial_rotary_factor", content.get("partial_rotary_factor")) not in (None, 1, 1.0):
        fields.problems.append("partial_rotary_factor is not 1; rotating a part of the head is not supported")
    rope_type = next(iter(types.values()), "default")
    if rope_type not in _ROPE_TYPES:
        fields.problems.append(f"rope_type is {rope_type!r}; supported are {', '.join(_ROPE_TYPES)} and null")
        return RopeConfig()
    return _checked_rope(fields, float(theta), scaling if rope_type == "llama3" else None)


def _checked_rope(fields: _Fields, theta: float, scaling: dict[str, Any] | None) -> RopeConfig:
    values: dict[str, Any] = {}
    if scaling is not None:
        wrong = [f"{name} is {scaling.get(name)!r}" for name in _LLAMA3_FIELDS if not is_number(scaling.get(name))]
        if wrong:
            fields.problems.append(
                f"rope_type 'llama3' needs the numbers {', '.join(_LLAMA3_FIELDS)}, but {', '.join(wrong)}"
            )
            return RopeConfig()
        factor, low, high, original = (scaling[name] for name in _LLAMA3_FIELDS)
        values = {"factor": float(factor), "low_freq_factor": float(low), "high_freq_factor": float(high)}
        values["original_max_position"] = int(original)
    try:
        return RopeConfig(theta=theta, **values)
    except ValueError as error:
        fields.problems.append(str(error))
        return RopeConfig()


def _known_ids(ids: list[int], vocab: int, path: Path) -> tuple[int, ...]:
    outside = sorted({i for i in ids if not 0 <= i < vocab})
    if outside:
        _log.warning(
            "%s: eos_token_id %s is outside the vocabulary of %d and never ends a generation", path, outside, vocab
        )
    return tuple(sorted(set(ids) - set(outside)))


def _stated_dtype(content: dict[str, Any]) -> str | None:
    stated = content.get("dtype") or content.get("torch_dtype")
    return stated if stated in ("float32", "bfloat16", "float16") else None
