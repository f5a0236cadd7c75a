"""Engines as processes that stay loaded and are held still between their turns.

A process leads a session of its own, so that one signal reaches all that it started: SIGSTOP when
its turn is over, since some engines poll or spin while they wait, SIGCONT when it comes again, and
SIGKILL at the end. A workload's name goes in as a line, its run comes out as one of JSON.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import IO, Any

import click

HERE = Path(__file__).parent
OURS = "tidemill"
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
LAST_LINES = 15


def end_as_interrupted() -> None:
    """Makes SIGTERM end this process as Ctrl-C does, with what it cleans up: engines lead sessions
    of their own, and one that is stopped would stay so for ever."""
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))


class EngineFailed(Exception):
    """An engine's process ended, or took too long; the message has its last lines."""


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine's script with its interpreter and options."""

    name: str
    python: str
    script: Path
    options: Sequence[str] = ()

    @classmethod
    def parse(cls, text: str) -> Contender:
        """``NAME=PYTHON [OPTION …]``; raises `click.BadParameter`."""
        name, _, rest = text.partition("=")
        python, *options = shlex.split(rest) or [""]
        engine = name.partition("-")[0]
        script = HERE / ("engine.py" if engine == OURS else f"peers/{engine}_engine.py")
        if not python:
            raise click.BadParameter(f"{text!r} is not NAME=PYTHON")
        if not script.exists():
            scripts = sorted((HERE / "peers").glob("*_engine.py"))
            known = ", ".join([OURS, *(path.stem.removesuffix("_engine") for path in scripts)])
            raise click.BadParameter(f"no adapter for {name!r}; there are {known}")
        return cls(name, python, script, options)

    @property
    def is_ours(self) -> bool:
        return self.script.parent == HERE

    def environment(self, threads: int) -> dict[str, str]:
        """As found, less what tunes BLAS for one machine, and for a peer less our own paths; vLLM
        wants two libraries preloaded."""
        left_out = {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"}
        if not self.is_ours:
            left_out.add("PYTHONPATH")
        env = {name: value for name, value in os.environ.items() if name not in left_out}
        env |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        if self.script.stem == "vllm_engine":
            # The interpreter is a link out of its environment: not resolved, for that reason.
            openmp = Path(self.python).absolute().parents[1] / "lib" / "libiomp5.so"
            env["LD_PRELOAD"] = ":".join(str(p) for p in (TCMALLOC, openmp) if p.exists())
        return env


class Served:
    """A contender's process, loaded and held still."""

    def __init__(
        self, contender: Contender, model: Path, threads: int, start_timeout_s: float
    ) -> None:
        """Starts it and waits until it has given a first token. Raises `EngineFailed`."""
        self.contender = contender
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - see `end`
        started = time.perf_counter()
        command = [contender.python, str(contender.script), str(model), "--serve"]
        command += ["--threads", str(threads), *contender.options]
        try:
            self._process = subprocess.Popen(
                command,
                env=contender.environment(threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineFailed(str(error)) from error
        self.ready = self._answer(start_timeout_s)
        self.cold_start_s = round(time.perf_counter() - started, 2)
        """From the start of the process to its first token, model loaded."""
        self.peak_rss_gib: float = self.ready["peak_rss_gib"]
        self._signal(signal.SIGSTOP)

    def run(self, workload: str, timeout_s: float) -> dict[str, Any]:
        """One run. Raises `EngineFailed`, and has ended then."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            print(workload, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failed("ended while it waited") from None
        found = self._answer(timeout_s)
        self._signal(signal.SIGSTOP)
        self.peak_rss_gib = max(self.peak_rss_gib, found["peak_rss_gib"])
        return found

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            stream.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        timer = Timer(timeout_s, self._signal, [signal.SIGKILL])
        timer.start()
        started = time.monotonic()
        assert self._process.stdout is not None
        try:
            line = self._process.stdout.readline()
        except BaseException:
            self.end()
            raise
        finally:
            timer.cancel()
        if not line:
            late = time.monotonic() - started >= timeout_s
            raise self._failed(f"stopped after {timeout_s:g} s" if late else None)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, how: str | None) -> EngineFailed:
        """Ends what is left of it; the error tells of that."""
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = None
        lines = [how or f"ended with {code}", *_last_lines(self._errors)]
        self.end()
        return EngineFailed("\n".join(lines))

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return


def _last_lines(file: IO[str]) -> list[str]:
    file.seek(0)
    return file.read().splitlines()[-LAST_LINES:]


@dataclass(slots=True)
class Needs:
    """What an engine was seen to take."""

    memory_gib: float = 8
    cold_start_s: float = 0


class Garage:
    """Keeps engines loaded as long as there is memory; those that start fastest leave first."""

    def __init__(self, model: Path, threads: int, timeout_s: float, spare_gib: float = 2) -> None:
        self._model, self._threads, self._timeout_s = model, threads, timeout_s
        self._spare_gib = spare_gib
        """For the probe of the ceilings and the rest of the machine."""
        self._loaded: dict[str, Served] = {}
        self._needs: dict[str, Needs] = {}

    def get(self, contender: Contender) -> tuple[Served, bool]:
        """The engine, and whether it was started for that. Raises `EngineFailed`."""
        found = self._loaded.get(contender.name)
        if found is not None:
            return found, False
        needs = self._needs.setdefault(contender.name, Needs())
        while self._loaded and available_gib() < needs.memory_gib + self._spare_gib:
            self.drop(min(self._loaded, key=lambda name: self._needs[name].cold_start_s))
        served = Served(contender, self._model, self._threads, self._timeout_s)
        needs.cold_start_s = served.cold_start_s
        self._loaded[contender.name] = served
        return served, True

    def run(self, contender: Contender, workload: str) -> dict[str, Any]:
        """One run of a loaded engine, which is forgotten where it fails (`EngineFailed`)."""
        served = self._loaded[contender.name]
        try:
            found = served.run(workload, self._timeout_s)
        except EngineFailed:
            del self._loaded[contender.name]
            raise
        self._needs[contender.name].memory_gib = served.peak_rss_gib
        return found

    def drop(self, name: str) -> None:
        self._loaded.pop(name).end()

    def close(self) -> None:
        for name in list(self._loaded):
            self.drop(name)


def available_gib() -> float:
    """Memory that can be had without swapping (proc(5), MemAvailable)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    raise RuntimeError("no MemAvailable in /proc/meminfo")
