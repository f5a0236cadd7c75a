"""What the queue costs beside arq and taskiq: rates, latencies, commands and Redis's CPU.

    python benchmarks/queue_rates.py --peer taskiq=.venv-taskiq/bin/python > out/queue.jsonl
    python benchmarks/queue_rates.py --summary out/queue.jsonl

Each queue runs its own producer and workers (`peers/queue_harness.py`), ours with the real worker
and a fake engine in place of the model. One server with an empty database serves one queue at a
time. A round takes every scenario through every queue, another one first each time:

drain     jobs are enqueued while the workers stand still, then run, without a step time; once more
          with fewer jobs before the eyes of MONITOR, which counts what clients send
step      the same, with 4 jobs a step of 50 ms
paced     jobs enqueued one by one at half of what the workers can do, 500 a second at most
trip      one worker, one job after another, each awaited, 20 ms between them
idle      what idle workers send, and what one job after another costs while they all wait

arq runs twice: `arq` at its best setting (1,000 jobs, polls every 10 ms) and `arq-default`, of
which only round trips are timed. Every run is a line of JSON; tables go to standard error.
"""

from __future__ import annotations

import json
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

import click
from contenders import HERE, OURS, end_as_interrupted
from redis import Redis

from tidemill_producer.embedded import EmbeddedRedis

COUNTED_JOBS = 500
STEP_MS, STEP_ROWS = 50, 4
STEPS = 10
"""How many steps each worker has to do."""
MOST_PACED = 500
PACED_S = 2.0
IDLE_S = 6.0
DRAIN_TIMEOUT_S = 30.0
"""Jobs that have not run by then count as lost."""


