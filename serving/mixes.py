"""What a request's `model`, `adapter_mix` and `lora` mean: names to a `Mix`, or an error that names the culprit.

Names end here: a `Mix` holds adapter ids, which tell the content too. A named mix holds names and is resolved when a
request comes, so that it follows a replaced adapter, while running requests keep what they began with.
"""

import dataclasses
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from dymerge_jax.retrieval import AUTO, is_auto_name
from serving.auto_mix import AutoMix, parse_auto_mix
from serving.errors import ConflictError, InvalidRequestError, UnknownModelError
from serving.request import MAX_FLOAT32, Mix

MAX_NAME_LEN = 256  # of a loaded adapter or a named mix; names are metric labels and parts of paths
_FORMS = 'an object such as {"legal": 0.7, "french": 0.3} or a list such as [{"adapter": "legal", "weight": 0.7}]'


@dataclasses.dataclass(frozen=True)
class AdapterEntry:
    """One adapter as requests see it.

    Attributes:
      name: what a request calls it.
      root: the folder it came from, shown by /v1/models.
      num_slots: slots it fills on the device.
      adapter_id: what everything below the registry calls it; another content has another id.
      generation: hash of its content, which a client may ask for when it replaces or unloads.
    """

    name: str
    root: str
    num_slots: int
    adapter_id: str
    generation: str


@dataclasses.dataclass(frozen=True)
class GatedSetEntry:
    """One gated set as requests see it: its name, the adapters its gates choose from, and its folder."""

    name: str
    experts: tuple[str, ...]
    root: str


def check_names(names: Sequence[str]) -> None:
    """Checks that base model, adapters, gated sets and named mixes can be told apart.

    Raises:
      ValueError: If a name is given more than once, or asks for retrieval; all of them are named.
    """
    if reserved := [name for name in names if is_auto_name(name)]:
        raise ValueError(
            f"the names {', '.join(map(repr, reserved))} are taken: requests ask by {AUTO!r} for the adapters that fit "
            "their prompt; name an adapter apart with --adapters NAME=FOLDER, the base with --served-model-name"
        )
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"the names {', '.join(map(repr, repeated))} are given more than once among base model, adapters, gated "
            "sets and mixes; name an adapter apart with --adapters NAME=FOLDER, the base with --served-model-name"
        )


