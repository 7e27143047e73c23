"""LoraHub's search: the weights of a mix from a few examples, without gradients (arXiv 2307.13269).

What is minimised is the mean cross entropy of the examples' answers plus l1 times the mean |weight|, with all weights
within ±max_weight. Unlike LoraHub's, the mix is the exact sum of the adapters, so any of their ranks and scalings fit.

CMA-ES asks for a whole population of mixes at a time, which the engine evaluates as one batch of different mixes.
"""

import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

_WEIGHT_DECIMALS = 4  # of a weight in a file; what is left out changes no answer
_FIRST_STEP = 0.5  # standard deviation of the first population's weights, a third of their range

CrossEntropy = Callable[[Float[np.ndarray, "num_mixes num_adapters"]], Float[np.ndarray, " num_mixes"]]
"""Weights of some mixes to the mean cross entropy of each, in nats a token."""


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """How weights are searched for.

    Attributes:
      population: mixes an iteration tries.
      iterations: of the search.
      max_weight: largest weight, and negated the smallest.
      l1: what the mean |weight| costs, in nats.
      seed: of what is tried.
    """

    population: int = 24
    iterations: int = 15
    max_weight: float = 1.5
    l1: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.population < 3:
            raise ValueError(f"population is {self.population}; expected at least 3")
        if self.iterations < 1:
            raise ValueError(f"iterations is {self.iterations}; expected at least 1")
        if not 0 < self.max_weight < float("inf"):
            raise ValueError(f"max_weight is {self.max_weight}; expected a finite number above 0")
        if not 0 <= self.l1 < float("inf"):
            raise ValueError(f"l1 is {self.l1}; expected a finite number, 0 or more")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; expected 0 or more")


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search found. A loss is cross entropy plus the L1 term.

    Attributes:
      weights: of each adapter, 0 where it is not used.
      cross_entropy: of these weights, in nats a token.
      loss: of these weights.
      start: name of the simple mix that the search started from: the best of `simple_mixes`.
      start_loss: its loss.
      simple_mixes: cross entropy of the base model, of each adapter alone, of equal weights and of all weights 1.
      losses: the best loss after every iteration.
      num_mixes: mixes that were evaluated.
      seconds: that it took, without compiling.
    """

    weights: dict[str, float]
    cross_entropy: float
    loss: float
    start: str
    start_loss: float
    simple_mixes: dict[str, float]
    losses: tuple[float, ...]
    num_mixes: int
    seconds: float


class _Objective:
    """The loss, which remembers the best mix that it was asked for."""

    def __init__(self, cross_entropy: CrossEntropy, l1: float) -> None:
        self._cross_entropy = cross_entropy
        self._l1 = l1
        self.num_mixes = 0
        self.weights = np.zeros(0)
        self.cross_entropy = self.loss = np.inf

    def __call__(self, mixes: Float[np.ndarray, "num_mixes num_adapters"]) -> Float[np.ndarray, " num_mixes"]:
        entropies = np.asarray(self._cross_entropy(mixes), np.float64)
        # A mix so far off that its logits are no numbers any more is merely a bad one.
        entropies = np.where(np.isfinite(entropies), entropies, np.finfo(np.float32).max)
        losses = entropies + self._l1 * np.abs(mixes).mean(1)
        best = int(losses.argmin())
        if losses[best] < self.loss:
            self.weights, self.cross_entropy, self.loss = mixes[best], float(entropies[best]), float(losses[best])
        self.num_mixes += len(mixes)
        return losses


def search_weights(
    names: Sequence[str], cross_entropy: CrossEntropy, config: SearchConfig, *, progress: bool = True
) -> SearchResult:
    """Searches the weights of a mix.

    Starts from the best of some simple mixes, runs CMA-ES, and at the end leaves out the adapters whose weights are so
    small that the loss is better without them.

    Args:
      names: of the adapters, at least two.
      cross_entropy: of mixes, [num_mixes, num_adapters]; any number of mixes at a time.
      config: how to search.
      progress: show a progress bar.

    Raises:
      ValueError: If there are less than two adapters.
      ImportError: If cma is not installed; the message says what to do.
    """
    import_cma()  # before time is taken
    if len(names) < 2:
        raise ValueError(f"a search needs two adapters or more, got {len(names)}: {', '.join(names)}")
    start_s = time.perf_counter()
    simple = _simple_mixes(names, config.max_weight)
    objective = _Objective(cross_entropy, config.l1)
    simple_losses = objective(np.stack(list(simple.values())))
    start = list(simple)[int(simple_losses.argmin())]
    entropies = simple_losses - config.l1 * np.asarray([np.abs(mix).mean() for mix in simple.values()])
    start_loss = objective.loss

    losses, mean = _evolved(objective, objective.weights, config, progress)
    objective(np.round(np.stack([mean, objective.weights]), _WEIGHT_DECIMALS))
    final = _Objective(cross_entropy, config.l1)
    final(_thinned(np.round(objective.weights, _WEIGHT_DECIMALS)))
    return SearchResult(
        weights={name: float(weight) for name, weight in zip(names, final.weights, strict=True)},
        cross_entropy=final.cross_entropy,
        loss=final.loss,
        start=start,
        start_loss=start_loss,
        simple_mixes={name: float(entropy) for name, entropy in zip(simple, entropies, strict=True)},
        losses=losses,
        num_mixes=objective.num_mixes + final.num_mixes,
        seconds=time.perf_counter() - start_s,
    )


def import_cma() -> Any:
    """The package that searches.

    Raises:
      ImportError: If it is not installed; the message says what to do.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Could not import matplotlib")  # for plots, which nobody asked for
            import cma
    except ImportError as error:
        raise ImportError("the search needs the package cma; run: pip install 'dymerge-jax[compose]'") from error
    return cma


