"""Files to pytrees and back: models, adapters, gated sets.

Ways in: `formats.load_model`, `peft_adapter.load_adapter`, `.inspect_adapter` and `.adapter_sources`,
`gated_set.load_gated_set`, `orbax_store.save_model`. Whatever is wrong with a file is one `errors.CheckpointError` that
lists every reason.
"""
