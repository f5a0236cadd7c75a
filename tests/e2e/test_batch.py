"""`tidemill batch` over a real worker: kills, Ctrl-C and models that cannot be served."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import TIDEMILL

SMALL = ("--dtype", "float32", "--kv-pages", "256", "--max-rows", "8")


def _write_rows(path: Path, count: int, *, max_tokens: int = 20) -> list[str]:
    ids = [f"row-{i}" for i in range(count)]
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    with path.open("w") as file:
        for i, custom_id in enumerate(ids):
            row = {"custom_id": custom_id, "prompt_token_ids": [i % 500, 7], "sampling": sampling}
            file.write(json.dumps(row) + "\n")
    return ids


def _batch(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TIDEMILL, "batch", *arguments], stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def _results(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _worker_pid(parent: int) -> int | None:
    """The worker process that `tidemill batch --embedded` has started."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                ppid = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if ppid == parent and b"worker" in command:
                return int(entry.name)
    return None


def _wait_for_rows(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_an_embedded_batch_answers_every_row(tmp_path: Path, tiny_model: Path) -> None:
    rows, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    ids = _write_rows(rows, 40)
    process = _batch(str(rows), str(output), "--embedded", str(tiny_model), *SMALL)
    _, log = process.communicate(timeout=90)
    assert process.returncode == 0, log
    results = _results(output)
    assert sorted(str(r["custom_id"]) for r in results) == sorted(ids)
    for result in results:
        assert result["error"] is None
        answer = result["result"]
        assert isinstance(answer, dict)
        assert (answer["text"], answer["finish_reason"]) == (None, "length")
        assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] == 20


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_costs_no_row(tmp_path: Path, tiny_model: Path) -> None:
    rows = tmp_path / "in.jsonl"
    ids = _write_rows(rows, 120, max_tokens=40)
    outputs = []
    for kill in (False, True):
        output = tmp_path / f"out-{kill}.jsonl"
        process = _batch(str(rows), str(output), "--embedded", str(tiny_model), *SMALL)
        if kill:
            _wait_for_rows(output, 10, process)
            pid = _worker_pid(process.pid)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        _, log = process.communicate(timeout=110)
        assert process.returncode == 0, log
        results = _results(output)
        assert sorted(str(r["custom_id"]) for r in results) == sorted(ids)
        outputs.append({r["custom_id"]: r["result"]["token_ids"] for r in results})  # type: ignore[index]
    assert outputs[0] == outputs[1]


@pytest.mark.slow
def test_ctrl_c_keeps_finished_rows_and_leaves_no_process(tmp_path: Path, tiny_model: Path) -> None:
    rows, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    _write_rows(rows, 400, max_tokens=60)
    process = _batch(str(rows), str(output), "--embedded", str(tiny_model), *SMALL)
    _wait_for_rows(output, 5, process)
    worker = _worker_pid(process.pid)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 130, log
    assert "Interrupted." in log
    results = _results(output)
    assert 5 <= len(results) < 400
    assert len({r["custom_id"] for r in results}) == len(results)
    assert worker is not None
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["missing", "llama", "truncated"])
def test_a_model_that_cannot_be_served_stops_the_run_with_one_line(
    tmp_path: Path, tiny_model: Path, fault: str
) -> None:
    rows, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    _write_rows(rows, 3)
    model = tmp_path / "model"
    if fault != "missing":
        model.mkdir()
        for file in tiny_model.iterdir():
            (model / file.name).write_bytes(file.read_bytes())
    if fault == "llama":
        config = json.loads((model / "config.json").read_text())
        config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        (model / "config.json").write_text(json.dumps(config))
    if fault == "truncated":
        with (model / "model.safetensors").open("r+b") as weights:
            weights.truncate(1_000)
    process = _batch(str(rows), str(output), "--embedded", str(model), *SMALL)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 1
    said = {"missing": "no such model directory", "llama": "LlamaForCausalLM"}
    (error,) = [line for line in log.splitlines() if line.startswith("tidemill: error:")]
    assert said.get(fault, "model.safetensors").lower() in error.lower()
    assert "Traceback" not in log


@pytest.mark.slow
def test_rows_that_cannot_be_run_are_error_rows_among_good_ones(
    tmp_path: Path, tiny_model: Path
) -> None:
    rows, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        '{"custom_id": "ok", "prompt_token_ids": [1], "sampling": {"max_tokens": 2}}',
        "not json",
        '{"custom_id": "empty", "prompt_token_ids": []}',
        '{"custom_id": "long", "prompt_token_ids": [' + ", ".join(["1"] * 80) + "]}",
        '{"custom_id": "text", "prompt": "hello"}',
        '{"custom_id": "unknown", "prompt_token_ids": [1], "sampling": {"beams": 2}}',
        '{"custom_id": "vocab", "prompt_token_ids": [99999]}',
        '{"custom_id": "ok2", "prompt_token_ids": [2], "sampling": {"max_tokens": 2}}',
    ]
    rows.write_text("\n".join(lines) + "\n")
    process = _batch(
        str(rows), str(output), "--embedded", str(tiny_model), *SMALL, "--max-model-len", "64"
    )
    _, log = process.communicate(timeout=60)
    assert process.returncode == 3, log
    codes = {
        r["custom_id"]: r["error"] and r["error"]["code"]  # type: ignore[index]
        for r in _results(output)
    }
    assert codes == {
        "ok": None,
        "ok2": None,
        None: "invalid_job",
        "empty": "empty_prompt",
        "long": "prompt_too_long",
        "text": "no_tokenizer",
        "unknown": "invalid_job",
        "vocab": "token_out_of_range",
    }
