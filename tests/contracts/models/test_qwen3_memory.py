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


@pytest.fixture(scope="module", params=["dense", "moe"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 140 MB."""
    config = qwen3_config(**SHAPE)
    if request.param == "moe":
        config = with_experts(
            config, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=256
        )
    return write_checkpoint(tmp_path_factory.mktemp("model"), config, shards=2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_peak_is_bounded(model_dir: Path, dtype: str) -> None:
    """In a process of its own; float32 doubles every tensor of the file on the way."""
    command = [sys.executable, "benchmarks/load.py", str(model_dir), "--dtype", dtype, "--json"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    report = json.loads(result.stdout)
    assert report["prepared_bytes"] > 100e6
    assert report["peak_bytes"] >= 0.9 * report["prepared_bytes"], "the peak was missed"
    assert report["peak_bytes"] <= BOUND * report["prepared_bytes"]
