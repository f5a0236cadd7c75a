"""docs/testing.md names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "testing.md"


@cache
def _tests_of(path: Path) -> frozenset[str]:
    """``name`` and ``Class::name`` of a module's tests."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        for member in members:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + member.name)
    return frozenset(found)


def test_every_test_that_the_page_names_exists() -> None:
    page = PAGE.read_text()
    named = re.findall(r"`(tests/[^`]*?\.py)::([^`]+)`", page)
    assert len(named) > 30
    gone = [f"{file}::{name}" for file, name in named if name not in _tests_of(ROOT / file)]
    assert not gone
    assert all(name.split("::")[-1].startswith("test_") for _, name in named)
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    untested = [row for row in rows if "`tests/" not in row]
    assert len(untested) == 2 * page.count("\n## "), "but for heads and rules, all have a test"
