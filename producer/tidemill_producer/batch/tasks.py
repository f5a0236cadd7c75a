"""Small tools of asyncio that it lacks: threads that nobody waits for, plain errors of a group."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

T = TypeVar("T")


@contextlib.asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """An `asyncio.TaskGroup` that raises its first failure as it is, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        first: BaseException = failures
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from first.__cause__


async def in_daemon_thread(call: Callable[[], T]) -> T:
    """What `call` returns. Unlike `asyncio.to_thread`, a call that hangs (a read of stdin) does
    not hang the end of the event loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def resolve(result: T | None, error: BaseException | None) -> None:
        if future.done():  # whoever waited was cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, raised = None, None
        try:
            result = call()
        except BaseException as error:
            raised = error
        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(resolve, result, raised)

    threading.Thread(target=run, daemon=True).start()
    return await future
