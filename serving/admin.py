"""What changes the server while it runs: adapters loaded, replaced and unloaded, named mixes.

A load: the path is checked (adapter_roots), its files are read and parsed in a worker thread, the engine's thread makes
the adapter known between two steps, and from then on the registry gives its id to new requests. An adapter that was
replaced or unloaded stays in the engine until the requests that use it have ended. A load that fails changes nothing.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError, MissingFileError
from dymerge_jax.example_lines import EXAMPLES_FILE
from serving.adapter_roots import AdapterRoots
from serving.async_engine import AsyncEngine, ReadAdapter
from serving.errors import (
    ConflictError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    ServingError,
    UnknownModelError,
)
from serving.metrics import Metrics
from serving.mixes import AdapterEntry, ModelRegistry, shown
from serving.protocol import LoadAdapterRequest, MixRequest, UnloadAdapterRequest, parse_adapter_mix, parse_json_object
from serving.retrieval import Retriever, usable_folder_examples

logger = logging.getLogger(__name__)

MAX_LOADS = 64  # requested at once; a client that loads a folder of adapters may send them all together
MAX_READERS = 4  # read at once: each holds a whole adapter in host memory
LOAD_BUSY = "lora_load_busy"
INVALID_ADAPTER = "invalid_lora_adapter"


def adapter_entry(adapter: ReadAdapter) -> AdapterEntry:
    """An adapter as the registry keeps it."""
    return AdapterEntry(adapter.name, str(adapter.root), adapter.num_slots, adapter.id, adapter.content_hash)


def read_mixes(path: Path, adapters: Collection[str]) -> dict[str, dict[str, float]]:
    """Named mixes of the adapters from a file: {"legal-french": {"legal": 0.7, "french": 0.3}}.

    Raises:
      OSError: If it cannot be read.
      InvalidRequestError: If it says something else; the file and the mix are named.
    """
    mixes: dict[str, dict[str, float]] = {}
    for name, value in parse_json_object(path.read_bytes(), f"--mixes {path}").items():
        try:
            weights = parse_adapter_mix(value)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"--mixes {path}: mix {name!r}: {error.message}") from None
        if not weights:
            raise InvalidRequestError(f"--mixes {path}: mix {name!r} is {shown(value)}; it names no adapter")
        if unknown := [adapter for adapter in weights if adapter not in adapters]:
            raise InvalidRequestError(
                f"--mixes {path}: mix {name!r} names {', '.join(map(repr, unknown))}, not loaded; add --adapters"
            )
        mixes[name] = weights
    return mixes


class NameLocks:
    """One lock a name; it lasts as long as somebody holds it or waits for it, so that nobody gets a second one."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}  # and how many hold it or wait

    @contextlib.asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[None]:
        lock, num_users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = lock, num_users + 1
        try:
            async with lock:
                yield
        finally:
            _, num_users = self._locks.pop(name)
            if num_users > 1:
                self._locks[name] = lock, num_users - 1


