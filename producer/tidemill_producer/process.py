"""Child processes that end when their parent ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# PR_SET_PDEATHSIG (prctl(2)) survives exec. Set in a small launcher rather than in a
# `preexec_fn`, which may deadlock in a parent that has threads; comparing the parent's id closes
# the gap in which the parent dies before prctl.
_LAUNCHER = """
import ctypes, os, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != parent:
    sys.exit(1)
os.execvp(command[0], command)
"""


def dying_with_us(command: Sequence[str]) -> list[str]:
    """The command, wrapped so that Linux kills it (SIGKILL) when our process ends, however it ends.

    The tie is to the *thread* that starts the process: start it from the main thread. Where
    there is no prctl (macOS) the command comes back as it is.
    """
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
