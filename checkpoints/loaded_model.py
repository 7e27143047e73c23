"""What every model reader returns."""

import dataclasses
from typing import TYPE_CHECKING, Literal

from checkpoints.params import Params
from dymerge_jax.config import LlamaConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ModelDtype = Literal["bfloat16", "float32"]


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model as read from disk.

    Attributes:
      config: its shape and constants.
      params: nested dict of arrays on the device, see `names.param_sources`.
      tokenizer: with its chat template, if it has one; None if the directory holds no tokenizer.
      name: what users call the model: the folder's name, or "demo".
    """

    config: LlamaConfig
    params: Params
    tokenizer: "PreTrainedTokenizerFast | None"
    name: str

    @property
    def dtype(self) -> str:
        """Dtype of the parameters, by name."""
        return str(self.params["embed"].dtype)


def model_dtype(own: str, requested: str | None) -> ModelDtype:
    """The dtype to load a model in: the requested one, else the checkpoint's own.

    float16 becomes bfloat16: no kernel here computes in float16, and bfloat16 covers its range with 3 bits fewer.
    Ask for float32 to keep every bit.
    """
    if requested is not None:
        if requested not in ("bfloat16", "float32"):
            raise ValueError(f"dtype is {requested!r}; a model is loaded as 'bfloat16' or 'float32'")
        return requested
    return "float32" if own == "float32" else "bfloat16"
