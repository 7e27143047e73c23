"""The loss of many mixes on a few examples, many mixes a batch."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dymerge_jax.compose.examples import Example
from dymerge_jax.generate import Batch
from dymerge_jax.library import Model, pad_batch
from dymerge_jax.step_batch import AdapterMix


class BatchedCrossEntropy:
    """The mean cross entropy of examples under mixes, many mixes a batch.

    A row of a batch is one example under one mix. All batches have the same shape, so that nothing compiles twice;
    the last one is filled up with rows that do not count.

    Attributes:
      num_rows: of a batch.
      row_len: tokens of a row, padding included.
    """

    def __init__(self, model: Model, examples: Sequence[Example], *, batch_mixes: int, max_tokens: int) -> None:
        """Lays the examples out.

        Args:
          model: with all adapters in its slots.
          examples: at least one.
          batch_mixes: mixes evaluated at once, at least 1.
          max_tokens: most tokens of a batch; more rows than that holds are cut into several batches.

        Raises:
          ValueError: If a number is below 1.
        """
        if batch_mixes < 1 or max_tokens < 1:
            raise ValueError(f"batch_mixes is {batch_mixes} and max_tokens {max_tokens}; expected at least 1")
        self._model = model
        batch = pad_batch([[*example.prompt, *example.target] for example in examples])
        self._tokens, self._lengths = np.asarray(batch.tokens), np.asarray(batch.lengths)
        self._prompt_lengths = np.asarray([len(example.prompt) for example in examples], np.int32)
        self._num_targets = sum(len(example.target) for example in examples)
        self._max_targets = max(len(example.target) for example in examples)
        self.row_len = self._tokens.shape[1]
        self._batch_mixes = batch_mixes
        self.num_rows = min(batch_mixes * len(examples), max(1, max_tokens // self.row_len))

    def __call__(self, mixes: Float[np.ndarray, "num_mixes num_adapters"]) -> Float[np.ndarray, " num_mixes"]:
        """The mean cross entropy of each mix, in nats a token."""
        parts = [self._evaluate(mixes[i : i + self._batch_mixes]) for i in range(0, len(mixes), self._batch_mixes)]
        return np.concatenate(parts)

    def _evaluate(self, mixes: Float[np.ndarray, "num_mixes num_adapters"]) -> Float[np.ndarray, " num_mixes"]:
        num_examples = len(self._lengths)
        names = self._model.adapter_names
        specs = [dict(zip(names, map(float, mix), strict=True)) for mix in mixes]
        slot_weights = np.asarray(self._model.mix(specs).weights)
        num_rows = len(mixes) * num_examples
        rows = np.arange(-(-num_rows // self.num_rows) * self.num_rows) % num_rows  # the last batch begins anew
        losses = [
            self._losses(slot_weights[rows[i : i + self.num_rows] // num_examples], rows[i : i + self.num_rows])
            for i in range(0, len(rows), self.num_rows)
        ]
        sums = np.concatenate([np.asarray(loss).sum(1) for loss in losses])[:num_rows]
        return sums.reshape(len(mixes), num_examples).sum(1) / self._num_targets

    def _losses(
        self, weights: Float[np.ndarray, "num_rows num_slots"], rows: Int[np.ndarray, " num_rows"]
    ) -> Float[Array, "num_rows max_targets"]:
        """Of one batch, still on the device: the next one is sent off before this one is read."""
        examples = rows % len(self._lengths)
        return self._model.losses(
            Batch(tokens=jnp.asarray(self._tokens[examples]), lengths=jnp.asarray(self._lengths[examples])),
            jnp.asarray(self._prompt_lengths[examples]),
            AdapterMix(weights=jnp.asarray(weights), gated_set_ids=jnp.full(len(rows), -1, jnp.int32)),
            max_targets=self._max_targets,
        )
