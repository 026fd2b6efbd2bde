"""What `bench/quality.py --plan` runs, and `--plan NAME`, the most important first, so that each
may stop and go on later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SHORT, LONG = 500, 3000
PAIRS = 560  # steps of NoLoCo against the heavy ball: a multiple of every 20, 40 and 70
SPARSE = "topk2+ef:0.95"
OTHERS = ("local-sgd", "streaming", "gasloc", "eager", "co2", "decoupled", "noloco-2", "diloco-hb")


class Cell(NamedTuple):
    """One row to be."""

    method: str
    codec: str
    peers: int
    every: int
    steps: int
    tuned_every: int | None = None
    """The ``every`` whose tuning it takes over; None: its own."""


class Stage(NamedTuple):
    """Cells and the seeds that each is run with; ``again``: half of the learning rate is tried too,
    of the cell given or each.
    """

    cells: Sequence[Cell]
    seeds: Sequence[int]
    again: bool | Cell = False


def _cell(
    method: str,
    every: int = 50,
    *,
    peers: int = 4,
    steps: int = SHORT,
    codec: str = "float32",
    like: int | None = None,
) -> Cell:
    return Cell(method, codec, peers, every, steps, like)


_LEADERS = [_cell("ddp", 1), _cell("diloco", 10), _cell("diloco"), _cell("noloco")]
_LONG = [cell._replace(steps=LONG) for cell in _LEADERS]
_LONG_CODECS = [
    _cell("diloco", steps=LONG, codec="e3m0+ef"),
    _cell("sparseloco", steps=LONG, codec=SPARSE),
]
_CODECS = [_cell("diloco", codec="e3m0+ef"), _cell("sparseloco", codec=SPARSE)]
# With 8 peers a ring sends each payload 1.75 times, a pair once: NoLoCo every 40 steps sends what
# the heavy ball does every 70.
_GOSSIP = [
    _cell("noloco", 40, peers=8, steps=PAIRS, like=50),
    _cell("diloco-hb", 40, peers=8, steps=PAIRS, like=50),
    _cell("diloco-hb", 70, peers=8, steps=PAIRS, like=50),
    _cell("ddp", 1, peers=8, steps=PAIRS),
]
# The two-tensor form sends twice as much: counted by payloads, as the heavy ball every 20.
_GOSSIP_2 = [
    _cell("noloco-2", 40, peers=8, steps=PAIRS, like=50),
    _cell("diloco-hb", 20, peers=8, steps=PAIRS, like=50),
]
_PEERS = [
    _cell(method, peers=peers)
    for peers in (1, 2, 8)
    for method in ("diloco", "noloco")
    if peers > 1 or method == "diloco"
]

ONE, ALL = (0,), (0, 1, 2)
METHODS = [
    Stage(_LEADERS, ALL),
    Stage(_CODECS, ALL),
    Stage(_LONG[:2], ONE, again=True),
    Stage(_GOSSIP, ONE),
    Stage(_LONG[2:3], ONE),
    Stage([_cell(name) for name in OTHERS[:6]], ONE),
    Stage(_GOSSIP, (0, 1)),
    Stage(_LONG[:2], (0, 1), again=True),
    Stage(_GOSSIP, ALL),
    Stage(_LONG_CODECS + _LONG[3:], ONE),
    Stage(_LONG[:2], ALL, again=True),
    Stage(_LONG[2:3], (0, 1)),
    Stage(_PEERS, ONE),
    Stage([_cell("noloco-2")], ONE),
    Stage([_cell("ddp-updates", 1), _cell("ddp-xK", 1)], ONE),
    Stage(_PEERS, ALL),
    Stage([_cell(name) for name in OTHERS], ALL),
    Stage([_cell("sparta", 1), _cell("lookahead", peers=1), _cell("none", 1), _cell("local")], ALL),
    Stage([_cell("diloco", 10, codec="e3m0+ef"), _cell("sparseloco", 10, codec=SPARSE)], ALL),
    Stage(_GOSSIP_2, ALL),
    Stage([_cell("diloco", codec=name) for name in ("int8", "e3m0", SPARSE)], ALL),
    Stage([_cell(name, 10) for name in ("noloco", *OTHERS)], ALL),
    Stage(_LONG + _LONG_CODECS, ALL, again=True),
]


def _gossip(peers: int, every: int, inner: str = "", *, steps: int = SHORT) -> list[Cell]:
    """Blocking and overlapped."""
    return [
        _cell(f"noloco{form}{inner}", every, peers=peers, steps=steps, like=50)
        for form in ("", "-overlap")
    ]


def _rate(inner: str = "") -> Cell:
    return _gossip(4, 50, inner, steps=LONG)[0]


def _long(peers: int, inner: str = "") -> list[Stage]:
    """Long runs, every 50 first; all at the rate that is better for the blocking form with 4 peers,
    every 50.
    """
    rate = _rate(inner)
    return [
        Stage(_gossip(peers, every, inner, steps=LONG), seeds, rate)
        for seeds in (ONE, ALL)
        for every in (50, 10)
    ]


MUON = "-muon"
OVERLAP = [
    *(Stage(_gossip(4, 50, inner), ALL) for inner in ("", MUON)),
    Stage(_gossip(4, 10), ALL),
    Stage(_gossip(8, 50), ALL),
    Stage(_gossip(4, 50, steps=LONG), ONE, _rate()),
    Stage(_gossip(4, 10, MUON), ALL),
    Stage(_gossip(8, 50, MUON), ALL),
    *(Stage(_gossip(8, 10, inner), ALL) for inner in ("", MUON)),
    Stage([_cell("ddp", 1), _cell("ddp-muon", 1)], ALL),
    Stage([_cell("ddp-muon", 1, steps=LONG)], ONE, again=True),
    *_long(4, MUON),
    *_long(4),
    Stage([_cell("ddp-muon", 1, steps=LONG), _cell("ddp", 1, steps=LONG)], ALL, again=True),
    *_long(8, MUON),
    *_long(8),
]
# Gossip with fewer bytes: NoLoCo sends weights, so only codecs of 8 bits and more are for it.
BYTES = [
    *(
        Stage([_cell(f"noloco{form}{inner}", codec="int8") for inner in ("", MUON)], ALL)
        for form in ("", "-overlap")
    ),
    Stage([_rate()._replace(codec="int8")], ONE, _rate()),
    Stage([_cell(f"noloco{inner}", codec="bfloat16") for inner in ("", MUON)], ALL),
    *(Stage([_rate(inner)._replace(codec="int8")], ALL, _rate(inner)) for inner in (MUON, "")),
]

PLANS = {"methods": METHODS, "overlap": OVERLAP, "bytes": BYTES}
