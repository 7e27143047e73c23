"""Reads the imports of Python sources, without running them."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module.

    Attributes:
      module: full dotted name; for `from p import m`, "p.m".
      line: where it stands in its file.
      is_lazy: stands in a function or under TYPE_CHECKING, so importing the file does not run it.
    """

    module: str
    line: int
    is_lazy: bool


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A module of the project.

    Attributes:
      path: relative to the repository.
      module: dotted name; a package's `__init__.py` is named like the package.
      imports: all of its imports, in order.
    """

    path: Path
    module: str
    imports: tuple[Import, ...]

    def uses(self, *names: str) -> list[Import]:
        """The imports of any of the named modules or of what lies below them."""
        return [i for i in self.imports if any(is_within(i.module, name) for name in names)]


def is_within(module: str, ancestor: str) -> bool:
    """Whether `module` is `ancestor` or lies below it."""
    return module == ancestor or module.startswith(ancestor + ".")


def read_sources(root: Path, packages: tuple[str, ...]) -> dict[str, SourceFile]:
    """Every module of the named packages below `root`, by dotted name."""
    sources = {}
    for path in sorted(p for package in packages for p in (root / package).rglob("*.py")):
        relative = path.relative_to(root)
        is_package = path.name == "__init__.py"
        parts = relative.parent.parts if is_package else relative.with_suffix("").parts
        tree = ast.parse(path.read_text(), filename=str(relative))
        package = parts if is_package else parts[:-1]
        sources[".".join(parts)] = SourceFile(relative, ".".join(parts), tuple(_imports(tree, package)))
    return sources


def modules_run_by(module: str, sources: dict[str, SourceFile]) -> dict[str, tuple[str, ...]]:
    """Everything that importing `module` imports, by name, with the chain of our modules that leads there."""
    reached: dict[str, tuple[str, ...]] = {}
    pending = [(module, ())]
    while pending:
        name, chain = pending.pop()
        for ancestor in _with_ancestors(name):
            if ancestor in reached:
                continue
            reached[ancestor] = chain
            if ancestor in sources:
                own = sources[ancestor]
                pending += [(i.module, (*chain, f"{own.path}:{i.line}")) for i in own.imports if not i.is_lazy]
    return reached


def _with_ancestors(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _imports(tree: ast.Module, package: tuple[str, ...]) -> Iterator[Import]:
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]
    found = []
    while pending:
        node, is_lazy = pending.pop()
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno, is_lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else ()
            prefix = (*parent, node.module) if node.module else parent
            found += [Import(".".join((*prefix, alias.name)), node.lineno, is_lazy) for alias in node.names]
        starts_lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        pending += [(child, is_lazy or starts_lazy) for child in ast.iter_child_nodes(node)]
    return iter(sorted(found, key=lambda i: (i.line, i.module)))
