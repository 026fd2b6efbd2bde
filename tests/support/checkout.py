"""The sources of a distribution, and a copy of them."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TOPS = ("node", "optim", "swarm", "verification")

SOURCES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "MANIFEST.in",
    "constraints.txt",
    "shoal",
    *TOPS,
)


def copied(copy):
    """Copy the sources of a distribution, for a build leaves folders beside them."""
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name,
                copy / name,
                symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy
