"""Open-loop workloads: which request comes when, with how many tokens and which mix; and traces of them as files.

A trace is a JSON list of requests by arrival, which two engines can be given alike:

    {"t": 0.25, "plen": 208, "olen": 195, "mix": [[12, 0.4], [3, 0.6]]}

t is seconds from the start, plen and olen are prompt and output tokens, mix has (adapter, weight) pairs, adapters being
numbers from 0; [] is the base model. A request on a gated set has "gated_set": its name, and an empty mix.

Workloads:

    base      no adapter
    single    every request uses adapter 0
    distinct  every request has a mix of its own; requests that follow each other share no adapter, as far as they go
    skewed    a catalogue of mixes, drawn by Zipf's law: the i-th with probability ~ 1 / i^s
    sparse    5 to 8 adapters are named, 2 of them have a weight
    gated     a gated set of 8 adapters, of which its gate picks 2 for each token
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float64, Int64

WorkloadName = Literal["base", "single", "distinct", "skewed", "sparse", "gated"]
LengthsName = Literal["lognormal", "sharegpt"]
WORKLOADS: tuple[WorkloadName, ...] = ("base", "single", "distinct", "skewed", "sparse", "gated")

GATED_SET = "gated"
NUM_EXPERTS = 8
TOP_K = 2
_SPARSE_NAMED = (5, 8)
_SPARSE_ACTIVE = 2

# (mean, sigma) of prompt and output lengths before clipping, as the peers were measured with.
_LOGNORMAL = {"prompt": (220.0, 1.0), "output": (200.0, 0.9)}
_SHORTEST, _LONGEST = 4, 1024


@dataclasses.dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
      arrival_s: seconds from the start.
      prompt_len, output_len: tokens, at least 1.
      mix: (adapter number, weight) pairs; empty for the base model and for a gated set. Weights may be 0.
      gated_set: name of the gated set, or None.
    """

    arrival_s: float
    prompt_len: int
    output_len: int
    mix: tuple[tuple[int, float], ...] = ()
    gated_set: str | None = None


@dataclasses.dataclass(frozen=True)
class WorkloadConfig:
    """What requests ask for.

    Attributes:
      num_adapters: adapters to draw from.
      mix_size: adapters of a mix, of "distinct" and "skewed".
      num_mixes: mixes of the catalogue of "skewed".
      zipf_s: exponent of "skewed"; larger is more skewed.
      lengths: "lognormal" (mean 220 and 200 tokens) or "sharegpt" (quantiles of public conversations).
      longest: no prompt and no output has more tokens.
    """

    num_adapters: int = 64
    mix_size: int = 3
    num_mixes: int = 64
    zipf_s: float = 1.5
    lengths: LengthsName = "lognormal"
    longest: int = _LONGEST

    def __post_init__(self) -> None:
        if not 1 <= self.mix_size <= self.num_adapters:
            raise ValueError(
                f"--mix-size is {self.mix_size}, expected 1 to {self.num_adapters}, the number of --adapters"
            )
        if self.num_mixes < 1:
            raise ValueError(f"--mixes is {self.num_mixes}, expected at least 1")
        if not self.zipf_s >= 0:
            raise ValueError(f"--zipf is {self.zipf_s}, expected an exponent >= 0 (0 is uniform)")
        if self.longest < _SHORTEST:
            raise ValueError(f"the longest prompt is {self.longest} tokens, expected at least {_SHORTEST}")


def make_trace(
    workload: WorkloadName, *, rate: float, duration_s: float, config: WorkloadConfig, seed: int = 0
) -> list[TraceRequest]:
    """Draws a workload with Poisson arrivals; the same arguments give the same requests.

    Arrivals and lengths depend on the seed, the rate and the duration only, so that workloads differ by their mixes.

    Args:
      workload: which mixes.
      rate: mean requests per second.
      duration_s: no request arrives later.
      config: what to draw from.
      seed: of everything.

    Raises:
      ValueError: If rate or duration is not positive, or there are too few adapters for the workload.
    """
    if not (rate > 0 and duration_s > 0):
        raise ValueError(f"rate is {rate} requests/s for {duration_s} s; both must be above 0")
    rng = np.random.default_rng(seed)
    arrivals_s = _poisson_arrivals(rng, rate, duration_s)
    prompt_lens, output_lens = (_draw_lengths(rng, part, len(arrivals_s), config) for part in ("prompt", "output"))
    mixes = _MIXES[workload](np.random.default_rng([seed, WORKLOADS.index(workload)]), config)
    return [
        TraceRequest(
            arrival_s=round(float(arrival_s), 6),
            prompt_len=int(prompt_len),
            output_len=int(output_len),
            mix=() if workload == "gated" else next(mixes),
            gated_set=GATED_SET if workload == "gated" else None,
        )
        for arrival_s, prompt_len, output_len in zip(arrivals_s, prompt_lens, output_lens, strict=True)
    ]


def read_trace(path: Path) -> list[TraceRequest]:
    """Reads a trace file.

    Raises:
      ValueError: If it is no trace; the message names the first wrong request.
    """
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--trace {path} cannot be read: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"--trace {path} holds no list of requests")
    requests = [_read_request(path, i, entry) for i, entry in enumerate(entries)]
    late = next((i for i in range(1, len(requests)) if requests[i].arrival_s < requests[i - 1].arrival_s), None)
    if late is not None:
        raise ValueError(f"--trace {path}: request {late} arrives before the one ahead of it; sort them by t")
    return requests


