"""The library's front: load a model with its adapters, make mixes, generate, score.

The one module of this package besides `serve` that reads files (through `checkpoints`).
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from checkpoints.formats import load_model
from checkpoints.gated_set import load_gated_sets
from checkpoints.loaded_model import ModelDtype
from checkpoints.peft_adapter import collect_adapters, load_adapter
from dymerge_jax.config import LlamaConfig
from dymerge_jax.demo import demo_adapters
from dymerge_jax.gating import GateArray, GatedSetWeights, build_gate_array, place_experts
from dymerge_jax.generate import Batch, GenerateOutput, batch_logits, generate_tokens, uniform_sampling
from dymerge_jax.lora import AdapterWeights, empty_slots, slot_contents, write_slot
from dymerge_jax.model import Implementations, SplitModel, model_from_params
from dymerge_jax.step import AdapterMix
from dymerge_jax.xlora import (
    GatedSet,
    XLoraArray,
    XLoraSetWeights,
    build_xlora_array,
    place_xlora_experts,
    set_id_of_row,
)

MixSpec = Mapping[str, float] | str
"""One row's mix: adapter name to weight, or the name of a gated set. {} is the base model."""


@runtime_checkable
class Generate(Protocol):
    """What `make_generate` makes."""

    def __call__(self, batch: Batch, mix: AdapterMix, *, seed: int | Int[Array, ""] = 0) -> GenerateOutput:
        """Continues every prompt of a batch with the mix of its row.

        Args:
          batch: prompts, from `Model.tokenize`, `pad_batch` or by hand.
          mix: one mix a row, from `Model.mix`.
          seed: of the sampling, any integer; row i draws from seed + i. Greedy rows ignore it.

        Raises:
          ValueError, TypeError: If batch and mix do not fit the model or each other.
        """
        ...


