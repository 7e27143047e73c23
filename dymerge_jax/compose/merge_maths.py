"""Merges A and B of one projection, as PEFT's `add_weighted_adapter` does where that is right. Plain numpy, float32.

With w the weight and s the scaling of an adapter, q = w s, and the result's own scaling being 1:

    cat              A = rows q A_i, B = columns B_i; the sum of q B_i A_i, exact
    svd              the best approximation of that sum of a given rank; the default rank is the adapters' largest
    linear           A = Σ sign(q) √|q| A_i, B = Σ √|q| B_i; the sign on A only, so that B A has it
    magnitude_prune  linear of what is left of A_i and B_i when each keeps its int(density · size) largest numbers
    dare_linear      linear of A_i and B_i, each number kept with probability density and then divided by it
    ties             prunes as magnitude_prune; every number's sign is elected by the adapters, those that have it are
                     averaged with their factors ±√|q|, divided by how many they are
    dare_ties        the same, pruned as dare_linear

All but cat and svd treat A and B apart, so that products of one adapter's A with another's B come in; they are here
because their results are known. The adapters vote with what is left of them, not with their weights; zero votes are
for plus; and an adapter of weight 0 votes too. An adapter without the projection takes no part.

What PEFT does, and what happens here instead:

    PEFT                                                            here
    --------------------------------------------------------------  ---------------------------------------------------
    the result takes use_rslora of the first adapter, so that its   scaling 1 always
    scaling is √r
    svd applied the scaling twice (to 0.20)                         once
    weights beyond the adapters, or adapters beyond the weights,    refused, both numbers named
    are dropped
    one adapter: linear, whatever was asked                         what was asked
    density: None crashes, 1 and more warns, 0 empties the adapter  above 0, to 1, and given where it is used only
    or divides by 0
    density · size below 1 empties the tensor                       refused
    DARE draws from PyTorch's global state                          from a seed, for every tensor anew
    rank_pattern: a result whose tensors do not have its config's   zero rows and columns up to the largest rank;
    rank, or a crash in the middle                                  different ranks at a projection are refused where
                                                                    the method needs equal ones
    svd of the full matrix                                          of its factors: the same, without the matrix
    an svd rank above a projection's size breaks the adapter        refused
    target_modules as text in one adapter and a list in another     taken: the tensors decide
    biases, DoRA vectors and modules_to_save stay unmerged          refused when the adapter is read
    a name that is taken: returns as if it had merged               refused
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np

Method = Literal["cat", "linear", "svd", "ties", "dare_linear", "dare_ties", "magnitude_prune"]
MajoritySign = Literal["total", "frequency"]
METHODS: tuple[Method, ...] = get_args(Method)

_PRUNING = ("ties", "dare_linear", "dare_ties", "magnitude_prune")
_ELECTING = ("ties", "dare_ties")

_Prune = Callable[[np.ndarray, tuple[int, ...]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class MergeConfig:
    """How adapters are merged.

    Attributes:
      method: see the module's docstring.
      rank: of the result, for "svd" only; None is the adapters' largest.
      density: share of the numbers that pruning keeps, above 0, at most 1; for the methods that prune, and only them.
      majority_sign: how "ties" and "dare_ties" elect a sign: by the sum of the numbers or by how many there are of
        each; None is "total".
      seed: of what DARE drops.
    """

    method: Method
    rank: int | None = None
    density: float | None = None
    majority_sign: MajoritySign | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}; expected one of {', '.join(METHODS)}")
        if self.rank is not None and self.method != "svd":
            raise ValueError(f"rank {self.rank} is given, but only svd makes an adapter of any rank; leave it out")
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"rank is {self.rank}; expected at least 1")
        if self.density is None and self.method in _PRUNING:
            raise ValueError(f"{self.method} needs a density: the share of the numbers it keeps, such as 0.5")
        if self.density is not None and self.method not in _PRUNING:
            raise ValueError(f"density {self.density} is given, but {self.method} prunes nothing; leave it out")
        if self.density is not None and not 0 < self.density <= 1:
            raise ValueError(f"density is {self.density}; expected a number above 0 and at most 1")
        if self.majority_sign is not None and self.method not in _ELECTING:
            raise ValueError(f"{self.method} elects no sign; leave majority_sign {self.majority_sign!r} out")
        if self.majority_sign not in (None, *get_args(MajoritySign)):
            raise ValueError(f"majority_sign is {self.majority_sign!r}; expected 'total' or 'frequency'")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; expected 0 or more")

    @property
    def needs_equal_ranks(self) -> bool:
        """Whether A and B are added number by number."""
        return self.method not in ("cat", "svd")


@dataclasses.dataclass(frozen=True)
class WeightedLora:
    """One adapter's part in a projection.

    Attributes:
      a: [rank, in_features] float32.
      b: [out_features, rank] float32.
      factor: the adapter's weight times its scaling.
      index: the adapter's position among those that are merged; DARE draws by it.
    """

    a: np.ndarray
    b: np.ndarray
    factor: float
    index: int


def merge_projection(
    config: MergeConfig, loras: Sequence[WeightedLora], *, rank: int, place: tuple[int, ...] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Merges one projection.

    Args:
      config: how.
      loras: the adapters that have the projection, at least one; of equal ranks where the method needs them.
      rank: of the result; zero rows and columns fill it up.
      place: what tells the projection from all others, for DARE's draws.

    Returns:
      A [rank, in_features] and B [out_features, rank], float32, to be used with scaling 1.

    Raises:
      ValueError: If the rank is too large for the projection, or pruning would keep nothing.
    """
    if config.method == "cat":
        a, b = _concatenated(loras)
    elif config.method == "svd":
        a, b = _truncated(loras, rank)
    else:
        prune = _pruning(config, place)
        a = _added(config, [lora.a for lora in loras], [_root(lora.factor) for lora in loras], prune, loras, side=0)
        b = _added(
            config, [lora.b for lora in loras], [abs(_root(lora.factor)) for lora in loras], prune, loras, side=1
        )
    missing = rank - a.shape[0]
    return np.pad(a, ((0, missing), (0, 0))), np.pad(b, ((0, 0), (0, missing)))