def write_trace(path: Path, trace: Sequence[TraceRequest]) -> None:
    """Writes what `read_trace` reads."""
    entries = []
    for r in trace:
        entry: dict[str, Any] = {"t": r.arrival_s, "plen": r.prompt_len, "olen": r.output_len, "mix": r.mix}
        entries.append(entry | ({} if r.gated_set is None else {"gated_set": r.gated_set}))
    path.write_text(json.dumps(entries) + "\n")


def prompt_token_ids(index: int, prompt_len: int, vocab: int, *, seed: int = 0) -> list[int]:
    """The prompt of request `index` of a trace: random tokens, the same in every run."""
    return np.random.default_rng([seed, 1_000_003, index]).integers(0, vocab, prompt_len).tolist()


def _read_request(path: Path, index: int, entry: Any) -> TraceRequest:
    try:
        request = TraceRequest(
            arrival_s=float(entry["t"]),
            prompt_len=int(entry["plen"]),
            output_len=int(entry["olen"]),
            mix=tuple((int(adapter), float(weight)) for adapter, weight in entry["mix"]),
            gated_set=entry.get("gated_set"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f'--trace {path}: request {index} is {entry!r}, expected {{"t": seconds, "plen": tokens, "olen": tokens, '
            f'"mix": [[adapter, weight], ...]}} ({type(error).__name__}: {error})'
        ) from error
    if request.arrival_s < 0 or request.prompt_len < 1 or request.output_len < 1:
        raise ValueError(f"--trace {path}: request {index} is {entry!r}; t must be >= 0, plen and olen at least 1")
    return request


def _poisson_arrivals(rng: np.random.Generator, rate: float, duration_s: float) -> Float64[np.ndarray, " num_requests"]:
    # The number in a fixed time is Poisson; given the number, the times are uniform.
    return np.sort(rng.uniform(0.0, duration_s, max(1, int(rng.poisson(rate * duration_s)))))


def _draw_lengths(
    rng: np.random.Generator, part: str, count: int, config: WorkloadConfig
) -> Int64[np.ndarray, " count"]:
    if config.lengths == "lognormal":
        mean, sigma = _LOGNORMAL[part]
        lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)  # its mean is `mean`
    else:
        percents, tokens = _sharegpt_quantiles(part)
        lengths = np.interp(rng.uniform(0.0, 100.0, count), percents, tokens)
    return np.clip(np.rint(lengths), _SHORTEST, config.longest).astype(np.int64)


def _sharegpt_quantiles(part: str) -> tuple[list[float], list[float]]:
    """Percents and the lengths in tokens below which they lie; between them lengths are drawn evenly."""
    table = json.loads((resources.files("serving.bench") / "sharegpt_lengths.json").read_text())[part]
    points = {0.0: table["min"], **{float(p): n for p, n in table["quantiles"].items()}, 100.0: table["max"]}
    return list(points), [float(n) for n in points.values()]


Mixes = Iterator[tuple[tuple[int, float], ...]]


def _base_mixes(rng: np.random.Generator, config: WorkloadConfig) -> Mixes:
    while True:
        yield ()


def _single_mixes(rng: np.random.Generator, config: WorkloadConfig) -> Mixes:
    while True:
        yield ((0, 1.0),)


def _distinct_mixes(rng: np.random.Generator, config: WorkloadConfig) -> Mixes:
    """Walks through shuffled adapters, so that as many mixes in a row as there is room for share none."""
    while True:
        order = rng.permutation(config.num_adapters)
        for start in range(0, config.num_adapters - config.mix_size + 1, config.mix_size):
            yield _weighted(rng, order[start : start + config.mix_size])


def _skewed_mixes(rng: np.random.Generator, config: WorkloadConfig) -> Mixes:
    catalogue = [
        _weighted(rng, rng.choice(config.num_adapters, config.mix_size, replace=False)) for _ in range(config.num_mixes)
    ]
    cumulative = zipf_cumulative(config.num_mixes, config.zipf_s)
    while True:
        yield catalogue[int(np.searchsorted(cumulative, rng.random(), side="right"))]


def _sparse_mixes(rng: np.random.Generator, config: WorkloadConfig) -> Mixes:
    least, most = _SPARSE_NAMED
    if config.num_adapters < most:
        raise ValueError(f"sparse names up to {most} adapters a request, but --adapters is {config.num_adapters}")
    while True:
        named = rng.choice(config.num_adapters, int(rng.integers(least, most + 1)), replace=False)
        rest = tuple((int(adapter), 0.0) for adapter in named[_SPARSE_ACTIVE:])
        yield _weighted(rng, named[:_SPARSE_ACTIVE]) + rest


_MIXES: dict[str, Callable[[np.random.Generator, WorkloadConfig], Mixes]] = {
    "base": _base_mixes,
    "single": _single_mixes,
    "distinct": _distinct_mixes,
    "skewed": _skewed_mixes,
    "sparse": _sparse_mixes,
    "gated": _base_mixes,
}


def zipf_cumulative(count: int, exponent: float) -> Float64[np.ndarray, " count"]:
    """[count] cumulative probabilities of Zipf's law; the last is 1."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    cumulative = np.cumsum(weights / weights.sum())
    cumulative[-1] = 1.0  # whatever rounding left
    return cumulative


def _weighted(rng: np.random.Generator, adapters: Sequence[int] | np.ndarray) -> tuple[tuple[int, float], ...]:
    weights = rng.uniform(0.1, 1.0, len(adapters))
    return tuple((int(a), round(float(w), 6)) for a, w in zip(adapters, weights / weights.sum(), strict=True))
