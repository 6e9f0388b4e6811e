"""Imports point one way, and each third-party library has one door: the tables of docs/design.md."""

from __future__ import annotations

import ast
import re
import sys

import pytest

from package_source import Module, modules

LAYERS = {
    # layer: the layers of ncclcomm that it may import, besides itself
    "errors": set(),
    "config": {"errors"},
    "topology": {"errors"},
    "chunks": {"errors"},
    "reductions": {"errors"},
    "devices": {"errors", "reductions"},
    "arrays": {"errors", "devices", "reductions", "chunks"},
    "transport": {"errors", "devices", "arrays", "reductions", "chunks"},
    "creation": {"errors", "devices", "arrays", "transport"},
    "comm": {"errors", "devices", "arrays", "transport", "chunks", "reductions"},
    "communicator": {"errors", "devices", "arrays", "transport", "topology", "chunks", "reductions"},
    "launcher": {"errors", "config"},
}
PUTS_TOGETHER = {"__init__", "__main__", "cli", "bench", "doctor"}
"""Where parts are put together: they may import any layer."""
HANDS_IN_CONFIG = {"devices/registry.py", *(f"communicator/{name}.py" for name in ("setup", "starting", "world"))}
"""Where the environment's configuration is read and handed to the parts."""

DOORS = {
    "cupy": {"devices/cuda", "transport/peer.py", "transport/nccl", "bench/"},
    "cuda": {"devices/cuda", "transport/peer.py", "transport/nccl"},
    "mpi4py": {"transport/mpi", "transport/shm.py", "communicator/world.py", "doctor/world.py"},
    "threading": {
        "devices/",
        "transport/peer.py",
        "communicator/watchdog",
        "communicator/board",  # names of threads
        "communicator/exits",  # their excepthook
        "communicator/progress",
        "communicator/world.py",  # a lock around the one world, and the excepthook of threads
        "launcher/",
    },
    "queue": {"devices/", "transport/peer.py", "communicator/watchdog", "communicator/progress", "launcher/"},
    "concurrent": {"devices/", "transport/peer.py", "communicator/watchdog", "communicator/progress", "launcher/"},
    "socket": {"devices/host_ipc.py", "communicator/watchdog", "doctor/network.py", "launcher/"},
    "torch": {"arrays.py", "devices/", "bench/"},
    "rich": {"bench/"},
    "tqdm": {"bench/"},
    "matplotlib": {"bench/"},
}
PURE = {"topology.py": set(), "communicator/hierarchy.py": {"numpy"}}
"""Files that do no I/O, and the third-party packages that they may import."""
BACKENDS = ("devices/cuda", "transport/nccl", "transport/mpi", "transport/shm.py", "bench/")
"""Files that are imported only where their library is in use, and so may import it at their top."""
HARMLESS = {"__future__", "collections", "dataclasses", "enum", "functools", "itertools", "math", "ncclcomm", "typing"}
ENVIRONMENT_READERS = ("config.py", "launcher/")

by_file = pytest.mark.parametrize("module", modules(), ids=lambda module: module.where)


def allowed(module: Module, places: set[str] | tuple[str, ...]) -> bool:
    """True if the file is one of the places or lies below one of them."""
    return any(module.where == place or module.where.startswith(place.rstrip("/")) for place in places)


@by_file
def test_layers_import_downwards(module: Module) -> None:
    if module.layer in PUTS_TOGETHER:
        return
    assert module.layer in LAYERS, f"{module.where} is in no layer of docs/design.md: add it here and there"
    may = LAYERS[module.layer] | {module.layer} | ({"config"} if module.where in HANDS_IN_CONFIG else set())
    for item in module.imports:
        top, _, rest = item.name.partition(".")
        layer = rest.partition(".")[0]
        if top == "ncclcomm" and layer not in may:
            pytest.fail(f"{module.where}:{item.line} imports {item.name}; {module.layer} may import {sorted(may)}")


@by_file
def test_libraries_come_in_by_their_doors(module: Module) -> None:
    for item in module.imports:
        top = item.name.partition(".")[0]
        if top in DOORS and not allowed(module, DOORS[top]):
            pytest.fail(f"{module.where}:{item.line} imports {item.name}; its doors are {sorted(DOORS[top])}")


@by_file
def test_optional_packages_are_imported_on_use(module: Module) -> None:
    for item in module.imports:
        top = item.name.partition(".")[0]
        if top in sys.stdlib_module_names or top in ("numpy", "ncclcomm", "__future__") or item.lazy:
            continue
        if not allowed(module, BACKENDS):
            pytest.fail(f"{module.where}:{item.line} imports {item.name} with the module; do it where it is used")


@by_file
def test_environment_is_read_in_config_alone(module: Module) -> None:
    if allowed(module, ENVIRONMENT_READERS):
        return
    for node in ast.walk(module.tree):
        reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv")
        if reads and isinstance(node.value, ast.Name) and node.value.id == "os":
            pytest.fail(f"{module.where}:{node.lineno} uses os.{node.attr}; config.py reads the environment")
    assert not re.search(r"from os import .*\b(environ|getenv)", module.text), module.where


@pytest.mark.parametrize("where", sorted(PURE))
def test_arithmetic_does_no_io(where: str) -> None:
    module = next(m for m in modules() if m.where == where)
    extra = {item.name.partition(".")[0] for item in module.imports} - HARMLESS - PURE[where]
    assert not extra, f"{where} imports {sorted(extra)}"
