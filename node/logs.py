"""Where a node logs: stderr, and a file in its folder."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

from shoal.swarm.errors import write_remedy

DISPLAYED = "shoal.node.runtime.display"
"""The logger of what the display has shown already."""
LOG_BYTES = 2 << 20
"""Of a node's log file."""
OLDER_LOGS = 3
"""That are kept."""


def log_to_stderr(verbose: bool) -> None:
    """Log to stderr, for as long as the process lives."""
    # Warnings of shoal are for the user; the rest, and what libraries log, come only with
    # --verbose.
    level = logging.WARNING if verbose else logging.ERROR
    logging.basicConfig(
        stream=sys.stderr, level=level, format="%(levelname)s %(name)s: %(message)s", force=True
    )
    (handler,) = logging.getLogger().handlers
    # A log file gets more.
    handler.setLevel(logging.DEBUG if verbose else logging.WARNING)
    handler.addFilter(lambda record: record.name != DISPLAYED)
    logging.getLogger("shoal").setLevel(logging.DEBUG if verbose else logging.WARNING)
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "WARNING" if verbose else "ERROR")


@contextmanager
def log_to_file(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Log to ``path`` too while the block runs; say a sentence if that cannot be.

    `OLDER_LOGS` older files of `LOG_BYTES` each are kept.
    """
    logger = logging.getLogger("shoal")
    try:
        handler = RotatingFileHandler(
            path,
            maxBytes=LOG_BYTES,
            backupCount=OLDER_LOGS,
            encoding="utf-8",
            errors="backslashreplace",
        )
    except OSError as error:
        say(
            f"Cannot write the log {str(path)!r} ({error.strerror}): {write_remedy(error)} or "
            "choose another folder."
        )
        yield
        return
    # A full disk ends no training.
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(before or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
        handler.close()
