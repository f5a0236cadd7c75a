"""Serving knows no kernel: nothing under worker/ or producer/ names a kernel file, a weight key,
an argument order or a constant of a model.

The words are not kept in a list here: they are read from the contracts themselves.
"""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill_contracts import models
from tidemill_contracts.models.contract import StageInputs
from tidemill_contracts.models.registry import get_contract, registrations
from tools.make_checkpoint import SHAPES, published_config, tensor_shapes

ROOT = Path(__file__).parents[1]
SERVING = sorted(
    path
    for part in ("worker", "producer")
    for path in (ROOT / part).rglob("*.py")
    if "demo_model" not in path.parts
)
# What the boundary itself is made of: the logical inputs, and the modules that define it.
LOGICAL = set(StageInputs.__dataclass_fields__)
BOUNDARY = {
    "checkpoint",
    "config",
    "contract",
    "errors",
    "fingerprint",
    "hub",
    "registry",
    "requirements",
    "runtime",
    "sampling",
    "startup",
}


def _argument_names() -> set[str]:
    contracts = [get_contract(r.family, r.variant) for r in registrations() if r.implemented]
    names = {arg.name for c in contracts for kernel in c.kernels.values() for arg in kernel.args}
    return names - LOGICAL


def _weight_keys() -> set[str]:
    """The parts of the tensors' names, such as ``q_proj``, that are words of their own."""
    parts = {part for name in tensor_shapes(published_config("tiny")) for part in name.split(".")}
    return {part for part in parts if "_" in part}


def _model_constants() -> set[int]:
    """Sizes of published models that are no round number anyone would write by chance."""
    configs = [published_config(shape) for shape in SHAPES]
    fields = ("vocab_size", "intermediate_size", "max_position_embeddings", "eos_token_id")
    values = {config.get(field) for config in configs for field in fields}
    return {value for value in values if isinstance(value, int) and value > 9_000}


def _names_and_values(path: Path) -> Iterator[tuple[int, str | int]]:
    """Every identifier, attribute, keyword and literal of a source file, docstrings apart."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.keyword(arg=str(name)):
                yield node.value.lineno, name
            case ast.Constant(value=str() | int() as value) if id(node) not in docstrings:
                yield node.lineno, value


def _imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name


@pytest.mark.parametrize("path", SERVING, ids=lambda path: str(path.relative_to(ROOT)))
def test_serving_names_nothing_of_a_kernel(path: Path) -> None:
    forbidden = _argument_names() | _weight_keys()
    constants = _model_constants()
    found = []
    for line, value in _names_and_values(path):
        if isinstance(value, int):
            if value in constants:
                found.append((line, value))
        elif forbidden & set(re.findall(r"\w+", value)):
            found.append((line, value))
    assert found == []


@pytest.mark.parametrize("path", SERVING, ids=lambda path: str(path.relative_to(ROOT)))
def test_serving_imports_only_the_boundary(path: Path) -> None:
    prefix = models.__name__ + "."
    reached = {
        module.removeprefix(prefix).partition(".")[0]
        for _, module in _imported_modules(path)
        if module.startswith(prefix)
    }
    assert reached <= BOUNDARY


def test_the_words_that_are_looked_for_are_real() -> None:
    # A guard against this test going blind: these are what it must know.
    assert {"wqkv", "k_cache", "lm_head", "w_down"} <= _argument_names()
    assert {"q_proj", "embed_tokens", "input_layernorm"} <= _weight_keys()
    assert {151_936, 40_960, 151_645} <= _model_constants()
    assert {m.name for m in pkgutil.iter_modules(models.__path__)} >= BOUNDARY | {"qwen3"}
    assert len(SERVING) > 20
