"""What a client saw of each request, and what a run of requests comes to: throughput and latencies at percentiles."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)

_MOST_DIFFERENCES = 32  # that are told apart; a soak may have thousands


@dataclasses.dataclass(eq=False)
class Record:
    """One request as its client saw it. Times are seconds from the start of the run.

    Attributes:
      index: number of the request in its trace, which its prompt depends on.
      arrival_s: when the trace lets it come; a client that is late counts as waiting.
      prompt_len: tokens.
      output_times_s: when tokens came, once for each arrival of tokens.
      num_tokens: output tokens so far.
      token_ids: the output; empty where the transport does not give ids.
      text: the output as text; empty where there is no tokenizer.
      is_done: it ended by itself.
      is_cancelled: its client left on purpose.
      error: why it failed, or None.
    """

    index: int
    arrival_s: float
    prompt_len: int
    output_times_s: list[float] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    is_done: bool = False
    is_cancelled: bool = False
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token; None without one."""
        return self.output_times_s[0] - self.arrival_s if self.output_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None unless it is done with two or more."""
        if not self.is_done or self.num_tokens < 2:
            return None
        return (self.output_times_s[-1] - self.output_times_s[0]) / (self.num_tokens - 1)

    @property
    def output(self) -> list[int] | str:
        """What is compared with another run of the request."""
        return self.token_ids or self.text


@dataclasses.dataclass(frozen=True)
class ServerCounts:
    """What the server counted in one run; None where it does not tell.

    Attributes:
      steps: engine steps.
      step_rows: sum over steps of the sequences in each.
      step_tokens: sum over steps of the tokens in each.
      adapter_loads: adapters copied into slots.
      adapter_uses: adapters that admitted requests needed.
      queueing_s: arrival to first admission, by request.
    """

    steps: int | None = None
    step_rows: int | None = None
    step_tokens: int | None = None
    adapter_loads: int | None = None
    adapter_uses: int | None = None
    queueing_s: Sequence[float] = ()

    def since(self, before: "ServerCounts") -> "ServerCounts":
        """What was counted after `before`."""
        numbers = {
            f.name: None if (now := getattr(self, f.name)) is None else now - (getattr(before, f.name) or 0)
            for f in dataclasses.fields(self)
            if f.name != "queueing_s"
        }
        return ServerCounts(**numbers, queueing_s=self.queueing_s[len(before.queueing_s) :])

    @property
    def hit_rate(self) -> float | None:
        """Share of adapter uses that found the adapter in slots."""
        if self.adapter_loads is None or not self.adapter_uses:
            return None
        return 1 - self.adapter_loads / self.adapter_uses


def summarise(records: Sequence[Record], counts: ServerCounts, *, wall_s: float) -> dict[str, Any]:
    """The numbers of one run.

    Throughput counts every output token, those of unfinished requests too, over the time from the start to the last
    token; TTFT those with a first token; TPOT, ITL (time between arrivals of tokens) and end-to-end those that are
    done.

    Args:
      records: of all requests.
      counts: of the server.
      wall_s: start to last token, in seconds.
    """
    done = [r for r in records if r.is_done]
    num_tokens = sum(r.num_tokens for r in records)
    gaps_s = [gap for r in done for gap in np.diff(r.output_times_s).tolist()]
    return {
        "requests": len(records),
        "completed": len(done),
        "cancelled": sum(r.is_cancelled for r in records),
        "failed": sum(r.error is not None for r in records),
        "wall_s": wall_s,
        "output_tokens": num_tokens,
        "output_tokens_per_s": num_tokens / wall_s if wall_s else 0.0,
        "requests_per_s": len(done) / wall_s if wall_s else 0.0,
        **percentiles("ttft_ms", [s * 1e3 for r in records if (s := r.ttft_s) is not None]),
        **percentiles("tpot_ms", [s * 1e3 for r in records if (s := r.tpot_s) is not None]),
        **percentiles("itl_ms", [s * 1e3 for s in gaps_s]),
        **percentiles("queueing_ms", [s * 1e3 for s in counts.queueing_s]),
        **percentiles("e2e_s", [r.output_times_s[-1] - r.arrival_s for r in done if r.output_times_s]),
        "steps": counts.steps,
        "mean_step_rows": _ratio(counts.step_rows, counts.steps),
        "mean_step_tokens": _ratio(counts.step_tokens, counts.steps),
        "adapter_loads": counts.adapter_loads,
        "hit_rate": counts.hit_rate,
    }


def percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """name_p50, name_p90 and name_p99; None without values."""
    found = np.percentile(values, PERCENTILES).tolist() if len(values) else [None] * len(PERCENTILES)
    return {f"{name}_p{p}": value for p, value in zip(PERCENTILES, found, strict=True)}


def json_text(result: Any) -> str:
    """A result as JSON, in which numbers that JSON has no form for, such as a θ of inf, are words."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(result), indent=1, allow_nan=False) + "\n"


def compare(first: list[int] | str, second: list[int] | str) -> int | None:
    """Index of the first difference of two outputs, tokens or characters; None if they are equal."""
    if first == second:
        return None
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def agreement(pairs: Mapping[int, tuple[list[int] | str, list[int] | str]]) -> dict[str, Any]:
    """How the outputs of requests under load compare with those of the same requests alone.

    Args:
      pairs: by number of the request, its output under load and alone.
    """
    differences = {index: at for index, (loaded, alone) in pairs.items() if (at := compare(loaded, alone)) is not None}
    return {
        "sample": len(pairs),
        "equal": len(pairs) - len(differences),
        "compared_tokens": sum(len(loaded) for loaded, _ in pairs.values()),
        "first_differences": {str(index): at for index, at in sorted(differences.items())[:_MOST_DIFFERENCES]},
    }


def _ratio(total: int | None, count: int | None) -> float | None:
    return total / count if total is not None and count else None
