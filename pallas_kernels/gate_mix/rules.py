"""How the logits of a gate become weights of its experts."""

from jaxtyping import Array, Int

from pallas_kernels.pytree import pytree_dataclass

NO_GATE = -1
"""In place of a set: the token has no gate here, and no expert gets a weight."""

ALL_EXPERTS = -2
"""In place of a set: the token has no gate here, and every expert has weight 1."""


@pytree_dataclass
class GateRules:
    """One rule for each gated set, or for each token that of its set.

    Attributes:
      num_experts: [num_rules] int32, at least 1; the gates of experts past it are never looked at.
      top_k: [num_rules] int32, experts that keep their weight, 1 to num_experts.
      renormalize: [num_rules] int32, 1: the kept weights are divided by their sum, else 0.
      is_absolute: [num_rules] int32, 1: an expert's logit is the size of the product, whatever its sign, else 0.
    """

    # The flags are integers, as a kernel loads them; converting them would be a launch for each site.
    num_experts: Int[Array, " num_rules"]
    top_k: Int[Array, " num_rules"]
    renormalize: Int[Array, " num_rules"]
    is_absolute: Int[Array, " num_rules"]
