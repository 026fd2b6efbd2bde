"""The set-up of logging."""

from __future__ import annotations

import logging
import os
import sys


def log_to_stderr(verbose: bool) -> None:
    """Log to stderr, for as long as the process lives."""
    # Warnings of shoal are for the user; the rest, and what libraries log, come only with --verbose.
    level = logging.WARNING if verbose else logging.ERROR
    logging.basicConfig(stream=sys.stderr, level=level, format="%(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("shoal").setLevel(logging.DEBUG if verbose else logging.WARNING)
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "WARNING" if verbose else "ERROR")
