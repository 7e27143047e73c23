"""The library's front: load a model with its adapters, make mixes, generate, score.

The one module of this package besides `serve` that reads files (through `checkpoints`).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from checkpoints.formats import load_model
from checkpoints.gated_set import load_gated_set
from checkpoints.peft_adapter import adapter_sources, load_adapter
from dymerge_jax.config import LlamaConfig
from dymerge_jax.demo import demo_adapters
from dymerge_jax.gating import GatedSetWeights, build_gate_array, place_experts
from dymerge_jax.generate import Batch, GenerateOutput, batch_logits, generate_tokens, uniform_sampling
from dymerge_jax.lora import AdapterWeights, empty_slots, slot_contents, write_slot
from dymerge_jax.mixes import check_weight
from dymerge_jax.model import Implementations, SplitModel, model_from_params
from dymerge_jax.step import AdapterMix

MixSpec = Mapping[str, float] | str
"""One row's mix: adapter name to weight, or the name of a gated set. {} is the base model."""


class Model:
    """A model with its adapters on the device.

    Args:
      split: the model.
      tokenizer: a transformers tokenizer, or None if the checkpoint has none.
      adapter_slots: slots of the slot array.
      slot_rank: rank rows of a slot.
      implementations: of the ops; the default picks by backend and shape.
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
        self.split = split
        self.tokenizer = tokenizer
        self.implementations = implementations
        self.slots = empty_slots(split.config, num_slots=adapter_slots, slot_rank=slot_rank, dtype=split.dtype)
        self.gates = None
        self._slots_of_adapter: dict[str, tuple[int, ...]] = {}
        self._gated_sets: list[GatedSetWeights] = []

    @property
    def config(self) -> LlamaConfig:
        return self.split.config

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(self._slots_of_adapter)

    @property
    def gated_set_names(self) -> tuple[str, ...]:
        return tuple(s.name for s in self._gated_sets)

    def add_adapter(self, name: str, adapter: AdapterWeights) -> None:
        """Puts an adapter into free slots, where it stays; mixes made before stay valid.

        Raises:
          ValueError: If the name is taken or too few slots are free.
        """
        if name in self._slots_of_adapter or name in self.gated_set_names:
            raise ValueError(f"the name {name!r} is taken already")
        needed = adapter.num_slots(self.slots.slot_rank)
        first = sum(len(s) for s in self._slots_of_adapter.values())
        if first + needed > self.slots.num_slots:
            raise ValueError(
                f"adapter {name!r} of rank {adapter.rank} needs {needed} slots of rank {self.slots.slot_rank}, but "
                f"only {self.slots.num_slots - first} of {self.slots.num_slots} are free; raise adapter_slots"
            )
        slot_ids = tuple(range(first, first + needed))
        contents = slot_contents(self.config, adapter, slot_rank=self.slots.slot_rank, dtype=self.split.dtype)
        for slot_id, content in zip(slot_ids, contents, strict=True):
            self.slots = write_slot(self.slots, slot_id, content)
        self._slots_of_adapter[name] = slot_ids

    def add_gated_sets(self, sets: Sequence[GatedSetWeights]) -> None:
        """Adds gated sets; their experts must have been added as adapters before."""
        for s in sets:
            missing = [e for e in s.experts if e not in self._slots_of_adapter]
            if missing:
                raise ValueError(f"gated set {s.name!r} needs adapters that are not loaded: {', '.join(missing)}")
            if s.name in self._slots_of_adapter or s.name in self.gated_set_names:
                raise ValueError(f"the name {s.name!r} is taken already")
        self._gated_sets.extend(sets)
        gates = build_gate_array(self.config, self._gated_sets, num_slots=self.slots.num_slots)
        if gates is not None:
            self.gates = place_experts(gates, self._gated_sets, self._slots_of_adapter)

    def tokenize(self, texts: Sequence[str], *, chat: bool = True) -> Batch:
        """Tokenizes texts into one batch, padded on the right.

        Args:
          texts: prompts.
          chat: each text is a user's message in the model's chat template; False takes it as it is.
        """
        tokenizer = self._require_tokenizer()
        if not texts:
            raise ValueError("got no texts; a batch needs at least one")
        if isinstance(texts, str):
            raise TypeError("got one str; expected a sequence of texts, such as [text]")
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
        tokenizer = self._require_tokenizer()
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
        """
        weights = np.zeros((len(rows), self.slots.num_slots), np.float32)
        gated = np.full(len(rows), -1, np.int32)
        for i, row in enumerate(rows):
            if isinstance(row, str):
                gated[i] = self._gated_set_id(row)
                continue
            for name, weight in row.items():
                if name not in self._slots_of_adapter:
                    known = ", ".join(self._slots_of_adapter) or "none"
                    raise ValueError(f"mix {i} names adapter {name!r}; the loaded adapters are: {known}")
                weights[i, list(self._slots_of_adapter[name])] = check_weight(name, weight)
        return AdapterMix(weights=jnp.asarray(weights), gated_set_ids=jnp.asarray(gated))

    def logits(self, batch: Batch, mix: AdapterMix) -> Float[Array, "num_seqs prompt_len vocab"]:
        """Logits after every prompt token, float32; of no meaning past a row's length."""
        self._check(batch, mix, 0)
        return batch_logits(
            self.split.graph, self.split.state, self.slots, self.gates, mix, batch, implementations=self.implementations
        )

    def _gated_set_id(self, name: str) -> int:
        if name not in self.gated_set_names:
            known = ", ".join(self.gated_set_names) or "none"
            raise ValueError(f"no gated set is named {name!r}; the loaded ones are: {known}")
        return self.gated_set_names.index(name)

    def _require_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer; make batches by Batch(tokens=, lengths=)")
        return self.tokenizer

    def _check(self, batch: Batch, mix: AdapterMix, max_new_tokens: int) -> None:
        num_seqs, prompt_len = batch.tokens.shape
        if batch.lengths.shape != (num_seqs,):
            raise ValueError(f"batch.lengths has shape {batch.lengths.shape}; batch.tokens has {num_seqs} rows")
        if mix.weights.shape != (num_seqs, self.slots.num_slots):
            raise ValueError(
                f"the mix has shape {mix.weights.shape}; expected ({num_seqs} rows of the batch, "
                f"{self.slots.num_slots} slots)"
            )
        if isinstance(batch.lengths, jax.core.Tracer):
            return
        lengths, tokens = np.asarray(batch.lengths), np.asarray(batch.tokens)
        if lengths.min() < 1 or lengths.max() > prompt_len:
            raise ValueError(f"prompt lengths are {lengths.min()} to {lengths.max()}; expected 1 to {prompt_len}")
        if lengths.max() + max_new_tokens > self.config.max_position:
            raise ValueError(
                f"the longest prompt has {lengths.max()} tokens and {max_new_tokens} are to be generated, but the "
                f"model's context is {self.config.max_position}"
            )
        if tokens.min() < 0 or tokens.max() >= self.config.vocab:
            raise ValueError(f"token ids are {tokens.min()} to {tokens.max()}; the vocabulary has {self.config.vocab}")


