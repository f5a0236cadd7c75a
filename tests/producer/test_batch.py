"""Whole batch runs against a real server and a double of the worker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from tidemill_contracts import keys
from tidemill_contracts.wire import ErrorCode, GenerationJob, JobError
from tidemill_contracts.wire.status import WorkerStatus
from tidemill_producer.batch import session as session_module
from tidemill_producer.batch.config import BatchConfig
from tidemill_producer.batch.session import BatchSession
from tidemill_producer.batch.tally import Tally, batch_occupancy
from tidemill_producer.embedded import EmbeddedWorker
from tidemill_producer.errors import BatchError, EmbeddedFailed, QueueUnavailable

STUB = (sys.executable, str(Path(__file__).with_name("stub_worker.py")))


class Recorder:
    """A progress that only remembers what was said."""

    period_s = 0.05

    def __init__(self) -> None:
        self.lines: list[str] = []

    def show(self, tally: Tally) -> None:
        pass

    def say(self, message: str) -> None:
        self.lines.append(message)

    def note(self, message: str) -> None:
        self.lines.append(message)

    def close(self) -> None:
        pass


class Files:
    """An input of so many rows, and where the output goes."""

    def __init__(self, folder: Path) -> None:
        self.input = folder / "in.jsonl"
        self.output = folder / "out.jsonl"

    def write_rows(self, count: int, **fields: Any) -> None:
        with self.input.open("w") as stream:
            for n in range(count):
                row = {"custom_id": f"r{n}", "prompt": f"p{n}"} | fields
                stream.write(json.dumps(row) + "\n")

    def read(self) -> list[dict[str, Any]]:
        raw = self.output.read_text()
        assert not raw or raw.endswith("\n")
        return [json.loads(line) for line in raw.splitlines()]

    def by_id(self) -> dict[str, dict[str, Any]]:
        found = self.read()
        rows = {row["custom_id"]: row for row in found}
        assert len(rows) == len(found)
        return rows


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def start(files: Files, redis_url: str) -> Callable[..., BatchSession]:
    """Makes a session on the test's server and files."""

    def make(**settings: Any) -> BatchSession:
        where = {} if "embedded" in settings else {"redis_url": redis_url}
        config = BatchConfig(
            **{"input": str(files.input), "output": str(files.output), **where, **settings}
        )
        return BatchSession(config, Recorder())

    return make


def said(session: BatchSession) -> str:
    progress = session._progress
    assert isinstance(progress, Recorder)
    return "\n".join(progress.lines)


async def test_every_row_comes_back(files: Files, start: Any, worker: Any, redis: Redis) -> None:
    files.write_rows(2500)
    session = start()
    async with worker.serving():
        assert await session.run() == 0
    found = files.by_id()
    assert len(found) == 2500
    for n in (0, 1, 2499):
        row = found[f"r{n}"]
        assert row["error"] is None
        assert "line" not in row
        assert row["result"]["text"] == f"P{n}"
        usage = row["result"]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(f"p{n}"), 3)
        assert row["result"]["finish_reason"] == "stop"
    assert (session.tally.done, session.tally.total, session.tally.failed) == (2500, 2500, 0)
    assert session.tally.completion_tokens == 7500


async def test_a_run_leaves_nothing_in_redis(
    files: Files, start: Any, worker: Any, redis: Redis
) -> None:
    files.write_rows(1200)
    async with worker.serving():
        await start().run()
    left = {key async for key in redis.scan_iter()}
    assert left <= {keys.doorbell_key(keys.DEFAULT_QUEUE).encode()}


