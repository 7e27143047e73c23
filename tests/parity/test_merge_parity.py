"""Merged adapters equal those of PEFT's add_weighted_adapter, in float32, but where PEFT is wrong."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints.files import read_json
from dymerge_jax.compose.merge import merge_adapters
from dymerge_jax.compose.merge_maths import MergeConfig
from tests.parity import cases


def _merge(name: str, path: Path) -> tuple[dict[str, np.ndarray], int]:
    """Every golden product of the merged adapter, and its rank."""
    case, adapters = cases.MERGE_CASES[name], cases.write_merge_adapters(path)
    config = MergeConfig(
        case.method,  # type: ignore[arg-type]  # cases.py knows nothing of this project
        rank=case.settings.get("svd_rank"),
        density=case.settings.get("density"),
        majority_sign=case.settings.get("majority_sign_method"),
    )
    sources = [(adapter, adapters[adapter]) for adapter in case.weights]
    merge_adapters(sources, list(case.weights.values()), path / "out", config, progress=False)
    tensors = load_file(path / "out" / "adapter_model.safetensors")
    written = read_json(path / "out" / "adapter_config.json")
    assert (written["lora_alpha"], written["use_rslora"]) == (written["r"], False)
    products = {}
    for (layer, projection), row_step in cases.MERGE_SITES.items():
        key = f"base_model.model.{cases.module_path(layer, projection)}.lora_{{}}.weight"
        product = tensors[key.format("B")] @ tensors[key.format("A")]
        products[f"{name}.{layer}.{projection}"] = product[::row_step]
    return products, written["r"]


@pytest.mark.parametrize("name", [name for name in cases.MERGE_CASES if name != "rslora_first"])
def test_a_merge_equals_that_of_peft(name: str, tmp_path: Path) -> None:
    golden = np.load(cases.GOLDENS / "merge.npz")
    products, _ = _merge(name, tmp_path)
    assert products
    for key, product in products.items():
        np.testing.assert_allclose(product, golden[key], rtol=1e-5, atol=2e-6, err_msg=key)


def test_rslora_of_the_first_adapter_is_not_inherited_as_peft_does(tmp_path: Path) -> None:
    golden = np.load(cases.GOLDENS / "merge.npz")
    products, rank = _merge("rslora_first", tmp_path)
    for key, product in products.items():
        np.testing.assert_allclose(product * rank**0.5, golden[key], rtol=1e-5, atol=2e-6, err_msg=key)


def test_the_goldens_tell_the_methods_apart() -> None:
    golden = np.load(cases.GOLDENS / "merge.npz")
    names = ("linear", "magnitude_prune", "ties", "ties_frequency", "ties_whole", "svd_rank_3")
    products = [golden[f"{name}.0.q_proj"] for name in names]
    assert min(np.abs(x - y).max() for i, x in enumerate(products) for y in products[:i]) > 0.01
