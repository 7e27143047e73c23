"""Adapters on the host, by name, and gated sets; what the engine copies into slots."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from jax.typing import DTypeLike

from dymerge_jax.config import LlamaConfig
from dymerge_jax.lora import AdapterWeights, SlotContent, slot_contents
from serving.errors import UnknownModelError


@dataclasses.dataclass(frozen=True)
class StoredAdapter:
    """One adapter on the host.

    Attributes:
      name: what a request calls it.
      root: the folder it came from; None for one made in memory.
      weights: its tensors, as read.
    """

    name: str
    root: Path | None
    weights: AdapterWeights


class AdapterStore:
    """All adapters of one engine, parsed and checked, in host memory.

    Args:
      config: shape of the model they adapt.
      slot_rank: rank rows of a slot.
      dtype: of the device's slot array.
    """

    def __init__(self, config: LlamaConfig, *, slot_rank: int, dtype: DTypeLike) -> None:
        self._config = config
        self._slot_rank = slot_rank
        self._dtype = dtype
        self._adapters: dict[str, StoredAdapter] = {}

    def add(self, adapter: StoredAdapter) -> None:
        """Adds an adapter.

        Raises:
          ValueError: If its name is taken.
        """
        if adapter.name in self._adapters:
            first = self._adapters[adapter.name].root
            raise ValueError(
                f"two adapters are named {adapter.name!r}: {first} and {adapter.root}; name one with name=folder"
            )
        self._adapters[adapter.name] = adapter

    @property
    def adapters(self) -> Iterable[StoredAdapter]:
        """All adapters in the order they were added."""
        return self._adapters.values()

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    def num_slots(self, name: str) -> int:
        """Slots the adapter fills.

        Raises:
          UnknownModelError: If there is no such adapter.
        """
        if name not in self._adapters:
            raise UnknownModelError(f"The adapter {name!r} is not loaded.", param="adapter_mix")
        return self._adapters[name].weights.num_slots(self._slot_rank)

    def contents(self, name: str) -> list[SlotContent]:
        """The adapter cut into slots, in the device's dtype."""
        return slot_contents(self._config, self._adapters[name].weights, slot_rank=self._slot_rank, dtype=self._dtype)
