"""The rows of bench/table.py: methods, their codecs, what each may choose from, and in which order
the rows are run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bench._quality_methods import FRAGMENTS, METHODS, RATES, Recipe
from shoal.optim.codecs.two_way import SEPARATOR

INNERS = ("adamw", "muon")
TUNED_EVERY = 50
TUNED_PEERS = 4
TORCHFT = TORCHFT_DILOCO, TORCHFT_STREAMING = ("torchft", "torchft-streaming")
PAPER = "topk2+ef:0.95"
AUTHORS = "topk2-senders+ef:0.95"
FOUR_BITS, TWO_BITS, ONE_BIT = "e3m0+ef", "auto:2+ef", "sign+ef"
BACK = tuple(f"{ONE_BIT}{SEPARATOR}{back}" for back in (ONE_BIT, TWO_BITS, FOUR_BITS))
"""One bit a value there, and averages back in one, two and four (`outer.codec_back`)."""
SKIPPED = {
    "hivemind": "its Optimizer averages parameters in the background and knows no outer optimizer, "
    "and the wall clock decides how "
    "many steps lie between two averages: no two runs of it are alike. local-sgd is its rule, at "
    "equal steps.",
    "gpa": "SNOO stands for the methods at K = 1.",
}
"""What has no row, and why."""


def _recipes() -> dict[str, Recipe]:
    diloco, streaming = METHODS["diloco"], METHODS["streaming"]
    return {
        "ddp": METHODS["ddp"],
        "local-sgd": METHODS["local-sgd"],
        "snoo": replace(diloco, tuned_at=1),
        "diloco": diloco,
        # As late as overlapped gossip; what Streaming's authors give a fragment is a few of their
        # much longer steps.
        "streaming": replace(streaming, fixed={}, overlap=True),
        "streaming-mix": replace(streaming, fixed={"mix": 0.5}, overlap=True, like="streaming"),
        "noloco": METHODS["noloco"],
        "noloco-overlap": replace(METHODS["noloco-overlap"], like=None),
        "co2": METHODS["co2"],
        "sparseloco": METHODS["sparseloco"],
        TORCHFT_DILOCO: replace(diloco, like="diloco"),
        TORCHFT_STREAMING: replace(streaming, fixed={}, like="streaming"),
    }


RECIPES = _recipes()
CODECS: dict[str, tuple[str, ...]] = {
    "ddp": ("float32",),
    "snoo": ("float32",),
    "local-sgd": ("float32", "int8"),
    "diloco": ("float32", FOUR_BITS, TWO_BITS, ONE_BIT, *BACK),
    "streaming": ("float32", FOUR_BITS, ONE_BIT, *BACK),
    "streaming-mix": ("float32", FOUR_BITS, ONE_BIT),
    "noloco": ("float32", "int8"),
    "noloco-overlap": ("float32", "int8", "mod4"),
    "co2": ("float32", FOUR_BITS),
    "sparseloco": (PAPER, AUTHORS),
    TORCHFT_DILOCO: ("float32",),
    TORCHFT_STREAMING: ("float32",),
}
BEST = {name: codecs[1] if len(codecs) > 1 else codecs[0] for name, codecs in CODECS.items()} | {
    "sparseloco": PAPER
}
"""The codec of the rows that are run first."""
LAG = 16
"""Inner steps that an overlapped exchange takes at 100 Mbit/s and 50 ms (``links``): the lag that a
node finds by itself.
"""
QUICK = {"mod4": 4, ONE_BIT: 5}
"""The lag where little is sent.

