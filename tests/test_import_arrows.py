"""Who may import whom; see "The parts" in the README.

Held twice: by what a clean interpreter has loaded after an import, and by every import statement
in the sources, so that an import inside a function counts as well.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PRODUCER_NEVER = ("torch", "arq", "tidemill_worker", "tidemill_contracts.models")
WIRE_NEVER = ("torch", "arq", "redis", "tidemill_producer", "tidemill_worker")
CONNECTIONS_NEVER = (*(name for name in WIRE_NEVER if name != "redis"), "tidemill_contracts.models")
MODELS_NEVER = ("redis", "arq", "tidemill_worker", "tidemill_producer")
WORKER_NEVER = ("tidemill_producer",)

FORBIDDEN = {
    "tidemill_producer": PRODUCER_NEVER,
    "tidemill_contracts": WIRE_NEVER,
    "tidemill_contracts.wire": (*WIRE_NEVER, "tidemill_contracts.models"),
    "tidemill_contracts.keys": (*WIRE_NEVER, "tidemill_contracts.models"),
    "tidemill_contracts.connections": CONNECTIONS_NEVER,
    "tidemill_contracts.models": MODELS_NEVER,
    "tidemill_worker": WORKER_NEVER,
}
"""What the sources of a package (its deepest entry counts) never name in an import."""

IMPORTED = {
    "tidemill_producer": PRODUCER_NEVER,
    "tidemill_producer.cli": PRODUCER_NEVER,
    "tidemill_producer.connection": PRODUCER_NEVER,
    "tidemill_producer.embedded": PRODUCER_NEVER,
    "tidemill_producer.batch.session": PRODUCER_NEVER,
    "tidemill_producer.commands.batch": PRODUCER_NEVER,
    "tidemill_producer.commands.dead": PRODUCER_NEVER,
    "tidemill_producer.commands.demo": PRODUCER_NEVER,
    "tidemill_contracts": FORBIDDEN["tidemill_contracts"],
    "tidemill_contracts.wire": FORBIDDEN["tidemill_contracts.wire"],
    "tidemill_contracts.wire.arq_format": FORBIDDEN["tidemill_contracts.wire"],
    "tidemill_contracts.wire.status": FORBIDDEN["tidemill_contracts.wire"],
    "tidemill_contracts.keys": FORBIDDEN["tidemill_contracts.keys"],
    "tidemill_contracts.urls": FORBIDDEN["tidemill_contracts"],
    "tidemill_contracts.connections": CONNECTIONS_NEVER,
    "tidemill_contracts.models": MODELS_NEVER,
}


def is_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize(("module", "never"), IMPORTED.items(), ids=IMPORTED)
def test_importing_a_module_loads_nothing_it_must_not(module: str, never: tuple[str, ...]) -> None:
    script = f"import sys, {module}; print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = done.stdout.split()
    assert module in loaded
    assert [name for name in loaded if any(is_inside(name, bad) for bad in never)] == []


def package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


def source_files() -> Iterator[tuple[str, Path]]:
    """Every module of the three packages, by its dotted name."""
    for package in ("tidemill_contracts", "tidemill_producer", "tidemill_worker"):
        folder = package_folder(package)
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *(part for part in parts if part != "__init__"))), path


def imported_names(module: str, path: Path) -> Iterator[str]:
    """Every module that the source imports anywhere, and every ``import_module("…")``.

    Imports for type checkers alone (under ``if TYPE_CHECKING``) do not count.
    """
    tree = ast.parse(path.read_bytes(), filename=str(path))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = (
                    module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                )
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (
                argument.value
                for argument in node.args
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            )


def test_no_source_names_a_module_it_must_not() -> None:
    broken = []
    for module, path in source_files():
        package = max((name for name in FORBIDDEN if is_inside(module, name)), key=len)
        broken += [
            f"{module} imports {name}"
            for name in imported_names(module, path)
            if any(is_inside(name, bad) for bad in FORBIDDEN[package])
        ]
    assert broken == []


def test_the_walk_sees_lazy_relative_and_dynamic_imports(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        "def later():\n"
        "    import torch.nn\n"
        "    from arq import worker\n"
        "    from . import sibling\n"
        "    from ..other import thing\n"
        "    importlib.import_module('redis')\n"
        "if TYPE_CHECKING:\n"
        "    import skipped\n"
    )
    assert set(imported_names("a.b.module", source)) == {
        "torch.nn",
        "arq.worker",
        "a.b.sibling",
        "a.other.thing",
        "redis",
    }
