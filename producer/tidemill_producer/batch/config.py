"""The settings of a batch run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemill_contracts import keys
from tidemill_contracts.urls import mask_url
from tidemill_producer.errors import BatchError

DEFAULT_WINDOW = 4096
STREAM = "-"
"""Stands for stdin as the input, for stdout as the output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """What to run, and where: exactly one of `redis_url` and `embedded` is set."""

    input: str
    output: str
    redis_url: str | None = None
    embedded: str | None = None
    """The model of a worker of our own: a directory, or ``demo``."""
    worker_options: Mapping[str, str | int] = field(default_factory=dict)
    """Options of that worker, by name without dashes in front."""
    queue: str = keys.DEFAULT_QUEUE
    window: int = DEFAULT_WINDOW
    """Most jobs in flight."""
    overwrite: bool = False
    format: str = "auto"
    """Of the rows: ``tidemill``, ``openai``, or what the first line that tells is in."""
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.redis_url and self.embedded:
            raise BatchError("--redis and --embedded exclude each other: give one of them")
        if not self.redis_url and not self.embedded:
            raise BatchError(
                "Say where to run: --embedded [MODEL_DIR] starts a server and a worker here,"
                " --redis URL (or TIDEMILL_REDIS_URL) uses workers that run already"
            )
        if self.worker_options and not self.embedded:
            names = ", ".join(f"--{name}" for name in self.worker_options)
            raise BatchError(
                f"{names}: for an embedded worker only. Give --embedded, or set it where"
                " `tidemill worker` is started"
            )
        if self.window < 1:
            raise BatchError(f"--window must be at least 1, got {self.window}")

    def __str__(self) -> str:
        """For a person, without secrets."""
        if self.redis_url:
            where = mask_url(self.redis_url)
        else:
            options = [f"--{name} {value}" for name, value in self.worker_options.items()]
            where = " ".join(["an embedded worker, --model", str(self.embedded), *options])
        return (
            f"{self.input} → {self.output} by {where}; queue {self.queue},"
            f" at most {self.window:,} jobs in flight"
        )
