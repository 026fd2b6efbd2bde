"""The bootstrap nodes that `shoal swarms` asks: those named, those of SHOAL_SEEDS, and those of a file beside the node's key."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shoal.node.config.settings import ConfigError, default_identity_path
from shoal.swarm.access.link import address_problem

VARIABLE = "SHOAL_SEEDS"
MAX_SEEDS = 16
MAX_FILE_BYTES = 64 * 1024


def seeds_file() -> Path:
    """Return the file that lists seeds, one address a line, ``#`` before a comment."""
    return default_identity_path().with_name("seeds")


def known_seeds(named: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the addresses of seeds: of ``named``, else of the variable, else of the file; at most `MAX_SEEDS`.

    Raises ConfigError: there is none, or one is no full address.
    """
    of_variable = (os.environ if environ is None else environ).get(VARIABLE, "").split()
    path = seeds_file()
    for where, addresses in (("--seed", list(named)), (VARIABLE, of_variable), (str(path), list(_lines(path)))):
        for address in addresses:
            if problem := address_problem(address):
                raise ConfigError(
                    f"{where}: {address[:100]!a} is no address of a bootstrap node, {problem}: `shoal seed` prints it, with /p2p/ "
                    "and its id at the end."
                )
        if addresses:
            return list(dict.fromkeys(addresses))[:MAX_SEEDS]
    raise ConfigError(
        f"No bootstrap node is known here: name one with --seed MULTIADDR, in the variable {VARIABLE}, or on a line of {path}. "
        "`shoal seed` prints the address of one that you run."
    )


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_FILE_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"Cannot read {path} ({error.strerror}): check its permissions.") from error
    for line in text.splitlines():
        if address := line.partition("#")[0].strip():
            yield address
