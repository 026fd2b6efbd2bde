"""Dialing a partner while its own call may come in."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.swarm.p2p.stream import Stream


async def open_unless(called: asyncio.Event, opening: Coroutine[Any, Any, Stream]) -> Stream | None:
    """Open a stream; return None if ``called`` is set before it is open, and then end it. Raises NetworkError."""
    stream, call, wanted = asyncio.ensure_future(opening), asyncio.ensure_future(called.wait()), False
    try:
        await asyncio.wait({stream, call}, return_when=asyncio.FIRST_COMPLETED)
        wanted = not called.is_set()
        return stream.result() if wanted else None
    finally:
        call.cancel()
        if not wanted:
            stream.add_done_callback(_hang_up)
            stream.cancel()


def _hang_up(stream: asyncio.Future[Stream]) -> None:
    if not stream.cancelled() and stream.exception() is None:
        stream.result().close()
