"""Frozen dataclasses that cross `jit`: one decorator, so that every state class reads alike."""

import dataclasses
from typing import Any, dataclass_transform

import jax


def static_field(**kwargs: Any) -> Any:
    """A field that is part of the compiled program's identity (hashable), not an array."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static_field, dataclasses.field))
def pytree_dataclass[T](cls: type[T]) -> type[T]:
    """Makes `cls` a frozen dataclass and registers it as a pytree.

    Fields are children (arrays or pytrees of arrays) unless made by `static_field`.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    static = [f.name for f in fields if f.metadata.get("static")]
    data = [f.name for f in fields if not f.metadata.get("static")]
    return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=static)
