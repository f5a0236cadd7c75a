"""Trains the demo model on two CPU cores in about an hour; resumes from its last checkpoint.

    python -m tools.demo_model.train --out out/demo_model

Short conversations are packed into rows of one fixed length, with positions that restart at every
conversation and a block-diagonal causal mask, so that no compute goes to padding and
`torch.compile` sees a single shape. The loss is on the answers only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from tools.demo_model.chat import END_OF_TEXT, IM_END, Segment, conversation
from tools.demo_model.tasks import TASKS, Sample, Split, stream
from tools.demo_model.tokenizer import train_tokenizer

ROW_TOKENS = 256
"""Length of a packed row; the longest conversation has to fit."""

HELD_OUT_SEED = 1_000_003
"""The seed of the questions that progress is measured on."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a training run does."""

    steps: int = 4_000
    rows: int = 24  # packed rows a step: 6,144 tokens, about 115 conversations
    peak_lr: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    seed: int = 0


def model_config(tokenizer: Tokenizer) -> Qwen3Config:
    """The model's shape: Qwen3 with everything it has, at 3.8 million parameters."""
    return Qwen3Config(
        vocab_size=math.ceil(tokenizer.get_vocab_size() / 64) * 64,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        use_cache=True,
    )


@dataclass(frozen=True, slots=True)
class Encoded:
    """One conversation as tokens."""

    ids: list[int]
    learnt: list[bool]  # for each id, whether the model should learn to write it
    samples: list[Sample]  # its questions, in order


def encode(
    tokenizer: Tokenizer, drawn: list[tuple[list[Sample], list[Segment]]]
) -> Iterator[Encoded]:
    """The conversations as tokens; one batched call to the tokenizer for all their segments."""
    segments = [segment for _, parts in drawn for segment in parts]
    encodings = iter(tokenizer.encode_batch([s.text for s in segments], add_special_tokens=False))
    for samples, parts in drawn:
        ids: list[int] = []
        learnt: list[bool] = []
        for part in parts:
            piece = next(encodings).ids
            ids += piece
            learnt += [part.learnt] * len(piece)
        yield Encoded(ids, learnt, samples)


@dataclass(frozen=True, slots=True)
class Packed:
    """A batch of packed rows, `rows` x `ROW_TOKENS`."""

    ids: Tensor  # [rows, ROW_TOKENS] int64, padded with token 0
    positions: Tensor  # [rows, ROW_TOKENS] int64, from 0 in every conversation
    mask: Tensor  # [rows, 1, ROW_TOKENS, ROW_TOKENS] bfloat16, added to the attention scores
    targets: Tensor  # [rows, ROW_TOKENS] int64, the token to predict next, or -100


def pack(rows: list[list[Encoded]]) -> Packed:
    """The batch whose rows hold these conversations side by side."""
    shape = (len(rows), ROW_TOKENS)
    ids = torch.zeros(shape, dtype=torch.int64)
    positions = torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, -100, dtype=torch.int64)
    block = torch.zeros(shape, dtype=torch.int64)  # 0 is padding: it sees itself
    for row, conversations in enumerate(rows):
        at = 0
        for number, item in enumerate(conversations, start=1):
            end = at + len(item.ids)
            piece = torch.tensor(item.ids)
            ids[row, at:end] = piece
            positions[row, at:end] = torch.arange(len(item.ids))
            block[row, at:end] = number
            learnt = torch.tensor(item.learnt[1:])
            targets[row, at : end - 1] = torch.where(learnt, piece[1:], -100)
            at = end
    same = block[:, :, None] == block[:, None, :]
    causal = torch.ones(ROW_TOKENS, ROW_TOKENS, dtype=torch.bool).tril()
    mask = torch.where((same & causal)[:, None], 0.0, -1e9).to(torch.bfloat16)
    return Packed(ids, positions, mask, targets)


def packed_rows(
    tokenizer: Tokenizer, samples: Iterator[Sample], rng: random.Random
) -> Iterator[list[Encoded]]:
    """Endless rows of conversations, filled best-fit from a small pool."""
    pool: list[Encoded] = []
    while True:
        row: list[Encoded] = []
        room = ROW_TOKENS
        while True:
            if len(pool) < 64:
                drawn = [conversation(samples, rng) for _ in range(64)]
                pool += (e for e in encode(tokenizer, drawn) if len(e.ids) <= ROW_TOKENS)
            fitting = [i for i, item in enumerate(pool) if len(item.ids) <= room]
            if not fitting:
                break
            # The oldest that fits, until the row is nearly full; then the longest that fits.
            pick = fitting[0]
            if room < ROW_TOKENS // 2:
                pick = max(fitting, key=lambda i: len(pool[i].ids))
            item = pool.pop(pick)
            row.append(item)
            room -= len(item.ids)
        yield row


