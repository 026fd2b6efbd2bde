"""``shoal swarms``: the public swarms that seeds list; and the choice of one of them by its name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.node.plan.advice import amount
from shoal.node.tasks.text_size import listed_parameters
from shoal.swarm.access.link import Link
from shoal.swarm.errors import LinkError, NetworkError
from shoal.swarm.membership.swarm_list import MAX_MEMBERS, PublicSwarm, look

COLUMNS = ("name", "task", "method", "peers", "parameters", "sent a round", "memory", "device", "id")
NUMBERS = ("peers", "parameters", "sent a round", "memory")
BUILT_IN = ("text", "rl")
SHOWN_ID = 12
LEAST_OF_ID = 8
JOIN = "Join one by its name or the beginning of its id: shoal join NAME"
SAID = "Bootstrap nodes say how many peers there are, a member what is sent and how much memory it takes."


def link_of(found: PublicSwarm) -> Link:
    """Return a link by which one joins it: by way of the seed and the members that it named. Raises LinkError."""
    return Link(found.swarm, found.addresses[:1]).also(found.addresses[1:])


def report(found: PublicSwarm) -> dict[str, Any]:
    """Return a swarm ready for JSON: sizes in bytes; ``memory`` is None where it was not measured."""
    params = listed_parameters(found.options, found.params) if found.title.task == "text" else found.params
    return {
        "name": found.title.name,
        "swarm": found.swarm,
        "task": found.title.task,
        "needs_task": found.title.task.partition(":")[0] not in BUILT_IN,
        "method": found.title.method,
        "peers": found.peers,
        "params": params,
        "round_bytes": found.round_bytes,
        "memory": found.memory or None,
        "device": found.device,
        "link": str(link_of(found)),
    }


def list_swarms(seeds: Sequence[str]) -> dict[str, Any]:
    """Ask the seeds for their swarms. ``problems``: a sentence for each seed that did not answer.

    Raises:
        StartupError: the network daemon does not start.
        NetworkError: no seed answers.
    """
    found, problems = asyncio.run(look(seeds))
    if len(problems) == len(seeds):
        raise NetworkError("No bootstrap node answers: " + " ".join(problems))
    return {"seeds": list(seeds), "swarms": [report(one) for one in found], "problems": problems}


def chosen(name: str, swarms: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the one of ``swarms`` of that name, or whose id begins so. LinkError if there is none, or if there are several."""
    fits = [one for one in swarms if one["name"] == name]
    if not fits and len(name) >= LEAST_OF_ID:
        fits = [one for one in swarms if one["swarm"].startswith(name)]
    if not fits:
        raise LinkError(f"No public swarm is called {name[:80]!a}: `shoal swarms` lists those that the bootstrap nodes know.")
    if len(fits) > 1:
        ids = ", ".join(one["swarm"][:SHOWN_ID] for one in fits[:4])
        raise LinkError(f"{len(fits)} public swarms are called {name[:80]!a}: join one by the beginning of its id ({ids}).")
    return fits[0]


def table(report: dict[str, Any]) -> str:
    """Return the swarms as a table, and below it what did not answer and how to join."""
    if not report["swarms"]:
        return "\n".join(
            [*report["problems"], "The bootstrap nodes list no public swarm: `shoal up --public --bootstrap MULTIADDR` makes one."]
        )
    grid = Table()
    for column in COLUMNS:
        grid.add_column(column, justify="right" if column in NUMBERS else "left")
    for one in report["swarms"]:
        grid.add_row(*[Text(cell) for cell in _cells(one)])  # Text: a stranger's name must not be markup
    console = Console(width=140)
    with console.capture() as capture:
        console.print(grid)
    return "\n".join([capture.get().rstrip(), *report["problems"], SAID, JOIN])


def described(one: dict[str, Any]) -> str:
    """Return what one should know before joining a swarm, in sentences."""
    needs = [f"a copy of its task {one['task']} (--task)"] if one["needs_task"] else []
    needs += ["text to train on (--data; else what this machine has)"] if one["task"] == "text" else []
    needs += [f"{amount(one['memory'])} of memory beyond training alone"] if one["memory"] else []
    device = "a processor, without a GPU" if one["device"] == "cpu" else f"a GPU ({one['device']})"
    return (
        f"{one['name']} ({one['swarm'][:SHOWN_ID]}): {one['task']} by {one['method']}, {_peers(one['peers'])} as a bootstrap node "
        f"says. As a member says, its model has {_count(one['params'])} parameters, a node sends {amount(one['round_bytes'])} in a "
        f"round, and that member computes on {device}." + (f" It needs {' and '.join(needs)}." if needs else "")
    )


def _cells(one: dict[str, Any]) -> list[str]:
    return [
        one["name"], one["task"], one["method"], _peers(one["peers"]).partition(" peer")[0], _count(one["params"]),
        amount(one["round_bytes"]), "-" if one["memory"] is None else amount(one["memory"]), one["device"],
        one["swarm"][:SHOWN_ID],
    ]  # fmt: skip


def _peers(count: int) -> str:
    return f"{count} or more peers" if count >= MAX_MEMBERS else f"{count} peer{'' if count == 1 else 's'}"


def _count(number: int) -> str:
    for unit, size in ((" G", 1e9), (" M", 1e6), (" k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
