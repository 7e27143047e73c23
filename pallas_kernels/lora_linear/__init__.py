"""A linear layer with its adapters: the base product and MAF-MVM in one launch, where a step is small enough."""

from pallas_kernels.lora_linear.api import Implementation, lora_linear, lora_swiglu
from pallas_kernels.lora_linear.arrivals import new_arrivals

__all__ = ["Implementation", "lora_linear", "lora_swiglu", "new_arrivals"]
