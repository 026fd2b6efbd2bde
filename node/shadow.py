"""Is it really our ``optim`` that Python finds? Imports nothing of ours, so that it can be asked before anything else.

``optim``, ``swarm``, ``node`` and ``verification`` are common words; a user's own ``optim.py`` earlier on the path
would be imported in place of ours and fail far from its cause.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

OURS = ("optim", "swarm", "node", "verification")


def _location(name: str) -> Path | None:
    """Where ``name`` was, or would be, imported from."""
    module = sys.modules.get(name)
    if module is not None:
        file = getattr(module, "__file__", None)
        return Path(file) if file else None
    spec: importlib.machinery.ModuleSpec | None = importlib.util.find_spec(name)
    return Path(spec.origin) if spec is not None and spec.origin else None


def shadowed() -> str | None:
    """Return one sentence if a package of ours is hidden by, or mixed up with, something else; None if all is well."""
    home = Path(__file__).resolve().parent.parent
    for name in OURS:
        found = _location(name)
        if found is None:
            return f"The package {name!r} of shoal is missing from {str(home)!r}: install shoal again."
        if found.resolve() != home / name / "__init__.py":
            return (
                f"Python imports {str(found)!r} in place of shoal's own package {name!r}: "
                "rename that file, or take its folder off PYTHONPATH."
            )
    return None