class ModelRegistry:
    """The base model, its adapters, gated sets and named mixes by name. Touched on the event loop only once it serves.

    Attributes:
      base_name: the id of the base model.
      base_root: where the base model was loaded from.
      adapters: by name, in the order of /v1/models; llama.cpp's `lora` ids count in this order.
      gated_sets: by name.
      mixes: weights by adapter name, by the mix's name.
      num_slots, slot_rank: size of the slot array.
    """

    def __init__(
        self,
        base_name: str,
        base_root: str,
        adapters: Sequence[AdapterEntry],
        gated_sets: Sequence[GatedSetEntry],
        mixes: Mapping[str, Mapping[str, float]] | None = None,
        *,
        num_slots: int,
        slot_rank: int,
    ) -> None:
        self.base_name = base_name
        self.base_root = base_root
        self.adapters = {a.name: a for a in adapters}
        self.gated_sets = {g.name: g for g in gated_sets}
        self.mixes: dict[str, dict[str, float]] = {}
        self.num_slots = num_slots
        self.slot_rank = slot_rank
        check_names([base_name, *(a.name for a in adapters), *(g.name for g in gated_sets), *(mixes or ())])
        for gated_set in gated_sets:
            if missing := [e for e in gated_set.experts if e not in self.adapters]:
                raise ValueError(
                    f"gated set {gated_set.name!r} uses the adapters {', '.join(map(repr, missing))}, which are not "
                    "loaded; add them with --adapters"
                )
        for name, weights in (mixes or {}).items():
            self.put_mix(name, weights)

    # Changes while it serves

    def check_adapter_name(self, name: str) -> None:
        """Checks that an adapter may be loaded under a name, or replace the one that has it.

        Raises:
          InvalidRequestError: If the name is no name, or that of something else.
          ConflictError: If a gated set uses the adapter: its gates were trained on that content.
        """
        _check_name(name, "lora_name")
        if (taken_by := self._kind(name)) not in (None, "adapter"):
            raise InvalidRequestError(
                f"the name {name!r} is taken ({taken_by}); load the adapter under another one", param="lora_name"
            )
        if gated_sets := [s.name for s in self.gated_sets.values() if name in s.experts]:
            raise ConflictError(
                f"the adapter {name!r} is an expert of the gated set {_listed(gated_sets)} and stays as it is while "
                "the server runs; load the new one under another name",
                param="lora_name",
            )

    def put_adapter(self, entry: AdapterEntry) -> None:
        """Adds an adapter, or replaces the one of its name, for all requests that come from now on.

        Raises:
          InvalidRequestError, ConflictError: See `check_adapter_name`; also if a named mix would need more slots than
            there are. Nothing has changed then.
        """
        self.check_adapter_name(entry.name)
        for mix, weights in self.mixes.items():
            used = [n for n, weight in weights.items() if weight != 0]
            total = sum(entry.num_slots if n == entry.name else self.adapters[n].num_slots for n in used)
            if entry.name in used and total > self.num_slots:
                raise ConflictError(
                    f"the new adapter {entry.name!r} has {entry.num_slots} slots, with which the mix {mix!r} would "
                    f"need {total}, but the slot array has {self.num_slots}; delete the mix first",
                    param="lora_name",
                )
        self.adapters[entry.name] = entry

    def remove_adapter(self, name: str) -> AdapterEntry:
        """Takes an adapter away from all requests that come from now on; gives what it was.

        Raises:
          UnknownModelError: If there is none of this name.
          InvalidRequestError: If the name is that of something else.
          ConflictError: If a gated set or a named mix uses it.
        """
        if (kind := self._kind(name)) not in (None, "adapter"):
            hint = f"; DELETE /v1/mixes/{name} deletes it" if kind == "mix" else ""
            raise InvalidRequestError(f"{name!r} is a {kind}, not an adapter{hint}", param="lora_name")
        if kind is None:
            raise UnknownModelError(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        if gated_sets := [s.name for s in self.gated_sets.values() if name in s.experts]:
            raise ConflictError(
                f"the adapter {name!r} is an expert of the gated set {_listed(gated_sets)}, which cannot be served "
                "without it",
                param="lora_name",
            )
        if mixes := [mix for mix, weights in self.mixes.items() if name in weights]:
            raise ConflictError(
                f"the adapter {name!r} is used by the mix {_listed(mixes)}; delete it first, by DELETE /v1/mixes/NAME",
                param="lora_name",
            )
        return self.adapters.pop(name)

    def put_mix(self, name: str, weights: Mapping[str, float], *, may_replace: bool = False) -> None:
        """Names a mix, to be used as `model`.

        Args:
          name: not yet taken.
          weights: finite, by adapter name, at least one.
          may_replace: the name may be that of a mix, which is replaced.

        Raises:
          InvalidRequestError: If the name is no name or that of something else, or the mix is empty or too large.
          ConflictError: If there is a mix of this name and it may not be replaced.
          UnknownModelError: If an adapter does not exist.
        """
        _check_name(name, "name")
        kind = self._kind(name)
        if kind == "mix" and not may_replace:
            raise ConflictError(
                f'there is a mix named {name!r} already; give "replace": true to replace it', param="name"
            )
        if kind not in (None, "mix"):
            raise InvalidRequestError(f"the name {name!r} is taken ({kind}); give the mix another", param="name")
        if not weights:
            raise InvalidRequestError(
                f"the mix {name!r} names no adapter; the base model {self.base_name!r} is that already",
                param="adapter_mix",
            )
        self._static_mix(weights, "adapter_mix")
        self.mixes[name] = dict(weights)

    def remove_mix(self, name: str) -> None:
        """Forgets a named mix; requests that use it go on.

        Raises:
          UnknownModelError: If there is none of this name.
        """
        if name not in self.mixes:
            raise UnknownModelError(f"There is no mix named {name!r}; GET /v1/mixes lists them.", param="name")
        del self.mixes[name]

    # Questions of a request

    def resolve(
        self,
        model: str | None,
        adapter_mix: Mapping[str, float] | None = None,
        lora: Sequence[tuple[int | str, float]] | None = None,
    ) -> Mix:
        """The mix a request asks for.

        Args:
          model: the base's name or None, an adapter (its mix is {adapter: 1}), a gated set or a named mix.
          adapter_mix: weights by adapter name; only with the base as `model`. An empty one is the base.
          lora: llama.cpp's form: (id or name, scale); the id is the adapter's position in /v1/models.

        Raises:
          UnknownModelError: If `model`, or an adapter of the mix, does not exist.
          InvalidRequestError: If two selectors are given, or the mix needs more slots than there are.
        """
        self._check_model(model)
        if adapter_mix is not None and lora is not None:
            raise InvalidRequestError(
                "adapter_mix and lora are both given; they say the same thing, use one", param="lora"
            )
        param = "adapter_mix" if lora is None else "lora"
        weights = adapter_mix if lora is None else self._weights_from_lora(lora)
        is_base = model is None or model == self.base_name
        if weights is not None:
            if not is_base:
                instead = f" and put {model!r} into it" if model in self.adapters else ""
                raise InvalidRequestError(
                    f"{param} is given together with model {model!r}, which selects adapters itself; leave {param} "
                    f"out, or use model {self.base_name!r} with {param}{instead}",
                    param=param,
                )
            return self._static_mix(weights, param)
        if is_base:
            return Mix()
        assert model is not None
        if model in self.gated_sets:
            self._check_slots(set(self.gated_sets[model].experts), f"gated set {model!r}", "model")
            return Mix(gated_set=model)
        return self._static_mix(self.mixes.get(model, {model: 1.0}), "model")

    def adapters_of(self, mix: Mix) -> tuple[str, ...]:
        """Ids of all adapters that must be on the device for `mix`, each once."""
        if mix.gated_set is not None:
            experts = dict.fromkeys(self.gated_sets[mix.gated_set].experts)
            return tuple(self.adapters[name].adapter_id for name in experts)
        return mix.adapters

    def auto_mix(
        self,
        model: str | None,
        adapter_mix: Mapping[str, float] | AutoMix | None,
        lora: Sequence[tuple[int | str, float]] | None,
    ) -> tuple[AutoMix, str] | None:
        """The mix that a request leaves to the server, and the field that says so; None if it names its adapters.

        Raises:
          UnknownModelError: If `model` does not exist.
          InvalidRequestError: If another selector is given beside it, or it has another form.
        """
        is_model = model is not None and is_auto_name(model)
        if not is_model and not isinstance(adapter_mix, AutoMix):
            return None
        other = "lora" if lora is not None else "adapter_mix" if is_model and adapter_mix is not None else None
        if not is_model:
            self._check_model(model)
            if model not in (None, self.base_name):
                other = other or f"model {model!r}"
        if other is not None:
            asked = f"model {model!r}" if is_model else "adapter_mix"
            raise InvalidRequestError(
                f"{asked} leaves the choice of adapters to the server, but {other} is given too; leave one out",
                param=other if other in ("lora", "adapter_mix") else "adapter_mix",
            )
        if isinstance(adapter_mix, AutoMix):
            return adapter_mix, "adapter_mix"
        assert model is not None
        return parse_auto_mix(model, "model"), "model"

    def cards(self, created: int, max_model_len: int, *, has_auto: bool = False) -> list[dict[str, Any]]:
        """The entries of /v1/models: base first, then adapters, gated sets and mixes with the base as `parent`.

        Args:
          created: in seconds since 1970.
          max_model_len: most tokens of a request.
          has_auto: adapters can be found for a prompt.
        """
        return [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "dymerge_jax",
                "root": root,
                "parent": parent,
                "max_model_len": max_model_len,
            }
            | more
            for name, root, parent, more in self._card_parts(has_auto)
        ]

    def _card_parts(self, has_auto: bool) -> Iterator[tuple[str, str | None, str | None, dict[str, Any]]]:
        """Id, root, parent and what else a card says."""
        yield self.base_name, self.base_root, None, {}
        for adapter in self.adapters.values():
            yield adapter.name, adapter.root, self.base_name, {"generation": adapter.generation}
        for gated_set in self.gated_sets.values():
            yield gated_set.name, gated_set.root, self.base_name, {}
        for name, weights in self.mixes.items():
            yield name, None, self.base_name, {"adapter_mix": weights}
        if has_auto:
            yield AUTO, None, self.base_name, {}

    def _kind(self, name: str) -> str | None:
        """What a name stands for, in a user's words; None for nothing."""
        if name == self.base_name:
            return "base model"
        kinds = {"adapter": self.adapters, "gated set": self.gated_sets, "mix": self.mixes}
        return next((kind for kind, named in kinds.items() if name in named), None)

    def _check_model(self, model: str | None) -> None:
        if model is None or self._kind(model) is not None:
            return
        raise UnknownModelError(
            f"The model {model!r} does not exist; GET /v1/models lists those that do.", param="model"
        )

    def _weights_from_lora(self, lora: Sequence[tuple[int | str, float]]) -> dict[str, float]:
        names = list(self.adapters)
        weights: dict[str, float] = {}
        for i, (adapter_id, scale) in enumerate(lora):
            if isinstance(adapter_id, int) and not 0 <= adapter_id < len(names):
                raise UnknownModelError(
                    f"lora[{i}].id is {adapter_id}, but there are {len(names)} adapters, counted from 0 in the order "
                    "of /v1/models",
                    param="lora",
                )
            name = names[adapter_id] if isinstance(adapter_id, int) else adapter_id
            if name in weights:
                raise InvalidRequestError(f"lora names the adapter {name!r} twice; give each once", param="lora")
            weights[name] = scale
        return weights

    def _static_mix(self, weights: Mapping[str, float], param: str) -> Mix:
        for name in weights:
            if (kind := self._kind(name)) in ("gated set", "mix"):
                raise InvalidRequestError(
                    f"{name!r} in {param} is a {kind}, not an adapter; give it as model, without a mix", param=param
                )
            if name not in self.adapters:
                raise UnknownModelError(
                    f"The adapter {name!r} in {param} does not exist; GET /v1/models lists those that do.", param=param
                )
        used = {name: weight for name, weight in weights.items() if weight != 0}
        self._check_slots(used, "the mix", param)
        return Mix(tuple((self.adapters[name].adapter_id, weight) for name, weight in used.items()))

    def _check_slots(self, names: Collection[str], what: str, param: str) -> None:
        needed = {name: self.adapters[name].num_slots for name in names}
        total = sum(needed.values())
        if total > self.num_slots:
            listed = ", ".join(f"{name!r} {count}" for name, count in sorted(needed.items())[:20])
            raise InvalidRequestError(
                f"{what} needs {total} slots of rank {self.slot_rank} ({listed}), but the slot array has "
                f"{self.num_slots}; use fewer adapters or raise --adapter-slots",
                param=param,
            )


