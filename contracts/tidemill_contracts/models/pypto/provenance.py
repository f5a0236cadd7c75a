"""Which code a checkout is: commit, local changes, and whether a branch holds the commit.

A commit that no branch holds (the head of a squash-merged pull request, say) cannot be fetched by
the next person: a pin of it is worth a warning. Only asks git; changes nothing.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

GIT_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Provenance:
    """What git says of a checkout's root."""

    root: str
    commit: str | None = None
    """Full hash of HEAD; ``None`` where `problem` says why it cannot be told."""
    dirty: bool = False
    """Files differ from the commit, untracked ones that are not ignored included."""
    branches: tuple[str, ...] = ()
    """Local and remote-tracking branches that hold the commit."""
    problem: str | None = None

    @property
    def on_branch(self) -> bool:
        return bool(self.branches)

    def __str__(self) -> str:
        if self.commit is None:
            return f"{self.root} ({self.problem})"
        state = ", with local changes" if self.dirty else ""
        if self.on_branch:
            more = f" and {len(self.branches) - 1} more" if len(self.branches) > 1 else ""
            where = f", on {self.branches[0]}{more}"
        else:
            where = ", on no branch"
        return f"{self.root} at {self.commit}{state}{where}"


def read_provenance(root: str | Path) -> Provenance:
    """Asks git. Never raises: what cannot be told is said in `Provenance.problem`."""
    path = Path(root).resolve()
    shown = str(path)
    try:
        top = _git(path, "rev-parse", "--show-toplevel")
        if Path(top).resolve() != path:
            return Provenance(shown, problem=f"not a git checkout itself, but inside {top}")
        return Provenance(
            shown,
            commit=_git(path, "rev-parse", "HEAD"),
            dirty=bool(_git(path, "status", "--porcelain")),
            branches=tuple(
                _git(
                    path,
                    "for-each-ref",
                    "--contains=HEAD",
                    "--format=%(refname:short)",
                    "refs/heads",
                    "refs/remotes",
                ).splitlines()
            ),
        )
    except FileNotFoundError:
        return Provenance(shown, problem="commit unknown: there is no git command")
    except subprocess.TimeoutExpired:
        return Provenance(shown, problem=f"commit unknown: git took over {GIT_TIMEOUT_S:g} s")
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or [f"git exited with {error.returncode}"])[0]
        if "not a git repository" in said:
            return Provenance(shown, problem="not a git checkout")
        return Provenance(shown, problem=f"commit unknown: {said}")


def _git(root: Path, *arguments: str) -> str:
    # A GIT_DIR of whoever started us would answer for another repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ["LC_ALL"] = "C"
    done = subprocess.run(
        ["git", "--no-optional-locks", "-C", str(root), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=GIT_TIMEOUT_S,
        env=environ,
    )
    return done.stdout.strip()
