"""Reads a tokenizer directory as Hugging Face writes it; no code from it is run and no network is used."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_log = logging.getLogger(__name__)


def tokenizer_class() -> "type[PreTrainedTokenizerFast]":
    """transformers' tokenizer over the `tokenizers` library; imported late, for it takes a second."""
    # Without torch transformers says at import that it can load no models; tokenizers are all that is wanted of it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast


def read_tokenizer(folder: Path, vocab: int) -> "PreTrainedTokenizerFast | None":
    """Reads tokenizer.json with its settings and chat template.

    The class named in tokenizer_config.json and any "auto_map" code are ignored: tokenizer.json says everything.

    Args:
      folder: a model directory.
      vocab: rows of the model's embedding; more ids than that are reported in the log.

    Returns:
      The tokenizer, or None if the folder has none.

    Raises:
      CheckpointError: If the tokenizer cannot be read, or is in SentencePiece's own format only.
    """
    if not (folder / "tokenizer.json").is_file():
        if (folder / "tokenizer.model").is_file():
            raise CheckpointError(
                f'{folder} has a tokenizer.model but no tokenizer.json; write one with: python -c "from transformers '
                f"import AutoTokenizer as T; T.from_pretrained('{folder}').save_pretrained('{folder}')\""
            )
        return None
    cls = tokenizer_class()
    try:
        tokenizer = cls.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise anything, bare Exception included
        raise CheckpointError(f"{folder / 'tokenizer.json'} cannot be read as a tokenizer: {error}") from error
    if len(tokenizer) > vocab:
        _log.warning(
            "%s: the tokenizer has %d ids but the model %d; ids from %d on are refused in prompts",
            folder, len(tokenizer), vocab, vocab,
        )  # fmt: skip
    return tokenizer