def _check_name(name: str, param: str) -> None:
    if not name.strip() or len(name) > MAX_NAME_LEN:
        raise InvalidRequestError(
            f"{param} is {shown(name)}; expected a name of 1 to {MAX_NAME_LEN} characters", param=param
        )
    if is_auto_name(name):
        raise InvalidRequestError(
            f"{param} is {shown(name)}, by which requests ask for the adapters that fit their prompt; choose another",
            param=param,
        )


def _listed(names: Sequence[str]) -> str:
    """The first few names."""
    return ", ".join(map(repr, names[:10])) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def parse_adapter_mix(value: object) -> dict[str, float] | None:
    """The field `adapter_mix` as weights by name; None where it is absent.

    Raises:
      InvalidRequestError: If it has another form, a weight is no finite number, or an adapter comes twice.
    """
    if value is None:
        return None
    if isinstance(value, dict):
        return {name: _weight(weight, f"adapter_mix[{name!r}]", "adapter_mix") for name, weight in value.items()}
    if not isinstance(value, list):
        raise InvalidRequestError(f"adapter_mix is {shown(value)}; expected {_FORMS}", param="adapter_mix")
    weights: dict[str, float] = {}
    for i, item in enumerate(value):
        name, weight = _pair(item, ("adapter", "weight"), f"adapter_mix[{i}]", "adapter_mix")
        if not isinstance(name, str):
            raise InvalidRequestError(
                f"adapter_mix[{i}].adapter is {shown(name)}; expected an adapter's name", param="adapter_mix"
            )
        if name in weights:
            raise InvalidRequestError(
                f"adapter_mix names the adapter {name!r} twice; give each once", param="adapter_mix"
            )
        weights[name] = _weight(weight, f"adapter_mix[{i}].weight", "adapter_mix")
    return weights


