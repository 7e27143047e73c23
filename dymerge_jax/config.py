"""Shape and constants of a Llama-architecture model, and the named model sizes."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, with Llama 3's frequency scaling where `factor` is not None.

    Attributes:
      theta: base of the geometric series of frequencies.
      factor: how many times longer the context became; None for no scaling.
      low_freq_factor: wavelengths above original_max_position / low_freq_factor are scaled by `factor`.
      high_freq_factor: wavelengths below original_max_position / high_freq_factor are kept.
      original_max_position: context length before scaling, in tokens.
    """

    theta: float = 10_000.0
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if self.theta <= 0:
            raise ValueError(f"rope theta is {self.theta}; it must be positive")
        if self.factor is None:
            return
        if self.factor <= 0:
            raise ValueError(f"rope factor is {self.factor}; it must be positive")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope low_freq_factor {self.low_freq_factor} and high_freq_factor {self.high_freq_factor}; "
                "expected 0 < low < high"
            )


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """A Llama-architecture model: everything its forward pass needs to know, nothing else.

    Attributes:
      vocab: rows of the token embedding.
      hidden, ffn: widths of the residual stream and of the SwiGLU.
      num_layers, num_q_heads, num_kv_heads, head_dim: attention shape; query heads share KV heads evenly.
      rms_norm_eps: added to the mean square before the root.
      rope: rotary embedding.
      max_position: longest context the model was made for, in tokens.
      tie_word_embeddings: the output matrix is the token embedding.
      bos_token_id: None where the model has none.
      eos_token_ids: every id that ends a generation.
    """

    vocab: int
    hidden: int
    ffn: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    max_position: int = 8192
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in (
            "vocab",
            "hidden",
            "ffn",
            "num_layers",
            "num_q_heads",
            "num_kv_heads",
            "head_dim",
            "max_position",
        ):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_q_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding needs an even one")

    @property
    def q_width(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def groups(self) -> dict[str, "ProjectionGroup"]:
        """The fused groups of linear projections, by name, in the order of the forward pass."""
        h, q, kv, f = self.hidden, self.q_width, self.kv_width, self.ffn
        return {
            "qkv": ProjectionGroup("qkv", h, ("q_proj", "k_proj", "v_proj"), (q, kv, kv)),
            "o": ProjectionGroup("o", q, ("o_proj",), (h,)),
            "gate_up": ProjectionGroup("gate_up", h, ("gate_proj", "up_proj"), (f, f)),
            "down": ProjectionGroup("down", f, ("down_proj",), (h,)),
        }

    @property
    def num_params(self) -> int:
        per_layer = sum(g.in_features * g.out_features for g in self.groups.values()) + 2 * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * per_layer + embeddings + self.hidden


@dataclasses.dataclass(frozen=True)
class ProjectionGroup:
    """Linear projections that read the same input and run as one matrix product.

    Attributes:
      name: "qkv", "o", "gate_up" or "down".
      in_features: width of the shared input.
      projections: Hugging Face names of the projections, in column order.
      widths: out_features of each projection.
    """

    name: str
    in_features: int
    projections: tuple[str, ...]
    widths: tuple[int, ...]

    @property
    def out_features(self) -> int:
        return sum(self.widths)


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_LLAMA3_ROPE: dict[str, Any] = {"theta": 500_000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def named_config(name: str) -> LlamaConfig:
    """One of the named sizes, for random weights: tests, benchmarks and compile checks.

    Raises:
      ValueError: If the name is unknown; the message lists the names.
    """
    sizes = {
        "tiny": LlamaConfig(
            vocab=128, hidden=64, ffn=128, num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=16, max_position=512
        ),
        "smollm2-135m": LlamaConfig(
            vocab=49152, hidden=576, ffn=1536, num_layers=30, num_q_heads=9, num_kv_heads=3, head_dim=64,
            rope=RopeConfig(theta=100_000.0), tie_word_embeddings=True,
        ),
        "llama-3.2-1b": LlamaConfig(
            vocab=128256, hidden=2048, ffn=8192, num_layers=16, num_q_heads=32, num_kv_heads=8, head_dim=64,
            rope=RopeConfig(factor=32.0, **_LLAMA3_ROPE), max_position=131072, tie_word_embeddings=True,
        ),
        "llama-3.2-3b": LlamaConfig(
            vocab=128256, hidden=3072, ffn=8192, num_layers=28, num_q_heads=24, num_kv_heads=8, head_dim=128,
            rope=RopeConfig(factor=32.0, **_LLAMA3_ROPE), max_position=131072, tie_word_embeddings=True,
        ),
        "llama-3-8b": LlamaConfig(
            vocab=128256, hidden=4096, ffn=14336, num_layers=32, num_q_heads=32, num_kv_heads=8, head_dim=128,
            rope=RopeConfig(theta=500_000.0),
        ),
        "llama-3.1-8b": LlamaConfig(
            vocab=128256, hidden=4096, ffn=14336, num_layers=32, num_q_heads=32, num_kv_heads=8, head_dim=128,
            rope=RopeConfig(factor=8.0, **_LLAMA3_ROPE), max_position=131072,
        ),
    }  # fmt: skip
    if name not in sizes:
        raise ValueError(f"no model size is named {name!r}; the names are {', '.join(sizes)}")
    return sizes[name]
