"""The benchmarks run, on a model so small that their figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tidemill_contracts.models.qwen3.native.library import find_compiler
from tools.make_checkpoint import published_config, write_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), published_config("tiny", "bfloat16"))


def run(*command: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="the ceilings need a C++ compiler")
def test_the_engine_benchmark_tells_of_every_workload(tiny: Path) -> None:
    lines = run(
        "benchmarks/engine.py", str(tiny), "--repeats", "1", "--threads", "1",
        "--max-model-len", "512", "--kv-tokens", "4096",
        "--workload", "D1", "--workload", "D8", "--workload", "P",
    )  # fmt: skip
    ready, *runs = lines
    assert ready["seconds"] > 0
    assert [line["workload"] for line in runs[:3]] == ["D1", "D8", "P"]
    for summary in runs[3:]:
        assert summary["read_gb_s"] > 0
        assert summary["wall_s"] > 0
        assert summary["peak_rss_gib"] > 0
