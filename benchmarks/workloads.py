"""The prompts that engines are compared on: token ids drawn from a seed, greedy, EOS ignored.

W1 is a mixed batch file, W2 a ragged one with short prompts and long answers, D1, D8 and D32 are
decode of 1, 8 and 32 rows, P is prefill. `W1:8` is the first 8 rows of W1: a short form to try
things with.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

NAMES = ("W1", "W2", "D1", "D8", "D32", "P")


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    new_tokens: int


def workload(name: str) -> list[Request]:
    """Raises `ValueError` where there is no workload of that name."""
    whole, colon, rows = name.partition(":")
    if whole not in NAMES or (colon and not (rows.isdecimal() and int(rows))):
        raise ValueError(f"no workload {name!r}; there are {', '.join(NAMES)}, and {NAMES[0]}:ROWS")
    return _requests(whole)[: int(rows) if colon else None]


def _requests(name: str) -> list[Request]:
    if name == "W1":
        rng = random.Random(0)
        return [Request(_tokens(rng, rng.randint(32, 512)), 64) for _ in range(64)]
    if name == "W2":
        rng = random.Random(1)
        return [Request(_tokens(rng, rng.randint(16, 128)), rng.randint(8, 256)) for _ in range(64)]
    if name == "P":
        rng = random.Random(2)
        return [Request(_tokens(rng, 512), 1) for _ in range(16)]
    rows = {"D1": 1, "D8": 8, "D32": 32}[name]
    rng = random.Random(100 + rows)
    return [Request(_tokens(rng, 128), 64) for _ in range(rows)]


def is_decode(name: str) -> bool:
    return name.startswith("D")


def figure(name: str) -> str:
    """The field of a run that a workload is judged by: less is better in both."""
    return "step_ms" if is_decode(name) else "wall_s"


def measure(name: str, run: Callable[[Sequence[Request]], float]) -> dict[str, Any]:
    """One run of a workload; `run` takes its requests all at once and answers with the seconds
    until the last of them has ended.

    The time of a decode step is that of the run less that of its first tokens alone, over the
    tokens that follow.
    """
    requests = workload(name)
    new = sum(request.new_tokens for request in requests)
    prompt = sum(len(request.prompt) for request in requests)
    decode = is_decode(name)
    first = run([Request(request.prompt, 1) for request in requests]) if decode else 0.0
    taken = run(requests)
    found = {
        "workload": name,
        "wall_s": taken,
        "out_tok_s": new / taken,
        "total_tok_s": (new + prompt) / taken,
    }
    if decode:
        found["step_ms"] = 1000 * (taken - first) / (requests[0].new_tokens - 1)
    return found


def serve(
    names: Iterable[str],
    run: Callable[[Sequence[Request]], float],
    tell: Callable[[dict[str, Any]], None],
) -> None:
    """Runs the workloads that are named line by line, as they come, and tells of each. Before
    each, a short run: whoever asks may have held the process still for minutes."""
    for line in names:
        name = line.strip()
        run([Request(request.prompt[:64], 4) for request in workload("D8")])
        tell(measure(name, run))


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """To print: figures of a run with three decimals."""
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}


def _tokens(rng: random.Random, count: int) -> list[int]:
    """Below the special tokens of Qwen3's vocabulary."""
    return [rng.randrange(1000, 151_000) for _ in range(count)]
