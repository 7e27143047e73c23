"""Makes gated sets of what other projects train: finds out which family a folder is of, and has it imported.

MoLA, LoRAMoE (MoE-PEFT)    a gate in each linear layer: a gated set, see `moe_peft`
MOELoRA                     a gate that reads the task's id: adapters and a named mix a task, see `moelora`
X-LoRA (PEFT)               a classifier that reads a first pass: a gated set of kind "xlora", see `peft_xlora`
MixLoRA                     refused, with the reason
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError, MissingFileError
from checkpoints.files import pickle_message, read_json
from checkpoints.moe_peft import import_moe_peft
from checkpoints.moelora import import_moelora
from checkpoints.peft_adapter import CONFIG_FILE, WEIGHTS_FILE
from checkpoints.peft_xlora import ORIGINAL_CONFIG_FILE, import_xlora

_REFUSED = {
    "MIXLORA": "MixLoRA's gate weighs whole expert MLPs, after their SwiGLU: down_proj runs once an expert on what the "
    "expert's own gate_proj and up_proj gave, which is no weighted sum of LoRA deltas on each linear layer, the only "
    "form that is served here; MoE-PEFT's MoLA and LoRAMoE are of that form",
    "LORA": "it is a plain LoRA adapter without a gate; serve it with --adapters, or make a gated set of several with "
    "`python -m checkpoints make-arrow`",
}


def import_gated(source: Path, target: Path, experts: Sequence[tuple[str, Path]] = ()) -> list[str]:
    """Imports a folder of any family that can be served.

    Args:
      source: the folder, with adapter_config.json and adapter_model.safetensors.
      target: folder to make; must not exist.
      experts: (name, folder) of X-LoRA's experts that are elsewhere than its config says.

    Returns:
      What to tell the user: what was made and how to serve it, a line each.

    Raises:
      MissingFileError: If a file is missing.
      CheckpointError: If the family is unknown or not supported, or a tensor is wrong; lists every reason.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists; give a folder that does not exist yet")
    if not (source / CONFIG_FILE).is_file():
        if (source / ORIGINAL_CONFIG_FILE).is_file():
            raise CheckpointError(
                f"{str(source)!r} holds {ORIGINAL_CONFIG_FILE}, of the format of X-LoRA's own repository, whose rules "
                "differ from one version to the next; only PEFT's format is read: load it with the version that "
                "trained it, and save a PEFT XLoraConfig and the classifier's tensors as internal_xlora_classifier"
            )
        raise MissingFileError(f"{str(source)!r} is no folder with {CONFIG_FILE}")
    content = read_json(source / CONFIG_FILE)
    family = _family(content, source)
    weights = _weights_file(source)
    if family == "XLORA":
        return import_xlora(content, weights, target, experts)
    if experts:
        raise CheckpointError(f"--experts is given, but {str(source)!r} is {family}, which holds its experts itself")
    if family in ("MOLA", "LORAMOE"):
        return import_moe_peft(content, weights, target)
    return import_moelora(content, weights, target)


def _family(content: dict[str, Any], source: Path) -> str:
    peft_type, routing = content.get("peft_type"), content.get("routing_strategy")
    family = peft_type.upper() if isinstance(peft_type, str) else None
    # A MixLoRA folder of before MoE-PEFT names its routing after Mixtral.
    if isinstance(routing, str) and routing.lower().startswith(("mixlora", "mixtral")):
        family = "MIXLORA"
    if family in _REFUSED:
        raise CheckpointError(f"{str(source)!r} is refused: {_REFUSED[family]}")
    if family not in ("MOLA", "LORAMOE", "MMOELORA", "MMOELORAS", "XLORA"):
        raise CheckpointError(
            f"{str(source)!r} has peft_type {peft_type!r}; families that can be imported are MOLA and LORAMOE "
            "(MoE-PEFT), MMOELORA and MMOELORAS (MOELoRA-peft), and XLORA (PEFT)"
        )
    return family


def _weights_file(source: Path) -> Path:
    weights, pickled = source / WEIGHTS_FILE, source / "adapter_model.bin"
    if not weights.is_file() and pickled.is_file():
        raise CheckpointError(f"{str(source)!r} has its weights as a pickle {pickle_message(pickled, weights)}")
    if not weights.is_file():
        raise MissingFileError(f"{str(source)!r} holds no {WEIGHTS_FILE}")
    return weights
