"""Prometheus metrics of one engine, in a registry of their own.

Cardinality: the label `adapter` takes the names of at most `max_adapter_labels` adapters; all others are counted
together under OTHER_ADAPTERS, and an adapter's series ends when it is unloaded. Mixes are never a label: a request
counts once for each of its adapters, and requests on the base model count for none. Names may hold any character; the
exposition format escapes them.
"""

from collections import Counter as Counts
from collections.abc import Iterator
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from serving.adapter_ids import adapter_name
from serving.adapter_tally import AdapterTally
from serving.plan import StepPlan
from serving.request import Request

Tier = Literal["slots", "host", "disk"]
"""Where an adapter is: in slots of the device, in host memory, or neither."""

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
OTHER_ADAPTERS = "(other)"
TTFT_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0)
TPOT_BUCKETS_S = (0.001, 0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """What the engine tells about itself; each verb is called where the thing happens.

    The verbs are called by the engine's thread, `render` by any.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, max_adapter_labels: int = 100) -> None:
        """All counts are zero.

        Args:
          registry: where to register; None makes a new registry, so that two engines never share one.
          max_adapter_labels: adapters that get a label value of their own.
        """
        registry = CollectorRegistry() if registry is None else registry
        self._registry = registry
        self._ttft = Histogram(
            "dymerge_time_to_first_token_seconds",
            "Arrival of a request to its first token out.",
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self._tpot = Histogram(
            "dymerge_time_per_output_token_seconds",
            "Mean time per output token after the first, one observation a request.",
            buckets=TPOT_BUCKETS_S,
            registry=registry,
        )
        self._step = Histogram(
            "dymerge_step_duration_seconds", "One engine step.", buckets=STEP_BUCKETS_S, registry=registry
        )
        self._step_tokens = Counter(
            "dymerge_step_tokens_total", "Tokens run in steps, recomputed ones included.", registry=registry
        )
        self._prompt_tokens = Counter("dymerge_prompt_tokens_total", "Prompt tokens taken in.", registry=registry)
        self._prefix_queries = Counter(
            "dymerge_prefix_cache_queries_total",
            "Prompt tokens of requests that got their first token.",
            registry=registry,
        )
        self._prefix_hits = Counter(
            "dymerge_prefix_cache_hits_total",
            "Those of them that were not computed, as their KV blocks were there.",
            registry=registry,
        )
        self._generated_tokens = Counter("dymerge_generated_tokens_total", "Output tokens.", registry=registry)
        self._finished = Counter(
            "dymerge_requests_finished_total", "Finished requests.", ["finish_reason"], registry=registry
        )
        self._adapter_requests = Counter(
            "dymerge_adapter_requests_total", "Requests taken in that use an adapter.", ["adapter"], registry=registry
        )
        self._refused = Counter(
            "dymerge_requests_refused_total", "Requests and loads answered with 429.", ["reason"], registry=registry
        )
        self._loads = Counter("dymerge_adapter_loads_total", "Adapters copied into slots.", registry=registry)
        self._reads = Counter("dymerge_adapter_reads_total", "Adapters read again from disk.", registry=registry)
        self._load_failures = Counter(
            "dymerge_adapter_load_failures_total", "Loads that failed, and their requests with them.", registry=registry
        )
        self._lookups = Counter(
            "dymerge_adapter_lookups_total",
            "Adapters of arriving requests by where they were: slots, host or disk.",
            ["tier"],
            registry=registry,
        )
        self._host_bytes = Gauge(
            "dymerge_adapter_host_bytes", "Host memory of adapters, those being read included.", registry=registry
        )
        self._host_limit = Gauge("dymerge_adapter_host_limit_bytes", "Bound of host memory.", registry=registry)
        self._staged_bytes = Gauge(
            "dymerge_adapter_staged_bytes", "Device memory of adapters on their way into slots.", registry=registry
        )
        self._preemptions = Counter(
            "dymerge_preemptions_total", "Requests that lost their KV blocks to older ones.", registry=registry
        )
        self._resident = Gauge("dymerge_adapters_resident", "Adapters in slots.", registry=registry)
        self._loading = Gauge("dymerge_adapters_loading", "Adapters on their way into slots.", registry=registry)
        self._free_blocks = Gauge("dymerge_kv_blocks_free", "KV blocks without an owner.", registry=registry)
        self._queues = _Queues(max_adapter_labels)
        registry.register(self._queues)
        self._labels: set[str] = set()
        self._max_adapter_labels = max_adapter_labels

    def observe_arrival(self, request: Request) -> None:
        """A request was taken in."""
        self._prompt_tokens.inc(request.num_prompt_tokens)
        for adapter_id in request.adapters:
            self._adapter_requests.labels(adapter=self._label(adapter_id)).inc()

    def observe_refused(self, reason: Literal["queue_full", "lora_load_busy"], count: int = 1) -> None:
        """Requests, or a load, were told to come back later. Called by any thread."""
        self._refused.labels(reason=reason).inc(count)

    def observe_ttft(self, request: Request, now_s: float) -> None:
        """The first token of a request went out at `now_s`, on the clock of its arrival."""
        self._ttft.observe(now_s - request.arrival_s)
        self._prefix_queries.inc(request.num_prompt_tokens)
        self._prefix_hits.inc(request.num_cached_tokens)

    def observe_tokens(self, num_tokens: int) -> None:
        """So many output tokens were read from the device."""
        self._generated_tokens.inc(num_tokens)

    def observe_finish(self, request: Request, now_s: float) -> None:
        """A request has finished at `now_s`, on the clock of its arrival."""
        assert request.finish_reason is not None, f"{request} has no finish reason"
        self._finished.labels(finish_reason=str(request.finish_reason)).inc()
        if request.first_token_s is not None and request.num_output_tokens > 1:
            self._tpot.observe((now_s - request.first_token_s) / (request.num_output_tokens - 1))

    def observe_step(self, plan: StepPlan, duration_s: float) -> None:
        """A step was run."""
        self._step.observe(duration_s)
        self._step_tokens.inc(plan.num_tokens)
        self._preemptions.inc(len(plan.preempted))

    def observe_lookup(self, tier: Tier) -> None:
        """A request came for an adapter that was in this tier."""
        self._lookups.labels(tier=tier).inc()

    def observe_loads(self, num_loads: int) -> None:
        """So many adapters were copied into slots."""
        self._loads.inc(num_loads)

    def observe_reads(self, num_reads: int) -> None:
        """So many adapters were read again from disk."""
        self._reads.inc(num_reads)

    def observe_load_failure(self) -> None:
        """An adapter could not be loaded."""
        self._load_failures.inc()

    def watch_queues(self, running: AdapterTally, waiting: AdapterTally) -> None:
        """Shows these counts from now on."""
        self._queues.tallies = (running, waiting)

    def set_resources(self, *, num_resident: int, num_loading: int, num_free_blocks: int) -> None:
        """Adapters in slots, adapters on their way there, and free KV blocks."""
        self._resident.set(num_resident)
        self._loading.set(num_loading)
        self._free_blocks.set(num_free_blocks)

    def set_adapter_bytes(self, *, host: int, host_limit: int, staged: int) -> None:
        """Host memory of adapters, its bound, and device memory of those on their way into slots."""
        self._host_bytes.set(host)
        self._host_limit.set(host_limit)
        self._staged_bytes.set(staged)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format, of type CONTENT_TYPE."""
        return generate_latest(self._registry)

    def forget_adapter(self, name: str) -> None:
        """An adapter was unloaded: its series ends, and its label's place is free for another one."""
        if name in self._labels:
            self._labels.remove(name)
            self._adapter_requests.remove(name)

    def _label(self, adapter_id: str) -> str:
        """The name of the adapter if it is among the first to need a label value, else OTHER_ADAPTERS."""
        name = adapter_name(adapter_id)
        if name == OTHER_ADAPTERS or (name not in self._labels and len(self._labels) >= self._max_adapter_labels):
            return OTHER_ADAPTERS
        self._labels.add(name)
        return name


class _Queues:
    """Collector of running and waiting requests, in total and by adapter.

    Attributes:
      tallies: of the running and the waiting requests. The engine's thread counts on while another one reads.
    """

    def __init__(self, max_adapter_labels: int) -> None:
        self.tallies = (AdapterTally(), AdapterTally())
        self._max_adapter_labels = max_adapter_labels

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields the four gauges."""
        for phase, tally in zip(("running", "waiting"), self.tallies, strict=True):
            yield GaugeMetricFamily(
                f"dymerge_requests_{phase}", f"Requests that are {phase}.", value=tally.num_requests
            )
            gauge = GaugeMetricFamily(
                f"dymerge_adapter_requests_{phase}",
                f"Requests that are {phase} and use an adapter.",
                labels=["adapter"],
            )
            for name, count in self._counts(tally):
                gauge.add_metric([name], count)
            yield gauge

    def _counts(self, tally: AdapterTally) -> list[tuple[str, int]]:
        """Requests by name, most used first; those beyond the limit of labels are added up."""
        by_name: Counts[str] = Counts()
        for adapter_id, count in tally.by_adapter().items():
            by_name[adapter_name(adapter_id)] += count  # a replaced adapter may still run beside the new one
        others = by_name.pop(OTHER_ADAPTERS, 0)  # an adapter may be named so
        counts = by_name.most_common()
        others += sum(count for _, count in counts[self._max_adapter_labels :])
        return counts[: self._max_adapter_labels] + ([(OTHER_ADAPTERS, others)] if others else [])