def answer_logits(model: Any, batch: Packed) -> tuple[Tensor, Tensor]:
    """Logits `[answer tokens, vocab]` float32 and their targets; other positions are left out."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            attention_mask={"full_attention": batch.mask},
            use_cache=False,
        ).last_hidden_state
        chosen = batch.targets != -100
        logits = model.lm_head(hidden[chosen])
    return logits.float(), batch.targets[chosen]


@torch.no_grad()
def held_out_accuracy(
    model: Any, tokenizer: Tokenizer, rows: int, batches: int = 6
) -> dict[str, tuple[int, int]]:
    """Right answers and questions for each kind, over batches of packed held-out questions.

    An answer is right when every token of it, and its <|im_end|>, is the most likely one: just
    what greedy generation would write, for the price of one forward pass.
    """
    rng = random.Random(HELD_OUT_SEED)
    source = packed_rows(tokenizer, stream(HELD_OUT_SEED, Split.HELD_OUT), rng)
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    end = tokenizer.token_to_id(IM_END)
    for _ in range(batches):
        taken = list(islice(source, rows))
        logits, targets = answer_logits(model, pack(taken))
        pairs = zip(targets.tolist(), (logits.argmax(-1) == targets).tolist(), strict=True)
        for sample in (sample for row in taken for item in row for sample in item.samples):
            correct = True
            for target, hit in pairs:
                correct &= hit
                if target == end:
                    break
            asked[sample.kind] += 1
            right[sample.kind] += correct
    return {kind: (right[kind], asked[kind]) for kind in TASKS}


def accuracy_line(scores: dict[str, tuple[int, int]]) -> str:
    """`mean 97.1% · sum 98% · …` for a log; the mean counts every kind the same."""
    shares = {kind: 100 * right / max(asked, 1) for kind, (right, asked) in scores.items()}
    mean = sum(shares.values()) / len(shares)
    kinds = (f"{kind} {share:.0f}%" for kind, share in shares.items())
    return " · ".join((f"mean {mean:.1f}%", *kinds))


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a cosine that ends at 1% of the peak."""
    if step < recipe.warmup_steps:
        return recipe.peak_lr * (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / (recipe.steps - recipe.warmup_steps)
    return recipe.peak_lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def optimizer_for(model: Qwen3ForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the norms alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    norms = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=(0.9, 0.98), fused=True)


def save_checkpoint(
    path: Path, model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, step: int, seconds: float
) -> None:
    """Writes the whole training state, whole or not at all."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "seconds": seconds,
    }
    unfinished = path.with_suffix(".tmp")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def train(out: Path, recipe: Recipe, compiled: bool) -> None:
    """Trains to the end of the recipe, from `out/checkpoint.pt` if it is there."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer_path = out / "tokenizer.json"
    if not tokenizer_path.exists():
        train_tokenizer(recipe.seed).save(str(tokenizer_path))
    tokenizer = Tokenizer.from_file(str(tokenizer_path))

    torch.manual_seed(recipe.seed)
    config = model_config(tokenizer)
    model = Qwen3ForCausalLM(config)
    # Compiled, plain matrix products beat the CPU's flash attention by a third of the step.
    model.set_attn_implementation("eager")
    optimizer = optimizer_for(model, recipe)
    checkpoint = out / "checkpoint.pt"
    first, seconds = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, seconds = state["step"], state["seconds"]
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters, {recipe}, from step {first}", flush=True)

    if compiled:
        model.model.compile(dynamic=False)
    # A resumed run draws other questions than an uninterrupted one would; both are training ones.
    seed = recipe.seed + 1 + first
    source = packed_rows(tokenizer, stream(seed, Split.TRAIN), random.Random(seed))
    model.train()
    started = time.monotonic()
    recent: list[float] = []
    for step in range(first, recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        logits, targets = answer_logits(model, pack(list(islice(source, recipe.rows))))
        loss = functional.cross_entropy(logits, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(loss.item())
        done = step + 1
        elapsed = seconds + time.monotonic() - started
        if done % 20 == 0:
            mean = sum(recent) / len(recent)
            recent.clear()
            print(f"step {done} loss {mean:.4f} {elapsed:.0f}s", flush=True)
        if done % 100 == 0 or done == recipe.steps:
            save_checkpoint(checkpoint, model, optimizer, done, elapsed)
            scores = held_out_accuracy(model, tokenizer, recipe.rows)
            print(f"step {done} held-out {accuracy_line(scores)}", flush=True)
            with (out / "progress.jsonl").open("a") as progress:
                line = {"step": done, "seconds": round(elapsed), "held_out": scores}
                progress.write(json.dumps(line) + "\n")


def main() -> None:
    """The command line."""
    recipe = Recipe()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("out/demo_model"))
    parser.add_argument("--steps", type=int, default=recipe.steps)
    parser.add_argument("--rows", type=int, default=recipe.rows, help="packed rows a step")
    parser.add_argument("--peak-lr", type=float, default=recipe.peak_lr)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recipe = Recipe(steps=args.steps, rows=args.rows, peak_lr=args.peak_lr)
    train(args.out, recipe, compiled=not args.no_compile)


if __name__ == "__main__":
    main()
