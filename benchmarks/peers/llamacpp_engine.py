"""llama.cpp by the C interface that llama-cpp-python wraps: every row a sequence of its own.

    python benchmarks/peers/llamacpp_engine.py MODEL_DIR --weights bf16 --workload D8

Prompts are computed one after another, then all rows decode together, one `llama_decode` a step,
as llama.cpp's own batched example has it; the likeliest token is found with numpy. The GGUF file
is written into `--gguf-dir` the first time (`gguf_export.py`).
"""

from __future__ import annotations

import importlib
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf_export
import harness
from workloads import Request


class LlamacppPeer(harness.Peer):
    name = "llamacpp"
    description = "llama.cpp's library, one sequence a row."

    @classmethod
    def add_options(cls, parser: ArgumentParser) -> None:
        parser.add_argument("--weights", choices=gguf_export.WEIGHTS, default="bf16")
        parser.add_argument(
            "--gguf-dir", type=Path, default=Path("out"), help="where the converted model is kept"
        )
        parser.add_argument("--max-rows", type=int, default=64)
        parser.add_argument("--row-tokens", type=int, default=640, help="prompt and answer")
        parser.add_argument("--max-step-tokens", type=int, default=512)

    def __init__(self, model: Path, options: Namespace) -> None:
        self.numpy: Any = importlib.import_module("numpy")
        package: Any = importlib.import_module("llama_cpp")
        self.llama: Any = importlib.import_module("llama_cpp.llama_cpp")
        self.version = package.__version__
        self.gguf = gguf_export.exported(model, options.gguf_dir, options.weights)
        self.rows, self.step_tokens = options.max_rows, options.max_step_tokens
        self.llama.llama_backend_init()
        self.model: Any = self.llama.llama_model_load_from_file(
            str(self.gguf).encode(), self.llama.llama_model_default_params()
        )
        if not self.model:
            raise SystemExit(f"llama.cpp does not load {self.gguf}")
        self.vocabulary = self.llama.llama_vocab_n_tokens(
            self.llama.llama_model_get_vocab(self.model)
        )
        params = self.llama.llama_context_default_params()
        params.n_ctx = options.max_rows * options.row_tokens
        params.n_batch = params.n_ubatch = options.max_step_tokens
        params.n_seq_max = options.max_rows
        params.n_threads = params.n_threads_batch = options.threads
        self.context: Any = self.llama.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit("llama.cpp gives no context")
        self.batch: Any = self.llama.llama_batch_init(options.max_step_tokens, 0, 1)

    def generate(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        written: list[list[int]] = []
        for start in range(0, len(requests), self.rows):
            written += self._together(requests[start : start + self.rows])
        return written

    def _together(self, requests: Sequence[Request]) -> list[list[int]]:
        """As many requests as there are sequences, to their ends."""
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), False)
        written = [[self._prefill(row, request.prompt)] for row, request in enumerate(requests)]
        while True:
            left = [i for i, r in enumerate(requests) if len(written[i]) < r.new_tokens]
            if not left:
                return written
            places = [(i, len(requests[i].prompt) + len(written[i]) - 1) for i in left]
            tokens = [written[i][-1] for i in left]
            chosen = self._decode(tokens, places, range(len(left)))
            for i, token in zip(left, chosen, strict=True):
                written[i].append(token)

    def _prefill(self, row: int, prompt: Sequence[int]) -> int:
        """The first new token."""
        for start in range(0, len(prompt), self.step_tokens):
            part = prompt[start : start + self.step_tokens]
            end = start + len(part)
            told = [len(part) - 1] if end == len(prompt) else []
            found = self._decode(part, [(row, place) for place in range(start, end)], told)
        return found[0]

    def _decode(
        self, tokens: Sequence[int], places: Sequence[tuple[int, int]], told: Sequence[int]
    ) -> list[int]:
        """Computes tokens, each at its sequence and position; the likeliest next ones of those at
        `told`."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, (row, position)) in enumerate(zip(tokens, places, strict=True)):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = row
            batch.logits[i] = 0
        for i in told:
            batch.logits[i] = 1
        if (code := self.llama.llama_decode(self.context, batch)) != 0:
            raise SystemExit(f"llama_decode answered {code}")
        if not told:
            return []
        logits = self.numpy.ctypeslib.as_array(
            self.llama.llama_get_logits(self.context), (len(told), self.vocabulary)
        )
        likeliest: list[int] = logits.argmax(axis=1).tolist()
        return likeliest

    def weight_bytes(self) -> int | None:
        return self.gguf.stat().st_size

    def versions(self) -> dict[str, str]:
        return {"llama-cpp-python": self.version}


if __name__ == "__main__":
    harness.main(LlamacppPeer)
