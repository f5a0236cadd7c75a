"""The benchmarks run, on a model so small that their figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill_contracts.models.qwen3.native.library import find_compiler
from tools.make_checkpoint import published_config, write_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), published_config("tiny", "bfloat16"))


def run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="the ceilings need a C++ compiler")
def test_the_engine_benchmark_tells_of_every_workload(tiny: Path) -> None:
    done = run(
        "benchmarks/engine.py", str(tiny), "--repeats", "1", "--threads", "1",
        "--max-model-len", "512", "--kv-tokens", "4096",
        "--workload", "D1", "--workload", "D8", "--workload", "P",
    )  # fmt: skip
    ready, *runs = (json.loads(line) for line in done.stdout.splitlines())
    assert ready["seconds"] > 0
    assert [line["workload"] for line in runs[:3]] == ["D1", "D8", "P"]
    for summary in runs[3:]:
        assert summary["read_gb_s"] > 0
        assert summary["wall_s"] > 0
        assert summary["peak_rss_gib"] > 0


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="the ceilings need a C++ compiler")
def test_a_comparison_goes_on_without_the_peer_that_fails(tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "compare.json"
    done = run(
        "benchmarks/compare.py", str(tiny), "--workload", "D1", "--rounds", "1", "--repeats", "1",
        "--threads", "1", "--ours", "--max-model-len 512 --kv-tokens 4096",
        "--peer", f"transformers-broken={sys.executable} --no-such-option",
        "--peer", f"transformers={sys.executable}", "--output", str(output),
    )  # fmt: skip
    (only,) = json.loads(output.read_text())["rounds"]
    assert only["ceilings"]["read_gb_s"] > 0
    ours, broken, peer = only["processes"]
    assert broken["runs"] == []
    assert "unrecognized arguments: --no-such-option" in broken["failure"]
    assert "unrecognized arguments: --no-such-option" in done.stderr
    for process in (ours, peer):
        assert process["failure"] is None
        assert process["cold_start_s"] > 0
        assert process["peak_rss_gib"] > 0
    ratio = peer["runs"][0]["step_ms"] / ours["runs"][0]["step_ms"]
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("| D1, ms a step |"))
    assert row.endswith(f"| {ratio:.2f} × (transformers) |")


@pytest.mark.slow
def test_growth_tells_of_every_point(tiny: Path) -> None:
    done = run(
        "benchmarks/growth.py", str(tiny), "--repeats", "1", "--threads", "1", "--steps", "8",
        "--rows", "1", "--rows", "4", "--context", "40", "--at-context", "16", "--at-rows", "2",
    )  # fmt: skip
    points = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(point["varied"], point["rows"], point["context"]) for point in points] == [
        ("rows", 1, 16),
        ("rows", 4, 16),
        ("context", 2, 40),
    ]
