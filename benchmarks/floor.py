"""The least time that a machine allows for a workload, from the shape of a dense model.

A **decode step** reads every matrix and the final head once, and the K and V of every token that
its rows have so far: the same bytes whichever engine reads them, at the best rate at which memory
was read. The weights are counted as the engine holds them (`weight_bytes`). Looking rows up in the
embedding, norms and RoPE tables are left out (0.01% of the 0.6B shape); a head that is tied to the
embedding is counted once, and an embedding that is not tied not at all. Where its multiplications
would take longer at the matrix unit's bf16 rate, that is the floor instead.

A **prefill** multiplies each token with every matrix of the layers, and the last token of each
prompt with the head. Attention is included, causal: token t attends to t tokens, and each of those
costs 4 flops per head and dimension (2 for the score, 2 for the sum). The time is that at the
matrix unit's rate; reading the weights is taken to hide behind it.

A **file** takes its prefill, then its decode steps: at least as many as its longest answer has
tokens after the first, and at least as many as fill the rows of a step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import workloads
from ceilings import Ceilings
from workloads import Request


@dataclass(frozen=True, slots=True)
class Floor:
    """What a dense Qwen3 model costs."""

    layer_parameters: int
    """Of the matrices that each token is multiplied with."""
    head_parameters: int
    kv_token_bytes: int
    """K and V of one token in bf16."""
    attention_flops: int
    """Of one token and one token that it attends to."""

    @classmethod
    def of(cls, model: Path) -> Floor:
        """Of a checkpoint directory."""
        config: dict[str, Any] = json.loads((model / "config.json").read_bytes())
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        dim = config.get("head_dim") or hidden // heads
        attention = (2 * heads + 2 * kv_heads) * dim * hidden
        return cls(
            layer_parameters=layers * (attention + 3 * hidden * config["intermediate_size"]),
            head_parameters=config["vocab_size"] * hidden,
            kv_token_bytes=layers * 2 * kv_heads * dim * 2,
            attention_flops=layers * heads * dim * 4,
        )

    @property
    def parameters(self) -> int:
        return self.layer_parameters + self.head_parameters

    @property
    def bf16_bytes(self) -> int:
        """Of the weights that a decode step reads."""
        return 2 * self.parameters

    def seconds(
        self, name: str, limits: Ceilings, max_rows: int = 64, weight_bytes: int | None = None
    ) -> float:
        """Of a decode step for D, of the whole for the others; what the matrix unit would take
        counts as nothing where there is none."""
        requests = workloads.workload(name)
        weights = self.bf16_bytes if weight_bytes is None else weight_bytes
        read = limits.read_gb_s * 1e9
        flops = limits.matrix_tflop_s * 1e12 or float("inf")
        if workloads.is_decode(name):
            # Over the run, a row's mean context is its prompt and half of what it writes.
            context = sum(len(r.prompt) + r.new_tokens / 2 for r in requests)
            moved = weights + self.kv_token_bytes * context
            done = 2 * self.parameters * len(requests) + self.attention_flops * context
            return max(moved / read, done / flops)
        prefill = sum(self._prompt_flops(len(r.prompt)) for r in requests) / flops
        return prefill + self._decode_s(requests, weights, read, flops, max_rows)

    def _decode_s(
        self, requests: Sequence[Request], weights: int, read: float, flops: float, max_rows: int
    ) -> float:
        """Of all tokens after the first of each row."""
        tokens = [request.new_tokens - 1 for request in requests]
        steps = max(max(tokens), -(-sum(tokens) // max_rows))
        context = sum(
            count * (len(request.prompt) + (count + 1) / 2)
            for count, request in zip(tokens, requests, strict=True)
        )
        moved = weights * steps + self.kv_token_bytes * context
        done = 2 * self.parameters * sum(tokens) + self.attention_flops * context
        return max(moved / read, done / flops)

    def _prompt_flops(self, length: int) -> float:
        pairs = length * (length + 1) / 2
        layers = 2 * self.layer_parameters * length
        return layers + 2 * self.head_parameters + self.attention_flops * pairs
