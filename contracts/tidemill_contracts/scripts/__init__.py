"""The Lua scripts that run inside Redis: the queue's protocol.

Each says at its top what it takes and returns. The producer enqueues and watches; the worker
claims, renews, finishes and releases. All times in them are Redis's own.
"""

from __future__ import annotations

from importlib import resources


def load_script(name: str) -> str:
    """The source of ``<name>.lua``."""
    return resources.files(__name__).joinpath(f"{name}.lua").read_text(encoding="utf-8")
