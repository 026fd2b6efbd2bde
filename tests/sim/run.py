"""One seed, one simulation: the swarm and its faults follow from the seed alone."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.sim.clock import Stuck, VirtualLoop
from tests.sim.faults import Fault, FaultInjector, plan
from tests.sim.invariants import Checks
from tests.sim.isolation import isolated
from tests.sim.memory_stream import NOTHING
from tests.sim.network import Links, SimNetwork, Trace
from tests.sim.peers import Setting, SimSwarm

REST = 20.0  # virtual seconds after the end of training in which everything must come to its end


@dataclass(frozen=True)
class Report:
    """The outcome of a simulation.

    ``failure``: the violated invariant, or an error of ours, or None.
    """

    seed: int
    setting: Setting
    faults: list[Fault]
    trace: str
    """Hex digest of the whole trace."""
    events: int
    lines: list[str] | None
    means: int
    """Rounds of single peers that ended with a mean, of ``rounds``."""
    rounds: int
    failure: BaseException | None


def blocks(seeds: int, size: int, quick: int) -> list[tuple[int, int]]:
    """Return the first and the end of each block of seeds: of the ``quick`` first ones, and of the
    rest in blocks up to the multiples of ``size``.
    """
    ends = [quick, *range(size, seeds + 1, size)]
    return list(zip([0, *ends], ends, strict=False))


def setting_of(seed: int, hostile: bool = False) -> Setting:
    """Return the swarm of a seed; one with a ``hostile`` member trains for longer."""
    chance = random.Random(f"setting {seed}")
    kind = chance.choice(("pair", "pair", "group"))
    options: dict[str, Any] = {}
    if kind == "group":
        ways: list[dict[str, Any]] = [{}, {}, {}, {"max_group": 2}, {"gather": True}]
        options = chance.choice(ways)
    if (
        kind == "pair" and seed % 3 == 0
    ):  # a third: with fragments in flight a simulation has many more events
        options["fragments"] = random.Random(f"fragments {seed}").choice(
            (1, 1, 2, 4)
        )  # from dice of its own: the others stay
    return Setting(
        kind,  # type: ignore[arg-type]
        chance.randint(3, 6) if kind == "pair" else chance.choice((3, 3, 4, 4, 5)),
        calm=15.0 if hostile else 6.0,
        skew=chance.choice((0.0, 0.0, 3.0)),
        lose=chance.choice((0.0, 0.0, 0.2)),
        again=chance.choice((0.0, 0.3)),
        options=options,
        mod4=kind == "pair" and seed % 4 == 1,
    )


def simulate(
    seed: int,
    *,
    setting: Setting | None = None,
    faults: list[Fault] | None = None,
    hostile: bool = False,
    keep: bool = False,
    prepare: Callable[[SimSwarm], None] = lambda swarm: None,
) -> Report:
    """Run a simulation to its end, or to the first violated invariant.

    ``hostile``: one member turns against the others. ``keep``:
    keep the trace's lines too. ``prepare``: called with the swarm before it begins.
    """
    setting = setting or setting_of(seed, hostile)
    faults = (
        plan(seed, setting.peers, 350 if setting.kind == "pair" else 700, hostile=hostile)
        if faults is None
        else faults
    )
    chance = random.Random(f"links {seed}")
    links = Links(
        chance.choice((0.005, 0.03, 0.15)),
        chance.choice((0.0, 0.01, 0.05)),
        chance.choice((1e4, 1e6)),
    )
    loop, trace = VirtualLoop(), Trace(keep)
    network = SimNetwork(loop, seed, links, trace)
    failure: BaseException | None = None
    with isolated(loop) as errors:
        swarm = SimSwarm(network, setting, seed)
        mischief = FaultInjector(swarm, faults)
        checks = Checks(swarm, mischief, errors)
        prepare(swarm)
        broken: list[BaseException] = []

        def watch(name: str) -> None:
            try:
                checks.look()
                mischief.look(name)
                if swarm.over:
                    rest()
            except Exception as error:
                broken.append(error)
                loop.stop()

        resting: list[asyncio.TimerHandle] = []

        def rest() -> None:
            if not resting:
                resting.append(loop.call_later(REST, loop.stop, context=NOTHING))
                network.keep_alive()

        network.watch = watch
        loop.set_exception_handler(
            lambda _, context: broken.append(
                context.get("exception") or RuntimeError(context["message"])
            )
        )
        try:
            loop.call_at(setting.calm + setting.patience, rest)
            loop.run_forever()
            if broken:
                raise broken[0]
            checks.end()
        except Exception as error:
            failure = error
        network.watch = lambda name: None
        digest, events = trace.hexdigest(), trace.events
        try:
            network.end()
        except Stuck as error:
            failure = failure or error
    ended = [mine for mine in swarm.contributions.values() if mine.ended is not None]
    means = sum(mine.mean is not None for mine in ended)
    return Report(seed, setting, faults, digest, events, trace.lines, means, len(ended), failure)


def main(argv: list[str]) -> int:
    """Run the named seeds, after the word ``hostile`` with a hostile member, and print their
    traces.

    Returns the exit code: 1 if an invariant did not hold.
    """
    failed, hostile = False, argv[1] == "hostile"
    for seed in map(int, argv[2:] if hostile else argv[1:]):
        report = simulate(seed, hostile=hostile, keep=True)
        for line in report.lines or ():
            print(line)
        print(f"{report.setting}\n{report.faults}")
        how = "held" if report.failure is None else f"failed ({report.failure!r})"
        print(f"seed {seed}: {how}, {report.events} events, trace {report.trace}")
        failed |= report.failure is not None
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv))
