"""`tidemill worker` and `arq tidemill_worker.WorkerSettings` as processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.worker.conftest import QUEUE
from tidemill_contracts import keys
from tidemill_contracts.wire import GenerationJob, SamplingParams
from tidemill_contracts.wire.arq_format import decode_outcome, encode_job_record
from tidemill_contracts.wire.status import decode_status

TIDEMILL = [sys.executable, "-m", "tidemill_producer.cli"]
SMALL = ["--dtype", "float32", "--kv-pages", "64", "--threads", "1"]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TIDEMILL, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


async def _enqueue(redis: Redis, job_id: str, **sampling: object) -> None:
    job = GenerationJob(
        id=job_id,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(temperature=0, ignore_eos=True, **sampling),  # type: ignore[arg-type]
    )
    await redis.set(keys.job_key(job_id), encode_job_record(job, enqueue_time_ms=0))
    await redis.zadd(QUEUE, {job_id: 1})


async def _tokens(redis: Redis, job_id: str) -> list[int]:
    async with asyncio.timeout(60):
        while (raw := await redis.get(keys.result_key(job_id))) is None:
            await asyncio.sleep(0.05)
    return decode_outcome(raw, job_id).unwrap().token_ids


def test_help_teaches_without_loading_torch() -> None:
    code = (
        "import sys\n"
        "from tidemill_producer.cli import main\n"
        "sys.argv = ['tidemill', 'worker', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'arq' not in sys.modules\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "Examples:" in result.stdout
    assert "--max-rows" in result.stdout
    assert "TIDEMILL_MAX_ROWS" in result.stdout


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "no such model directory"),
        ("llama", "LlamaForCausalLM"),
        ("truncated", "model.safetensors"),
    ],
)
def test_a_model_that_cannot_be_served_is_one_line_and_exit_code_1(
    redis_url: str, tiny_model: Path, tmp_path: Path, change: str, said: str
) -> None:
    model = tmp_path / "model"
    if change != "missing":
        model.mkdir()
        for file in tiny_model.iterdir():
            (model / file.name).write_bytes(file.read_bytes())
    if change == "llama":
        config = json.loads((model / "config.json").read_text())
        config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        (model / "config.json").write_text(json.dumps(config))
    if change == "truncated":
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
    result = _run("worker", "--model", str(model), "--redis", redis_url, "--log-level", "error")
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("tidemill: error: ")
    assert said.lower() in line.lower()


def test_an_unreachable_redis_is_one_line_and_exit_code_1() -> None:
    result = _run("worker", "--redis", "unix:///nowhere.sock", "--log-level", "error")
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("tidemill: error: Redis does not answer at unix:///nowhere.sock")


@pytest.mark.parametrize("url", ["localhost:6379", "http://h", "redis://:secret@h:port/0"])
def test_a_url_that_is_none_of_redis_is_one_line_and_exit_code_1(url: str) -> None:
    result = _run("worker", "--redis", url, "--log-level", "error")
    assert result.returncode == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("tidemill: error: redis_url: ")
    assert "secret" not in line


def test_a_setting_out_of_range_is_named() -> None:
    result = _run("worker", "--max-rows", "0")
    assert result.returncode != 0
    assert "max_rows" in result.stderr


async def test_the_worker_serves_says_so_and_drains_on_sigterm(
    redis_url: str, redis: Redis, tiny_model: Path
) -> None:
    await _enqueue(redis, "first", max_tokens=5)
    process = await asyncio.create_subprocess_exec(
        *TIDEMILL, "worker", "--model", str(tiny_model), "--redis", redis_url, *SMALL,
        "--worker-id", "w1", "--checkpoint-tokens", "1", stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert len(await _tokens(redis, "first")) == 5
        async with asyncio.timeout(10):
            while (raw := await redis.get(keys.worker_key(QUEUE, "w1"))) is None or (
                status := decode_status(raw)
            ).jobs_done < 1:
                await asyncio.sleep(0.1)
        assert (status.state, status.model, status.dtype) == ("ready", "tiny", "float32")
        assert status.completion_tokens == 5
        assert status.row_steps >= status.steps > 0
        assert status.eta_s == 0.0
        await _enqueue(redis, "second", max_tokens=400)
        await redis.lpush(keys.doorbell_key(QUEUE), "1")
        # A checkpoint tells that it runs: what has not begun is handed back.
        begun = keys.progress_key("second"), keys.result_key("second")
        async with asyncio.timeout(10):
            while not await redis.exists(*begun):
                await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        log = (await asyncio.wait_for(process.stderr.read(), 30)).decode()
        assert await process.wait() == 0, log
    finally:
        if process.returncode is None:
            process.kill()
    assert len(await _tokens(redis, "second")) == 400, "a drain finishes what runs"
    assert not await redis.exists(keys.worker_key(QUEUE, "w1"))


async def test_stock_arq_runs_the_same_function_with_the_same_answer(
    redis_url: str, redis: Redis, tiny_model: Path
) -> None:
    await _enqueue(redis, "stock", max_tokens=6)
    environment = {
        **os.environ,
        "TIDEMILL_REDIS_URL": redis_url,
        "TIDEMILL_MODEL": str(tiny_model),
        "TIDEMILL_DTYPE": "float32",
        "TIDEMILL_KV_PAGES": "64",
    }
    arq = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("arq")), "tidemill_worker.WorkerSettings", "--burst",
        env=environment, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    stock = await _tokens(redis, "stock")
    assert arq.stderr is not None
    assert await arq.wait() == 0, (await arq.stderr.read()).decode()
    await _enqueue(redis, "ours", max_tokens=6)
    ours = await asyncio.create_subprocess_exec(
        *TIDEMILL, "worker", "--model", str(tiny_model), "--redis", redis_url, *SMALL, "--burst",
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert await _tokens(redis, "ours") == stock
    assert await asyncio.wait_for(ours.wait(), 30) == 0
