"""The loss of many mixes on a few examples, many mixes a batch."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dymerge_jax.compose.examples import Example
from dymerge_jax.generate import Batch, batch_losses
from dymerge_jax.library import Model, pad_batch
from dymerge_jax.step_batch import AdapterMix


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of one batch, on the device but for `mix_ids`: they are the same for all mixes.

    Attributes:
      mix_ids: which mix of those evaluated at once a row has.
      batch: the examples, each with its target.
      prompt_lengths: tokens of each row that are not predicted.
      gated_set_ids: no row uses a gate.
    """

    mix_ids: Int[np.ndarray, " num_rows"]
    batch: Batch
    prompt_lengths: Int[Array, " num_rows"]
    gated_set_ids: Int[Array, " num_rows"]


class BatchedCrossEntropy:
    """The mean cross entropy of examples under mixes, many mixes a batch.

    A row of a batch is one example under one mix. All batches have the same shape, so that nothing compiles twice; the
    last one is filled up with rows that do not count.

    Attributes:
      num_rows: of a batch.
      row_len: tokens of a row, padding included.
    """

    def __init__(
        self,
        model: Model,
        examples: Sequence[Example],
        *,
        batch_mixes: int,
        max_tokens: int,
        min_row_len: int = 1,
        min_targets: int = 0,
    ) -> None:
        """Lays the rows out.

        Args:
          model: with all adapters in its slots.
          examples: at least one; no longer than the model's context.
          batch_mixes: mixes evaluated at once, at least 1.
          max_tokens: most tokens of a batch; more rows than that holds are cut into several batches.
          min_row_len, min_targets: tokens of a row and targets of it, at least: searches with other examples then share
            what is compiled.

        Raises:
          ValueError: If a number is below 1, or there is no example.
        """
        if batch_mixes < 1 or max_tokens < 1:
            raise ValueError(f"batch_mixes is {batch_mixes} and max_tokens {max_tokens}; expected at least 1 of each")
        self._model = model
        self._batch_mixes = batch_mixes
        self._num_examples = len(examples)
        self._num_targets = sum(len(example.target) for example in examples)
        self._max_targets = max([min_targets, *(len(example.target) for example in examples)])
        batch = pad_batch([[*example.prompt, *example.target] for example in examples])
        tokens = np.asarray(batch.tokens)
        tokens = np.pad(tokens, ((0, 0), (0, max(0, min_row_len - tokens.shape[1]))))
        self.row_len = tokens.shape[1]
        self.num_rows = min(batch_mixes * len(examples), max(1, max_tokens // self.row_len))
        prompt_lengths = np.asarray([len(example.prompt) for example in examples], np.int32)
        self._rows = self._laid_out(tokens, np.asarray(batch.lengths), prompt_lengths)
        # Weights of adapters times this are weights of slots.
        self._slots = np.asarray(model.mix([{name: 1.0} for name in model.adapter_names]).weights)

    def __call__(self, mixes: Float[np.ndarray, "num_mixes num_adapters"]) -> Float[np.ndarray, " num_mixes"]:
        """The mean cross entropy of each mix, in nats a token."""
        parts = [self._evaluate(mixes[i : i + self._batch_mixes]) for i in range(0, len(mixes), self._batch_mixes)]
        return np.concatenate(parts)

    def _laid_out(
        self,
        tokens: Int[np.ndarray, "num_examples row_len"],
        lengths: Int[np.ndarray, " num_examples"],
        prompt_lengths: Int[np.ndarray, " num_examples"],
    ) -> list[_Rows]:
        total = self._batch_mixes * self._num_examples
        ids = np.arange(-(-total // self.num_rows) * self.num_rows) % total
        batches = []
        for row_ids in ids.reshape(-1, self.num_rows):
            mix_ids, example_ids = np.divmod(row_ids, self._num_examples)
            batch = Batch(tokens=jnp.asarray(tokens[example_ids]), lengths=jnp.asarray(lengths[example_ids]))
            no_gates = jnp.full(self.num_rows, -1, jnp.int32)
            batches.append(_Rows(mix_ids, batch, jnp.asarray(prompt_lengths[example_ids]), no_gates))
        return batches

    def _evaluate(self, mixes: Float[np.ndarray, "num_mixes num_adapters"]) -> Float[np.ndarray, " num_mixes"]:
        """Of at most batch_mixes mixes."""
        filled = np.zeros((self._batch_mixes, mixes.shape[1]), np.float32)
        filled[: len(mixes)] = mixes
        # All are sent off before the first is read, so that the device does not wait for the host.
        losses = [self._losses(filled @ self._slots, rows) for rows in self._rows]
        sums = np.concatenate([np.asarray(loss).sum(1) for loss in losses])[: self._batch_mixes * self._num_examples]
        return sums.reshape(self._batch_mixes, self._num_examples).sum(1)[: len(mixes)] / self._num_targets

    def _losses(
        self, slot_weights: Float[np.ndarray, "batch_mixes num_slots"], rows: _Rows
    ) -> Float[Array, "num_rows max_targets"]:
        model = self._model
        return batch_losses(
            model.split.graph,
            model.split.state,
            model.slots,
            model.gates,
            AdapterMix(weights=jnp.asarray(slot_weights[rows.mix_ids]), gated_set_ids=rows.gated_set_ids),
            rows.batch,
            rows.prompt_lengths,
            max_targets=self._max_targets,
            implementations=model.implementations,
        )
