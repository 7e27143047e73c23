"""Files to pytrees and back: models, adapters, gated sets."""
