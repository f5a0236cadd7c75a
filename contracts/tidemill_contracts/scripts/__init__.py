"""The Lua scripts that run inside Redis: the queue's protocol.

Each says at its top what it takes and returns. Before each go the constants of `keys` and what
several of them do (``job.lua``). All times in them are Redis's own. Every key is the queue's, or
a job's, with its name in it.
"""

from __future__ import annotations

from importlib import resources

from tidemill_contracts import keys

_CONSTANTS = (
    "JOB_PREFIX",
    "IN_PROGRESS_PREFIX",
    "RETRY_PREFIX",
    "RESULT_PREFIX",
    "HISTORY_PREFIX",
    "DEAD_PREFIX",
    "DEAD_HISTORY_PREFIX",
    "PROGRESS_PREFIX",
    "WAITERS_PREFIX",
    "REPLY_TTL_MS",
    "WAITERS_TTL_MS",
    "PROGRESS_TTL_MS",
    "RETRY_TTL_MS",
    "DEAD_TTL_MS",
    "PRIORITY_STEP_MS",
    "HOLD_MS",
    "MAX_HISTORY",
)


def load_script(name: str) -> str:
    """The source of ``<name>.lua`` with all that it needs."""
    return "\n".join([_constants(), _read("job"), _read(name)])


def _constants() -> str:
    values = [getattr(keys, constant) for constant in _CONSTANTS]
    return "\n".join(
        f"local {constant} = " + (f"'{value}'" if isinstance(value, str) else str(value))
        for constant, value in zip(_CONSTANTS, values, strict=True)
    )


def _read(name: str) -> str:
    return resources.files(__name__).joinpath(f"{name}.lua").read_text(encoding="utf-8")
