"""Real processes on a real server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.tiny import write_tiny_model

TIDEMILL = (sys.executable, "-m", "tidemill_producer.cli")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@asynccontextmanager
async def serving(
    redis_url: str, model: Path, *options: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker process in fp32; killed at the end."""
    process = await asyncio.create_subprocess_exec(
        *TIDEMILL, "worker", "--model", str(model), "--redis", redis_url, "--dtype", "float32",
        "--threads", "1", "--lease-ms", "2000", *options, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
