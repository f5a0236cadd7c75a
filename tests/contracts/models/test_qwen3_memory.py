"""Loading takes little more memory than the loaded weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.make_checkpoint import qwen3_config, with_experts, write_checkpoint

BOUND = 1.15
"""Most anonymous memory while the weights are prepared, in units of their size."""

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 30_016,
    "max_position_embeddings": 4096,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """About 140 MB each."""
    dense = qwen3_config(**SHAPE)
    moe = with_experts(dense, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=256)
    return {
        name: write_checkpoint(tmp_path_factory.mktemp(name), config, shards=2)
        for name, config in (("dense", dense), ("moe", moe))
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dense", ["--dtype", "bfloat16"]),
        ("dense", ["--dtype", "float32"]),
        ("dense", ["--quantization", "int8"]),
        ("dense", ["--quantization", "int8", "--kernels", "torch"]),
        ("moe", ["--dtype", "bfloat16"]),
        ("moe", ["--dtype", "float32"]),
    ],
)
def test_the_peak_is_bounded(model_dirs: dict[str, Path], kind: str, options: list[str]) -> None:
    """In a process of its own; float32 doubles every tensor of the file on the way."""
    script = [sys.executable, "benchmarks/load.py", str(model_dirs[kind]), "--json"]
    result = subprocess.run([*script, *options], check=True, capture_output=True, text=True)
    report = json.loads(result.stdout)
    assert report["prepared_bytes"] > 80e6
    assert report["peak_bytes"] >= 0.9 * report["prepared_bytes"], "the peak was missed"
    assert report["peak_bytes"] <= BOUND * report["prepared_bytes"]
