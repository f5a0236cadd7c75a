"""Hugging Face transformers: `generate` on left-padded batches, bf16, SDPA.

    python benchmarks/peers/transformers_engine.py MODEL_DIR --workload D8 --repeats 2

A batch pads every row to its longest prompt and runs until its longest answer, so rows of a like
length go together.
"""

from __future__ import annotations

import importlib
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
from workloads import Request

PADDING = 0
"""Masked out, so any id serves."""


class TransformersPeer(harness.Peer):
    name = "transformers"
    description = "transformers' generate on left-padded batches of rows of a like length."

    @classmethod
    def add_options(cls, parser: ArgumentParser) -> None:
        parser.add_argument("--batch", type=int, default=32, help="the most rows of a batch")
        parser.add_argument("--dtype", default="bfloat16")

    def __init__(self, model: Path, options: Namespace) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.transformers: Any = importlib.import_module("transformers")
        self.torch.set_num_threads(options.threads)
        self.batch = options.batch
        self.model: Any = self.transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(self.torch, options.dtype), attn_implementation="sdpa"
        ).eval()
        # In place of the checkpoint's own, which samples and ends at EOS.
        self.model.generation_config = self.transformers.GenerationConfig(
            do_sample=False, pad_token_id=PADDING
        )

    def generate(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        def lengths(index: int) -> tuple[int, int]:
            return requests[index].new_tokens, len(requests[index].prompt)

        order = sorted(range(len(requests)), key=lengths)
        rows: dict[int, list[int]] = {}
        for start in range(0, len(order), self.batch):
            chosen = order[start : start + self.batch]
            rows.update(zip(chosen, self._batch([requests[i] for i in chosen]), strict=True))
        return [rows[index] for index in range(len(requests))]

    def _batch(self, requests: Sequence[Request]) -> list[list[int]]:
        width = max(len(request.prompt) for request in requests)
        steps = max(request.new_tokens for request in requests)
        padding = [width - len(request.prompt) for request in requests]
        pairs = list(zip(padding, requests, strict=True))
        tokens = self.torch.tensor([[PADDING] * pad + r.prompt for pad, r in pairs])
        mask = self.torch.tensor([[0] * pad + [1] * len(r.prompt) for pad, r in pairs])
        with self.torch.inference_mode():
            written = self.model.generate(
                input_ids=tokens, attention_mask=mask, max_new_tokens=steps
            )
        return [
            row[width : width + request.new_tokens].tolist()
            for row, request in zip(written, requests, strict=True)
        ]

    def versions(self) -> dict[str, str]:
        return {"transformers": self.transformers.__version__, "torch": self.torch.__version__}


if __name__ == "__main__":
    harness.main(TransformersPeer)
