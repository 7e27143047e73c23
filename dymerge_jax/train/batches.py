"""Which samples a step takes, as a function of seed and step alone, and their padded arrays."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from dymerge_jax.train.data import Sample
from dymerge_jax.train.forward import TrainBatch

_POOL_BATCHES = 16
"""Batches among whose samples those of like length are put together: less padding, and still well mixed."""


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """The order of the samples of a training run.

    Attributes:
      samples: all of them.
      batch_size: samples of a step; those of an epoch's last step are filled up with samples of its first.
      seed: of the order.
      mates: names of the frozen mates, in the order of their weights.
      mate_weights: their weights, where a sample gives none.
    """

    samples: Sequence[Sample]
    batch_size: int
    seed: int
    mates: Sequence[str] = ()
    mate_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.samples) // self.batch_size)

    def batch(self, step: int) -> TrainBatch:
        """The batch of a step, from 0; the same whenever it is asked for."""
        epoch, index = divmod(step, self.steps_per_epoch)
        # A permutation of a few thousand samples takes less than a millisecond: it is made anew rather than kept.
        return self._padded([self.samples[i] for i in self._epoch(epoch)[index]])

    def _epoch(self, epoch: int) -> list[np.ndarray]:
        rng = np.random.default_rng([self.seed, epoch])
        order = np.resize(rng.permutation(len(self.samples)), self.steps_per_epoch * self.batch_size)
        lengths = np.asarray([len(sample.tokens) for sample in self.samples])
        pool_size = _POOL_BATCHES * self.batch_size
        batches = []
        for pool in (order[start : start + pool_size] for start in range(0, len(order), pool_size)):
            by_length = pool[np.argsort(lengths[pool], kind="stable")].reshape(-1, self.batch_size)
            batches += list(by_length[rng.permutation(len(by_length))])
        return batches

    def _padded(self, samples: Sequence[Sample]) -> TrainBatch:
        seq_len = seq_bucket(max(len(sample.tokens) for sample in samples))
        tokens = np.zeros((len(samples), seq_len), np.int32)
        is_target = np.zeros((len(samples), seq_len), bool)
        weights = np.zeros((len(samples), len(self.mates)), np.float32)
        for row, sample in enumerate(samples):
            tokens[row, : len(sample.tokens)] = sample.tokens
            is_target[row, : len(sample.tokens)] = sample.is_target
            own = self.mate_weights if sample.mates is None else sample.mates
            weights[row] = [own.get(name, 0.0) for name in self.mates]
        places = np.flatnonzero(is_target)
        num_targets = target_bucket(len(places))
        sources, targets = np.zeros(num_targets, np.int32), np.zeros(num_targets, np.int32)
        sources[: len(places)] = places - 1
        targets[: len(places)] = tokens.reshape(-1)[places]
        return TrainBatch(
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray([len(sample.tokens) for sample in samples], jnp.int32),
            sources=jnp.asarray(sources),
            targets=jnp.asarray(targets),
            is_target=jnp.asarray(np.arange(num_targets) < len(places)),
            mate_weights=jnp.asarray(weights),
        )


def seq_bucket(size: int) -> int:
    """The next of 16, 20, 24, 28, 32, 40, 48, ...: few shapes to compile, at most a fifth of them padding."""
    quarter = max(4, target_bucket(size) // 8)
    return max(16, -(-size // quarter) * quarter)


def target_bucket(size: int) -> int:
    """The next power of two from 16 on: targets cost the output matrix only, and each length of theirs a program."""
    return 1 << max(4, (size - 1).bit_length())
