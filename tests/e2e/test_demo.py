"""The README's first command: real prompts, a real queue, a real model whose answers count."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import TIDEMILL
from tidemill_producer.batch.tally import is_right

ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "examples" / "demo.jsonl"
ACCURACY_FLOOR = 0.9


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_the_demo_answers_held_out_prompts_through_the_queue(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    run = subprocess.run(
        [*TIDEMILL, "demo", str(output)], capture_output=True, text=True, timeout=270, check=False
    )
    assert run.returncode == 0, run.stderr
    rows = {row["custom_id"]: row for row in map(json.loads, PROMPTS.read_text().splitlines())}
    results = list(map(json.loads, output.read_text().splitlines()))
    assert sorted(result["custom_id"] for result in results) == sorted(rows)
    correct = sum(
        is_right(r["result"]["text"], rows[r["custom_id"]]["metadata"]["expected"]) for r in results
    )
    assert correct / len(rows) >= ACCURACY_FLOOR
    # What a person sees: the table, and what to try next.
    assert "accuracy" in run.stderr.lower()
    assert "occupancy" in run.stderr.lower()
    assert "tidemill" in run.stdout + run.stderr
