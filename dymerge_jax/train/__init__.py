"""Training of adapters and gates over a frozen model: `python -m dymerge_jax.train adapter|gate`.

The forward pass is that of the served model, layer by layer, with `maf_mvm` and its gradient; what is trained here is
served as it was trained.
"""
