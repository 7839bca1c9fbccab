"""Do imports only go down?

The package is a house of floors (`FLOORS`): a module imports from its own floor and from those below it.
Imports inside functions and under TYPE_CHECKING count like all others, since they too say who knows whom. The
modules are parsed, not imported, and where the package is installed, so the test holds for a wheel as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptengine

PACKAGE = "ckptengine"
SOURCE = Path(ckptengine.__file__).parent

# Package or module of ckptengine → floor. `testing` is shipped for tests: nothing else may import it.
FLOORS = {
    "errors": 0,
    "config": 0,
    "events": 0,
    "info": 0,
    "phases": 0,
    "tracing": 0,
    "format": 1,
    "storage": 2,
    "codecs": 2,
    "catalog": 3,
    "tiers": 3,
    "staging": 3,
    "comm": 3,
    "write": 4,
    "read": 4,
    "adapters": 5,
    "interop": 5,
    "candidates": 6,
    "checkpointer": 6,
    "giving_up": 6,
    "handle": 6,
    "monitor": 6,
    "no_match": 6,
    "on_all_ranks": 6,
    "opening": 6,
    "restore_handle": 6,
    "restore_options": 6,
    "restore_parts": 6,
    "read_once": 6,
    "read_together": 6,
    "restorer": 6,
    "run": 6,
    "step_shards": 6,
    "saver": 6,
    "snapshot": 6,
    "streaming": 6,
    "streaming_peers": 6,
    "reader_api": 6,
    "verification": 6,
    "watch": 6,
    "cli": 7,
    "__main__": 8,
    "testing": 7,
}

# Where each heavy or replaceable library may be imported: nowhere else, so that it can be exchanged.
CONFINED = {
    "torch": ("adapters", "interop", "checkpointer", "reader_api", "testing.strategies"),
    "nvidia_resiliency_ext": ("adapters.nvrx",),
    "typer": ("cli",),
    "rich": ("cli",),
    "pytest": ("testing",),
    "hypothesis": ("testing",),
}


def imported_names(source: str, module: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every module that an import statement or `import_module("…")` names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            # `from ckptengine import errors` names a module by its alias; elsewhere the alias adds nothing.
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}" if base == PACKAGE else base
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            yield node.lineno, node.args[0].value


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of `module` ("ckptengine.format.shard"), one line each."""
    inside = module.removeprefix(f"{PACKAGE}.") if module != PACKAGE else ""
    unit = inside.split(".")[0]
    if unit == "":
        # The package itself only re-exports, and lazily: it stands on the roof.
        floor = max(FLOORS.values())
    elif unit in FLOORS:
        floor = FLOORS[unit]
    else:
        return [f"{module}: {unit!r} has no floor in FLOORS"]
    found = []
    for line, name in imported_names(source, module, is_package=is_package):
        where = f"{module}:{line} imports {name}"
        parts = name.split(".")
        if parts[0] in CONFINED and inside:
            allowed = CONFINED[parts[0]]
            if not any(inside == home or inside.startswith(home + ".") for home in allowed):
                found.append(f"{where}: only for {', '.join(allowed)}")
        if parts[0] != PACKAGE or len(parts) == 1:
            continue
        target = parts[1]
        if target not in FLOORS:
            if target != "__version__":
                found.append(f"{where}: {target!r} has no floor: name the module")
        elif FLOORS[target] > floor:
            found.append(f"{where}: up from floor {floor} to floor {FLOORS[target]}")
        elif target == "testing" and unit != "testing":
            found.append(f"{where}: testing is for tests")
    return found


def module_files() -> list[tuple[str, Path]]:
    files = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = [PACKAGE, *path.relative_to(SOURCE).with_suffix("").parts]
        files.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return files


def test_imports_never_go_up_a_floor() -> None:
    found = [
        violation
        for module, path in module_files()
        for violation in violations(path.read_text(), module, is_package=path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_no_two_units_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in module_files():
        if module == PACKAGE:
            continue
        unit = module.split(".")[1]
        for _, name in imported_names(path.read_text(), module, is_package=path.name == "__init__.py"):
            parts = name.split(".")
            if parts[0] == PACKAGE and len(parts) > 1 and parts[1] in FLOORS and parts[1] != unit:
                graph.setdefault(unit, set()).add(parts[1])

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for following in graph.get(todo.pop(), ()):
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        return seen

    circular = sorted(unit for unit in graph if unit in reachable(unit))
    assert not circular, f"these import each other in a circle: {circular}"


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("ckptengine.format.x", "from ckptengine.read.plan import plan_reads", "up from floor 1 to floor 4"),
        ("ckptengine.format.x", "import ckptengine.catalog.catalog", "up from floor 1 to floor 3"),
        ("ckptengine.format.x", "def f():\n    from ckptengine import cli", "up from floor 1 to floor 7"),
        ("ckptengine.format.x", "from ..write import commit", "up from floor 1 to floor 4"),
        ("ckptengine.errors", "from .format import names", "up from floor 0 to floor 1"),
        (
            "ckptengine.read.x",
            "if TYPE_CHECKING:\n    from ckptengine.adapters import state",
            "up from floor 4",
        ),
        ("ckptengine.read.x", "import_module('ckptengine.checkpointer')", "up from floor 4 to floor 6"),
        ("ckptengine.read.x", "from ckptengine import Checkpointer", "has no floor"),
        ("ckptengine.read.x", "import torch", "only for adapters"),
        ("ckptengine.verification", "def f():\n    import torch.distributed as dist", "only for adapters"),
        ("ckptengine.adapters.c10d", "from nvidia_resiliency_ext import x", "only for adapters.nvrx"),
        ("ckptengine.write.x", "from ckptengine.testing.faulty import FaultyStore", "up from floor 4"),
        ("ckptengine.cli.x", "from ckptengine.testing.faulty import FaultyStore", "testing is for tests"),
        ("ckptengine.attic.x", "import os", "has no floor in FLOORS"),
    ],
)
def test_a_violating_import_is_found(module: str, source: str, complaint: str) -> None:
    found = violations(source, module)
    assert len(found) == 1, found
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "ckptengine.read.x",
            "from ckptengine.format.shard import ShardHeader\nfrom ckptengine import errors",
        ),
        ("ckptengine.read.x", "from .plan import plan_reads\nimport numpy, os"),
        ("ckptengine.adapters.x", "import torch\nfrom torch.distributed import tensor"),
        ("ckptengine.checkpointer", "import torch"),
        ("ckptengine.cli.x", "from ckptengine import __version__\nimport typer"),
        ("ckptengine", "from ckptengine.checkpointer import Checkpointer"),
    ],
)
def test_an_import_on_the_same_floor_or_down_passes(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_a_relative_import_in_a_package_starts_at_that_package() -> None:
    assert violations("from .shard import x", "ckptengine.format", is_package=True) == []
    assert violations("from ..cli import x", "ckptengine.format", is_package=True) != []
