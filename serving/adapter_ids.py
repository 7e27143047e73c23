"""An adapter's id: its name and its content, so that a replaced adapter is another adapter to all but the registry."""

_HASH_DIGITS = 16


def adapter_id(name: str, content_hash: str) -> str:
    """The id of an adapter of this name and content."""
    return f"{name}@{content_hash[:_HASH_DIGITS]}"


def adapter_name(adapter_id: str) -> str:
    """The name in an id, which may hold "@" itself; an id without "@" is a name."""
    name, at, _ = adapter_id.rpartition("@")
    return name if at else adapter_id