async def test_all_faults_in_one_file(files: Files, start: Any, worker: Any) -> None:
    lines: list[bytes] = [
        b"\xef\xbb\xbf" + b'{"custom_id": "ok1", "prompt": "a"}\r',
        b"",
        b"[1,2]",
        b"null",
        b'{"custom_id": "ok1", "prompt": "again"}',
        b'{"custom_id": "typo", "prompt": "a", "sampling": {"max_tokenz": 3}}',
        b'{"custom_id": "range", "prompt": "a", "sampling": {"top_p": 2}}',
        b'{"custom_id": "nan", "prompt": "a", "sampling": {"top_p": NaN}}',
        b'{"custom_id": "bytes", "prompt": "\xc3("}',
        b'{"custom_id": "both", "prompt": "a", "prompt_token_ids": [1]}',
        b'{"prompt": "nobody"}',
        b'{"custom_id": "fails", "prompt": "fail"}',
        b'{"custom_id": "cut", "prompt": "a"',
        b'{"custom_id": "ok2", "prompt": "z"}',
    ]
    files.input.write_bytes(b"\n".join(lines))

    def answer(job: GenerationJob) -> Any:
        if job.prompt == "fail":
            return JobError.of(ErrorCode.ENGINE_ERROR, "it broke")
        return echo(job)

    echo = worker.answer
    worker.answer = answer
    session = start()
    async with worker.serving():
        assert await session.run() == 3
    found = files.read()
    assert len(found) == 13
    assert all((row["result"] is None) != (row["error"] is None) for row in found)
    results = {row["custom_id"]: row["result"]["text"] for row in found if row["result"]}
    assert results == {"ok1": "A", "ok2": "Z"}
    bad_lines = {row["line"]: row for row in found if "line" in row}
    assert {line: row["custom_id"] for line, row in bad_lines.items()} == {
        3: None,
        4: None,
        5: "ok1",
        6: "typo",
        7: "range",
        8: None,
        9: "bytes",
        10: "both",
        11: None,
        13: None,
    }
    assert {row["error"]["code"] for row in bad_lines.values()} == {"invalid_job"}
    (failed,) = [row for row in found if row["custom_id"] == "fails"]
    assert failed["error"] == {"code": "engine_error", "message": "it broke", "retryable": True}
    assert session.tally.errors == {"invalid_job": 10, "engine_error": 1}


async def test_an_empty_file_gives_an_empty_file(files: Files, start: Any) -> None:
    files.input.write_text("\n\n")
    assert await start().run() == 0
    assert files.read() == []


async def test_no_more_jobs_are_in_flight_than_the_window(
    files: Files, start: Any, worker: Any, redis: Redis
) -> None:
    files.write_rows(200)
    most = 0

    async def look() -> None:
        nonlocal most
        while True:
            # One command: a SCAN of several calls also counts what came and went in between.
            most = max(most, len(await redis.keys(keys.JOB_PREFIX + "*")))
            await asyncio.sleep(0.002)

    looking = asyncio.create_task(look())
    async with worker.serving():
        assert await start(window=16).run() == 0
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    assert 0 < most <= 16
    assert len(files.by_id()) == 200


async def test_a_window_of_one_works(files: Files, start: Any, worker: Any) -> None:
    files.write_rows(10)
    async with worker.serving():
        assert await start(window=1).run() == 0
    assert [row["custom_id"] for row in files.read()] == [f"r{n}" for n in range(10)]


async def test_answers_are_scored_by_task(files: Files, start: Any, worker: Any) -> None:
    rows = [
        {"custom_id": "1", "prompt": "a", "metadata": {"expected": "A", "task": "up"}},
        {"custom_id": "2", "prompt": "b", "metadata": {"expected": "b", "task": "up"}},
        {"custom_id": "3", "prompt": '{"A": 1}', "metadata": {"expected": ' {"A":1}'}},
        {"custom_id": "4", "prompt": "c", "metadata": {"task": "up"}},
    ]
    files.input.write_text("\n".join(map(json.dumps, rows)))
    session = start()
    async with worker.serving():
        await session.run()
    scores = {task: (score.right, score.total) for task, score in session.tally.scores.items()}
    assert scores == {"up": (1, 2), "": (1, 1)}


async def test_an_output_that_exists_is_left_alone(files: Files, start: Any, worker: Any) -> None:
    files.write_rows(1)
    files.output.write_text("precious\n")
    with pytest.raises(BatchError, match=r"exists; --overwrite"):
        await start().run()
    assert files.output.read_text() == "precious\n"
    async with worker.serving():
        assert await start(overwrite=True).run() == 0
    assert len(files.read()) == 1


