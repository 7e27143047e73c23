#!/usr/bin/env bash
# What is measured on a GPU, a part at a time: bash benchmarks/h200.sh OUT PART...
#   tests    the GPU tests (compiled kernels, laws): about 5 minutes, most of it compiling
#   decode   time per token of the engine's loop, 8B and 1B shapes, and prefill: 3 minutes
#   step     the step's program alone with each kernel's share, of decode steps and of two with prompts: 3 minutes
#   kernels  what adapters add to one launch, beside the paper's baselines, batch 1-64, rank 4-64: 10 minutes
#   slots    the same for ranks 8 and 16 in slots of 8 and of 16 rank rows: 4 minutes
#   prefill  what adapters add to steps that read prompts, 512, 2048 and 8192 tokens, by block sizes; linear layers by
#            the library's GEMM and maf_mvm, and by the Mosaic kernel: 8 minutes
#   attention  block sizes of the prefill kernels, Triton's and Mosaic's: a few minutes
#   gated    gated decoding beside static mixes and baselines, 5 minutes; and eager PyTorch's loop over experts
#   tiers    time to first token from disk, host and slots, decode steps while adapters stream in; starts: 3 minutes
#   load     open-loop serving at 8 and 16 requests/s, four workloads: 5 minutes; TRACES="a.json b.json" replays those
#   rates    the highest rate that each of WORKLOADS="base single" sustains with TTFT p99 < 1 s: 2 minutes each
#   sweep    FIGURES="10 13" of the paper, 2 to 8 minutes each, 9 an hour (QUICK=--quick takes fewer points, DURATION=8
#            shorter ones); draw them anywhere: python -m serving.bench figures --from OUT/sweep.json OUT/maf_mvm.json
#   soak     SOAK_MINUTES=30 of load at RATE=20 requests/s on a server process, over HTTP, with clients that vanish,
#            malformed requests and an adapter loaded and unloaded all the time; writes 16 GB first, see soak.sh
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
        python3 -m serving.bench.decode --shape 1b --prompt-len 224 --output-len 128 --out "$out/decode-1b.json" ;;
    step)
      XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 python3 -m serving.bench.step --profile --prefill 4x2048 1x482+30 \
        --out "$out/step-8b.json" ;;
    kernels)
      python3 -m pallas_kernels.maf_mvm.bench --site --implementation pallas_triton --batch 1 8 32 64 \
        --column maf_pallas_triton copy_sgmv naive bmm dense site_fused site_plain --out "$out/maf_mvm.json" ;;
    slots)
      work="--site --implementation pallas_triton --batch 1 8 32 64 --rank 8 16 --column site_fused site_plain"
      # shellcheck disable=SC2086
      python3 -m pallas_kernels.maf_mvm.bench $work --slot-rank 8 --out "$out/maf_mvm-slots-of-8.json" &&
        python3 -m pallas_kernels.maf_mvm.bench $work --slot-rank 16 --out "$out/maf_mvm-slots-of-16.json" ;;
    prefill)
      python3 -m pallas_kernels.maf_mvm.bench_prefill --num-tokens 512 --prompts 1 --decode-rows 30 \
        --out "$out/prefill-512.json" &&
        python3 -m pallas_kernels.maf_mvm.bench_prefill --num-tokens 2048 --out "$out/prefill-2048.json" &&
        python3 -m pallas_kernels.maf_mvm.bench_prefill --num-tokens 8192 --out "$out/prefill-8192.json" &&
        python3 -m pallas_kernels.lora_linear.bench_prefill --num-tokens 8192 2048 --out "$out/linear.json" &&
        python3 -m pallas_kernels.lora_linear.bench_prefill --num-tokens 512 --prompts 1 --decode-rows 30 \
          --out "$out/linear-512.json" ;;
    attention)
      python3 -m pallas_kernels.paged_attention.bench --sweep --out "$out/attention.json" \
        --shapes 8b_prefill_4x2048+0 8b_prefill_4x2048+0_blocks_of_128 8b_prefill_16x512+0 8b_prefill_2048+2048 ;;
    gated)
      XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 python3 -m serving.bench.gated --shape 8b --out "$out/gated.json" &&
        python3 benchmarks/sequential_experts_torch.py --out "$out/sequential.json" ;;
    tiers)
      export XLA_PYTHON_CLIENT_MEM_FRACTION=0.9
      python3 -m serving.bench.adapter_tiers --shape 8b --slots 64 --rows 32 --prompt-len 224 --out "$out/tiers.json" &&
        python3 -m serving.bench.startup --shape 8b --out "$out/startup.json" ;;
    load)
      work="--rates 8 16 --duration ${DURATION:-20}"
      [ -z "${TRACES:-}" ] || work="--trace $TRACES"
      # shellcheck disable=SC2086 (words)
      XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 python3 -m serving.bench $work --out "$out/load.json" ;;
    rates)
      # shellcheck disable=SC2086
      XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 python3 -m serving.bench --find-rate --rates 20 --duration 10 --drain 15 \
        --rate-precision 0.1 --workloads ${WORKLOADS:-base single skewed distinct} --out "$out/rates.json" ;;
    sweep)
      # shellcheck disable=SC2086
      XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 python3 -m serving.bench sweep --figure ${FIGURES:-10 12 13 15 table1} \
        ${QUICK:-} --duration "${DURATION:-20}" --out "$out/sweep.json" ;;
    soak)
      bash "$(dirname "${BASH_SOURCE[0]}")/soak.sh" "$out" ;;
    tune)
      python3 -m pallas_kernels.lora_linear.tune --shape llama-3-8b llama-3.2-1b --out "$out/h200.json" ;;
    *)
      echo "$part is unknown; the parts are tests, decode, step, kernels, slots, prefill, attention, gated, tiers, load, rates, sweep, soak and tune" >&2
      false ;;
  esac || status=1
done
exit $status