def _simple_mixes(names: Sequence[str], max_weight: float) -> dict[str, Float[np.ndarray, " num_adapters"]]:
    """What one would try by hand, by its name."""
    count, one = len(names), min(1.0, max_weight)
    mixes = {"the base model": np.zeros(count)}
    mixes |= {f"{name} alone": one * np.eye(count)[i] for i, name in enumerate(names)}
    return mixes | {"equal weights": np.full(count, one / count), "all weights 1": np.full(count, one)}


def _evolved(
    objective: _Objective, start: Float[np.ndarray, " num_adapters"], config: SearchConfig, progress: bool
) -> tuple[tuple[float, ...], Float[np.ndarray, " num_adapters"]]:
    """Runs CMA-ES; the best loss after every iteration, and the mean of the last population's distribution."""
    rng = np.random.default_rng(config.seed)
    options = {
        "bounds": [-config.max_weight, config.max_weight],
        "popsize": config.population,
        # Its own generator, since cma's default seeds numpy's global one.
        "randn": lambda *shape: rng.standard_normal(shape),
        "seed": np.nan,
        "verbose": -9,
        "verb_log": 0,
        "signals_filename": "",
    }
    strategy = import_cma().CMAEvolutionStrategy(start, min(_FIRST_STEP, config.max_weight / 3), options)
    losses: list[float] = []
    with tqdm(total=config.iterations, desc="search", unit="iteration", disable=not progress) as bar:
        while len(losses) < config.iterations:
            mixes = np.stack(strategy.ask())
            strategy.tell(list(mixes), objective(mixes).tolist())
            losses.append(objective.loss)
            bar.set_postfix_str(f"loss {objective.loss:.4f}", refresh=False)
            bar.update()
    return tuple(losses), np.asarray(strategy.result.xfavorite)


def _thinned(weights: Float[np.ndarray, " num_adapters"]) -> Float[np.ndarray, "num_mixes num_adapters"]:
    """The mix itself, and without its smallest weight, its two smallest, and so on: fewer adapters take fewer slots."""
    mixes = np.repeat(weights[None], len(weights) + 1, axis=0)
    for count, smallest in enumerate(np.argsort(np.abs(weights), kind="stable"), start=1):
        mixes[count:, smallest] = 0
    return mixes[::-1]  # of equal losses the first counts: that of the fewest adapters
