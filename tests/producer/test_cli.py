"""The command line: what a person sees before anything runs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tidemill_contracts.wire import TidemillError
from tidemill_producer import cli


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
    return subprocess.run(
        [sys.executable, "-m", "tidemill_producer.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean | environment,
        check=False,
    )


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"custom_id": "a", "prompt": "x"}\n')
    return path


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The line that a failed command ends with; nothing but such lines went before."""
    assert done.returncode == 1
    assert done.stdout == ""
    *before, last = done.stderr.splitlines()
    assert last.startswith("tidemill: error: ")
    assert all(line.startswith("tidemill: ") for line in before)
    return last


def test_help_lists_every_command_and_teaches_by_example() -> None:
    done = run("--help")
    assert done.returncode == 0
    for word in ("batch", "demo", "worker", "Examples:", "--embedded ./Qwen3-0.6B"):
        assert word in done.stdout


@pytest.mark.parametrize("command", ["batch", "demo"])
def test_each_command_explains_itself(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert "Examples:" in done.stdout


def test_version() -> None:
    assert run("--version").stdout == f"tidemill {metadata.version('tidemill')}\n"


def test_a_command_that_does_not_exist() -> None:
    done = run("nonsense")
    assert done.returncode == 2
    assert "No such command" in done.stderr


def test_no_redis(rows: Path, tmp_path: Path) -> None:
    url = "redis://user:s3cret@127.0.0.1:1/0"
    done = run("batch", str(rows), str(tmp_path / "out"), "--redis", url)
    line = error_of(done)
    assert "redis://user:***@127.0.0.1:1/0" in line
    assert "Is it running" in line
    assert "s3cret" not in done.stderr


def test_the_environment_can_name_redis(rows: Path, tmp_path: Path) -> None:
    done = run("batch", str(rows), str(tmp_path / "o"), TIDEMILL_REDIS_URL="redis://127.0.0.1:1")
    assert "127.0.0.1:1" in error_of(done)


def test_missing_input(tmp_path: Path) -> None:
    done = run("batch", "nowhere.jsonl", str(tmp_path / "out"), "--embedded")
    assert "nowhere.jsonl: No such file" in error_of(done)


def test_existing_output(rows: Path) -> None:
    done = run("batch", str(rows), str(rows), "--embedded")
    assert "--overwrite" in error_of(done)


def test_neither_redis_nor_embedded(rows: Path) -> None:
    assert "--embedded [MODEL_DIR]" in error_of(run("batch", str(rows), "out"))


def test_both_redis_and_embedded(rows: Path) -> None:
    done = run("batch", str(rows), "out", "--redis", "redis://127.0.0.1:1", "--embedded")
    assert "exclude each other" in error_of(done)


def test_worker_options_without_an_embedded_worker(rows: Path) -> None:
    done = run(
        *("batch", str(rows), "out", "--redis", "redis://127.0.0.1:1"),
        *("--max-rows", "8", "--dtype", "float32"),
    )
    line = error_of(done)
    assert "--dtype, --max-rows" in line
    assert "embedded worker only" in line


def test_an_embedded_that_swallows_the_input_says_so(rows: Path) -> None:
    done = run("batch", "--embedded", str(rows), "out.jsonl")
    assert done.returncode == 2
    assert "write --embedded last" in done.stderr


def test_debug_shows_the_traceback(rows: Path) -> None:
    arguments = ("batch", str(rows), "out")
    assert "Traceback" not in run(*arguments).stderr
    assert "Traceback" in run("--debug", *arguments).stderr
    assert "Traceback" in run(*arguments, TIDEMILL_DEBUG="1").stderr


def entry_point(value: str, requires: list[str] | None = None) -> metadata.EntryPoint:
    found = metadata.EntryPoint("worker", value, cli.COMMAND_GROUP)
    if requires is not None:
        found = found._for(SimpleNamespace(requires=requires))  # type: ignore[attr-defined]
    return found


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers one command, `worker`."""

    def register(found: metadata.EntryPoint) -> None:
        monkeypatch.setattr(cli, "_entry_points", lambda: {"worker": found})

    return register


INSTALL = "pip install 'tidemill[worker]'"


@pytest.mark.parametrize(
    "found",
    [
        entry_point("no_such_module_at_all:worker [worker]"),
        entry_point(
            "tidemill_producer.cli:tidemill [worker]",
            ["msgspec>=0.19", "no-such-distribution>=2 ; extra == 'worker'"],
        ),
    ],
    ids=["module", "requirement"],
)
@pytest.mark.parametrize("arguments", [[], ["--model", "x", "y"], ["--help"]])
def test_a_command_without_its_extra_answers_with_the_install_line(
    registered: Any, found: metadata.EntryPoint, arguments: list[str]
) -> None:
    registered(found)
    done = CliRunner().invoke(cli.tidemill, ["worker", *arguments])
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert INSTALL in done.stderr
    listed = CliRunner().invoke(cli.tidemill, ["--help"])
    assert listed.exit_code == 0
    assert INSTALL in " ".join(listed.stdout.split())


def test_a_requirement_of_another_extra_is_not_asked_for(registered: Any) -> None:
    registered(
        entry_point(
            "tidemill_producer.commands.batch:batch [worker]",
            ["no-such-distribution ; extra == 'other'", "click ; extra == 'worker'"],
        )
    )
    assert CliRunner().invoke(cli.tidemill, ["worker", "--help"]).exit_code == 0


@click.command()
def imports_late() -> None:
    """Needs a module only when it runs."""
    import no_such_module_at_all  # type: ignore[import-not-found]  # noqa: F401


@click.command()
def fails_in_two_lines() -> None:
    """Fails."""
    raise TidemillError("one\ntwo")


def test_a_command_that_imports_late_answers_with_the_install_line(
    registered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(worker=imports_late)
    monkeypatch.setitem(sys.modules, "a_worker", module)
    registered(entry_point("a_worker:worker [worker]"))
    done = CliRunner().invoke(cli.tidemill, ["worker"])
    assert done.exit_code == 1
    assert INSTALL in done.stderr


def test_an_error_is_one_line(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(worker=fails_in_two_lines)
    monkeypatch.setitem(sys.modules, "a_worker", module)
    registered(entry_point("a_worker:worker"))
    done = CliRunner().invoke(cli.tidemill, ["worker"])
    assert (done.exit_code, done.stderr) == (1, "tidemill: error: one two\n")


def test_a_broken_module_of_ours_is_not_blamed_on_an_extra(registered: Any) -> None:
    registered(entry_point("tidemill_producer.no_such_module:worker [worker]"))
    done = CliRunner().invoke(cli.tidemill, ["worker"])
    assert done.exit_code == 1
    assert "cannot be loaded" in done.stderr
    assert "pip install" not in done.stderr
