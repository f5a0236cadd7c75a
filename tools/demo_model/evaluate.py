"""Measures an exported model directory on held-out questions, by greedy generation.

    python -m tools.demo_model.evaluate --per-kind 100

It loads the directory as any user of transformers would, and so checks the export too.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tidemill_producer.batch.tally import is_right
from tools.demo_model.chat import SYSTEM_MESSAGES
from tools.demo_model.tasks import TASKS, Sample, Split, draw

BATCH = 64


def fresh_samples(seed: int, per_kind: int) -> list[Sample]:
    """Held-out samples, `per_kind` of each kind, with no two prompts alike."""
    rng = random.Random(seed)
    found: dict[str, Sample] = {}
    for kind in TASKS:
        wanted = len(found) + per_kind
        while len(found) < wanted:
            sample = draw(kind, rng, Split.HELD_OUT)
            found.setdefault(sample.prompt, sample)
    return list(found.values())


def answers(directory: Path, samples: list[Sample], system: bool) -> Iterator[tuple[Sample, str]]:
    """What the model writes to each sample; with a system message in front of it if `system`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    for start in range(0, len(samples), BATCH):
        batch = samples[start : start + BATCH]
        chats = []
        for number, sample in enumerate(batch):
            chat = [{"role": "user", "content": sample.prompt}]
            if system:
                text = SYSTEM_MESSAGES[number % len(SYSTEM_MESSAGES)]
                chat.insert(0, {"role": "system", "content": text})
            chats.append(chat)
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        written = model.generate(**inputs, max_new_tokens=64)[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        yield from zip(batch, texts, strict=True)


def main() -> None:
    """The command line: prints a Markdown table, and the first few wrong answers."""
    parser = argparse.ArgumentParser(description="Accuracy of the exported model, held-out.")
    parser.add_argument("--model", type=Path, default=Path("worker/tidemill_worker/demo_model"))
    parser.add_argument("--per-kind", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--system", action="store_true", help="put a system message in front")
    args = parser.parse_args()
    right: Counter[str] = Counter()
    wrong: list[tuple[Sample, str]] = []
    samples = fresh_samples(args.seed, args.per_kind)
    for sample, text in answers(args.model, samples, args.system):
        if is_right(text, sample.answer):
            right[sample.kind] += 1
        else:
            wrong.append((sample, text))
    print("| task | right | of |\n| --- | --- | --- |")
    for kind in TASKS:
        print(f"| {kind} | {right[kind]} | {args.per_kind} |")
    print(f"| all | {100 * right.total() / len(samples):.1f}% | {len(samples)} |")
    for sample, text in wrong[:20]:
        print(f"{sample.kind}: {sample.prompt!r} wants {sample.answer!r}, got {text!r}")


if __name__ == "__main__":
    main()