def pad_batch(rows: Sequence[Sequence[int]]) -> Batch:
    """Makes a batch of token id lists of different lengths."""
    if not rows or any(len(r) == 0 for r in rows):
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
      gated_sets: folders with a gated_set.json.
      dtype: "bfloat16" or "float32"; None keeps the checkpoint's, and float32 for the demo model on a CPU.
      adapter_slots: slots on the device; every adapter of rank r takes ceil(r / slot_rank) of them.
      slot_rank: rank rows of a slot.
      progress: show progress bars.
    """
    is_demo = str(model) == "demo"
    if dtype is None and is_demo:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    loaded = load_model(model, dtype=None if dtype is None else jnp.dtype(dtype).name, progress=progress)
    result = Model(
        model_from_params(loaded.config, loaded.params),
        loaded.tokenizer,
        adapter_slots=adapter_slots,
        slot_rank=slot_rank,
    )
    if adapters is None:
        adapters = demo_adapters() if is_demo else ()
    for spec in adapters:
        for name, folder in adapter_sources(str(spec)):
            result.add_adapter(name, load_adapter(folder, loaded.config))
    result.add_gated_sets([load_gated_set(folder, loaded.config) for folder in gated_sets])
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
) -> Callable[..., GenerateOutput]:
    """Makes the jitted function generate(batch, mix, *, seed=0).

    It compiles once for each shape of `batch.tokens`; a new mix, rank, adapter name or seed compiles nothing.

    Args:
      model: whose weights, adapters and tokenizer are used.
      max_new_tokens: most tokens generated a row.
      temperature: 0 is greedy.
      top_k: keep that many tokens; 0 keeps all.
      top_p: keep the likeliest tokens that add up to it; 1 keeps all.
      min_p: keep tokens at least this times as likely as the likeliest; 0 keeps all.
      ignore_eos: do not stop at the model's end tokens.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    if not (np.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature is {temperature}; it must be 0 or more")
    stop_ids = () if ignore_eos else model.config.eos_token_ids

    def generate(batch: Batch, mix: AdapterMix, *, seed: int = 0) -> GenerateOutput:
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
        )

    return cast(Callable[..., GenerateOutput], generate)
