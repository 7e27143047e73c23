"""A decode step's linear layers with 8 LoRA experts in eager PyTorch, one expert after another, as MoELoRA-PEFT does.

    python benchmarks/sequential_experts_torch.py --batch 32 --out sequential.json

Every linear layer of the 8B shape computes its base product, a softmax gate of its own over the experts with the top 2
kept, and then for each expert y += gate * scale * (x @ A.T) @ B.T: what `serving.bench.gated` calls "linear-naive", but
dispatched from Python, launch by launch, as the systems do that the paper compares with. Attention, norms, embedding,
output matrix, sampling and the host's other work are left out, which is kind to it. Needs PyTorch, which the project
does not.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch

NUM_LAYERS, HIDDEN, FFN, KV_WIDTH = 32, 4096, 14336, 1024
SHAPES = [(HIDDEN, HIDDEN), (HIDDEN, KV_WIDTH), (HIDDEN, KV_WIDTH), (HIDDEN, HIDDEN)]
SHAPES += [(HIDDEN, FFN), (HIDDEN, FFN), (FFN, HIDDEN)]


class SequentialExperts(torch.nn.Module):
    """A linear layer with experts that run one after another on all tokens."""

    def __init__(self, fan_in: int, fan_out: int, num_experts: int, rank: int) -> None:
        super().__init__()
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        self.base = torch.nn.Linear(fan_in, fan_out, bias=False, **options)
        self.gate = torch.nn.Linear(fan_in, num_experts, bias=False, **options)
        self.a = torch.nn.ModuleList(torch.nn.Linear(fan_in, rank, bias=False, **options) for _ in range(num_experts))
        self.b = torch.nn.ModuleList(torch.nn.Linear(rank, fan_out, bias=False, **options) for _ in range(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        probs = torch.softmax(self.gate(x), -1)
        top, chosen = probs.topk(2, -1)
        weights = torch.zeros_like(probs).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        for expert, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
            y = y + weights[:, expert, None] * b(a(x)) * 2.0
        return y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32, help="rows (default: %(default)s)")
    parser.add_argument("--experts", type=int, default=8, help="of every layer (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="of each expert (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="steps that are timed (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    # Four layers serve in turn: their bytes are more than the L2 cache holds.
    layers = [[SequentialExperts(*shape, options.experts, options.rank) for shape in SHAPES] for _ in range(4)]
    inputs = {width: torch.randn(options.batch, width, dtype=torch.bfloat16, device="cuda") for width in (HIDDEN, FFN)}

    def step(*, has_experts: bool) -> None:
        for i in range(NUM_LAYERS):
            for layer in layers[i % len(layers)]:
                x = inputs[layer.base.in_features]
                layer(x) if has_experts else layer.base(x)

    result = {"command": shlex.join(["python", "benchmarks/sequential_experts_torch.py", *sys.argv[1:]])}
    result |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "repeats": options.repeats}
    with torch.inference_mode():
        for name, has_experts in (("base", False), ("sequential experts", True)):
            step_ms = []
            for repeat in range(options.repeats + 3):
                torch.cuda.synchronize()
                start_s = time.perf_counter()
                step(has_experts=has_experts)
                torch.cuda.synchronize()
                if repeat >= 3:
                    step_ms.append((time.perf_counter() - start_s) * 1e3)
            result[name] = {"ms_median": statistics.median(step_ms), "ms_min": min(step_ms), "ms_max": max(step_ms)}
            print(f"{name:20} {result[name]['ms_median']:8.2f} ms a step ({min(step_ms):.2f} to {max(step_ms):.2f})")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
