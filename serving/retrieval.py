"""Finds the adapters for requests that leave the choice to the server; embeds their prompts beside the running ones.

A prompt's pieces become vectors on the engine's thread, between two steps, many prompts in one batch and one batch at a
time: the thread only sends a batch to the device, a worker thread waits for it, and what comes meanwhile makes the next
batch. So a decode step waits for one batch at most. Scores are a small product on the host.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from dymerge_jax.embedding import MAX_ROWS, TokenEmbedder
from dymerge_jax.example_lines import EXAMPLES_FILE, read_prompts
from dymerge_jax.model import SplitModel
from dymerge_jax.retrieval import (
    AUTO,
    MAX_EXAMPLES,
    MAX_PIECES,
    Scorer,
    example_pieces,
    example_vectors,
    make_embedder,
    mix_weights,
    that_fit,
    tokenized_pieces,
)
from serving.async_engine import AsyncEngine
from serving.auto_mix import AutoMix
from serving.errors import EngineError, InvalidRequestError, ServingError

logger = logging.getLogger(__name__)

Pieces = Sequence[Sequence[int]]
Vectors = Float[np.ndarray, "_ hidden"]

assert MAX_PIECES <= MAX_ROWS, "a prompt must fit into one batch"


def read_folder_examples(folder: Path) -> list[str]:
    """The example prompts that lie beside an adapter; none where there is no file of them.

    Raises:
      ValueError, OSError: If there is one that cannot be used.
    """
    file = folder / EXAMPLES_FILE
    return read_prompts(file, max_prompts=MAX_EXAMPLES) if file.exists() else []


class PromptIndex:
    """The example prompts of adapters as vectors, and the scores fitted to them.

    Attributes:
      embedder: compiled.
      tokenizer: of the model that embeds.
      given: prompts by adapter from a file of their own, which count in place of those in the adapter's folder.
      vectors: by adapter, for each of its examples.
    """

    def __init__(
        self,
        model: SplitModel,
        tokenizer: Any,
        examples: Mapping[str, Sequence[str]],
        given: Mapping[str, Sequence[str]],
    ) -> None:
        """Compiles what embeds, embeds all examples and fits the scores.

        Args:
          model: embeds; on the device.
          tokenizer: of that model.
          examples: prompts of the adapters that have some, by name; see `read_examples`.
          given: see above; adapters that are not loaded may be loaded later.

        Raises:
          ValueError: If the examples of an adapter hold no text.
        """
        self.embedder: TokenEmbedder = make_embedder(model, tokenizer)
        self.tokenizer = tokenizer
        self.given = dict(given)
        self.vectors = example_vectors(self.embedder, tokenizer, examples, progress=True)
        self.scorer = Scorer.fit(self.vectors) if self.vectors else None


def read_examples(
    folders: Mapping[str, Path], given: Mapping[str, Sequence[str]], *, is_wanted: bool | None
) -> dict[str, Sequence[str]]:
    """The example prompts of those adapters that have some.

    Args:
      folders, given, is_wanted: see `build_index`.

    Raises:
      ValueError, OSError: If a file of examples cannot be used and `is_wanted` is true; else a warning is logged.
    """
    found = {
        name: given.get(name) or (read_folder_examples(folder) if is_wanted else usable_folder_examples(folder))
        for name, folder in folders.items()
    }
    return {name: prompts for name, prompts in found.items() if prompts}


def usable_folder_examples(folder: Path) -> list[str]:
    """The same as `read_folder_examples`, but a file that cannot be used, which may be for others, is only told."""
    try:
        return read_folder_examples(folder)
    except (ValueError, OSError) as error:
        logger.warning("the adapter in %s is never found by its examples, which cannot be used: %s", folder, error)
        return []


def build_index(
    tokenizer: Any,
    model: SplitModel,
    folders: Mapping[str, Path],
    given: Mapping[str, Sequence[str]],
    *,
    is_wanted: bool | None,
) -> PromptIndex | None:
    """The index of a server, or None for one without, which then costs nothing.

    Args:
      tokenizer: of `model`; None if its directory has none.
      model: embeds; the served one or another, on the device.
      folders: of all adapters, by name.
      given: see `PromptIndex`.
      is_wanted: None for an index where an adapter has examples, as far as they can be used.

    Raises:
      ValueError, OSError: If a file of examples cannot be used and `is_wanted` is true, or there is no tokenizer.
    """
    if is_wanted is False:
        return None
    examples = read_examples(folders, given, is_wanted=is_wanted)
    if is_wanted is None and not examples:
        return None
    if tokenizer is None:
        raise ValueError(
            "adapters are to be found by example prompts, but the directory of the model that compares them has no "
            "tokenizer; add one, or start with --no-retrieval"
        )
    start_s = time.perf_counter()
    index = PromptIndex(model, tokenizer, examples, given)
    logger.info(
        "retrieval: %d of %d adapters may be found, by %d examples; compiled and embedded in %.1f s",
        len(index.vectors), len(folders), sum(map(len, index.vectors.values())), time.perf_counter() - start_s,
    )  # fmt: skip
    return index


class Retriever:
    """Finds adapters for prompts while the engine runs. Touched on the event loop only."""

    def __init__(self, index: PromptIndex, engine: AsyncEngine) -> None:
        self._index = index
        self._engine = engine
        self._vectors = dict(index.vectors)
        self._scorer = index.scorer
        self._changing = asyncio.Lock()
        self._waiting: deque[tuple[Pieces, asyncio.Future[Vectors]]] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._num_embedded = 0  # makes ids for the bound of waiting requests

    @property
    def num_candidates(self) -> int:
        """Adapters that may be found."""
        return len(self._vectors)

    # Questions of a request

    async def embed_prompts(self, texts: Sequence[str]) -> list[Vectors]:
        """The vectors of the pieces of each prompt.

        They wait like requests for their first token: too many of both are refused.

        Raises:
          ServingError: If too many wait, or the engine fails or ends.
        """
        ids = [f"retrieval-{self._num_embedded + i}" for i in range(len(texts))]
        self._num_embedded += len(texts)
        self._engine.queue_bound.take(ids)
        try:
            prompts = await asyncio.to_thread(self._tokenize, texts)
            return await self._embed(prompts)
        finally:
            for request_id in ids:
                self._engine.queue_bound.leave(request_id)

    def weights(self, auto: AutoMix, vectors: Vectors, param: str) -> dict[str, float]:
        """The mix for a prompt, by adapter name.

        Raises:
          InvalidRequestError: If it asks for more adapters than may be found.
        """
        self.check(auto, param)
        assert self._scorer is not None
        candidates = self._scorer.top_k(vectors, auto.num_adapters(self.num_candidates, param))
        return mix_weights(that_fit(candidates) if auto.k is None else candidates, auto.weights)

    def check(self, auto: AutoMix, param: str) -> None:
        """Checks, before a prompt is embedded, that there are as many adapters as are asked for.

        Raises:
          InvalidRequestError: If not.
        """
        if not self.num_candidates:
            raise no_candidates(param)
        auto.num_adapters(self.num_candidates, param)

    # Changes while it serves

    @contextlib.asynccontextmanager
    async def changing(self, name: str, prompts: Sequence[str] | None) -> AsyncIterator[None]:
        """Prepares another set of examples, and lets it count when the block ends without an error.

        Nothing waits between the two, so that a block that changes the registry, and does not wait, changes both at
        once: no request finds an adapter by the examples of another content.

        Args:
          name: of the adapter that is loaded, replaced or unloaded.
          prompts: its examples, which may be none; None to unload it.

        Raises:
          InvalidRequestError: If the examples hold no text.
          ServingError: If the engine fails or ends.
        """
        async with self._changing:
            if not prompts and name not in self._vectors and name not in self._index.given:
                yield  # nothing changes for those that may be found
                return
            vectors = {other: found for other, found in self._vectors.items() if other != name}
            if prompts is not None and (prompts := self._index.given.get(name) or prompts):
                vectors[name] = await self._embed(await asyncio.to_thread(self._example_pieces, name, prompts))
            try:
                scorer = await asyncio.to_thread(Scorer.fit, vectors) if vectors else None
            except ValueError as error:
                raise InvalidRequestError(str(error), param="lora_path") from error
            yield
            self._vectors, self._scorer = vectors, scorer

    def _example_pieces(self, name: str, prompts: Sequence[str]) -> list[list[list[int]]]:
        try:
            return example_pieces(self._index.tokenizer, name, prompts)
        except ValueError as error:
            raise InvalidRequestError(str(error), param="lora_path") from error

    # Batches

    def _tokenize(self, texts: Sequence[str]) -> list[list[list[int]]]:
        return [tokenized_pieces(self._index.tokenizer, text) for text in texts]

    async def _embed(self, prompts: Sequence[Pieces]) -> list[Vectors]:
        futures = [self._submit(pieces) for pieces in prompts]
        try:
            return [await future for future in futures]
        finally:
            for future in futures:
                future.cancel()  # those that are left if one failed or the caller went: nobody waits for them

    def _submit(self, pieces: Pieces) -> asyncio.Future[Vectors]:
        future: asyncio.Future[Vectors] = asyncio.get_running_loop().create_future()
        if not pieces:
            future.set_result(np.zeros((0, self._index.embedder.hidden), np.float32))
            return future
        self._waiting.append((pieces, future))
        if self._worker is None:
            self._worker = asyncio.ensure_future(self._work())
        return future

    async def _work(self) -> None:
        """Embeds batch after batch until nobody waits."""
        try:
            while batch := self._next_batch():
                await self._embed_batch(batch)
        finally:
            self._worker = None

    def _next_batch(self) -> list[tuple[Pieces, asyncio.Future[Vectors]]]:
        """As many of the prompts that came first as fit into one batch."""
        batch, num_rows = [], 0
        while self._waiting and num_rows + len(self._waiting[0][0]) <= MAX_ROWS:
            pieces, future = self._waiting.popleft()
            if not future.done():  # else its client has gone
                batch.append((pieces, future))
                num_rows += len(pieces)
        return batch

    async def _embed_batch(self, batch: Sequence[tuple[Pieces, asyncio.Future[Vectors]]]) -> None:
        """An error is that of this batch's prompts alone."""
        rows = [piece for pieces, _ in batch for piece in pieces]
        try:
            on_device = await self._engine.call(self._index.embedder.dispatch, rows)
            vectors = await asyncio.to_thread(np.asarray, on_device)
        except Exception as error:
            if not isinstance(error, ServingError):
                logger.exception("embedding %d prompts failed", len(batch))
                error = EngineError(f"the prompt could not be embedded: {type(error).__name__}: {error}")
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        start = 0
        for pieces, future in batch:
            if not future.done():
                future.set_result(vectors[start : start + len(pieces)])
            start += len(pieces)


def no_candidates(param: str) -> InvalidRequestError:
    """The error of a request that leaves the choice to a server without examples."""
    return InvalidRequestError(
        f'{param} asks for the adapters that fit the prompt ("{AUTO}"), but no adapter of this server has example '
        f'prompts; put a file {EXAMPLES_FILE} with lines such as {{"prompt": "..."}} into the folders of the adapters, '
        "or give one for all by --retrieval-examples, and start the server again; start it with --retrieval to load "
        "such adapters later",
        param=param,
    )
