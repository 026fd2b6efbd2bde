"""The arguments of ``python -m bench.sim``: networks by name, kills a minute, and sizes."""

from __future__ import annotations

import math
import re

from shoal.node.config.settings import ConfigError
from tests.sim.network import Links

BYTES_OF_MBIT = 1e6 / 8
NETS = {"lan": (0.2, 0.1, 1000.0), "wan": (40.0, 10.0, 100.0), "home": (25.0, 25.0, 20.0)}
"""Milliseconds one way, milliseconds of jitter at most on top, megabits a second that a peer sends
at most, in all its streams.
"""
JITTER = 0.25  # of the delay, where that is given in numbers


def parse_net(text: str) -> Links:
    """Return the network of ``lan``, ``wan``, ``home``, or ``MS:MBIT``. ConfigError."""
    if text in NETS:
        delay, jitter, mbit = NETS[text]
    else:
        found = re.fullmatch(r"([0-9.]{1,12}):([0-9.]{1,12})", text)
        try:
            delay, mbit = (
                (float(part) for part in found.groups()) if found else (math.nan, math.nan)
            )
        except ValueError:
            delay = mbit = math.nan
        if not 0 <= delay <= 60_000 or not 0.001 <= mbit <= 1e6:
            raise ConfigError(
                f"There is no net {text[:40]!r}: use {', '.join(NETS)}, or milliseconds one way "
                "and megabits a second: 40:100."
            )
        jitter = JITTER * delay
    return Links(delay / 1000, jitter / 1000, mbit * BYTES_OF_MBIT, shared=True)


def parse_rate(text: str) -> float:
    """Return the kills, or naps, a minute of ``2/min`` or ``0.5``. ConfigError."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)(?:/min)?", text)
    if found is None:
        raise ConfigError(
            f"{text[:40]!r} is no number of kills or naps a minute: write it so, such as 2/min."
        )
    return float(found[1])


def parse_sizes(text: str) -> list[int]:
    """Return the sizes of ``--peers``, such as ``16`` or ``16,64,256``, each once and the smallest
    first. ConfigError.
    """
    if not re.fullmatch(r"[0-9]{1,5}(,[0-9]{1,5}){0,15}", text) or not all(
        2 <= int(part) <= 65_536 for part in text.split(",")
    ):
        raise ConfigError(
            f"The sizes {text[:40]!r} are not 1 to 16 numbers of peers, from 2 to 65536: write "
            "them so, such as 16,64,256."
        )
    return sorted({int(part) for part in text.split(",")})
