"""Short texts to vectors by the base model or another: the mean hidden state of a text's tokens in its middle layer.

Only the first half of the layers runs, without adapters and without a cache. One program embeds the tokens, one runs a
layer and one takes the mean; all layers share theirs, so that a size compiles in the time of one layer.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from dymerge_jax.attention import WholeSequences
from dymerge_jax.config import LlamaConfig
from dymerge_jax.kv_cache import empty_cache
from dymerge_jax.layers import rope_angles
from dymerge_jax.lora import empty_slots
from dymerge_jax.model import Implementations, Llama, LlamaLayer, MixContext, SplitModel, Stream
from dymerge_jax.step import ModelStructure, Weights, split_weights

ROW_LEN = 32  # tokens of a row: longer texts are cut, so that a batch of many short ones is not mostly padding
MAX_ROWS = 16  # of a batch: half a default step of the engine, so that decode rows beside it wait no longer than that
_NUM_ROWS = (4, MAX_ROWS)  # sizes that are compiled
# The GEMM of a step with many tokens; its counterpart for few has a counter a layer, and here all layers are layer 0.
_IMPLEMENTATIONS = Implementations(lora_linear="separate")


@functools.partial(jax.jit, static_argnames="structure")
def _before_layers(
    structure: ModelStructure[Llama], weights: Weights, tokens: Int[Array, "num_rows row_len"]
) -> tuple[Stream, WholeSequences]:
    model = structure.merge(weights)
    num_rows, row_len = tokens.shape
    positions = jnp.tile(jnp.arange(row_len, dtype=jnp.int32), num_rows)
    cos, sin = rope_angles(positions, model.config.head_dim, model.config.rope)
    return model.embedded(tokens.reshape(-1)), WholeSequences(cos=cos, sin=sin, num_seqs=num_rows)


@functools.partial(jax.jit, static_argnames="structure", donate_argnames="stream")
def _layer(structure: ModelStructure[LlamaLayer], weights: Weights, stream: Stream, context: WholeSequences) -> Stream:
    layer = structure.merge(weights)
    dtype = stream.x.dtype
    # What the layer asks for and does not use: a step without segments reads no slot, whole sequences no cache.
    slots = empty_slots(layer.config, num_slots=1, slot_rank=8, dtype=dtype)
    no_cache = empty_cache(layer.config, num_blocks=0, block_size=1, dtype=dtype).layers[0]
    mix = MixContext(slots=slots, segments=None, gates=None, tokens=None)
    stream, _ = layer(stream, no_cache, context, mix, _IMPLEMENTATIONS, 0)
    return stream


@functools.partial(jax.jit, static_argnames="num_skipped")
def _mean_states(
    stream: Stream, lengths: Int[Array, " num_rows"], *, num_skipped: int
) -> Float[Array, "num_rows hidden"]:
    states = stream.x.astype(jnp.float32) + stream.delta.astype(jnp.float32).sum(0)
    states = states.reshape(lengths.shape[0], -1, states.shape[1])
    position = jnp.arange(states.shape[1], dtype=jnp.int32)[None, :]
    is_counted = (position >= num_skipped) & (position < lengths[:, None])
    total = jnp.where(is_counted[:, :, None], states, 0.0).sum(1)
    return total / jnp.maximum(lengths - num_skipped, 1)[:, None].astype(jnp.float32)


class TokenEmbedder:
    """Rows of token ids to vectors; every program compiles in the constructor.

    Each row runs behind the same few tokens, which do not count: the first token of any sequence takes most of the
    attention and has a state like no other, and words that introduce a task bring out what a text asks for.

    Attributes:
      hidden: width of a vector.
      row_len: most tokens of a row.
    """

    def __init__(self, model: SplitModel, prefix: Sequence[int], *, row_len: int = ROW_LEN) -> None:
        """Compiles for batches of a few sizes.

        Args:
          model: weights on the device; used again with every call, no copy is made.
          prefix: token ids that run before those of a row, at least one.
          row_len: most tokens of a row, the prefix not counted.

        Raises:
          ValueError: If there is no prefix, or it and a row do not fit into the model's context.
        """
        if not prefix or row_len < 1 or len(prefix) + row_len > model.config.max_position:
            raise ValueError(
                f"the prefix has {len(prefix)} tokens and row_len is {row_len}; expected at least 1 of each, together "
                f"at most the model's context of {model.config.max_position}"
            )
        self.hidden = model.config.hidden
        self.row_len = row_len
        self._prefix = np.asarray(prefix, np.int32)
        self._structure, self._weights = split_weights(model.graph, model.state)
        layers = nnx.merge(model.graph, model.state).layers[: num_embedding_layers(model.config)]
        split = [split_weights(*nnx.split(layer)) for layer in layers]
        self._layer_structure = split[0][0]
        assert all(structure == self._layer_structure for structure, _ in split), "layers differ in structure"
        self._layer_weights = [weights for _, weights in split]
        for num_rows in _NUM_ROWS:
            jax.block_until_ready(self.dispatch([[0]] * num_rows))

    def dispatch(self, rows: Sequence[Sequence[int]]) -> Float[Array, "padded_rows hidden"]:
        """Sends a batch to the device and does not wait for it.

        Args:
          rows: token ids, 1 to `MAX_ROWS` rows of 1 to row_len tokens.

        Returns:
          [padded_rows, hidden] float32, one vector a row, of no meaning for the padding behind them.
        """
        lens = [len(row) for row in rows]
        assert 0 < len(rows) <= MAX_ROWS, f"a batch has {len(rows)} rows"
        assert min(lens) > 0, "a row has no token"
        assert max(lens) <= self.row_len, f"a row has {max(lens)} tokens, expected at most {self.row_len}"
        num_rows = next(size for size in _NUM_ROWS if size >= len(rows))
        start = len(self._prefix)
        tokens = np.zeros((num_rows, start + self.row_len), np.int32)
        tokens[:, :start] = self._prefix
        lengths = np.full((num_rows,), start, np.int32)
        for i, row in enumerate(rows):
            tokens[i, start : start + len(row)] = row
            lengths[i] += len(row)
        stream, context = _before_layers(self._structure, self._weights, tokens)
        for weights in self._layer_weights:
            stream = _layer(self._layer_structure, weights, stream, context)
        return _mean_states(stream, lengths, num_skipped=start)

    def __call__(
        self, rows: Sequence[Sequence[int]], *, progress: bool = False
    ) -> Float[np.ndarray, "num_rows hidden"]:
        """Vectors of any number of rows, in batches; waits for them, with a progress bar if asked for."""
        found = np.zeros((len(rows), self.hidden), np.float32)
        before: tuple[int, Array] | None = None  # the batch that the device runs while the next one is made
        starts = range(0, len(rows), MAX_ROWS)
        for start in tqdm(starts, desc="embedding examples", unit="batch", disable=not progress):
            batch = self.dispatch(rows[start : start + MAX_ROWS])
            _keep(found, before)
            before = start, batch
        _keep(found, before)
        return found


def _keep(found: Float[np.ndarray, "num_rows hidden"], batch: tuple[int, Array] | None) -> None:
    """Reads a batch into its place, without its padding."""
    if batch is not None:
        start, vectors = batch
        part = found[start : start + MAX_ROWS]
        part[:] = np.asarray(vectors)[: len(part)]


def num_embedding_layers(config: LlamaConfig) -> int:
    """Layers that run: half, which finds phrasings that no example had best (of the demo's 30, 10 to 20 were tried)."""
    return -(-config.num_layers // 2)
