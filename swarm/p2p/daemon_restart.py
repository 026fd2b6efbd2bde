"""Starting a daemon again until that succeeds, and what may be said of the connections that it took
with it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from shoal.swarm.errors import ShoalError
from shoal.swarm.internal_errors import InternalErrors
from shoal.swarm.p2p.daemon import DAEMON_GONE

log = logging.getLogger(__name__)

T = TypeVar("T")

BACKOFF_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Before each further attempt to restart the daemon; the last repeats."""
START_S = 60.0
"""For one attempt."""


async def started_again(start: Callable[[], Awaitable[T]]) -> T:
    """Return what ``start`` returns once it succeeds: whatever is in the way, a node needs its
    network back.
    """
    for pause in itertools.chain(BACKOFF_S, itertools.repeat(BACKOFF_S[-1])):
        await asyncio.sleep(pause)
        try:
            return await asyncio.wait_for(start(), START_S)
        except Exception as error:
            expected = isinstance(error, (ShoalError, *DAEMON_GONE, asyncio.TimeoutError))
            why = str(error) or type(error).__name__
            log.warning(
                "the network daemon is not back yet, trying again: %s", why, exc_info=not expected
            )
    raise AssertionError  # never: the last pause repeats


def report(
    loop: asyncio.AbstractEventLoop, context: dict[str, Any], errors: InternalErrors | None = None
) -> None:
    """Log an exception that nothing awaited.

    When a daemon dies, hivemind leaves many broken connections behind: no warning.

    ``errors``: where one of this node's own code is counted.
    """
    error = context.get("exception")
    of_hivemind = type(error).__module__.startswith("hivemind.")
    expected = isinstance(error, (*DAEMON_GONE, asyncio.TimeoutError)) or of_hivemind
    level = logging.DEBUG if expected else logging.WARNING
    log.log(level, "%s: %r", context.get("message"), error)
    of_others = expected or isinstance(error, (ShoalError, OSError, EOFError))
    if errors is not None and isinstance(error, Exception) and not of_others:
        errors.caught("network", error)
