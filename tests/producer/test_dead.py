"""`tidemill dead` on letters that are in Redis already."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from redis import Redis

from tidemill_contracts import keys
from tidemill_contracts.wire import GenerationJob, Try
from tidemill_contracts.wire.arq_format import encode_job_record
from tidemill_contracts.wire.lifecycle import encode_try
from tidemill_producer.commands.dead import dead

QUEUE = "mill"


@pytest.fixture
def server(redis_url: str) -> Any:
    with Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def ask(redis_url: str) -> Any:
    def run(*arguments: str) -> Result:
        options = ["--redis", redis_url, "--queue", QUEUE]
        return CliRunner().invoke(dead, [*options, *arguments])

    return run


def bury(server: Any, job_id: str, ago_s: float = 0) -> None:
    job = GenerationJob(id=job_id, prompt=f"prompt of {job_id}")
    server.set(keys.dead_letter_key(job_id), encode_job_record(job, enqueue_time_ms=0))
    server.zadd(keys.dead_key(QUEUE), {job_id: (time.time() - ago_s) * 1000})
    last = Try(number=3, worker="w1", started_ms=1, ended_ms=2, error="worker_died")
    server.rpush(keys.dead_history_key(job_id), encode_try(last))


def test_help_teaches_by_example() -> None:
    assert "Examples:" in CliRunner().invoke(dead, ["--help"]).stdout


def test_list_and_show(server: Any, ask: Any) -> None:
    bury(server, "old", ago_s=100)
    bury(server, "new")
    listed = ask("list")
    assert listed.exit_code == 0, listed.output
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["new", "old"]
    assert "worker_died" in listed.stdout
    assert "and 1 more" in ask("list", "--limit", "1").output
    shown = json.loads(ask("show", "old").stdout)
    assert shown["job"]["prompt"] == "prompt of old"
    assert msgspec.convert(shown["history"][0], Try).worker == "w1"
    assert "no dead job nobody" in str(ask("show", "nobody").exception)


def test_requeue_and_drop(server: Any, ask: Any) -> None:
    for job_id in ("a", "b", "c"):
        bury(server, job_id)
    server.set(keys.result_key("a"), "gave up")
    queued = ask("requeue", "a", "nobody")
    assert queued.exit_code == 1
    assert queued.stdout.splitlines() == ["a  queued", "nobody  not dead, or queued already"]
    assert server.zrange(QUEUE, 0, -1) == [b"a"]
    assert not server.exists(keys.result_key("a"))
    assert server.ttl(keys.job_key("a")) == -1
    assert ask("drop", "b").stdout == "dropped 1\n"
    assert ask("requeue", "--all").exit_code == 0
    assert server.zrange(QUEUE, 0, -1) == [b"a", b"c"]
    assert ask("drop").exit_code == 2
    assert ask("drop", "a", "--all").exit_code == 2
    assert server.keys("*dead*") == []
