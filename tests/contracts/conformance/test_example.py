"""The example contract, installed as its authors would install one, and the page that shows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tidemill_contracts.models.conformance import CHECKS

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "contract"
DOC = ROOT / "docs" / "contract.md"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the example is installed: on the path, with its metadata."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    site = tmp_path_factory.mktemp("site")
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    # The sources that this test stands beside, whichever checkout is installed.
    sources = [str(ROOT / part) for part in ("contracts", "producer", "worker")]
    path = os.pathsep.join([str(site), str(EXAMPLE), *sources])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run(environment: dict[str, str], cwd: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


TIDEMILL = ("-c", "from tidemill_producer.cli import main; main()")


def test_the_registry_finds_it(environment: dict[str, str], tmp_path: Path) -> None:
    listed = run(environment, tmp_path, *TIDEMILL, "contracts", "list")
    assert re.search(r"tiny/attention +implemented +tiny_attention", listed)
    shown = run(environment, tmp_path, *TIDEMILL, "contracts", "show", "tiny", "attention")
    assert "tiny_attention.decode" in shown
    assert shown.index("block_table") < shown.index("slot_mapping") < shown.index("k_cache")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_passes_the_kit(environment: dict[str, str], tmp_path: Path, dtype: str) -> None:
    kit = ("-m", "tidemill_contracts.models.conformance", "tiny", "attention")
    case = ("--case", "tiny_attention.case:CASE", "--dtype", dtype)
    assert "27 passed, 0 failed, 4 skipped" in run(environment, tmp_path, *kit, *case)


def test_its_own_tests_pass(environment: dict[str, str], tmp_path: Path) -> None:
    options = ("-p", "no:cacheprovider", "-p", "no:asyncio", "-q")
    said = run(environment, tmp_path, "-m", "pytest", *options, str(EXAMPLE / "tests"))
    assert "27 passed, 4 skipped" in said


def test_every_snippet_of_the_page_stands_in_the_example() -> None:
    sources = [
        path.read_text()
        for path in EXAMPLE.rglob("*")
        if path.suffix in (".py", ".toml") and path.is_file()
    ]
    snippets = re.findall(r"```(?:python|toml)\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert len(snippets) > 8
    for snippet in snippets:
        assert any(snippet in source for source in sources), snippet


def test_the_page_lists_every_check() -> None:
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.+) \|$", DOC.read_text(), re.MULTILINE)
    assert rows == [(check.name, check.proves) for check in CHECKS]


def test_every_file_that_the_page_names_exists() -> None:
    named = re.findall(r"`(tidemill_contracts/[a-z0-9_/]+\.py)`", DOC.read_text())
    assert named
    for name in named:
        assert (ROOT / "contracts" / name).is_file(), name
