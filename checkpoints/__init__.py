"""Files to pytrees and back: models, adapters, gated sets.

Entry points: `formats.load_model`, `peft_adapter.load_adapter` and `.inspect_adapter`, `adapter_sources.resolve_adapters`,
`gated_set.load_gated_set`, `orbax_store.save_model`. Whatever is wrong with a file is one `errors.CheckpointError` that
lists every reason.
"""
