"""Compiles JAX programs, Pallas kernels included, to machine code of an H200 or an L40 on a machine without a GPU.

    @pytest.fixture(scope="module")
    def h200() -> Iterator[H200]:
        with h200_target() as target:
            yield target

    def test_kernel_compiles(h200):
        compiled = h200.compile(fn, jax.ShapeDtypeStruct((16, 64), jnp.bfloat16))
        assert compiled.memory_analysis().temp_size_in_bytes < ...

Inside the context `jax.default_backend()` says "gpu", so code that picks an implementation by backend picks the one it
would use on an H200; arrays still live on the CPU and nothing can be run on the target. GEMM autotuning needs a device
and is skipped: XLA's own GEMM kernels differ from those of a real run. The helper reaches into `jax._src`, hence the
test suite's pinned JAX.
"""

import contextlib
import dataclasses
import importlib.util
import os
import re
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from jax._src import xla_bridge
from jax._src.interpreters import mlir
from jax._src.pallas.triton import gpu_info
from jax.experimental import topologies
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton_dialect

# What XLA would ask a real H200, as its GpuTargetConfigProto.
_TARGET_CONFIG = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  kernel_mode_driver_version: "580.159.3"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.15.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True)
class H200:
    """A compile-only H200, or L40.

    Attributes:
      sharding: places an argument on the compile-only device.
    """

    sharding: jax.sharding.SingleDeviceSharding

    def lower(self, fn: Callable[..., Any], *args: Any, **jit_kwargs: Any) -> jax.stages.Lowered:
        """Lowers `jax.jit(fn, **jit_kwargs)` for arguments of the shapes and dtypes of `args` (arrays or structs)."""
        structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding), args)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
            return jax.jit(fn, **jit_kwargs).trace(*structs).lower()

    def compile(self, fn: Callable[..., Any], *args: Any, **jit_kwargs: Any) -> jax.stages.Compiled:
        """Compiles `jax.jit(fn, **jit_kwargs)` to machine code; see `lower`."""
        return self.lower(fn, *args, **jit_kwargs).compile()


@contextlib.contextmanager
def h200_target() -> Iterator[H200]:
    """Makes JAX compile for an H200 inside the context; outside, the process stays a plain CPU one.

    Skips the calling test when a GPU is present (there the kernels run for real, `pytest -m gpu`).

    Raises:
      RuntimeError: If the CUDA plugin that holds XLA's GPU compiler is not installed or was refused.
    """
    info = gpu_info.GpuInfo(gpu_version=gpu_info.GpuVersion.H200, arch_name="9.0", compute_capability=90)
    with _target(_TARGET_CONFIG, info) as target:
        yield target


@contextlib.contextmanager
def l40_target() -> Iterator[H200]:
    """The same for an L40, for what Ada lacks: 99 KiB of shared memory a block instead of 227, no wgmma."""
    info = gpu_info.GpuInfo(gpu_version=gpu_info.GpuVersion.L40, arch_name="8.9", compute_capability=89)
    config = _TARGET_CONFIG
    for ours, theirs in (
        ("shared_memory_per_core: 233472", "shared_memory_per_core: 102400"),
        ("shared_memory_per_block_optin: 232448", "shared_memory_per_block_optin: 101376"),
        ("{ major: 9 minor: 0 }", "{ major: 8 minor: 9 }"),
        ("core_count: 132", "core_count: 142"),
        ("threads_per_core_limit: 2048", "threads_per_core_limit: 1536"),
        ("NVIDIA H200", "NVIDIA L40"),
    ):
        assert ours in config
        config = config.replace(ours, theirs)
    device = types.SimpleNamespace(compute_capability=info.arch_name)
    with _target(config, info) as target, pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: [device])
        yield target


@contextlib.contextmanager
def _target(config: str, info: gpu_info.GpuInfo) -> Iterator[H200]:
    if jax.default_backend() != "cpu":
        pytest.skip("deviceless compile is for CPU-only runs; set JAX_PLATFORMS=cpu to run it here")
    topology = _topology(config)
    canonicalize = xla_bridge.canonicalize_platform

    def canonicalize_for_target(platform: str) -> str:
        # "gpu" is an alias that JAX resolves by the devices that are present; here none is.
        return "cuda" if platform in ("gpu", "cuda") else canonicalize(platform)

    # A program traced for the CPU (interpret mode) must not be taken from the cache for the target, nor the reverse.
    jax.clear_caches()
    is_quick = jax.config.read("jax_disable_most_optimizations")
    with pytest.MonkeyPatch.context() as patch:
        jax.config.update("jax_disable_most_optimizations", False)
        patch.setattr(xla_bridge, "canonicalize_platform", canonicalize_for_target)
        patch.setattr(gpu_info, "get_gpu_info", lambda: info)
        patch.setattr(jax, "default_backend", lambda: "gpu")
        try:
            yield H200(jax.sharding.SingleDeviceSharding(topology.devices[0]))
        finally:
            jax.config.update("jax_disable_most_optimizations", is_quick)
            jax.clear_caches()


def _topology(config: str) -> topologies.TopologyDescription:
    version = jax.__version__
    install = f"pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        raise RuntimeError(f"compiling for a GPU needs XLA's GPU compiler, which is not installed; run: {install}")
    # The plugin looks for a driver and CUDA libraries when it loads, which a compile-only run has not.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        return topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1")
    except NotImplementedError as error:
        raise RuntimeError(
            "the CUDA plugin is installed but JAX did not load it; set JAX_PLATFORMS=cpu or "
            f"JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before Python starts, or reinstall it: {install}"
        ) from error


def triton_modules(lowered: jax.stages.Lowered) -> list[str]:
    """The text of the program's Triton kernels, before Triton compiles them."""
    module: Any = lowered.compiler_ir()
    found = []
    for operation in _operations(module.operation):
        if operation.name != "stablehlo.custom_call" or "triton" not in str(operation.attributes["call_target_name"]):
            continue
        config = ir.DictAttr(operation.attributes["mhlo.backend_config"])
        with mlir.make_ir_context() as context:
            triton_dialect.register_dialect(context)
            found.append(str(ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes)))
    return found


def triton_offsets(lowered: jax.stages.Lowered) -> set[tuple[str, str]]:
    """(dtype of the array, integer type of the offset) of every pointer that the program's Triton kernels compute."""
    pattern = re.compile(r"tt\.addptr .*!tt\.ptr<(\w+)>>?, .*?(i32|i64)>?$", re.MULTILINE)
    return {pair for text in triton_modules(lowered) for pair in pattern.findall(text)}


def _operations(operation: Any) -> Iterator[Any]:
    yield operation
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _operations(inner.operation)
