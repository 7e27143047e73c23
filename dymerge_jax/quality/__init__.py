"""Does a composition of adapters work? `python -m dymerge_jax.quality data|train|run`.

Small skills whose answers exact rules check, adapters and gates trained for them by the project's own trainer, and a
table of every way to compose them.
"""
