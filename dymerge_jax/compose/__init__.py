"""Makes mixes and adapters offline: `python -m dymerge_jax.compose merge` and `... search`.

`merge.merge_adapters` makes one adapter of several, `search.search_weights` finds the weights of a mix.
"""
