"""A peer that is slow within all rules, and what the others lose by it: their rounds in a swarm
with it and in one without it.

latency   each message to it and from it takes so many seconds longer, as over a bad link
pieces    what it sends of a payload comes in pieces, so many seconds apart
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from shoal.swarm.p2p.bulk import Outgoing
from shoal.swarm.p2p.stream import Stream
from tests.sim.faults import Fault
from tests.sim.memory_stream import NOTHING
from tests.sim.peers import Setting, SimSwarm
from tests.sim.run import Report, simulate

Kind = Literal["waiting", "overlapped", "group", "gather"]
Way = Literal["latency", "pieces"]
SECONDS: dict[Way, float] = {"latency": 0.4, "pieces": 0.9}
TRAINED, PIECES = 120.0, 6
OPTIONS: dict[Kind, dict[str, Any]] = {"overlapped": {"fragments": 4}, "gather": {"gather": True}}


class InPieces(Stream):
    """A stream on which a payload leaves in pieces, each before its receiver takes the silence for
    a broken link.
    """

    async def _pump(
        self, out: Outgoing, most: int, can_write: Callable[[], Awaitable[None]]
    ) -> None:
        while left := out.next_size():
            await asyncio.sleep(SECONDS["pieces"])
            await can_write()
            self._writer.transport.write(out.take(min(-(-out.nbytes // PIECES), left)))


@dataclass(frozen=True)
class Rounds:
    """The rounds of the honest peers, with those in which they trained on and sent nothing."""

    all: int
    met: int
    """Those with a mean."""
    report: Report


def rounds_of(
    kind: Kind,
    seed: int,
    way: Way | None,
    honest: int = 4,
    trained: float = TRAINED,
    keep: bool = False,
) -> Rounds:
    """Run a swarm of ``honest`` peers and one that is slow in a ``way``; None: without it."""
    last, found = honest, list[SimSwarm]()

    def prepare(swarm: SimSwarm) -> None:
        found.append(swarm)
        swarm.network.loop.call_at(
            trained, setattr, swarm, "over", True, context=NOTHING
        )  # all leave, near to each other or not
        slow, network = swarm.peers[last].host, swarm.network
        if way == "pieces":
            network.stream = lambda peer, reader, writer, traffic: (  # type: ignore[assignment, misc]
                InPieces if traffic is slow.traffic else Stream
            )(peer, reader, writer, traffic)

    setting = Setting(
        "pair" if kind in ("waiting", "overlapped") else "group",
        honest + 1,
        calm=trained,
        patience=0.0,
        options=OPTIONS.get(kind, {}),
    )
    # From before the first round to the end of training; what touches it may come apart, as two
    # generals do.
    dice = (SECONDS["latency"] - 0.1) / 1.5 if way == "latency" else -0.1 / 1.5
    faults = [Fault(1, "slow", last, trained, dice) if way else Fault(1, "kill", last, 0.0, 0.0)]
    report = simulate(seed, setting=setting, faults=faults, keep=keep, prepare=prepare)
    mine = [
        one
        for (number, _), one in found[0].contributions.items()
        if number < honest and one.begun < trained
    ]
    left_out = sum(when < trained for peer in found[0].peers[:honest] for _, when in peer.left_out)
    return Rounds(len(mine) + left_out, sum(one.mean is not None for one in mine), report)


def main(argv: list[str]) -> int:
    """Print the share of rounds kept: kinds, ways, and the number of seeds."""
    for kind in argv[1].split(","):
        for way in argv[2].split(","):
            for seed in range(int(argv[3])):
                without, slow = (rounds_of(kind, seed, one) for one in (None, way))  # type: ignore[arg-type]
                print(
                    f"{kind:10} {way:7} seed {seed}: {slow.all / without.all:.2f} of {without.all} "
                    "rounds,"
                    f" {slow.met / max(without.met, 1):.2f} of {without.met} means, "
                    f"{slow.report.failure!r:.120}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
