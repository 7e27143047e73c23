"""Run as a process: attention by a program of a store. Prints whether it was compiled, and a digest of the result.

python -m tests.support.kept_program FOLDER SHAPE
"""

import hashlib
import sys
from pathlib import Path

import jax
import numpy as np
from jax import Array

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.shapes import SHAPES, AttentionInputs, random_inputs
from serving.program_store import ProgramStore


def main(folder: str, shape: str) -> None:
    inputs = random_inputs(SHAPES[shape], "bfloat16", np.random.default_rng(0))

    def attend(q: Array, inputs: AttentionInputs) -> Array:
        return paged_attention(q, inputs.kv, inputs.block_tables, inputs.tiles)

    def compile() -> jax.stages.Compiled:
        print("compiled")
        return jax.jit(attend).lower(inputs.q, inputs).compile()

    store = ProgramStore(Path(folder), jax.local_devices()[0])
    program = store.program("attention", (inputs.q, inputs), inputs.q, compile)
    print(hashlib.sha256(np.asarray(program(inputs.q, inputs), np.float32).tobytes()).hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
