"""How engines are held and what is made of their runs."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

ENGINE = """
import json, sys, time
tell = lambda line: print(json.dumps({**line, "peak_rss_gib": 0.5}), flush=True)
tell({"event": "ready"})
for line in sys.stdin:
    name = line.strip()
    if name == "fail":
        sys.exit("no such luck")
    if name == "hang":
        time.sleep(60)
    tell({"workload": name, "wall_s": 1.0})
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports one of the scripts as the scripts import each other."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def served(bench: Any, tmp_path: Path) -> Iterator[Any]:
    """An engine that runs nothing, loaded and waiting."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    contenders: ModuleType = bench("contenders")
    contender = contenders.Contender("tidemill", sys.executable, script)
    process = contenders.Served(contender, tmp_path, 1, 60)
    yield process
    process.end()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_an_engine_is_stopped_between_its_turns(served: Any) -> None:
    pid = served._process.pid
    for _ in range(2):
        until = time.monotonic() + 30
        while state(pid) != "T" and time.monotonic() < until:
            time.sleep(0.01)
        assert state(pid) == "T"
        assert served.run("W1", 60)["workload"] == "W1"


def test_an_engine_that_fails_says_why(bench: Any, served: Any) -> None:
    with pytest.raises(bench("contenders").EngineFailed, match="ended with 1\nno such luck"):
        served.run("fail", 60)


def test_an_engine_that_hangs_is_ended(bench: Any, served: Any) -> None:
    pid = served._process.pid
    with pytest.raises(bench("contenders").EngineFailed, match=r"stopped after 0\.2 s"):
        served.run("hang", 0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_each_peer_has_ours_beside_it(bench: Any) -> None:
    compare = bench("compare")
    names = [engine for shift in (0, 1) for engine in compare.turn(["a", "b", "c"], "ours", shift)]
    assert names == ["ours", "a", "b", "ours", "c", "ours", "b", "c", "ours", "a"]


def event(position: int, engine: str, wall_s: float, number: int = 0) -> dict[str, Any]:
    limits = {"threads": 2, "read_gb_s": 20.0, "matrix_tflop_s": 2.0}
    return {
        "event": "run", "round": number, "workload": "P", "position": position,
        "engine": engine, "wall_s": wall_s, "peak_rss_gib": 1.0,
        "before": limits, "after": {**limits, "matrix_tflop_s": 4.0},
    }  # fmt: skip


HEAD = {
    "event": "comparison", "started": "now", "model": "m", "threads": 2, "max_rows": 64,
    "engines": ["tidemill", "a", "b"],
    "floor": {
        "layer_parameters": 440_401_920, "head_parameters": 155_582_464,
        "kv_token_bytes": 114_688, "attention_flops": 229_376,
    },
}  # fmt: skip


def test_ratios_are_those_of_neighbours(bench: Any) -> None:
    events = [
        HEAD,
        *(event(0, "tidemill", 1.0), event(1, "a", 9.0)),
        # The turn was cut there, and run again.
        *(event(0, "tidemill", 1.0), event(1, "a", 3.0), event(2, "b", 8.0)),
        event(3, "tidemill", 4.0),
        *(event(0, "tidemill", 2.0, 1), event(1, "a", 8.0, 1)),
    ]
    found = bench("comparison").Comparison(events)
    assert found.ratios("a", "P") == bench("comparison").Figure(3.5, 3.0, 4.0, 2)
    assert found.ratios("b", "P").median == 2.0
    # 7.7 TFLOP at the mean of 2 and 4 TFLOP/s.
    assert found.fractions("b", "P").median == pytest.approx(7.70e12 / 3e12 / 8.0, rel=0.01)


def test_a_comparison_that_was_cut_goes_on_where_it_was(bench: Any, tmp_path: Path) -> None:
    output = tmp_path / "compare.jsonl"
    events = [HEAD, event(0, "tidemill", 1.0), {"event": "turn", "round": 0, "workload": "P"}]
    whole = "".join(json.dumps(each) + "\n" for each in events)
    output.write_text(whole + '{"event": "ru')
    assert bench("compare")._done(output, HEAD) == {(0, "P")}
    assert output.read_text() == whole
    with pytest.raises(bench("click").UsageError, match="its threads is 2, not 3"):
        bench("compare")._done(output, {**HEAD, "threads": 3})


def test_the_floor_is_that_of_the_arithmetic(bench: Any, tmp_path: Path) -> None:
    """Figures reckoned by hand for the 0.6B shape at 36 GB/s and 5.8 TFLOP/s."""
    config = {
        "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "vocab_size": 151_936,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    floor = bench("floor").Floor.of(tmp_path)
    assert floor.bf16_bytes == 1_191_968_768
    limits = bench("ceilings").Ceilings(2, 36.0, 5.8)
    for name, milliseconds in {"D1": 33.6, "D8": 37.2, "D32": 49.4, "P": 1328}.items():
        assert 1000 * floor.seconds(name, limits) == pytest.approx(milliseconds, rel=2e-3)
    # Half the bytes of weights: KV and all else stay.
    halved = floor.seconds("D1", limits, weight_bytes=floor.bf16_bytes // 2)
    assert 1000 * halved == pytest.approx(33.6 - 33.11 / 2, rel=2e-3)
