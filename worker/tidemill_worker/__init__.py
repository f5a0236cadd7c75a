"""The worker: gathers jobs from Redis into full batches and runs them.

``tidemill worker`` starts it. ``arq tidemill_worker.WorkerSettings`` runs the same function
under stock arq, configured by the ``TIDEMILL_…`` environment variables.
"""

from __future__ import annotations

from typing import Any

__all__ = ["WorkerSettings"]


def __getattr__(name: str) -> Any:
    # Made on demand: it reads the environment and imports arq.
    if name == "WorkerSettings":
        from tidemill_worker.arq_settings import worker_settings

        return worker_settings()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
