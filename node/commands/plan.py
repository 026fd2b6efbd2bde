"""What `shoal plan` does: the table of all settings that fit, over a link that was stated or
measured.
"""

from __future__ import annotations

import reprlib
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from shoal.node.plan.advice import Situation, advise
from shoal.node.plan.rows import MEMORY_SOURCE, ModelTensors, rows
from shoal.node.plan.run_cost import RunCost, run_cost
from shoal.swarm.access.link import Link
from shoal.swarm.errors import MessageError, NetworkError, ShoalError
from shoal.swarm.exchange.cost import BUSY, GOOD, Line
from shoal.swarm.figures import amount, duration

if TYPE_CHECKING:
    from shoal.node.doctor.visit import Visit
    from shoal.swarm.p2p.throughput import Throughput

MBIT = 1e6 / 8  # bytes a second
TRIES = 3  # round trips that are measured with a peer
PEERS = 3  # peers that are asked
ASK_S = 15.0  # seconds for a round trip to be measured
SPEED_S = 30.0  # seconds for a rate to be measured
RAMP = 10  # round trips that a transfer must take at least, or they are what is measured
BOUNDS: dict[str, tuple[float, float, str]] = {
    "params": (1, 1e13, "parameters"),
    "mbit": (1e-3, 1e6, "megabits a second"),
    "rtt": (0, 60, "seconds"),
    "step": (1e-6, 86_400, "seconds"),
    "peers": (2, 65_536, "peers"),
    "every": (1, 1_000_000, "inner steps"),
    "steps": (1, 1e12, "inner steps"),
}


class PlanError(ShoalError):
    """A number that `shoal plan` was given cannot be used, or a link could not be measured."""


@dataclass(frozen=True)
class Measured:
    """A link as it was measured.

    ``rate``: bytes a second of the slower direction, or None, and ``why`` there is none.
    """

    round_trip: float
    rate: float | None
    why: str = ""


def plan(
    *,
    params: float,
    step: float,
    peers: int,
    mbit: float | None,
    rtt: float | None,
    measure: str | None,
    every: int | None,
    steps: int | None = None,
    uneven: bool = False,
    public: bool = False,
) -> dict[str, Any]:
    """Return the report: link, rows and advice, and what ``steps`` cost with the advice.

    Raises PlanError, LinkError, or NetworkError if nobody can be reached.
    """
    given = {
        "params": params,
        "mbit": mbit,
        "rtt": rtt,
        "step": step,
        "peers": peers,
        "every": every,
        "steps": steps,
    }
    for name, value in given.items():
        low, high, unit = BOUNDS[name]
        if value is not None and not low <= value <= high:
            raise PlanError(
                f"--{name} {reprlib.repr(value)} cannot be used: give between {low:g} and {high:g} "
                f"{unit}."
            )
    measured = None
    if measure is not None:
        measured = measured_line(Link.parse(measure))
        if rtt is None:
            rtt = measured.round_trip
        if mbit is None:
            mbit = _known_mbit(measured)
    if mbit is None or rtt is None:
        raise PlanError(
            "The link is not known: give --mbit and --rtt, or --measure LINK of a swarm."
        )
    line = Line(mbit * MBIT, rtt)
    tensors = ModelTensors.of_count(round(params))
    found = rows(line, tensors, peers=peers, step_s=step, every=every)
    if public:  # whose members judge whole contributions
        found = [row for row in found if not row.outer.codec_back]
    swarm = Situation(peers, uneven, public)
    chosen, advice = advise(swarm, line, tensors, step_s=step, every=every)
    return {
        "params": tensors.params,
        "peers": peers,
        "uneven": uneven,
        "public": public,
        "step_s": step,
        "link": {
            "mbit": round(mbit, 3),
            "round_trip_s": round(rtt, 4),
            "measured": measured is not None,
        },
        "rows": [row.json() for row in found],
        "memory_source": MEMORY_SOURCE,
        "advised": chosen.json(),
        "advice": advice,
        "run": None if steps is None else asdict(run_cost(chosen, steps=steps)),
    }


def _known_mbit(measured: Measured) -> float:
    """Return the rate of a link that was measured. PlanError if there is none."""
    if measured.rate is None:
        raise PlanError(
            f"The round trip takes {duration(measured.round_trip)}, but the rate could not be "
            f"measured ({measured.why}): give it by --mbit."
        )
    return measured.rate / MBIT


def measured_line(link: Link) -> Measured:
    """Dial the members of a swarm, or its seeds, and measure; this node joins nothing.

    Raises NetworkError if nobody answers.
    """
    from shoal.node.doctor import network_checks
    from shoal.node.doctor.check import FaultError, Note
    from shoal.node.doctor.visit import Visit

    visit = Visit(link)
    try:
        network_checks.daemon(visit, lambda finding: None)
        try:
            network_checks.bootstrap(visit, lambda finding: None)
        except (FaultError, Note):  # only seeds answer, or not all of the link's peers do
            if not (visit.reached or visit.seeds):
                raise
        return _rate(visit, _round_trip(visit))
    finally:
        visit.close()