class Model:
    """A model with its adapters on the device.

    Attributes:
      split: the model's graph and state.
      tokenizer: a transformers tokenizer, or None.
      implementations: of the ops.
      slots: the slot array; adapters stay in the slots they were put into.
      gates: gates of the gated sets; None if there are none.
      xlora: X-LoRA sets; None if there are none.
    """

    def __init__(
        self,
        split: SplitModel,
        tokenizer: Any,
        *,
        adapter_slots: int = 64,
        slot_rank: int = 8,
        implementations: Implementations = Implementations(),  # noqa: B008 (frozen)
    ) -> None:
        """A model without adapters.

        Args:
          split: the model.
          tokenizer: a transformers tokenizer, or None if the checkpoint has none.
          adapter_slots: slots of the slot array, at least 1.
          slot_rank: rank rows of a slot.
          implementations: of the ops; the default picks by backend and shape.
        """
        self.split = split
        self.tokenizer = tokenizer
        self.implementations = implementations
        self.slots = empty_slots(split.config, num_slots=adapter_slots, slot_rank=slot_rank, dtype=split.dtype)
        self.gates: GateArray | None = None
        self.xlora: XLoraArray | None = None
        self._slots_of_adapter: dict[str, tuple[int, ...]] = {}
        self._gated_sets: list[GatedSetWeights] = []
        self._xlora_sets: list[XLoraSetWeights] = []
        self._is_traced = False  # a program of the caller's own holds today's slots and gates

    @property
    def config(self) -> LlamaConfig:
        """Shape of the model."""
        return self.split.config

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the adapters in the order they were added."""
        return tuple(self._slots_of_adapter)

    @property
    def gated_set_names(self) -> tuple[str, ...]:
        """Names of the gated sets in the order they were added, those of X-LoRA last."""
        return tuple(s.name for s in (*self._gated_sets, *self._xlora_sets))

    def add_adapter(self, name: str, adapter: AdapterWeights) -> None:
        """Puts an adapter into free slots, where it stays; mixes made before stay valid.

        Raises:
          ValueError: If the name is taken or too few slots are free.
        """
        self._check_is_free(name)
        needed = adapter.num_slots(self.slots.slot_rank)
        first = sum(len(s) for s in self._slots_of_adapter.values())
        if first + needed > self.slots.num_slots:
            raise ValueError(
                f"adapter {name!r} of rank {adapter.rank} needs {needed} slots of rank {self.slots.slot_rank}, but "
                f"only {self.slots.num_slots - first} of {self.slots.num_slots} are free; raise adapter_slots"
            )
        self._warn_if_traced(f"adapter {name!r}")
        slot_ids = tuple(range(first, first + needed))
        contents = slot_contents(self.config, adapter, slot_rank=self.slots.slot_rank, dtype=self.split.dtype)
        for slot_id, content in zip(slot_ids, contents, strict=True):
            self.slots = write_slot(self.slots, slot_id, content)
        self._slots_of_adapter[name] = slot_ids

    def add_gated_sets(self, sets: Sequence[GatedSet]) -> None:
        """Adds gated sets; their experts must have been added as adapters before.

        Raises:
          ValueError: If an expert is missing or a name is taken; then none of the sets is added.
        """
        names = [s.name for s in sets]
        for s in sets:
            self._check_is_free(s.name)
            if names.count(s.name) > 1:
                raise ValueError(f"{names.count(s.name)} gated sets are named {s.name!r}; give each its own name")
            missing = [e for e in s.experts if e not in self._slots_of_adapter]
            if missing:
                raise ValueError(f"gated set {s.name!r} needs adapters that are not loaded: {', '.join(missing)}")
        if not sets:
            return
        self._warn_if_traced(f"gated set {names[0]!r}")
        self._gated_sets.extend(s for s in sets if isinstance(s, GatedSetWeights))
        self._xlora_sets.extend(s for s in sets if isinstance(s, XLoraSetWeights))
        gates = build_gate_array(self.config, self._gated_sets, num_slots=self.slots.num_slots)
        if gates is not None:
            self.gates = place_experts(gates, self._gated_sets, self._slots_of_adapter)
        xlora = build_xlora_array(self._xlora_sets, num_slots=self.slots.num_slots)
        if xlora is not None:
            self.xlora = place_xlora_experts(xlora, self._xlora_sets, self._slots_of_adapter)

    def tokenize(self, texts: Sequence[str], *, chat: bool = True) -> Batch:
        """Tokenizes texts into one batch, padded on the right.

        Args:
          texts: prompts, at least one.
          chat: each text is a user's message in the model's chat template; False takes it as it is, behind the begin
            token that the tokenizer adds, if it does.

        Raises:
          ValueError: If the model has no tokenizer, or no chat template for `chat`.
        """
        tokenizer = self.require_tokenizer()
        if isinstance(texts, str):
            raise TypeError("got one str; expected a sequence of texts, such as [text]")
        if chat and not tokenizer.chat_template:
            raise ValueError("this model's tokenizer has no chat template; take the texts as they are by chat=False")
        rows = []
        for text in texts:
            if chat:
                text = tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                )
            rows.append(tokenizer.encode(text, add_special_tokens=not chat))
        return pad_batch(rows)

    def detokenize(self, out: GenerateOutput) -> list[str]:
        """The generated texts, without special tokens."""
        tokenizer = self.require_tokenizer()
        tokens, lengths = np.asarray(out.tokens), np.asarray(out.lengths)
        return [
            tokenizer.decode(row[:n].tolist(), skip_special_tokens=True) for row, n in zip(tokens, lengths, strict=True)
        ]

    def mix(self, rows: Sequence[MixSpec]) -> AdapterMix:
        """Makes the mixes of a batch.

        Args:
          rows: one a row: {adapter name: weight}, the name of a gated set, or {} for the base model. Weights multiply
            the adapter's own scaling; they may be negative or above 1 and are not normalised.

        Raises:
          ValueError: If a name is unknown or a weight is not finite.
          TypeError: If `rows` is a single mix, or a mix or weight is of a wrong type.
        """
        if isinstance(rows, Mapping | str):
            raise TypeError(f"got one mix, {rows!r}; expected a sequence with one mix a row, such as [{rows!r}]")
        weights = np.zeros((len(rows), self.slots.num_slots), np.float32)
        gated = np.full(len(rows), -1, np.int32)
        for i, row in enumerate(rows):
            match row:
                case str():
                    gated[i] = self._gated_set_id(row)
                case Mapping():
                    self._set_weights(weights[i], i, row)
                case _:
                    raise TypeError(f"mix {i} is {row!r}; expected {{adapter: weight}} or the name of a gated set")
        return AdapterMix(weights=jnp.asarray(weights), gated_set_ids=jnp.asarray(gated))

    def _set_weights(self, weights: np.ndarray, index: int, mix: Mapping[str, float]) -> None:
        """Fills the [num_slots] weights of one static mix."""
        for name, weight in mix.items():
            if name not in self._slots_of_adapter:
                known = ", ".join(self._slots_of_adapter) or "none"
                raise ValueError(f"mix {index} names adapter {name!r}; the loaded adapters are: {known}")
            weights[list(self._slots_of_adapter[name])] = _check_weight(name, weight)

    def logits(self, batch: Batch, mix: AdapterMix) -> Float[Array, "num_seqs prompt_len vocab"]:
        """Logits after every prompt token, for tests and evaluation.

        Returns:
          [num_seqs, prompt_len, vocab] float32, of no meaning past a row's length.

        Raises:
          ValueError, TypeError: If batch and mix do not fit the model or each other.
        """
        self._check(batch, mix, 0)
        return batch_logits(
            self.split.graph,
            self.split.state,
            self.slots,
            self.gates,
            mix,
            batch,
            implementations=self.implementations,
            xlora=self._xlora_of(mix),
        )

    def _xlora_of(self, mix: AdapterMix) -> XLoraArray | None:
        """The X-LoRA sets for a batch that uses one, or may do so: then all its rows pay for a second pass."""
        ids = mix.gated_set_ids
        return self.xlora if isinstance(ids, Tracer) or (np.asarray(ids) <= -2).any() else None

    def _gated_set_id(self, name: str) -> int:
        if name not in self.gated_set_names:
            known = ", ".join(self.gated_set_names) or "none"
            raise ValueError(f"no gated set is named {name!r}; the loaded ones are: {known}")
        index = self.gated_set_names.index(name)
        num_gated = len(self._gated_sets)
        return index if index < num_gated else set_id_of_row(index - num_gated)

    def require_tokenizer(self) -> Any:
        """The tokenizer.

        Raises:
          ValueError: If the model has none.
        """
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer; make batches by Batch(tokens=, lengths=)")
        return self.tokenizer

    def _check_is_free(self, name: str) -> None:
        if name in self._slots_of_adapter or name in self.gated_set_names:
            raise ValueError(f"the name {name!r} is taken already; give the new adapter or gated set another one")

    def _warn_if_traced(self, what: str) -> None:
        if self._is_traced:
            warnings.warn(
                f"a jitted function of yours that calls generate or logits of this model was compiled before {what} "
                "was added and will not see it; jit that function anew",
                stacklevel=3,
            )

    def _check(self, batch: Batch, mix: AdapterMix, max_new_tokens: int) -> None:
        """Checks shapes always, and the values of what is not traced."""
        self._check_shapes(batch, mix)
        self._is_traced |= any(isinstance(x, Tracer) for x in jax.tree.leaves((batch, mix)))
        prompt_len = batch.tokens.shape[1]
        if not isinstance(batch.lengths, Tracer):
            lengths = np.asarray(batch.lengths)
            if lengths.min() < 1 or lengths.max() > prompt_len:
                raise ValueError(f"prompt lengths are {lengths.min()} to {lengths.max()}; expected 1 to {prompt_len}")
            if lengths.max() + max_new_tokens > self.config.max_position:
                raise ValueError(
                    f"the longest prompt has {lengths.max()} tokens and {max_new_tokens} are to be generated, but the "
                    f"model's context is {self.config.max_position}"
                )
        if not isinstance(batch.tokens, Tracer):
            tokens = np.asarray(batch.tokens)
            if tokens.min() < 0 or tokens.max() >= self.config.vocab:
                raise ValueError(
                    f"token ids are {tokens.min()} to {tokens.max()}; the vocabulary has {self.config.vocab}"
                )

    def _check_shapes(self, batch: Batch, mix: AdapterMix) -> None:
        for name, array, num_axes in (("tokens", batch.tokens, 2), ("lengths", batch.lengths, 1)):
            if not isinstance(array, jax.Array | np.ndarray) or not np.issubdtype(array.dtype, np.integer):
                raise TypeError(f"batch.{name} is {_type_text(array)}; expected an int32 array")
            if array.ndim != num_axes or 0 in array.shape:
                raise ValueError(
                    f"batch.{name} has shape {array.shape}; expected "
                    f"{'[num_seqs, prompt_len]' if num_axes == 2 else '[num_seqs]'}, none of them 0"
                )
        num_seqs = batch.tokens.shape[0]
        if batch.lengths.shape != (num_seqs,):
            raise ValueError(f"batch.lengths has shape {batch.lengths.shape}; batch.tokens has {num_seqs} rows")
        if mix.weights.shape != (num_seqs, self.slots.num_slots):
            raise ValueError(
                f"the mix has shape {mix.weights.shape}; expected ({num_seqs} rows of the batch, "
                f"{self.slots.num_slots} slots)"
            )


def _type_text(value: object) -> str:
    return f"{value.dtype}{value.shape}" if isinstance(value, jax.Array | np.ndarray) else type(value).__name__


def _check_weight(name: str, weight: object) -> float:
    """A mix weight as a float; any finite number, negative ones and those above 1 included."""
    if isinstance(weight, bool) or not isinstance(weight, int | float | np.integer | np.floating):
        raise TypeError(f"the weight of adapter {name!r} is {weight!r}; expected a number")
    if not abs(weight) <= float(np.finfo(np.float32).max):
        raise ValueError(f"the weight of adapter {name!r} is {weight!r}; expected a finite number of float32")
    return float(weight)


def pad_batch(rows: Sequence[Sequence[int]]) -> Batch:
    """Makes a batch of token id lists of different lengths.

    Raises:
      ValueError: If there is no row, or one without a token.
    """
    if not rows:
        raise ValueError("a batch needs at least one prompt")
    if any(len(r) == 0 for r in rows):
        raise ValueError("every prompt needs at least one token")
    tokens = np.zeros((len(rows), max(len(r) for r in rows)), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return Batch(tokens=jnp.asarray(tokens), lengths=jnp.asarray([len(r) for r in rows], jnp.int32))


def load(
    model: str | Path,
    *,
    adapters: Sequence[str | Path] | None = None,
    gated_sets: Sequence[str | Path] = (),
    dtype: DTypeLike | None = None,
    adapter_slots: int = 64,
    slot_rank: int = 8,
    progress: bool = True,
) -> Model:
    """Loads a model and its adapters.

    Args:
      model: "demo", a Hugging Face directory, a GGUF file of the demo's kind or an Orbax store.
      adapters: PEFT folders, folders of such folders, or "name=folder". None loads the demo's adapters with the demo
        model and nothing otherwise.
      gated_sets: folders with a gated_set.json; experts given as folders are loaded too.
      dtype: "bfloat16" or "float32"; None keeps the checkpoint's, and float32 for the demo model on a CPU.
      adapter_slots: slots on the device; every adapter of rank r takes ceil(r / slot_rank) of them.
      slot_rank: rank rows of a slot.
      progress: show progress bars.

    Raises:
      FileNotFoundError: If a path, or the demo's model, does not exist; the message says what to do.
      ValueError: If a file is refused (`checkpoints.errors.CheckpointError`), two adapters or gated sets have one
        name, or the adapters need more slots than there are.
    """
    for name, value in (("adapters", adapters), ("gated_sets", gated_sets)):
        if isinstance(value, str | Path):
            raise TypeError(f"{name} is one path, {str(value)!r}; expected a list of paths")
    is_demo = str(model) == "demo"
    if adapters is None:
        adapters = demo_adapters() if is_demo else ()
    sources = collect_adapters(adapters)
    if dtype is None and is_demo:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    dtype_name = None if dtype is None else cast(ModelDtype, jnp.dtype(dtype).name)
    loaded = load_model(model, dtype=dtype_name, progress=progress)
    result = Model(
        model_from_params(loaded.config, loaded.params),
        loaded.tokenizer,
        adapter_slots=adapter_slots,
        slot_rank=slot_rank,
    )
    sets, sources = load_gated_sets(gated_sets, loaded.config, sources)
    for name, folder in sources:
        result.add_adapter(name, load_adapter(folder, loaded.config))
    result.add_gated_sets(sets)
    return result


def make_generate(
    model: Model,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    ignore_eos: bool = False,
) -> Generate:
    """Makes the jitted function generate(batch, mix, *, seed=0); see `Generate`.

    It compiles once for each shape of `batch.tokens`; a new mix, rank, adapter name or seed compiles nothing. It may be
    called inside a jitted function of yours, which then holds weights and adapters as constants: add all adapters
    before, or pass them yourself to `dymerge_jax.generate.generate_tokens`.

    Args:
      model: whose weights, adapters and tokenizer are used.
      max_new_tokens: most tokens generated a row.
      temperature: 0 is greedy.
      top_k: keep that many tokens; 0 keeps all.
      top_p: keep the likeliest tokens that add up to it; 1 keeps all.
      min_p: keep tokens at least this times as likely as the likeliest; 0 keeps all.
      ignore_eos: do not stop at the model's end tokens.

    Raises:
      ValueError: If a number is out of its range.
    """
    _check_number("max_new_tokens", max_new_tokens, max_new_tokens >= 1 and max_new_tokens % 1 == 0, "an integer >= 1")
    _check_number("temperature", temperature, 0 <= temperature < math.inf, "a finite number >= 0")
    _check_number("top_k", top_k, top_k >= 0 and top_k % 1 == 0, "an integer >= 0 (0 keeps all tokens)")
    _check_number("top_p", top_p, 0 < top_p <= 1, "a number in (0, 1]")
    _check_number("min_p", min_p, 0 <= min_p <= 1, "a number in [0, 1]")
    stop_ids = () if ignore_eos else model.config.eos_token_ids

    def generate(batch: Batch, mix: AdapterMix, *, seed: int | Int[Array, ""] = 0) -> GenerateOutput:
        model._check(batch, mix, max_new_tokens)
        sampling = None
        if temperature > 0:
            sampling = uniform_sampling(
                batch.tokens.shape[0], temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
            )
        return generate_tokens(
            model.split.graph,
            model.split.state,
            model.slots,
            model.gates,
            mix,
            batch,
            sampling,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            implementations=model.implementations,
            xlora=model._xlora_of(mix),
        )

    return generate


def _check_number(name: str, value: float, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise ValueError(f"{name} is {value!r}; expected {expected}")
