"""The project's own files: dependencies with reasons, one version, nothing of one machine."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version

import pytest

import ncclcomm
from package_source import ROOT, project_files

PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

OF_ONE_MACHINE = {
    "a home or work folder": re.compile(r"(?<![\w.])/(?:root|home/\w+|work|Users/\w+)/"),
    "a pip mirror or registry": re.compile(r"--(?:extra-)?index-url|--find-links|--trusted-host|pythonhosted"),
    "a private address": re.compile(r"\b(?:10\.\d+|192\.168|172\.(?:1[6-9]|2\d|3[01]))\.\d+\.\d+\b"),
}
MAY_NAME_ADDRESSES = ("tests/cluster/",)
"""Fake hosts in network namespaces of a test need addresses of their own."""


@pytest.fixture
def installed_version() -> str:
    """The version in the installed metadata."""
    try:
        return version("ncclcomm")
    except PackageNotFoundError:
        pytest.skip("ncclcomm is on the path but not installed: pip install -e .")


def dependency_lines() -> list[str]:
    """The lines of pyproject.toml that name a dependency."""
    pattern = r"^dependencies = \[\n(.*?)^\]\n\n(\[project.optional-dependencies\].*?)^\["
    lists = re.search(pattern, PYPROJECT, re.M | re.S)
    assert lists
    return [line for text in lists.groups() for line in text.splitlines() if line.lstrip().startswith('"')]


def test_every_dependency_has_its_reason() -> None:
    lines = dependency_lines()
    assert len(lines) >= 15
    bare = [line.strip() for line in lines if not re.search(r'",\s+# \w.{10,}', line)]
    assert not bare


def test_every_dependency_has_a_lower_bound() -> None:
    unbounded = [line.strip() for line in dependency_lines() if ">=" not in line and "ncclcomm[" not in line]
    assert not unbounded


@pytest.mark.usefixtures("installed_version")
def test_numpy_alone_is_required() -> None:
    needed = [name for name in requires("ncclcomm") or [] if "extra ==" not in name]
    assert [re.split(r"[^\w-]", name)[0] for name in needed] == ["numpy"]


def test_constraints_pin_exactly_and_name_no_place() -> None:
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        assert re.fullmatch(r"#.*|[a-z0-9-]+==[\w.]+( ; python_version .+)?", line), line


def test_constraints_cover_the_dependencies() -> None:
    pinned = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
    named = {re.match(r'\s*"([\w-]+)', line).group(1).replace("_", "-") for line in dependency_lines()}
    assert not named - pinned - {"ncclcomm", "cuda-bindings"}


def test_installed_version_is_the_stated_one(installed_version: str) -> None:
    assert installed_version == ncclcomm.__version__, "the environment has an older install: make clean"


def test_version_has_one_source() -> None:
    stated = ncclcomm.__version__
    assert not re.search(r'^version = "', PYPROJECT, re.M), "ncclcomm/__init__.py states the version"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(stated)}\]", changelog, re.M), f"CHANGELOG.md has no entry for {stated}"


@pytest.mark.parametrize("what", sorted(OF_ONE_MACHINE))
def test_files_name_nothing_of_one_machine(what: str) -> None:
    found = []
    for path in project_files():
        name = path.relative_to(ROOT).as_posix()
        if what == "a private address" and name.startswith(MAY_NAME_ADDRESSES):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if OF_ONE_MACHINE[what].search(line) and path.name != "test_project.py":
                found.append(f"{name}:{number}: {line.strip()}")
    assert not found, f"{what} in\n" + "\n".join(found)


def test_machine_patterns_find_what_they_look_for() -> None:
    assert OF_ONE_MACHINE["a home or work folder"].search("cd /home/ann/project")
    for folder in ("home", "root", "work"):  # as a part of a relative path
        assert not OF_ONE_MACHINE["a home or work folder"].search(f"docs/{folder}/plan and ./{folder}/x")
    assert OF_ONE_MACHINE["a pip mirror or registry"].search("pip install --index-url x")
    assert OF_ONE_MACHINE["a private address"].search("ssh 192.168.1.2")
