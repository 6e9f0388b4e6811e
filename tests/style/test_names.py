"""Public names are documented names, and files stay small enough to read."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

import pytest

import ncclcomm
from package_source import ROOT, Module, modules

MOST_LINES = 400
by_file = pytest.mark.parametrize("module", modules(), ids=lambda module: module.where)


def declared(module: Module) -> list[str] | None:
    """The names in the file's `__all__`, or None without one."""
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions and classes of a file with their dotted names, methods included."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, f"{prefix}{node.name}.")


@by_file
def test_file_has_docstring_and_all(module: Module) -> None:
    if not module.text.strip():
        return
    assert ast.get_docstring(module.tree), f"{module.where} has no docstring"
    if module.path.name not in ("__init__.py", "__main__.py"):
        assert declared(module) is not None, f"{module.where} has no __all__"


@by_file
def test_public_definitions_have_docstrings(module: Module) -> None:
    bare = [
        f"{module.where}:{node.lineno} {name}"
        for name, node in definitions(module.tree.body)
        if not any(part.startswith("_") for part in name.split("."))
        and not ast.get_docstring(node)
        and "overload" not in (ast.unparse(d) for d in node.decorator_list)
    ]
    assert not bare


@by_file
def test_all_lists_what_the_file_defines(module: Module) -> None:
    names = declared(module) or []
    assert len(names) == len(set(names)), f"{module.where}: __all__ names something twice"
    if module.path.name == "__init__.py":
        return
    top = {name for name, _ in definitions(module.tree.body) if "." not in name and not name.startswith("_")}
    assert top <= set(names), f"{module.where}: public but not in __all__: {sorted(top - set(names))}"


@by_file
def test_file_is_short(module: Module) -> None:
    lines = module.text.count("\n")
    assert lines <= MOST_LINES, f"{module.where} has {lines} lines, at most {MOST_LINES} are readable"


def test_package_names_are_there_and_documented() -> None:
    assert ncclcomm.__all__
    for name in ncclcomm.__all__:
        value = getattr(ncclcomm, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), f"ncclcomm.{name} has no docstring"


def test_public_names_are_in_the_documentation() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    words = set(re.findall(r"\w+", text))
    unknown = [name for name in ncclcomm.__all__ if name not in words]
    assert not unknown, f"public names that neither README.md nor docs/ mentions: {unknown}"
