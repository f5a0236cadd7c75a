"""Which code a checkout is, as git tells it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tidemill_contracts.models.pypto.provenance import read_provenance


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--initial-branch=main")
    (tmp_path / "kernels.py").write_text("one\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    return tmp_path


def test_a_clean_commit_on_a_branch(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    found = read_provenance(repository)
    monkeypatch.undo()
    assert found.commit == git(repository, "rev-parse", "HEAD")
    assert (found.dirty, found.branches, found.problem) == (False, ("main",), None)
    assert str(found) == f"{repository} at {found.commit}, on main"


@pytest.mark.parametrize("file", ["kernels.py", "new.py"])
def test_local_changes(file: str, repository: Path) -> None:
    (repository / file).write_text("two\n")
    found = read_provenance(repository)
    assert found.dirty
    assert str(found).endswith(", with local changes, on main")


def test_a_commit_that_no_branch_holds(repository: Path) -> None:
    """As the head of a pull request that was squashed when it was merged."""
    git(repository, "checkout", "--detach")
    git(repository, "commit", "--allow-empty", "-m", "two")
    found = read_provenance(repository)
    assert not found.on_branch
    assert str(found).endswith(", on no branch")


def test_a_detached_head_on_a_branch(repository: Path) -> None:
    git(repository, "checkout", "--detach")
    assert read_provenance(repository).branches == ("main",)


def test_no_checkout_at_all(tmp_path: Path) -> None:
    assert str(read_provenance(tmp_path)) == f"{tmp_path} (not a git checkout)"


def test_a_folder_of_another_checkout(repository: Path) -> None:
    folder = repository / "vendor"
    folder.mkdir()
    found = read_provenance(folder)
    assert found.commit is None
    assert found.problem == f"not a git checkout itself, but inside {repository}"
