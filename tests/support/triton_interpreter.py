"""Runs Triton kernels on the CPU in Triton's own interpreter, without a GPU and without torch.

    def test_kernel(interpreted: ModuleType):
        y = interpreted.maf_mvm(...)

The kernels' module is loaded a second time with TRITON_INTERPRET=1, which Triton reads where a kernel is defined, and
its `launch` is replaced. Programs run one after another, outputs start as NaN. Slow: for tests of small shapes. Seen to
work with triton 3.6.0 and 3.9.0, on whose internals it leans.
"""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

_TYPE_NAMES = {
    np.dtype(np.float32): "fp32",
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype(np.int32): "i32",
}


@contextlib.contextmanager
def interpreted(path: Path) -> Iterator[ModuleType]:
    """The module at `path`, its kernels interpreted and its jitted functions run eagerly inside the context."""
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # NumPy no longer makes an int of an array of one element, such as a loop bound.
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, _in_float32(a), _in_float32(b), *rest)

    name = f"{path.stem}_interpreted"
    with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        patch.setattr(module, "launch", _launch)
        yield module


def _launch(
    *args: jax.Array,
    kernel: Any,
    out_type: Any,
    grid: tuple[int, ...],
    name: str,
    num_warps: int,
    num_stages: int,
    **constants: Any,
) -> jax.Array:
    del name, num_warps, num_stages
    assert os.environ["TRITON_INTERPRET"] == "1"
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    arrays = [np.array(arg) for arg in args]
    out = np.full(out_type.shape, np.nan, out_type.dtype)
    executor: Any = interpreter.GridExecutor(kernel.fn, kernel.arg_names, grid)
    # The arrays lie on the host already.
    executor._init_args_hst = lambda args, kwargs: (list(args), dict(kwargs))
    executor._restore_args_dev = lambda *_: None
    with np.errstate(invalid="ignore", over="ignore"):  # a token without pairs may hold infinity, as on a GPU
        executor(*map(_Pointer, [*arrays, out]), **constants)
    return jnp.asarray(out)


class _Pointer:
    """What the interpreter asks of a tensor: an address and the name of a dtype."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.dtype = _TYPE_NAMES[array.dtype]

    def data_ptr(self) -> int:
        return self._array.ctypes.data


def _in_float32(operand: Any) -> Any:
    """The interpreter keeps bfloat16 as its bits in uint16, and would multiply those."""
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    if operand.dtype.scalar != interpreter.tl.bfloat16:
        return operand
    return interpreter.TensorHandle(operand.data.view(ml_dtypes.bfloat16).astype(np.float32), interpreter.tl.float32)
