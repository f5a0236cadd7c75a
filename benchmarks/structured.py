"""What holding outputs to a JSON Schema costs, with a real Qwen3 vocabulary.

    python benchmarks/structured.py package/models/tokenizer.json [--rows 1 --rows 32]

Compiles each schema anew, then walks a valid answer token by token with a matcher for each row and
times the step's masks; prints one JSON line each. Where xgrammar is installed too it is measured
beside llguidance, in the same run; the worker itself uses llguidance alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from tokenizers import Tokenizer

from tidemill_worker.engine.grammar import bar
from tidemill_worker.text import token_bytes

VOCABULARY = 151_936
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{6}$"},
        "placed": {"type": "string", "format": "date-time"},
        "state": {"enum": ["open", "paid", "sent", "returned"]},
        "items": {"type": "array", "minItems": 1, "maxItems": 20, "items": {"$ref": "#/$defs/i"}},
    },
    "required": ["id", "placed", "state", "items"],
    "additionalProperties": False,
    "$defs": {
        "i": {
            "type": "object",
            "properties": {
                "sku": {"type": "string", "maxLength": 40},
                "count": {"type": "integer", "minimum": 1, "maximum": 999},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["sku", "count"],
            "additionalProperties": False,
        }
    },
}
WIDE = {
    "type": "object",
    "properties": {f"field_{i}": {"type": ["string", "null"]} for i in range(200)},
    "required": ["field_0"],
    "additionalProperties": False,
}
ITEM = {"sku": "blue teapot, 1.2 l", "count": 12, "note": "to be wrapped — with “care”"}
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "person": (PERSON, {"name": "Božena Němcová", "age": 41}),
    "order": (
        ORDER,
        {
            "id": "ABC-123456",
            "placed": "2026-12-01T10:20:30Z",
            "state": "paid",
            "items": [ITEM, ITEM, ITEM],
        },
    ),
    "200 fields": (WIDE, {f"field_{i}": "a few words" for i in range(0, 200, 20)}),
}


class Library(Protocol):
    def compile(self, schema: str) -> object: ...

    def matchers(self, compiled: object, count: int) -> list[Any]: ...

    def mask(self, matchers: list[Any]) -> None: ...

    def advance(self, matchers: list[Any], token_id: int) -> bool: ...


class Llguidance:
    def __init__(self, tokenizer: Tokenizer) -> None:
        special = [i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special]
        table = token_bytes(tokenizer)
        vocabulary = type(
            "Vocabulary",
            (),
            {
                "eos_token_id": VOCABULARY,
                "bos_token_id": None,
                "tokens": [*table, *[b""] * (VOCABULARY + 1 - len(table))],
                "special_token_ids": [*special, VOCABULARY],
                "__call__": lambda _, text: tokenizer.encode(text.decode()).ids,
            },
        )
        self._tokenizer = LLTokenizer(TokenizerWrapper(vocabulary()))
        self._executor = LLExecutor()

    def compile(self, schema: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_json_schema(schema))
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def matchers(self, compiled: Any, count: int) -> list[LLMatcher]:
        self._bits = allocate_token_bitmask(count, VOCABULARY + 1)
        return [compiled.deep_copy() for _ in range(count)]

    def mask(self, matchers: list[LLMatcher]) -> None:
        lines = [(matcher, line) for line, matcher in enumerate(matchers)]
        fill_next_token_bitmask_par(self._executor, lines, self._bits)

    def advance(self, matchers: list[LLMatcher], token_id: int) -> bool:
        taken = [matcher.consume_token(token_id) for matcher in matchers]
        return all(taken)


class Xgrammar:
    def __init__(self, tokenizer: Tokenizer) -> None:
        xgrammar = importlib.import_module("xgrammar")

        self._xgrammar = xgrammar
        vocabulary = [tokenizer.id_to_token(i) or "" for i in range(VOCABULARY)]
        information = xgrammar.TokenizerInfo(
            vocabulary,
            xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=VOCABULARY,
            stop_token_ids=[tokenizer.token_to_id("<|im_end|>")],
        )
        self._compiler = xgrammar.GrammarCompiler(information, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher()

    def compile(self, schema: str) -> object:
        return self._compiler.compile_json_schema(schema)

    def matchers(self, compiled: object, count: int) -> list[Any]:
        self._bits = self._xgrammar.allocate_token_bitmask(count, VOCABULARY)
        return [self._xgrammar.GrammarMatcher(compiled) for _ in range(count)]

    def mask(self, matchers: list[Any]) -> None:
        self._batch.batch_fill_next_token_bitmask(matchers, self._bits)

    def advance(self, matchers: list[Any], token_id: int) -> bool:
        taken = [matcher.accept_token(token_id) for matcher in matchers]
        return all(taken)


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds that `action` took, and what it gave."""
    started = time.perf_counter()
    value = action()
    return (time.perf_counter() - started) * 1000, value


def report(times: list[float], **what: object) -> None:
    median = statistics.median(times)
    line = {
        **what,
        "median_ms": round(median, 3),
        "spread": round((max(times) - min(times)) / median, 2),
        "slowest_ms": round(max(times), 2),
    }
    print(json.dumps(line), flush=True)


def measure(name: str, library: Library, tokenizer: Tokenizer, rows: int, rounds: int) -> None:
    for case, (schema, answer) in CASES.items():
        source = json.dumps(schema)
        compiles, copies, masks = [], [], []
        for _ in range(rounds):
            took, compiled = timed(partial(library.compile, source))
            compiles.append(took)
            took, matchers = timed(partial(library.matchers, compiled, rows))
            copies.append(took / rows)
            for token_id in tokenizer.encode(json.dumps(answer, ensure_ascii=False)).ids:
                masks.append(timed(partial(library.mask, matchers))[0])
                assert library.advance(matchers, token_id), (name, case, token_id)
        common = {"library": name, "schema": case, "rows": rows}
        report(compiles, **common, what="compile")
        report(copies, **common, what="matcher of one row")
        report(masks, **common, what="masks of a step")


def measure_bar(rows: int, rounds: int) -> None:
    """What barring the other tokens in the logits takes, where a few and where most are allowed."""
    logits = torch.randn(rows, VOCABULARY)
    for name, mostly in (("few tokens allowed", 0), ("most tokens allowed", -1)):
        bits = np.full((rows, VOCABULARY // 32 + 1), mostly, np.int32)
        bits[:, ::20] = 77
        times = [timed(partial(bar, logits.clone(), bits))[0] for _ in range(rounds)]
        report(times, rows=rows, what="barring in the logits: " + name)


@click.command()
@click.argument("tokenizer_json", type=click.Path(exists=True, path_type=Path))
@click.option("--rows", multiple=True, default=[1, 32], show_default=True)
@click.option("--rounds", default=9, show_default=True)
def main(tokenizer_json: Path, rows: list[int], rounds: int) -> None:
    """Time compiling and masking for ROWS rows a step."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    libraries: dict[str, Callable[[Tokenizer], Library]] = {"llguidance": Llguidance}
    if importlib.util.find_spec("xgrammar") is not None:
        libraries["xgrammar"] = Xgrammar
    for name, load in libraries.items():
        took, library = timed(partial(load, tokenizer))
        report([took], library=name, what="reading the vocabulary")
        for count in rows:
            measure(name, library, tokenizer, count, rounds)
    for count in rows:
        measure_bar(count, rounds * 5)


if __name__ == "__main__":
    main()
