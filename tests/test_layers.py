"""The house: data flows one way, and each module imports only from below."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfcluster

ROOT = Path(tfcluster.__file__).parent

# From the ground up. Each line is a layer; its members may import from lower layers,
# from their own package, and from each other only where the line is joined by "+".
LAYERS = [
    "errors states wire loading hostlist",
    "model",
    "program tfconfig placement compose planning expected causes +",
    "config record",
    "lifecycle console agent crash",
    "backends",
    "launcher",
    "submit",
    "query stopping",
    "doctor",
    "launching looking examining",
    "cli",
    "__main__",
]

# Who alone may import what costs time or ties us to something.
ONLY = {
    "click": {"cli"},
    "yaml": {"config"},
    "pydantic": {"config"},
    "paramiko": {"backends.ssh"},
    "tensorflow": {"runtime"},
    "keras": {"runtime"},
    "numpy": {"runtime"},
    "mpi4py": {"runtime.collective.mpi"},
}

# The runtime is started with -m or imported by the user's script, never by us.
RUNTIME_MAY_IMPORT = {"runtime", "wire", "states", "model", "errors", "loading"}
# Shipped to hosts that have nothing but Python.
AGENT_MAY_IMPORT = {"agent", "wire"}


def _modules() -> list[str]:
    names = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(part for part in parts if part != "__init__"))
    return [name for name in names if name]


def _imports(module: str) -> Iterator[str]:
    """Every module that the source names in an import, wherever it stands."""
    path = ROOT.joinpath(*module.split("."))
    source = path.with_suffix(".py")
    if not source.exists():
        source = path / "__init__.py"
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _own_imports(module: str) -> set[str]:
    """The top-level members of tfcluster that a module imports."""
    known = {name.split(".")[0] for name in _modules()}
    return {
        name.split(".")[1]
        for name in _imports(module)
        if name.startswith("tfcluster.") and name.split(".")[1] in known
    }


def _level(member: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if member in layer.split())


def test_every_module_has_its_layer() -> None:
    placed = {name for layer in LAYERS for name in layer.split()} - {"+"}
    members = {name.split(".")[0] for name in _modules()}
    assert members == placed | {"runtime"}


@pytest.mark.parametrize(
    "module", [m for m in _modules() if not m.startswith(("runtime", "agent"))]
)
def test_a_module_imports_only_from_below(module: str) -> None:
    own = module.split(".")[0]
    level = _level(own)
    joined = "+" in LAYERS[level]
    for member in _own_imports(module) - {own}:
        assert member != "runtime", "nobody imports the runtime"
        below = _level(member) < level
        beside = joined and _level(member) == level
        assert below or beside, f"{module} imports {member}"


@pytest.mark.parametrize("module", [m for m in _modules() if m.startswith("agent")])
def test_the_agent_can_be_shipped_alone(module: str) -> None:
    assert _own_imports(module) <= AGENT_MAY_IMPORT
    foreign = {
        name.split(".")[0]
        for name in _imports(module)
        if not name.startswith("tfcluster")
    }
    assert foreign <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("module", [m for m in _modules() if m.startswith("runtime")])
def test_the_runtime_stands_alone(module: str) -> None:
    assert _own_imports(module) <= RUNTIME_MAY_IMPORT


@pytest.mark.parametrize("module", _modules())
def test_heavy_packages_have_one_room_each(module: str) -> None:
    for name in _imports(module):
        rooms = ONLY.get(name.split(".")[0])
        if rooms is not None:
            assert any(
                module == room or module.startswith(f"{room}.") for room in rooms
            ), f"{module} imports {name}"


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("tfcluster.cli", "yaml pydantic paramiko psutil tensorflow tfcluster.config"),
        ("tfcluster.looking", "yaml pydantic paramiko psutil tensorflow"),
        ("tfcluster.config", "yaml pydantic paramiko psutil tensorflow"),
        ("tfcluster.agent.supervisor", "yaml pydantic psutil click subprocess.run"),
        ("tfcluster.runtime", "tensorflow numpy psutil click yaml pydantic"),
    ],
)
def test_importing_is_cheap(module: str, forbidden: str) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not set(forbidden.split()) & set(done.stdout.split())