async def test_no_output_is_made_when_the_run_cannot_start(files: Files, start: Any) -> None:
    files.write_rows(1)
    with pytest.raises(QueueUnavailable, match=r"127\.0\.0\.1:1"):
        await start(redis_url="redis://127.0.0.1:1/0").run()
    with pytest.raises(BatchError, match="No such file"):
        await start(input=str(files.input) + "x").run()
    assert not files.output.exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"output": "{folder}/missing/out"}, "folder .* does not exist"),
        ({"output": "{folder}"}, "is a folder"),
        ({"output": "{folder}/in.jsonl", "overwrite": True}, "both input and output"),
        ({"input": "{folder}"}, "Is a directory"),
    ],
)
async def test_files_that_make_no_sense_are_refused(
    files: Files, start: Any, tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    files.write_rows(1)
    settings = {
        name: value.format(folder=tmp_path) if isinstance(value, str) else value
        for name, value in settings.items()
    }
    with pytest.raises(BatchError, match=says):
        await start(**settings).run()
    assert len(files.input.read_text().splitlines()) == 1


async def test_a_utf16_file_is_refused_as_such(files: Files, start: Any) -> None:
    files.input.write_bytes('{"custom_id": "a", "prompt": "x"}\n'.encode("utf-16"))
    with pytest.raises(BatchError, match="UTF-16"):
        await start().run()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
async def test_a_full_disk_ends_the_run_with_its_name(
    files: Files, start: Any, worker: Any
) -> None:
    files.write_rows(3)
    async with worker.serving():
        with pytest.raises(BatchError, match="Cannot write /dev/full: No space left"):
            await start(output="/dev/full", overwrite=True).run()


async def test_a_pipe_can_be_the_input(files: Files, start: Any, worker: Any) -> None:
    files.write_rows(50)
    pipe = files.input.with_name("pipe")
    os.mkfifo(pipe)
    writer = await asyncio.create_subprocess_shell(f"cat {files.input} > {pipe}")
    session = start(input=str(pipe))
    async with worker.serving():
        assert await session.run() == 0
    await writer.wait()
    assert len(files.by_id()) == 50
    assert session.tally.total is None


async def test_nobody_serving_is_said_once(
    files: Files, start: Any, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "NO_WORKER_AFTER_S", 0.1)
    monkeypatch.setattr(session_module, "WATCH_PERIOD_S", 0.05)
    files.write_rows(1)
    session = start()
    running = asyncio.create_task(session.run())
    await asyncio.sleep(0.8)
    assert said(session).count("No worker serves queue tidemill:queue") == 1
    async with worker.serving():
        assert await running == 0


async def test_a_restart_of_redis_is_waited_out(
    files: Files, start: Any, worker: Any, redis_server: Any
) -> None:
    files.write_rows(300)
    session = start(window=100)
    running = asyncio.create_task(session.run())
    await asyncio.sleep(1.8)  # the append-only file is synced every second
    redis_server.kill()
    await asyncio.sleep(0.5)
    redis_server.start()
    async with worker.serving():
        assert await running == 0
    assert len(files.by_id()) == 300
    assert "cannot be reached" in said(session)
    assert "answers again" in said(session)


async def test_a_redis_that_stays_away_ends_the_run_and_keeps_the_rows(
    files: Files,
    start: Any,
    worker: Any,
    redis_server: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "OUTAGE_LIMIT_S", 1.0)
    monkeypatch.setattr(session_module, "WATCH_PERIOD_S", 0.1)
    files.write_rows(10)
    session = start()
    running = asyncio.create_task(session.run())
    while await worker.run_one() is None:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    redis_server.kill()
    try:
        with pytest.raises(QueueUnavailable):
            await running
    finally:
        redis_server.start()
    assert len(files.read()) == 1
    assert "Rows done: 1, in" in said(session)
    assert "unfinished: 9." in said(session)


async def test_jobs_that_redis_forgot_are_retryable_errors(
    files: Files, start: Any, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidemill_producer import replies

    monkeypatch.setattr(replies, "SWEEP_S", 0.1)
    files.write_rows(3)
    running = asyncio.create_task(start().run())
    while await redis.zcard(keys.DEFAULT_QUEUE) < 3:
        await asyncio.sleep(0.02)
    await redis.flushall()
    assert await running == 3
    assert {row["error"]["code"] for row in files.read()} == {"payload_lost"}


@pytest.fixture
def stub_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--embedded` starts the stub."""
    monkeypatch.setattr(session_module, "EmbeddedWorker", partial(EmbeddedWorker, command=STUB))


@pytest.mark.usefixtures("stub_worker")
async def test_an_embedded_run_needs_nothing_else(files: Files, start: Any) -> None:
    files.write_rows(40)
    session = start(embedded="good", worker_options={"max-rows": 4})
    assert await session.run() == 0
    assert len(files.by_id()) == 40
    assert session.tally.occupancy == pytest.approx(0.75)
    assert "The worker is ready" in said(session)
    assert session._worker is not None
    with pytest.raises(ProcessLookupError):
        os.kill(session._worker.pid, 0)


@pytest.mark.usefixtures("stub_worker")
async def test_an_embedded_worker_that_cannot_start_says_why(files: Files, start: Any) -> None:
    files.write_rows(1)
    with pytest.raises(EmbeddedFailed, match="there is no model named dies"):
        await start(embedded="dies").run()
    assert not files.output.exists()


@pytest.mark.usefixtures("stub_worker")
async def test_an_embedded_worker_that_keeps_dying_ends_the_run(
    files: Files, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidemill_producer import embedded

    monkeypatch.setattr(embedded, "MAX_RESTARTS", 0)
    files.write_rows(100_000)
    session = start(embedded="brief", window=64)
    with pytest.raises(EmbeddedFailed, match="status 7"):
        await session.run()
    assert len(files.read()) == session.tally.done > 0
    assert session._worker is not None
    assert session._worker._log is not None
    session._worker._log.unlink()


async def test_an_embedded_server_that_dies_ends_the_run(
    files: Files, start: Any, stub_worker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "WATCH_PERIOD_S", 0.1)
    files.write_rows(100_000)
    session = start(embedded="good", window=64)
    running = asyncio.create_task(session.run())
    while not session.tally.done:
        await asyncio.sleep(0.02)
    assert session._server is not None
    os.kill(session._server.pid, signal.SIGKILL)
    with pytest.raises((EmbeddedFailed, QueueUnavailable)):
        await running
    assert len(files.read()) == session.tally.done


def a_status(
    steps: int, row_steps: int, *, worker: str = "w", started_at: float = 1.0
) -> WorkerStatus:
    return WorkerStatus(
        id=worker,
        state="ready",
        model="m",
        contract="c",
        device="cpu",
        dtype="float32",
        max_rows=10,
        rows_running=0,
        rows_waiting=0,
        steps=steps,
        row_steps=row_steps,
        prompt_tokens=0,
        completion_tokens=0,
        jobs_done=0,
        jobs_failed=0,
        started_at=started_at,
        updated_at=2.0,
    )


def test_occupancy_is_of_the_steps_between() -> None:
    before = [a_status(10, 100)]
    after = [a_status(20, 150), a_status(10, 90, worker="new")]
    assert batch_occupancy(before, after) == pytest.approx((50 + 90) / 200)
    assert batch_occupancy(before, before) is None
    assert batch_occupancy([], []) is None
    restarted = [a_status(5, 50, started_at=9.0)]
    assert batch_occupancy(before, restarted) == pytest.approx(1.0)


# The command itself, as a process.

RUN_WITH_STUB = """
import sys
from functools import partial
from tidemill_producer import cli
from tidemill_producer.batch import session
session.EmbeddedWorker = partial(session.EmbeddedWorker, command=sys.argv[1:3])
sys.argv[1:3] = []
cli.main()
"""


def run_batch(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN_WITH_STUB, *STUB, "batch", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture
def interrupted(files: Files) -> Callable[..., tuple[int, str]]:
    """Runs a command, sends it signals once it has written rows; returns status and stderr."""

    def run(arguments: list[str], signals: int) -> tuple[int, str]:
        process = run_batch(str(files.input), str(files.output), *arguments)
        while not files.output.exists() or not files.output.stat().st_size:
            assert process.poll() is None, process.communicate()
        for _ in range(signals):
            process.send_signal(signal.SIGINT)
            try:
                process.wait(0.3)
            except subprocess.TimeoutExpired:
                continue
        _, stderr = process.communicate(timeout=30)
        return process.returncode, stderr

    return run


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_keeps_what_is_finished(files: Files, interrupted: Any, signals: int) -> None:
    files.write_rows(100_000)
    status, stderr = interrupted(["--embedded", "stubborn", "--window", "64"], signals)
    assert status == 130
    done = len(files.read())
    assert 0 < done < 100_000
    if signals == 1:
        assert f"Interrupted. Rows done: {done:,}" in stderr
        assert f"unfinished: {100_000 - done:,}." in stderr
    assert "Traceback" not in stderr


def test_stdin_and_stdout(files: Files) -> None:
    files.write_rows(20)
    process = run_batch("-", "-", "--embedded", "good", "--quiet")
    stdout, stderr = process.communicate(files.input.read_text(), timeout=30)
    assert process.returncode == 0
    assert stderr == ""
    assert {json.loads(line)["custom_id"] for line in stdout.splitlines()} == {
        f"r{n}" for n in range(20)
    }


def test_ctrl_c_while_stdin_is_silent(files: Files) -> None:
    process = run_batch("-", str(files.output), "--embedded", "good")
    while not files.output.exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Interrupted" in stderr


def test_progress_and_summary_are_plain_lines_without_a_terminal(files: Files) -> None:
    files.write_rows(20, metadata={"expected": "P1"})
    process = run_batch(str(files.input), str(files.output), "--embedded", "good")
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 0
    assert stdout == ""
    for line in ("rows: 20", "ok: 20", "completion tokens: 60", "accuracy: 1/20 (5%)"):
        assert line in stderr.splitlines()
    assert "\x1b" not in stderr
    assert stat.S_IMODE(files.output.stat().st_mode) & 0o111 == 0
