"""Named problem shapes, shared by tests and bench."""

import dataclasses
from typing import Literal

Group = Literal["qkv", "o", "gate_up", "down"]
GROUPS: tuple[Group, ...] = ("qkv", "o", "gate_up", "down")


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Widths of a model's projections.

    Attributes:
      hidden: width of the residual stream.
      q_width: num_q_heads * head_dim.
      kv_width: num_kv_heads * head_dim.
      ffn: width of the feed-forward layer.
      num_layers: decoder layers.
    """

    hidden: int
    q_width: int
    kv_width: int
    ffn: int
    num_layers: int

    def group(self, group: Group) -> tuple[int, tuple[int, ...]]:
        """in_features and the widths of the projections of one fused group."""
        match group:
            case "qkv":
                return self.hidden, (self.q_width, self.kv_width, self.kv_width)
            case "o":
                return self.q_width, (self.hidden,)
            case "gate_up":
                return self.hidden, (self.ffn, self.ffn)
            case "down":
                return self.ffn, (self.hidden,)


def named_shapes() -> dict[str, ModelShape]:
    """The models that the engine is measured on, by name."""
    return {
        "tiny": ModelShape(hidden=64, q_width=64, kv_width=32, ffn=128, num_layers=2),
        "smollm2-135m": ModelShape(hidden=576, q_width=576, kv_width=192, ffn=1536, num_layers=30),
        "llama-3.2-1b": ModelShape(hidden=2048, q_width=2048, kv_width=512, ffn=8192, num_layers=16),
        "llama-3.2-3b": ModelShape(hidden=3072, q_width=3072, kv_width=1024, ffn=8192, num_layers=28),
        "llama-3-8b": ModelShape(hidden=4096, q_width=4096, kv_width=1024, ffn=14336, num_layers=32),
    }
