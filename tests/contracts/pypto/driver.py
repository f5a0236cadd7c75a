"""Builds stand-in checkouts and models that fit them, and runs either contract over one model."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.contracts.models.driver import int32, small_model
from tidemill_contracts.models.checkpoint import Checkpoint
from tidemill_contracts.models.config import load_config
from tidemill_contracts.models.contract import ModelContract, Phase, RuntimeConfig, StageInputs
from tidemill_contracts.models.pypto.backend import PyptoBackend
from tidemill_contracts.models.pypto.contract import make_contract
from tidemill_contracts.models.pypto.options import PyptoOptions
from tidemill_contracts.models.pypto.session import Session
from tidemill_contracts.models.startup import load_model

STAND_IN = Path(__file__).parent / "checkout"
VARIANT = Path("models", "qwen3_tiny")
PAGE_SIZE, MAX_SEQ = 8, 64


def make_checkout(directory: Path, *edits: tuple[str | Path, str, str]) -> Path:
    """A copy of the stand-in, changed: file, text in it, text in its place."""
    root = directory / "pypto-lib"
    shutil.copytree(STAND_IN, root, ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in edits:
        path = root / name
        text = path.read_text()
        assert old in text, f"{name} has no {old!r}"
        path.write_text(text.replace(old, new))
    return root


def make_model(directory: Path, **changes: object) -> Path:
    """A Qwen3 model of the one shape that the stand-in's matcher accepts."""
    fitting = {"hidden_size": 64, "intermediate_size": 96, "dtype": "bfloat16"}
    return small_model(directory / "model", **{**fitting, **changes})


def options(root: Path, **changes: object) -> PyptoOptions:
    values = {"contract": "qwen3/tiny", "platform": "a2a3sim", "start_timeout_s": 60.0}
    return PyptoOptions(lib_root=str(root), **{**values, **changes})


def make_runtime(**changes: object) -> RuntimeConfig:
    values = {
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "max_batch_size": 10,
        "max_seq_len": MAX_SEQ,
        "max_step_tokens": 256,
        "page_size": PAGE_SIZE,
        "total_kv_pages": 40,
    }
    return RuntimeConfig(**{**values, **changes})


class Served:
    """A loaded model behind `contract`, driven as a worker drives it."""

    def __init__(self, contract: ModelContract, model_dir: Path, **runtime: object) -> None:
        self.contract = contract
        self.config = load_config(model_dir)
        self.runtime = make_runtime(**runtime)
        self.model = load_model(contract, self.config, self.runtime, lambda: Checkpoint(model_dir))
        width = contract.hooks.logits_width(self.config)
        self.logits = torch.full((self.runtime.max_batch_size, width), float("nan"))
        self.forget_rows()

    def forget_rows(self) -> None:
        self.free = list(range(self.runtime.total_kv_pages))[::-1]

    def row(self, prompt: Sequence[int]) -> Row:
        return Row(list(prompt))

    def prefill(self, *rows: Row, chunk: int = 10**6) -> Tensor:
        """The next `chunk` tokens of each row; float32 [rows, vocabulary]."""
        lengths = [min(chunk, len(row.tokens) - row.computed) for row in rows]
        offsets = [sum(lengths[:index]) for index in range(len(rows))]
        return self._run(
            "prefill", rows, lengths, chunk_lens=int32(lengths), chunk_offsets=int32(offsets)
        )

    def decode(self, *rows: Row) -> Tensor:
        """The last token of each row; float32 [rows, vocabulary]."""
        return self._run("decode", rows, [1] * len(rows))

    def generate(
        self, prompts: Sequence[Sequence[int]], new: int, chunk: int = 10**6
    ) -> tuple[list[list[int]], Tensor]:
        """Greedy tokens of all prompts as one batch, and the logits that they were chosen by,
        float32 [prompts, new, vocabulary]."""
        rows = [self.row(prompt) for prompt in prompts]
        logits = torch.empty(len(rows), new, self.config.vocab_size)
        while left := [i for i, row in enumerate(rows) if row.computed < len(row.tokens)]:
            out = self.prefill(*(rows[i] for i in left), chunk=chunk)
            for i, line in zip(left, out, strict=True):
                logits[i, 0] = line
        for step in range(new):
            if step:
                logits[:, step] = self.decode(*rows)
            for row, token in zip(rows, logits[:, step].argmax(1).tolist(), strict=True):
                row.tokens.append(token)
        for row in rows:
            self.free += row.pages[::-1]
        return [row.tokens[-new:] for row in rows], logits

    def _run(
        self, phase: Phase, rows: Sequence[Row], lengths: Sequence[int], **fields: Tensor
    ) -> Tensor:
        ids: list[int] = []
        slots: list[int] = []
        for row, length in zip(rows, lengths, strict=True):
            places = range(row.computed, row.computed + length)
            while len(row.pages) * PAGE_SIZE < places.stop:
                row.pages.append(self.free.pop())
            ids += [row.tokens[place] for place in places]
            slots += [row.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in places]
        width = max(len(row.pages) for row in rows)
        logits = self.logits[: len(rows)]
        inputs = StageInputs(
            input_ids=int32(ids),
            seq_lens=int32(
                [row.computed + length for row, length in zip(rows, lengths, strict=True)]
            ),
            block_table=int32([row.pages + [-1] * (width - len(row.pages)) for row in rows]),
            slot_mapping=int32(slots),
            logits=logits,
            **fields,
        )
        self.model.stages[phase](inputs)
        for row, length in zip(rows, lengths, strict=True):
            row.computed += length
        return logits[:, : self.config.vocab_size].clone()


class Row:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.computed = 0
        self.pages: list[int] = []

    def forget(self) -> None:
        """As after a preemption: everything is to be computed again."""
        self.computed = 0


class Pypto:
    """A session with a checkout, ended when the test is over."""

    def __init__(self, root: Path, **changes: object) -> None:
        self.session = Session(options(root, **changes))

    def contract(self) -> ModelContract:
        self.backend = PyptoBackend(self.session)
        return make_contract(self.backend)

    def serve(self, model_dir: Path, **runtime: object) -> Served:
        return Served(self.contract(), model_dir, **runtime)

    def __enter__(self) -> Pypto:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()