class Host:
    """One queue's process."""

    def __init__(self, name: str, python: str, options: Sequence[str], url: str) -> None:
        kind = name.partition("-")[0]
        script = HERE / ("queue_tidemill.py" if kind == OURS else f"peers/{kind}_queue.py")
        self.name = name
        self._process = subprocess.Popen(
            [python, str(script), url, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended, see above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __call__(self, do: str, **arguments: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Sent:
    """Counts the commands that clients send, by MONITOR: what scripts call is marked as theirs."""

    def __init__(self, redis: Redis) -> None:
        kwargs = redis.connection_pool.connection_kwargs
        if "path" in kwargs:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(kwargs["path"])
        else:
            self._socket = socket.create_connection((kwargs["host"], kwargs["port"]))
        self._stream = self._socket.makefile("rb")
        self.commands = 0
        self.inside = 0

    def __enter__(self) -> Sent:
        self._socket.sendall(b"MONITOR\r\n")
        self._stream.readline()
        self._thread = Thread(target=self._count, daemon=True)
        self._thread.start()
        return self

    def _count(self) -> None:
        for line in self._stream:
            if b' lua] "' in line[:60]:
                self.inside += 1
            elif line.startswith(b"+"):
                self.commands += 1

    def __exit__(self, *_: object) -> None:
        time.sleep(0.05)
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._stream.close()
        self._socket.close()


def cpu_s(redis: Redis) -> float:
    info: Any = redis.info("cpu")
    return float(info["used_cpu_sys"]) + float(info["used_cpu_user"])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile, in ms."""
    ranked = sorted(values)
    return {
        name: round(ranked[min(len(ranked) - 1, int(len(ranked) * share))], 3)
        for name, share in (("p50_ms", 0.5), ("p95_ms", 0.95), ("p99_ms", 0.99))
    }


class Bench:
    """Takes hosts through scenarios; each gives the figures of one run."""

    def __init__(self, redis: Redis, jobs: int, peer_jobs: int, trips: int) -> None:
        self._redis = redis
        self._jobs = jobs
        self._peer_jobs = peer_jobs
        self._trips = trips

    def _size(self, host: Host) -> int:
        return self._jobs if host.name.startswith(OURS) else self._peer_jobs

    def _start(self, host: Host, workers: int, *, step: bool = False) -> None:
        self._redis.flushall()
        host("start", workers=workers, step_ms=STEP_MS if step else 0, rows=STEP_ROWS)

    def _end(self, host: Host) -> dict[str, Any]:
        ended = host("stop")
        waits = ended.pop("claim_ms")
        return {**ended, **({"claim": spread(waits)} if waits else {})}

    def enqueue(self, host: Host, workers: int) -> dict[str, Any]:
        """One by one, each awaited; nobody works meanwhile."""
        self._redis.flushall()
        jobs = self._peer_jobs
        before = cpu_s(self._redis)
        taken = host("enqueue", jobs=jobs, bulk=False)["seconds"]
        cpu = cpu_s(self._redis) - before
        return {"jobs_s": jobs / taken, "redis_us": cpu / jobs * 1e6}

    def drain(self, host: Host, workers: int) -> dict[str, Any]:
        jobs = self._size(host)
        self._start(host, workers)
        host("hold")
        start = cpu_s(self._redis)
        enqueued = host("enqueue", jobs=jobs, bulk=True)
        filled = cpu_s(self._redis)
        drained = host("drain", timeout_s=DRAIN_TIMEOUT_S)
        found = {
            "bulk_jobs_s": jobs / enqueued["seconds"],
            "jobs_s": drained["jobs"] / drained["seconds"],
            "enqueue_redis_us": (filled - start) / jobs * 1e6,
            "redis_us": (cpu_s(self._redis) - filled) / jobs * 1e6,
            **self._end(host),
        }
        del found["claim"]  # of jobs that waited for their workers
        self._start(host, workers)
        with Sent(self._redis) as sent:
            host("flow", jobs=COUNTED_JOBS, rate=0)
        counted = self._end(host)
        found["commands"] = sent.commands / COUNTED_JOBS
        found["inside"] = sent.inside / COUNTED_JOBS
        found["duplicates"] += counted["duplicates"]
        found["missing"] += counted["missing"]
        return found

    def step(self, host: Host, workers: int) -> dict[str, Any]:
        jobs = workers * STEP_ROWS * STEPS
        self._start(host, workers, step=True)
        host("hold")
        host("enqueue", jobs=jobs, bulk=True)
        before = cpu_s(self._redis)
        drained = host("drain", timeout_s=DRAIN_TIMEOUT_S)
        found = self._end(host)
        del found["claim"]
        rate = drained["jobs"] / drained["seconds"]
        most = workers * STEP_ROWS / STEP_MS * 1000
        cpu = cpu_s(self._redis) - before
        return {"jobs_s": rate, "of_most": rate / most, "redis_us": cpu / jobs * 1e6, **found}

    def paced(self, host: Host, workers: int) -> dict[str, Any]:
        rate = min(MOST_PACED, workers * STEP_ROWS / STEP_MS * 1000 / 2)
        jobs = int(rate * PACED_S)
        self._start(host, workers, step=True)
        before = cpu_s(self._redis)
        taken = host("flow", jobs=jobs, rate=rate)["seconds"]
        cpu = cpu_s(self._redis) - before
        return {"jobs_s": jobs / taken, "redis_us": cpu / jobs * 1e6, **self._end(host)}

    def trip(self, host: Host, workers: int) -> dict[str, Any]:
        jobs = min(self._trips, 10) if host.name == "arq-default" else self._trips
        self._start(host, workers)
        taken = host("round_trips", jobs=jobs, gap_ms=20)["ms"]
        return {**spread(taken), **self._end(host)}

    def idle(self, host: Host, workers: int) -> dict[str, Any]:
        trips = 20
        self._start(host, workers)
        time.sleep(1)
        with Sent(self._redis) as sent:
            time.sleep(IDLE_S)
        idle = sent.commands / IDLE_S
        started = time.perf_counter()
        with Sent(self._redis) as sent:
            taken = host("round_trips", jobs=trips - 1, gap_ms=50)["ms"]
            seconds = time.perf_counter() - started
        each = max(0.0, sent.commands - idle * seconds) / trips
        found = {"per_worker_s": idle / workers, "commands": each, **spread(taken)}
        return {**found, **self._end(host)}


SCENARIOS = ("enqueue", "drain", "step", "paced", "trip", "idle")
ALONE = ("enqueue", "trip")
"""Those that are run with one worker only, or none."""


def applies(name: str, scenario: str) -> bool:
    return name != "arq-default" or scenario == "trip"


def run(
    url: str, hosts: Sequence[Host], bench: Bench, rounds: int, workers: Sequence[int],
    scenarios: Sequence[str],
) -> list[dict[str, Any]]:  # fmt: skip
    lines = []
    for number in range(rounds):
        for scenario in scenarios:
            for count in (1,) if scenario in ALONE else workers:
                shift = number % len(hosts)
                for host in (*hosts[shift:], *hosts[:shift]):
                    if not applies(host.name, scenario):
                        continue
                    line = {
                        "round": number,
                        "scenario": scenario,
                        "workers": count,
                        "queue": host.name,
                        "at": time.strftime("%H:%M:%S"),
                        **getattr(bench, scenario)(host, count),
                    }
                    print(json.dumps(line), flush=True)
                    lines.append(line)
    return lines


COLUMNS: dict[str, tuple[tuple[str, str, int], ...]] = {
    "enqueue": (("jobs_s", "jobs/s", 0), ("redis_us", "Redis CPU a job, µs", 1)),
    "drain": (
        ("bulk_jobs_s", "bulk enqueue, jobs/s", 0),
        ("jobs_s", "drain, jobs/s", 0),
        ("commands", "commands a job", 2),
        ("enqueue_redis_us", "Redis CPU a job enqueued, µs", 1),
        ("redis_us", "drained, µs", 1),
    ),
    "step": (
        ("jobs_s", "jobs/s", 0),
        ("of_most", "of what the steps allow", 2),
        ("redis_us", "Redis CPU a job, µs", 1),
    ),
    "paced": (
        ("jobs_s", "jobs/s", 0),
        ("claim.p50_ms", "claimed after, ms, p50", 1),
        ("claim.p99_ms", "p99", 1),
        ("redis_us", "Redis CPU a job, µs", 1),
    ),
    "trip": (("p50_ms", "p50, ms", 2), ("p95_ms", "p95", 2), ("p99_ms", "p99", 2)),
    "idle": (
        ("per_worker_s", "commands/s of an idle worker", 2),
        ("commands", "commands for one job", 1),
        ("p50_ms", "its round trip, ms, p50", 2),
    ),
}


def value_of(line: dict[str, Any], key: str) -> float:
    outer, _, inner = key.partition(".")
    return float(line[outer][inner] if inner else line[outer])


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: medians, with the least and most of the rounds."""
    cells: dict[tuple[str, int, str], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        cells[line["scenario"], line["workers"], line["queue"]].append(line)
    text = []
    for scenario, columns in COLUMNS.items():
        of_this = {key: found for key, found in cells.items() if key[0] == scenario}
        if not of_this:
            continue
        titles = [title for _, title, _ in columns]
        text += ["", f"| {scenario}: queue | workers | {' | '.join(titles)} | lost, doubled |"]
        text.append("| --- " * (len(columns) + 3) + "|")
        for (_, workers, queue), found in sorted(of_this.items(), key=lambda item: item[0][1:]):
            row = [queue, str(workers)]
            for key, _, digits in columns:
                values = [value_of(line, key) for line in found]
                least, middle, most = min(values), statistics.median(values), max(values)
                row.append(f"{middle:,.{digits}f} ({least:,.{digits}f}–{most:,.{digits}f})")
            lost = sum(line.get("missing", 0) for line in found)
            row.append(f"{lost}, {sum(line.get('duplicates', 0) for line in found)}")
            text.append(f"| {' | '.join(row)} |")
    return "\n".join([*text, "", *ratios(lines)])


def ratios(lines: Sequence[dict[str, Any]]) -> list[str]:
    """What the bars are about: the medians of ratios within a round, with their spread."""
    by_round: dict[tuple[str, int, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for line in lines:
        by_round[line["scenario"], line["workers"], line["queue"]][line["round"]] = line

    def ratio(
        title: str, ours: tuple[str, int, str], key: str, theirs: tuple[str, int, str], other: str
    ) -> list[str]:
        mine, peers = by_round.get(ours, {}), by_round.get(theirs, {})
        found = [
            value_of(mine[number], key) / value_of(peers[number], other)
            for number in sorted(mine.keys() & peers.keys())
        ]
        if not found:
            return []
        middle = statistics.median(found)
        return [f"- {title}: {middle:.2f} × ({min(found):.2f}–{max(found):.2f})"]

    text = ratio(
        "bulk enqueue over arq's awaited `enqueue_job`",
        ("drain", 1, OURS), "bulk_jobs_s", ("enqueue", 1, "arq"), "jobs_s",
    )  # fmt: skip
    for peer in ("arq", "taskiq"):
        for workers in sorted({key[1] for key in by_round if key[0] == "drain"}):
            title = f"drain with {workers} over {peer}'s"
            same = ("drain", workers)
            text += ratio(title, (*same, OURS), "jobs_s", (*same, peer), "jobs_s")
    for peer in ("arq-default", "arq", "taskiq"):
        title = f"round trip of {peer} over ours"
        text += ratio(title, ("trip", 1, peer), "p50_ms", ("trip", 1, OURS), "p50_ms")
    return text


@click.command()
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="NAME=PYTHON [OPTION …]",
    help="Another queue, by its script in benchmarks/peers/; what follows a dash tells two of one"
    " kind apart. arq runs in this environment unless it is given.",
)
@click.option("--ours", default="", metavar="OPTIONS", help="For queue_tidemill.py.")
@click.option("--workers", multiple=True, type=int, default=(1, 4, 16, 64), show_default=True)
@click.option("--scenario", "scenarios", multiple=True, default=SCENARIOS, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--jobs", default=20_000, show_default=True, help="To drain, of ours.")
@click.option("--peer-jobs", default=4_000, show_default=True, help="Of the others.")
@click.option("--trips", default=200, show_default=True)
@click.option("--redis", "url", help="An own server by its URL: IT IS EMPTIED.")
@click.option("--no-arq", is_flag=True, help="Without arq.")
@click.option(
    "--summary", "read", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Print the tables of an output file and end.",
)  # fmt: skip
def main(
    peers: Sequence[str],
    ours: str,
    workers: Sequence[int],
    scenarios: Sequence[str],
    rounds: int,
    jobs: int,
    peer_jobs: int,
    trips: int,
    url: str | None,
    no_arq: bool,
    read: Path | None,
) -> None:
    """Measure the queue beside arq's and others."""
    if read is not None:
        print(summary([json.loads(line) for line in read.read_text().splitlines()]))
        return
    end_as_interrupted()
    with ExitStack() as stack:
        if url is None:
            url = stack.enter_context(EmbeddedRedis()).url
        redis = stack.enter_context(Redis.from_url(url))
        engines = [(OURS, sys.executable, shlex.split(ours))]
        if not no_arq:
            slow = ["--max-jobs", "10", "--poll", "0.5"]
            engines += [("arq", sys.executable, []), ("arq-default", sys.executable, slow)]
        for peer in peers:
            name, _, rest = peer.partition("=")
            python, *options = shlex.split(rest)
            engines.append((name, python, options))
        hosts = []
        for engine in engines:
            host = Host(*engine, url)
            stack.callback(host.close)
            hosts.append(host)
        bench = Bench(redis, jobs, peer_jobs, trips)
        lines = run(url, hosts, bench, rounds, workers, scenarios)
    print(summary(lines), file=sys.stderr)


if __name__ == "__main__":
    main()