def _round_trip(visit: Visit) -> float:
    """Return the median round trip, in seconds, to some of the peers that answer."""
    from shoal.swarm.p2p.reachability import DIAL_PROTOCOL, ask

    trips: list[float] = []
    why = "no member of the swarm answers, and bootstrap nodes do not measure it"
    for address in [*visit.reached, *visit.seeds][:PEERS]:
        try:
            seen = [visit.ask(address, DIAL_PROTOCOL, ask, ASK_S) for _ in range(TRIES)]
        except (NetworkError, MessageError) as error:
            why = str(error).removesuffix(".")
            continue
        trips.append(2 * min(view.error for view in seen))
    if not trips:
        raise PlanError(f"No round trip could be measured ({why}): give --mbit and --rtt.")
    return sorted(trips)[len(trips) // 2]


def _rate(visit: Visit, round_trip: float) -> Measured:
    """Return the link, with the rate to the first member with which it can be measured."""
    from shoal.swarm.p2p.throughput import MAX_BYTES

    why = "no member of the swarm answers, and bootstrap nodes do not measure it"
    for address in visit.reached[:PEERS]:
        # the fewer bytes for a link that does not carry the more in time
        for nbytes in (MAX_BYTES, MAX_BYTES // 16):
            try:
                speed = _speed(visit, address, nbytes)
            except (NetworkError, MessageError) as error:
                why = str(error).removesuffix(".")
                break
            if not speed.whole:
                why = "the link carries too little for the test"
                continue
            rate = min(speed.down, speed.up)
            if nbytes / rate >= RAMP * round_trip:
                return Measured(round_trip, rate)
            why = (
                f"at least {rate / MBIT:.3g} Mbit/s, but {amount(nbytes)} are over before the "
                "link is full"
            )
            break
    return Measured(round_trip, None, why)


def _speed(visit: Visit, address: str, nbytes: int) -> Throughput:
    from shoal.swarm.p2p.throughput import SPEED_PROTOCOL, measure

    return visit.ask(address, SPEED_PROTOCOL, partial(measure, nbytes=nbytes), SPEED_S)


def _cells(row: dict[str, Any]) -> list[str]:
    memory = row["memory_bytes"]
    return [
        row["method"],
        row["codec"],
        str(row["every"]),
        f"auto ({row['expected_lag']})" if row["lag"] == "auto" else str(row["lag"]),
        duration(row["exchange_s"]),
        f"{100 * row['utilisation']:.1f} %",
        f"{100 * row['link_filled']:.0f} %",
        amount(row["bytes_a_day"]),
        f"{row['times_fewer']:,.0f} times",
        "-" if memory is None else amount(memory),
    ]


def table(report: dict[str, Any]) -> str:
    """Format a report for people: the advised row, then what computes nearly always, then the
    others.
    """
    link = report["link"]
    grid = Table(
        "method",
        "codec",
        "every",
        "lag",
        "exchange",
        "computes",
        "of the link",
        "sends a day",
        "fewer bytes",
        "memory",
        title=f"{report['params']:,} parameters, {report['peers']} peers, "
        f"{duration(report['step_s'])} a step, "
        f"{link['mbit']:g} Mbit/s, {duration(link['round_trip_s'])} round "
        f"trip{' (measured)' if link['measured'] else ''}",
        title_justify="left",
    )
    grid.add_row(*_cells(report["advised"]), end_section=True)
    for number, row in enumerate(report["rows"]):
        good = row["utilisation"] >= GOOD
        after = report["rows"][number + 1 :]
        last_good = good and bool(after) and after[0]["utilisation"] < GOOD
        grid.add_row(*_cells(row), end_section=last_good)
    console = Console(width=132)
    with console.capture() as capture:
        console.print(grid)
    run = [] if report["run"] is None else [f"With it {RunCost(**report['run']).said()}."]
    return "\n".join(
        [
            capture.get().rstrip(),
            "first the settings below; exchange: from sending a part of the model to its mean",
            f"of the link: what exchanges take; the advice leaves {100 - 100 * BUSY:.0f} % to "
            "small messages, newcomers, you",
            "fewer bytes: than leave a node if as many all-reduce float32 gradients at every step",
            "memory: beyond model, gradients and inner optimizer; -: not measured",
            f"        measured by {report['memory_source']}",
            "",
            "Settings to copy into swarm.toml, for `shoal up swarm.toml`:",
            "",
            report["advised"]["settings"],
            report["advice"],
            *run,
        ]
    )