For ``mod4`` it is the aim: two real nodes with 10 million parameters find 6 on a machine that does
nothing else, and four on two cores 7. Streaming in one bit finds 4 there."""


def recipe(method: str, inner: str) -> Recipe:
    """How the method is made with that inner optimizer."""
    if method == "ddp" and inner == "muon":
        return METHODS["ddp-muon"]
    return replace(RECIPES[method], inner="muon" if inner == "muon" else "adamw")


def rates(inner: str) -> Sequence[float]:
    """Inner learning rates to choose from; the second is tried first.

    Muon's begin higher than bench/quality.py's: with those data parallel training chose the
    highest.
    """
    return tuple(2 * rate for rate in RATES[inner]) if inner == "muon" else RATES[inner]


class Cell(NamedTuple):
    """One row to be."""

    method: str
    inner: str
    codec: str
    peers: int
    every: int


@dataclass(frozen=True)
class Stage:
    """Cells and the seeds that each is run with."""

    cells: Sequence[Cell]
    seeds: Sequence[int]


def cell(
    method: str, inner: str = "muon", codec: str | None = None, peers: int = 4, every: int = 50
) -> Cell:
    """A row; DDP exchanges at every step, and SNOO with nobody."""
    every = 1 if method == "ddp" else every
    return Cell(method, inner, codec or BEST[method], 1 if method == "snoo" else peers, every)


DEFAULT = cell("noloco-overlap", codec="mod4", every=25)
"""What a swarm does whose settings say nothing."""
FIRST = (
    cell("ddp", "adamw"),
    cell("ddp"),
    cell("diloco"),
    DEFAULT,
    cell("noloco-overlap"),
    cell("diloco", "adamw"),
    cell("noloco-overlap", "adamw"),
    cell("diloco", codec=TWO_BITS),
    cell("diloco", every=200),
    cell("diloco", codec=TWO_BITS, every=200),
)
OFTEN = (
    *(cell("diloco", codec=ONE_BIT, every=every) for every in (13, 16, 40)),
    *(cell("streaming", codec=ONE_BIT, every=every) for every in (16, 40)),
)
"""Short rounds of one bit a value: about the bytes of 4 bits every 50, and fewer than a thousandth
of data parallel training's.
"""
WAYS_BACK = [
    cell(name, codec=codec, peers=peers, every=16)
    for peers in (4, 8)
    for name in ("diloco", "streaming")
    for codec in (ONE_BIT, *BACK)
]
"""What averages back in few bits cost and save, beside contributions that all get whole."""
FLOOR = [
    cell("local-sgd", inner, "float32", peers, 1) for inner in reversed(INNERS) for peers in (4, 8)
]
"""An exact mean of the weights at every step: what an exchange of weights can come to at best."""
OTHERS = ("noloco", "streaming", "sparseloco", "co2", "local-sgd", "snoo")
SPREAD = ("diloco", "noloco-overlap", "streaming", "noloco")


def _order() -> Iterator[Sequence[Cell]]:
    yield FIRST
    yield OFTEN
    yield WAYS_BACK
    yield FLOOR
    yield [cell(name) for name in OTHERS]
    yield [cell("diloco", codec="float32"), cell("noloco-overlap", codec="float32")]
    yield [cell(name, "adamw") for name in OTHERS]
    yield [cell(TORCHFT_DILOCO, "adamw"), cell(TORCHFT_STREAMING, "adamw")]
    yield [
        cell(name, every=every)
        for every in (10, 200)
        for name in SPREAD
        if (name, every) != ("diloco", 200)
    ]
    yield [DEFAULT._replace(peers=8), *(cell(name, peers=8) for name in SPREAD)]
    yield [cell("streaming-mix"), cell("streaming-mix", codec=ONE_BIT, every=16)]
    yield [
        cell("sparseloco", codec=AUTHORS),
        cell("streaming", codec="float32"),
        cell("noloco", codec="float32"),
    ]
    yield [cell(TORCHFT_DILOCO), cell(TORCHFT_STREAMING)]
    yield [cell(name, "adamw", peers=8) for name in SPREAD]
    yield [
        cell(name, inner, peers=peers, every=every)
        for inner in INNERS
        for name in ("sparseloco", "co2", "local-sgd")
        for peers, every in ((8, 50), (4, 10), (4, 200))
    ]
    yield [cell(name, peers=8, every=every) for every in (10, 200) for name in SPREAD]
    yield [cell(name, "adamw", every=every) for every in (10, 200) for name in SPREAD]


PLAN = [Stage(cells, (0,)) for cells in _order()] + [Stage(cells, (0, 1, 2)) for cells in _order()]
SMALL = [
    Stage(
        (
            *FIRST,
            *(
                cell("diloco", codec=ONE_BIT, every=every) for every in (20, 40)
            ),  # which divide its steps
            cell("streaming", codec=ONE_BIT, every=20),
            DEFAULT._replace(peers=8),
            *(cell(name, peers=8) for name in ("diloco", "noloco-overlap")),
            *(cell(name) for name in ("noloco", "streaming", "sparseloco", "co2", "local-sgd")),
        ),
        (0,),
    )
]
"""What the aims are about, and one row of each other method."""


def fragments(method: str, every: int) -> int:
    """Parts of the model that are sent one after another in a round; torchft wants their number to
    divide its steps.
    """
    if method == TORCHFT_STREAMING:
        return next(count for count in range(FRAGMENTS, 0, -1) if every % count == 0)
    return FRAGMENTS if RECIPES[method].overlap else 1


def lag(method: str, every: int, codec: str = "") -> int:
    """Inner steps from sending to applying in the runs: as long as an exchange takes, which is most
    of a short round.
    """
    if method == "co2":
        return every
    if method == TORCHFT_STREAMING:
        return every // fragments(method, every) - 1
    there = codec.partition(SEPARATOR)[0]
    return max(1, min(QUICK.get(there, LAG), 5 * every // 8)) if RECIPES[method].overlap else 0