def parse_request_mix(value: object) -> dict[str, float] | AutoMix | None:
    """The field `adapter_mix` of a request, which may leave the choice to the server.

    Raises:
      InvalidRequestError: See `parse_adapter_mix` and `parse_auto_mix`.
    """
    return parse_auto_mix(value, "adapter_mix") if isinstance(value, str) else parse_adapter_mix(value)


def parse_lora(value: object) -> list[tuple[int | str, float]] | None:
    """llama.cpp's field `lora`, [{"id": 0, "scale": 0.5}], as (id or name, scale); None where it is absent."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise InvalidRequestError(
            f'lora is {shown(value)}; expected a list such as [{{"id": 0, "scale": 0.5}}]', param="lora"
        )
    pairs: list[tuple[int | str, float]] = []
    for i, item in enumerate(value):
        adapter_id, scale = _pair(item, ("id", "scale"), f"lora[{i}]", "lora")
        if isinstance(adapter_id, bool) or not isinstance(adapter_id, int | str):
            raise InvalidRequestError(
                f"lora[{i}].id is {shown(adapter_id)}; expected an adapter's position in /v1/models or its name",
                param="lora",
            )
        pairs.append((adapter_id, _weight(scale, f"lora[{i}].scale", "lora")))
    return pairs


def _pair(item: object, keys: tuple[str, str], where: str, param: str) -> tuple[object, object]:
    if not isinstance(item, dict) or set(item) != set(keys):
        raise InvalidRequestError(
            f"{where} is {shown(item)}; expected an object with exactly {keys[0]!r} and {keys[1]!r}", param=param
        )
    return item[keys[0]], item[keys[1]]


def _weight(value: object, where: str, param: str) -> float:
    # Compared before it is converted: an integer of any length compares, and NaN fails.
    if isinstance(value, int | float) and not isinstance(value, bool) and -MAX_FLOAT32 <= value <= MAX_FLOAT32:
        return float(value)
    raise InvalidRequestError(f"{where} is {shown(value)}; expected a finite number", param=param)


def shown(value: object) -> str:
    """What a client sent, short enough for an error message however large or deep it is."""
    short = reprlib.Repr(maxstring=80, maxother=80, maxlevel=3)
    return short.repr(value)
