"""A worker in miniature: drives any contract through its public surface alone.

It plays the part of the engine's runner and page allocator: rows own pages whose ids are shuffled,
so that nothing works by accident of order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tidemill_contracts.models.checkpoint import Checkpoint
from tidemill_contracts.models.config import load_config
from tidemill_contracts.models.contract import (
    Kernels,
    Phase,
    Quantization,
    RuntimeConfig,
    StageInputs,
)
from tidemill_contracts.models.registry import find_contract_for_model_config
from tidemill_contracts.models.requirements import ServingRequirements
from tools.make_checkpoint import qwen3_config, tensor_shapes, with_experts, write_checkpoint


def lively_tensors(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Weights of a model that is no near-constant: logits of several units, norms far from one."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.rand(shape, generator=generator) + 0.5
        return torch.randn(shape, generator=generator) * 0.2

    return {name: tensor(name, shape) for name, shape in tensor_shapes(config).items()}


def small_config(**changes: Any) -> dict[str, Any]:
    """A ``config.json`` of a model of some ten thousand parameters, with `changes` in it."""
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "tie_word_embeddings": True,
        "vocab_size": 101,
        "max_position_embeddings": 512,
        "eos_token_id": None,
        "dtype": "float32",
    }
    known = {name: changes.pop(name) for name in list(changes) if name in shape}
    return {**qwen3_config(**{**shape, **known}), **changes}


def small_moe_config(**changes: Any) -> dict[str, Any]:
    """The same with experts."""
    experts: dict[str, Any] = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    }
    known = {name: changes.pop(name) for name in list(changes) if name in experts}
    config = small_config(**{"tie_word_embeddings": False, **changes})
    return with_experts(config, **{**experts, **known})


def small_model(
    directory: Path,
    seed: int = 0,
    config: Callable[..., dict[str, Any]] = small_config,
    **changes: Any,
) -> Path:
    raw = config(**changes)
    return write_checkpoint(directory, raw, tensors=lively_tensors(raw, seed))


@dataclass
class Row:
    pages: list[int]
    tokens: list[int] = field(default_factory=list)
    """Those that the cache holds."""


class Driver:
    """A loaded model. `edit` may change the stage inputs of a call just before it is made."""

    def __init__(
        self,
        model_dir: Path,
        *,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        pages: int | None = None,
        max_seq_len: int = 512,
        max_rows: int = 32,
        device: str = "cpu",
        kernels: Kernels = "auto",
        quantization: Quantization | None = None,
    ) -> None:
        """`device` is where the stages believe that they run: the tensors stay on the CPU."""
        self.config = load_config(model_dir)
        self.contract = find_contract_for_model_config(self.config, quantization)
        ServingRequirements().check(self.contract)
        self.runtime = RuntimeConfig(
            device=torch.device("cpu"),
            dtype=dtype,
            max_batch_size=max_rows,
            max_seq_len=max_seq_len,
            max_step_tokens=4096,
            page_size=page_size,
            total_kv_pages=pages or 4096 // page_size + max_rows,
            kernels=kernels,
        )
        hooks = self.contract.hooks
        loaded = hooks.load_kernels()
        hooks.validate_kernels(loaded, self.config, self.runtime)
        hooks.bind(loaded)
        self.static = hooks.prepare_weights(
            Checkpoint(model_dir), self.config, self.runtime, lambda tensor: tensor
        )
        self.spec = hooks.cache_spec(self.config, self.runtime)
        self.cache = self.spec.allocate(self.runtime.total_kv_pages)
        self.compiled = {}
        for phase in ServingRequirements().phases(self.contract):
            stage = self.contract.stage(phase)
            dummies = stage.compile_args_builder(self.config, self.runtime)
            self.compiled[phase] = stage.host_jit_fn.compile(
                *dummies, config=replace(self.runtime, device=torch.device(device))
            )
        self.free = list(range(self.runtime.total_kv_pages))
        random.Random(7).shuffle(self.free)
        self.edit: Callable[[StageInputs], StageInputs] = lambda inputs: inputs

    def row(self) -> Row:
        return Row(pages=[])

    def release(self, row: Row) -> None:
        self.free += row.pages
        row.pages, row.tokens = [], []

    def prefill(self, *chunks: tuple[Row, Sequence[int]]) -> Tensor:
        """One call over all chunks; float32 [chunks, vocabulary]."""
        return self._call("prefill", chunks)

    def score(self, *chunks: tuple[Row, Sequence[int]], logit_rows: Sequence[int]) -> Tensor:
        """The same with the logits of those packed tokens, float32 [those, vocabulary]."""
        return self._call("score", chunks, logit_rows)

    def decode(self, *rows: tuple[Row, int]) -> Tensor:
        """One token of each row; float32 [rows, vocabulary]."""
        return self._call("decode", [(row, [token]) for row, token in rows])

    def generate(self, prompts: Sequence[Sequence[int]], new: int, chunk: int = 10**9) -> Tensor:
        """Greedy logits of all prompts as one batch, float32 [prompts, new, vocabulary]; prompts
        are prefilled at most `chunk` tokens of each at a time."""
        rows = [self.row() for _ in prompts]
        logits = torch.empty(len(prompts), new, self.config.vocab_size)
        for start in range(0, max(map(len, prompts)), chunk):
            parts = [
                (index, prompt[start : start + chunk])
                for index, prompt in enumerate(prompts)
                if start < len(prompt)
            ]
            out = self.prefill(*((rows[index], tokens) for index, tokens in parts))
            logits[[index for index, _ in parts], 0] = out
        for step in range(1, new):
            tokens = logits[:, step - 1].argmax(-1).tolist()
            logits[:, step] = self.decode(*zip(rows, tokens, strict=True))
        for row in rows:
            self.release(row)
        return logits

    def _call(
        self,
        phase: Phase,
        work: Sequence[tuple[Row, Sequence[int]]],
        logit_rows: Sequence[int] | None = None,
    ) -> Tensor:
        size = self.runtime.page_size
        slots: list[int] = []
        for row, tokens in work:
            start = len(row.tokens)
            row.tokens += tokens
            while len(row.pages) * size < len(row.tokens):
                row.pages.append(self.free.pop())
            slots += [
                row.pages[place // size] * size + place % size
                for place in range(start, len(row.tokens))
            ]
        # Wider than any row needs: what lies past a row's pages is -1 and never read.
        width = max(len(row.pages) for row, _ in work) + 2
        table = [row.pages + [-1] * (width - len(row.pages)) for row, _ in work]
        lengths = [len(tokens) for _, tokens in work]
        offsets = [sum(lengths[:index]) for index in range(len(lengths))]
        packed = phase != "decode"
        logits = torch.full(
            (
                len(work if logit_rows is None else logit_rows),
                self.contract.hooks.logits_width(self.config),
            ),
            float("nan"),
        )
        inputs = StageInputs(
            input_ids=int32([token for _, tokens in work for token in tokens]),
            seq_lens=int32([len(row.tokens) for row, _ in work]),
            block_table=int32(table),
            slot_mapping=int32(slots),
            logits=logits,
            chunk_lens=int32(lengths) if packed else None,
            chunk_offsets=int32(offsets) if packed else None,
            logit_rows=None if logit_rows is None else int32(logit_rows),
        )
        stage = self.contract.stage(phase)
        args = stage.runtime_args_builder(self.edit(inputs), self.static, self.cache)
        self.compiled[phase](*args)
        return logits[:, : self.config.vocab_size]


def int32(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
