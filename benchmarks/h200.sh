#!/usr/bin/env bash
# What is measured on a GPU, a part at a time: bash benchmarks/h200.sh OUT PART...
#   tests    the GPU tests (compiled kernels, laws): about 5 minutes, most of it compiling
#   decode   time per token of the engine's loop, 8B and 1B shapes, and prefill: 3 minutes
#   step     the step's program alone with each kernel's share: 2 minutes
#   kernels  maf_mvm beside the paper's baselines, batch 1-64, rank 4-64: 4 to 6 minutes
#   tune     block sizes of lora_linear anew: 3 minutes a shape; writes OUT/h200.json, which is not used until it is
#            committed as pallas_kernels/lora_linear/h200.json
# Every part writes JSON into OUT and prints a table last. A part that fails does not keep the others from running.
set -uo pipefail
out=${1:?usage: benchmarks/h200.sh OUT PART...}
shift
mkdir -p "$out"
status=0
for part in "$@"; do
  echo "== $part"
  case $part in
    tests)
      XLA_PYTHON_CLIENT_PREALLOCATE=false python3 -m pytest -q -m gpu -p no:benchmark -n 8 --durations=10 ;;
    decode)
      export XLA_PYTHON_CLIENT_MEM_FRACTION=0.9
      python3 -m serving.bench.decode --shape 8b --prompt-len 224 --output-len 64 --out "$out/decode-8b.json" &&
        python3 -m serving.bench.decode --shape 1b --prompt-len 224 --output-len 64 --out "$out/decode-1b.json" ;;
    step)
      XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 python3 -m serving.bench.step --profile --out "$out/step-8b.json" ;;
    kernels)
      python3 -m pallas_kernels.maf_mvm.bench --out "$out/maf_mvm.json" ;;
    tune)
      python3 -m pallas_kernels.lora_linear.tune --shape llama-3-8b llama-3.2-1b --out "$out/h200.json" ;;
    *)
      echo "$part is unknown; the parts are tests, decode, step, kernels and tune" >&2
      false ;;
  esac || status=1
done
exit $status
