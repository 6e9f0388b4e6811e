"""The package's source, parsed once for the tests of this folder."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

__all__ = ["ROOT", "Module", "modules", "project_files"]

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ncclcomm"


@dataclass(frozen=True)
class Import:
    """One imported module, by its absolute name, and where."""

    name: str
    line: int
    lazy: bool
    """Within a function or under TYPE_CHECKING: it does not run when the module is imported."""


class Module:
    """A source file of the package."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text, str(path))

    @property
    def where(self) -> str:
        """The path within the package, such as devices/cuda.py."""
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def layer(self) -> str:
        """The folder, or the file's own name at the top of the package."""
        return self.where.partition("/")[0].removesuffix(".py")

    @cached_property
    def imports(self) -> list[Import]:
        """Every import, inside functions too; `from package import module` counts as that module."""
        return list(self._imports(self.tree, lazy=False))

    def _imports(self, node: ast.AST, *, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            inside = inside or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = self._absolute(child)
                yield from (Import(f"{base}.{alias.name}", child.lineno, lazy) for alias in child.names)
            else:
                yield from self._imports(child, lazy=inside)

    def _absolute(self, node: ast.ImportFrom) -> str:
        """The absolute name of what a from-import imports from."""
        if not node.level:
            return node.module or ""
        parts = self.path.relative_to(ROOT).parts[: -node.level]
        return ".".join([*parts, *([node.module] if node.module else [])])


@cache
def modules() -> tuple[Module, ...]:
    """All source files of the package, in order of their paths."""
    return tuple(Module(path) for path in sorted(PACKAGE.rglob("*.py")))


@cache
def project_files() -> tuple[Path, ...]:
    """Text files of the project: what git tracks or would track; skips the test outside a git checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: which files are the project's is not known")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return tuple(f for f in files if f.is_file() and b"\0" not in f.read_bytes()[:4096])