class Admin:
    """What the routes do that change the server, apart from HTTP. Touched on the event loop only."""

    def __init__(
        self,
        engine: AsyncEngine,
        registry: ModelRegistry,
        roots: AdapterRoots,
        metrics: Metrics | None = None,
        *,
        max_loads: int = MAX_LOADS,
        retriever: Retriever | None = None,
    ) -> None:
        """Nothing is loading.

        Args:
          engine: holds the adapters.
          registry: names them.
          roots: where they may come from.
          metrics: where refused loads are counted and unloaded adapters forgotten.
          max_loads: loads that may be asked for at once.
          retriever: told of examples that come and go with adapters.
        """
        self._engine = engine
        self._registry = registry
        self._roots = roots
        self._metrics = metrics or Metrics()
        self._max_loads = max_loads
        self._retriever = retriever
        self._num_loads = 0
        self._locks = NameLocks()
        self._readers = asyncio.Semaphore(MAX_READERS)

    async def load_adapter(self, fields: LoadAdapterRequest) -> AdapterEntry:
        """Loads an adapter, or replaces one.

        Raises:
          ServingError: 400 for a bad adapter or name, 403 for a path elsewhere, 404 for none, 409 if another
            generation was expected or something depends on the old one, 429 while too many loads run.
        """
        if not fields.lora_name or not fields.lora_path:
            raise InvalidUserInputError("Both 'lora_name' and 'lora_path' must be provided.")
        if fields.expected_generation is not None and not fields.load_inplace:
            raise InvalidRequestError(
                "expected_generation is given but load_inplace is not true; only a replacement expects something",
                param="expected_generation",
            )
        if self._num_loads >= self._max_loads:
            self._metrics.observe_refused(LOAD_BUSY)
            raise OverloadedError(
                f"{self._num_loads} loads run already; try again when some have ended", code=LOAD_BUSY
            )
        self._num_loads += 1
        try:
            async with self._locks.hold(fields.lora_name):
                return await self._load(fields)
        finally:
            self._num_loads -= 1

    async def _load(self, fields: LoadAdapterRequest) -> AdapterEntry:
        name, old = fields.lora_name, self._registry.adapters.get(fields.lora_name)
        if old is not None and not fields.load_inplace:
            raise InvalidUserInputError(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                param="lora_name",
            )
        _check_generation(name, old, fields.expected_generation)
        self._registry.check_adapter_name(name)
        async with self._readers:
            adapter, prompts = await asyncio.to_thread(self._read, name, fields.lora_path)
        entry = adapter_entry(adapter)
        await self._add(adapter)
        try:
            async with self._changing(name, prompts):
                self._registry.put_adapter(entry)
        except BaseException:  # a cancellation too: nobody else could remove it
            await asyncio.shield(self._remove_if_other(entry, old))
            raise
        if old is not None:
            await self._remove_if_other(old, entry)
        logger.info("loaded adapter %r from %s, generation %s", name, entry.root, entry.generation)
        return entry

    def _changing(self, name: str, prompts: Sequence[str] | None) -> contextlib.AbstractAsyncContextManager[None]:
        """See `Retriever.changing`."""
        return contextlib.nullcontext() if self._retriever is None else self._retriever.changing(name, prompts)

    def _read(self, name: str, lora_path: str) -> tuple[ReadAdapter, list[str]]:
        """An adapter and its example prompts; runs in a worker thread."""
        folder = self._roots.find(lora_path)
        try:
            adapter = self._engine.engine.read_adapter(name, folder)
            prompts = self._examples(folder)
            self._roots.check_files(folder)
        except ServingError:
            raise
        except MissingFileError as error:
            raise UnknownModelError(str(error), param="lora_path", code=INVALID_ADAPTER) from error
        except (CheckpointError, ValueError) as error:
            raise InvalidRequestError(str(error), param="lora_path", code=INVALID_ADAPTER) from error
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise InvalidRequestError(f"adapter {str(folder)!r} cannot be read: {reason}", param="lora_path") from error
        return adapter, prompts

    def _examples(self, folder: Path) -> list[str]:
        if self._retriever is not None:
            return usable_folder_examples(folder)
        if (folder / EXAMPLES_FILE).exists():
            logger.warning("%s is not used: retrieval is off, --retrieval turns it on", folder / EXAMPLES_FILE)
        return []

    async def _add(self, adapter: ReadAdapter) -> None:
        try:
            await self._engine.call(self._engine.engine.add_adapter, adapter)
        except ServingError:
            raise
        except ValueError as error:  # it is too large for what is left
            raise InvalidRequestError(str(error), param="lora_path", code=INVALID_ADAPTER) from error
        except Exception as error:
            logger.exception("the engine did not take adapter %r", adapter.name)
            raise EngineError(f"the engine did not take the adapter: {type(error).__name__}: {error}") from error

    async def _remove_if_other(self, entry: AdapterEntry, than: AdapterEntry | None) -> None:
        if than is None or entry.adapter_id != than.adapter_id:
            await self._engine.call(self._engine.engine.remove_adapter, entry.adapter_id)

    async def unload_adapter(self, fields: UnloadAdapterRequest) -> None:
        """Takes an adapter away from new requests; those that use it go on.

        Raises:
          ServingError: 404 for an unknown one, 409 if another generation was expected or something depends on it.
        """
        name = fields.lora_name
        if not name:
            raise InvalidUserInputError("'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name")
        async with self._locks.hold(name):
            if name in self._registry.adapters:
                _check_generation(name, self._registry.adapters[name], fields.expected_generation)
            async with self._changing(name, None):
                entry = self._registry.remove_adapter(name)
            await self._engine.call(self._engine.engine.remove_adapter, entry.adapter_id)
            await self._engine.call(self._metrics.forget_adapter, name)
        logger.info("unloaded adapter %r, generation %s", name, entry.generation)

    def mixes(self) -> list[dict[str, Any]]:
        """All named mixes."""
        return [mix_content(name, weights) for name, weights in self._registry.mixes.items()]

    def put_mix(self, fields: MixRequest) -> dict[str, Any]:
        """Names a mix.

        Raises:
          ServingError: See `ModelRegistry.put_mix`.
        """
        self._registry.put_mix(fields.name, fields.adapter_mix or {}, may_replace=fields.replace)
        return mix_content(fields.name, self._registry.mixes[fields.name])

    def delete_mix(self, name: str) -> None:
        """Forgets a named mix.

        Raises:
          UnknownModelError: If there is none of this name.
        """
        self._registry.remove_mix(name)


class InvalidUserInputError(InvalidRequestError):
    """400 with the type and the text that clients of vLLM know."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.type = "InvalidUserInput"


def mix_content(name: str, weights: dict[str, float]) -> dict[str, Any]:
    return {"name": name, "object": "mix", "adapter_mix": weights}


def _check_generation(name: str, adapter: AdapterEntry | None, expected: str | None) -> None:
    found = None if adapter is None else adapter.generation
    if expected is not None and expected != found:
        raise ConflictError(
            f"adapter {name!r} has the generation {found!r}, expected_generation is {expected!r}; look at GET "
            "/v1/models and decide anew",
            param="expected_generation",
            code="generation_mismatch",
        )
