"""Writes examples/demo.jsonl: held-out questions of every kind as jobs, one JSON object a line.

    python -m tools.demo_model.make_prompts

Most jobs are one user message. Some have a system message or an earlier turn, and some bring the
finished ChatML as a plain prompt, so that every form of input passes through the system.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from tools.demo_model.chat import SYSTEM_MESSAGES, Message, prompt_text
from tools.demo_model.tasks import TASKS, Sample, Split, draw

JOBS = 240
SEED = 2026
MAX_TOKENS = 48
"""More than the longest answer takes (about 40)."""


def jobs() -> list[dict[str, Any]]:
    """The jobs of examples/demo.jsonl; always the same."""
    rng = random.Random(SEED)
    kinds = list(TASKS)
    seen: set[str] = set()
    rows = []
    for index in range(JOBS):
        kind = kinds[index % len(kinds)]
        sample = _unseen(kind, rng, seen)
        form = rng.random()
        messages: list[Message] = [{"role": "user", "content": sample.prompt}]
        if form < 0.15:
            messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM_MESSAGES)})
        elif form < 0.25:
            earlier = _unseen(rng.choice(kinds), rng, seen)
            messages[:0] = [
                {"role": "user", "content": earlier.prompt},
                {"role": "assistant", "content": earlier.answer},
            ]
        plain = rng.random() < 0.06
        rows.append(
            {
                "custom_id": f"{kind}-{index // len(kinds) + 1:03}",
                **({"prompt": prompt_text(messages)} if plain else {"messages": messages}),
                "sampling": {"temperature": 0, "max_tokens": MAX_TOKENS},
                "metadata": {"task": kind, "expected": sample.answer},
            }
        )
    rng.shuffle(rows)
    return rows


def _unseen(kind: str, rng: random.Random, seen: set[str]) -> Sample:
    """A held-out sample whose prompt is not in `seen`, which it then is."""
    while True:
        sample = draw(kind, rng, Split.HELD_OUT)
        if sample.prompt not in seen:
            seen.add(sample.prompt)
            return sample


def as_lines(rows: list[dict[str, Any]]) -> str:
    """The rows as JSON lines, with non-ASCII text as it is."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write the demo's jobs.")
    parser.add_argument("--to", type=Path, default=Path("examples/demo.jsonl"))
    args = parser.parse_args()
    args.to.write_text(as_lines(jobs()), encoding="utf-8")


if __name__ == "__main__":
    main()
