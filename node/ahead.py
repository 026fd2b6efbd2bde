"""Imports that are slow and surely needed soon, done while the node waits for the network."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator

OPTIMIZERS = "torch._dynamo"
"""What the first optimizer of torch that is made imports: 1.3 s of work."""


@contextlib.contextmanager
def importing(module: str) -> Iterator[None]:
    """Import ``module`` in a thread meanwhile. At the end it is there: two threads never import parts of torch at the same time,
    as long as nothing within does. Whoever needs a module that cannot be imported is told by its own import.
    """

    def work() -> None:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)

    thread = threading.Thread(target=work, name="shoal-import", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
