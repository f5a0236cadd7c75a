"""The benchmarks run, on a model so small that their figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill_contracts.models.qwen3.native.library import find_compiler, lacking
from tools.make_checkpoint import published_config, write_checkpoint

ROOT = Path(__file__).parents[2]
SMALL = ("--max-model-len", "512", "--kv-tokens", "4096")

needs_compiler = pytest.mark.skipif(
    find_compiler() is None, reason="the ceilings need a C++ compiler"
)


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
@needs_compiler
def test_the_engine_benchmark_tells_of_every_workload(tiny: Path) -> None:
    done = run(
        "benchmarks/engine.py", str(tiny), "--repeats", "1", "--threads", "1", *SMALL,
        "--workload", "D1", "--workload", "D8:2", "--workload", "P:2",
    )  # fmt: skip
    ready, *runs = (json.loads(line) for line in done.stdout.splitlines())
    assert ready["seconds"] > 0
    assert [line["workload"] for line in runs[:3]] == ["D1", "D8:2", "P:2"]
    for summary in runs[3:]:
        assert summary["read_gb_s"] > 0
        assert summary["wall_s"] > 0
        assert summary["ceiling_fraction"] > 0
        # What was touched of the KV cache is no more than what was set aside.
        assert summary["rss_of_budget"] >= summary["rss_of_reserved"] > 1


@pytest.mark.slow
@needs_compiler
def test_a_comparison_goes_on_without_the_peer_that_fails(tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "compare.jsonl"
    done = run(
        "benchmarks/compare.py", str(tiny), "--workload", "D8:2", "--rounds", "1",
        "--threads", "1", "--ours", " ".join(SMALL),
        "--peer", f"transformers-broken={sys.executable} --no-such-option",
        "--peer", f"transformers={sys.executable}", "--output", str(output),
    )  # fmt: skip
    head, *events = [json.loads(line) for line in output.read_text().splitlines()]
    assert head["engines"] == ["tidemill", "transformers-broken", "transformers"]
    (failure,) = (event for event in events if event["event"] == "failure")
    assert "unrecognized arguments: --no-such-option" in failure["message"]
    assert "unrecognized arguments: --no-such-option" in done.stderr
    ours, peer = (event for event in events if event["event"] == "run")
    assert (ours["engine"], peer["engine"]) == ("tidemill", "transformers")
    for measured in (ours, peer):
        assert measured["before"]["read_gb_s"] > 0
        assert measured["after"]["read_gb_s"] > 0
        assert measured["peak_rss_gib"] > 0
    ratio = peer["step_ms"] / ours["step_ms"]
    summary = run("benchmarks/compare.py", "--summary", str(output)).stdout
    assert summary == done.stdout
    assert f"| D8:2, ms a step | – | – | {ratio:.2f} × ({ratio:.2f}–{ratio:.2f}) |" in summary


@pytest.mark.slow
def test_growth_tells_of_every_point(tiny: Path, tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_growth_of_a_file_counts_every_row() -> None:
    done = run("benchmarks/growth_file.py", "--rows", "5", "--max-rows", "2")
    (point,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (point["varied"], point["rows"]) == ("file", 5)
    assert point["wall_s"] > 0
    assert min(point[f"{who}_mib"] for who in ("command_rss", "worker_rss", "redis")) > 1


def test_a_summary_of_growth_has_exponents(tmp_path: Path) -> None:
    lines = tmp_path / "growth.jsonl"
    with lines.open("w") as file:
        for rows, wall_s in ((10, 1.0), (1000, 1e4), (100, 10.0)):
            point = {"varied": "file", "rows": rows, "wall_s": wall_s, "command_rss_mib": 30.0}
            file.write(json.dumps(point) + "\n")
    table = run("benchmarks/growth_summary.py", str(lines)).stdout
    assert "| 100 | 10.0 | 1.00 |" in table
    assert "| 1,000 | 10,000.0 | 3.00 |" in table


@pytest.mark.slow
def test_a_cold_start_is_told_in_parts(tiny: Path) -> None:
    done = run("benchmarks/start.py", str(tiny), "--rounds", "1", "--max-model-len", "512")
    first, summary = (json.loads(line) for line in done.stdout.splitlines())
    parts = ("interpreter_s", "import_s", "load_s", "token_s")
    assert sum(first[part] for part in parts) == pytest.approx(first["start_s"], abs=0.01)
    assert all(first[part] > 0 for part in parts)
    assert summary["of_bar"] == pytest.approx(first["start_s"] / first["bar_s"], abs=0.01)


@pytest.mark.slow
def test_the_queue_is_held_to_the_engine_alone(tiny: Path) -> None:
    done = run(
        "benchmarks/queue_cost.py", str(tiny), "--workload", "W1:2", "--rounds", "2",
        "--threads", "1", "--max-model-len", "1024", "--kv-tokens", "4096",
    )  # fmt: skip
    *runs, summary = (json.loads(line) for line in done.stdout.splitlines())
    for measured in runs:
        ratio = measured["engine_s"] / measured["queue_s"]
        assert measured["of_engine"] == pytest.approx(ratio, rel=0.05)
    assert summary["runs"] == len(runs) == 2


@pytest.mark.skipif(lacking() is not None, reason="no matrix unit to watch")
def test_the_matrix_unit_is_found_in_one_of_its_states() -> None:
    done = run("benchmarks/matrix_unit.py", "--threads", "1", "--seconds", "0.5")
    states = [json.loads(line) for line in done.stdout.splitlines()]
    assert 0 < sum(state["share"] for state in states) <= 1
    assert all(state["load_far"] > 0 for state in states)


def test_the_queue_loses_and_doubles_nothing_while_it_is_measured() -> None:
    done = run(
        "benchmarks/queue_rates.py", "--rounds", "1", "--workers", "2", "--jobs", "100",
        "--peer-jobs", "20", "--trips", "5", "--scenario", "enqueue", "--scenario", "drain",
        "--scenario", "trip",
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    of = {(line["scenario"], line["queue"]): line for line in lines}
    assert of.keys() == {
        *((scenario, queue) for scenario in ("enqueue", "drain") for queue in ("tidemill", "arq")),
        *(("trip", queue) for queue in ("tidemill", "arq", "arq-default")),
    }
    for (scenario, queue), jobs in {("drain", "tidemill"): 101, ("drain", "arq"): 21}.items():
        drained = of[scenario, queue]
        assert sum(drained["per_worker"]) == jobs
        assert (drained["duplicates"], drained["missing"]) == (0, 0)
    # Scripts call for many jobs what arq's clients send for each.
    assert of["drain", "tidemill"]["commands"] < 3 < of["drain", "arq"]["commands"]
    assert of["drain", "tidemill"]["inside"] > 1
    assert "drain with 2 over arq's: " in done.stderr
