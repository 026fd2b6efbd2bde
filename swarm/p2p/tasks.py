"""Tasks of one block: run them, wait for the first, and leave none behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any

AGAIN_S = 5.0  # after which a task that goes on is cancelled again


async def first_of(*tasks: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Wait until one of ``tasks`` is done, ``timeout`` seconds at most; none of them is
    cancelled.
    """
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


async def stop(*tasks: asyncio.Future[Any]) -> None:
    """Cancel ``tasks`` and wait for their end.

    What they raise is retrieved, also if this is cancelled too, as asyncio wants. A task that goes
    on is cancelled again: ``asyncio.wait_for`` of Python 3.11 loses a cancellation that comes as
    what it waits for is done.
    """
    for task in tasks:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)


@contextlib.asynccontextmanager
async def running(*works: Awaitable[Any]) -> AsyncIterator[list[asyncio.Future[Any]]]:
    """Run ``works`` as tasks in this block; at its end they are cancelled, and have ended."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(work) for work in works]
    try:
        yield tasks
    finally:
        await stop(*tasks)


async def race(*works: Awaitable[Any], timeout: float) -> None:
    """Wait until one of ``works`` is done, ``timeout`` seconds at most, and cancel the others.

    Unlike ``asyncio.wait_for`` it never swallows that the caller is cancelled at the moment at
    which one is done.
    """
    async with running(*works) as tasks:
        await first_of(*tasks, timeout=timeout)
