"""A virtual loop run in isolation: no garbage collector interferes, and the protocols' log is
collected.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from unittest.mock import patch

from shoal.optim.codecs import slices
from shoal.swarm.exchange import kept_streams
from shoal.swarm.exchange.group import exchange as group_exchange
from shoal.swarm.exchange.group import streams
from tests.sim.clock import VirtualLoop
from tests.sim.memory_stream import Ends, stream_pair


class ErrorCollector(logging.Handler):
    """Collects the log records with an exception: after one the protocols go on, but something is
    wrong in shoal.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None and record.exc_info[1] is not None:
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


async def _connected() -> tuple[Ends, Ends]:
    return stream_pair()


@contextlib.contextmanager
def isolated(loop: VirtualLoop) -> Iterator[ErrorCollector]:
    """Run a block with no garbage collection, which finalizes at arbitrary moments; yield the log,
    and close the loop.
    """
    errors, logger, collecting = ErrorCollector(), logging.getLogger("shoal"), gc.isenabled()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(errors)
    logger.setLevel(
        logging.WARNING
    )  # below that the protocols report the very faults that are injected
    logger.propagate = False
    gc.disable()
    try:
        # A virtual loop has no sockets; streams that are kept have to be gone when a simulation
        # rests, and payloads are small.
        with (
            patch.object(group_exchange, "connected", _connected),
            patch.object(kept_streams, "KEPT_S", 5.0),
            patch.object(streams, "WINDOW", 0),
            patch.object(slices, "BLOCK", 2),
        ):
            yield errors
    finally:
        logger.removeHandler(errors)
        logger.setLevel(level)
        logger.propagate = propagate
        if collecting:
            gc.enable()
        loop.close()