def _root(factor: float) -> float:
    """√|factor| with the factor's sign."""
    return math.copysign(math.sqrt(abs(factor)), factor)


def _concatenated(loras: Sequence[WeightedLora]) -> tuple[np.ndarray, np.ndarray]:
    a = np.concatenate([lora.a * np.float32(lora.factor) for lora in loras])
    return a, np.concatenate([lora.b for lora in loras], axis=1)


def _truncated(loras: Sequence[WeightedLora], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest singular values of B A, which are those of R_b R_aᵀ, where A = R_aᵀ Q_aᵀ and B = Q_b R_b."""
    a, b = _concatenated(loras)
    if rank > min(a.shape[1], b.shape[0]):
        raise ValueError(
            f"rank {rank} is given, but a projection is of {b.shape[0]} x {a.shape[1]}; give at most the smaller one"
        )
    q_a, r_a = np.linalg.qr(a.T.astype(np.float64))
    q_b, r_b = np.linalg.qr(b.astype(np.float64))
    u, values, v = np.linalg.svd(r_b @ r_a.T, full_matrices=False)
    kept = slice(min(rank, len(values)))
    return (
        (v[kept] @ q_a.T).astype(np.float32),
        (q_b @ u[:, kept] * values[kept]).astype(np.float32),
    )


def _added(
    config: MergeConfig,
    tensors: Sequence[np.ndarray],
    factors: Sequence[float],
    prune: _Prune,
    loras: Sequence[WeightedLora],
    *,
    side: int,
) -> np.ndarray:
    """One side, A or B, of the methods that add number by number."""
    pruned = np.stack([prune(tensor, (lora.index, side)) for tensor, lora in zip(tensors, loras, strict=True)])
    weighted = pruned * np.asarray(factors, np.float32)[:, None, None]
    if config.method not in _ELECTING:
        return weighted.sum(0)
    votes = pruned if config.majority_sign != "frequency" else np.sign(pruned)
    has_elected_sign = np.sign(pruned) == np.where(votes.sum(0) >= 0, 1, -1)
    count = has_elected_sign.sum(0).astype(np.float32)
    return (weighted * has_elected_sign).sum(0) / np.maximum(count, np.float32(1))


def _pruning(config: MergeConfig, place: tuple[int, ...]) -> _Prune:
    if config.density is None or config.density == 1:
        return lambda tensor, _: tensor
    density = config.density
    if config.method in ("ties", "magnitude_prune"):
        return lambda tensor, _: _largest(tensor, density)
    return lambda tensor, which: _randomly_kept(tensor, density, np.random.default_rng([config.seed, *place, *which]))


def _largest(tensor: np.ndarray, density: float) -> np.ndarray:
    """Keeps the int(density · size) numbers that are largest without their signs; the others become 0."""
    count = int(density * tensor.size)
    if count == 0:
        raise ValueError(f"density {density} keeps none of the {tensor.size} numbers of a tensor; give a larger one")
    flat = tensor.reshape(-1)
    kept = np.argpartition(np.abs(flat), flat.size - count)[flat.size - count :]
    result = np.zeros_like(flat)
    result[kept] = flat[kept]
    return result.reshape(tensor.shape)


def _randomly_kept(tensor: np.ndarray, density: float, rng: np.random.Generator) -> np.ndarray:
    """Keeps each number with probability `density`, divided by it, so that the expectation stays."""
    is_kept = rng.random(tensor.shape, np.float32) < np.float32(density)
    return np.where(is_kept, tensor / np.float32(density), np.float32(0))
