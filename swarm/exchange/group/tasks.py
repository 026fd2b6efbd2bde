"""The end of tasks that a group's round no longer needs."""

from __future__ import annotations

import asyncio
from typing import Any


async def stop(*tasks: asyncio.Future[Any]) -> None:
    """Cancel ``tasks`` and wait for their end. What they raise is retrieved, also if this is cancelled too, as asyncio wants."""
    for task in tasks:
        task.add_done_callback(_retrieve)
        task.cancel()
    await asyncio.wait(tasks)


def _retrieve(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()
