"""``shoal swarms``: the public swarms that seeds list; and the choice of one of them by its
name.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from shoal.node.config.node_settings import default_identity_path
from shoal.node.config.settings import ConfigError
from shoal.node.console import dumps, plural
from shoal.node.console import table as grid
from shoal.node.tasks.text_size import BYTE_VOCABULARY, TextSize, is_within
from shoal.swarm.access.address import address_problem
from shoal.swarm.access.link import Link
from shoal.swarm.errors import LinkError, NetworkError
from shoal.swarm.figures import amount
from shoal.swarm.identity import Identity
from shoal.swarm.membership.swarm_list import MAX_MEMBERS, PublicSwarm, look
from shoal.swarm.seed.bootstrap_node import Seed

# ``shoal seed``: run a bootstrap and relay node, without torch.

LISTEN = ("/ip4/0.0.0.0/tcp/4001",)


def run_seed(
    identity: Path | None,
    *,
    listen: Sequence[str],
    announce: Sequence[str],
    relay: bool,
    as_json: bool,
) -> None:
    """Print the addresses, one a line, and serve until SIGINT or SIGTERM.

    Raises StartupError, IdentityError or InUseError.
    """
    key = Identity.load_or_create(identity or default_identity_path().with_name("seed.key"))
    printed: set[tuple[str, ...]] = set()

    def ready(addresses: tuple[str, ...]) -> None:
        usable = tuple(address for address in addresses if address_problem(address) is None)
        if usable in printed:  # a restarted daemon has the same ones
            return
        printed.add(usable)
        if as_json:
            click.echo(dumps({"peer": key.peer_id, "addresses": usable, "relay": relay}))
        else:
            click.echo("\n".join(usable))

    with key.lock():
        seed = Seed(key, listen=listen or LISTEN, announce=announce, relay=relay, on_ready=ready)
        asyncio.run(_until_stopped(seed))


async def _until_stopped(seed: Seed) -> None:
    loop = asyncio.get_running_loop()
    running = loop.create_task(seed.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        return


VARIABLE = "SHOAL_SEEDS"
MAX_SEEDS = 16
MAX_FILE_BYTES = 64 * 1024
BYTES = "bytes"
"""`shoal.node.data.tokenizer.BYTES`, whose module imports torch."""


def seeds_file() -> Path:
    """Return the file that lists seeds, one address a line, ``#`` before a comment."""
    return default_identity_path().with_name("seeds")


def known_seeds(named: Sequence[str] = (), flag: str = "--seed") -> list[str]:
    """Return the addresses of seeds: of ``named``, by ``flag``, else of the variable, else of the
    file; at most `MAX_SEEDS`.

    Raises ConfigError: there is none, or one is no full address.
    """
    of_variable = os.environ.get(VARIABLE, "").split()
    path = seeds_file()
    places = ((flag, list(named)), (VARIABLE, of_variable), (str(path), list(_lines(path))))
    for where, addresses in places:
        for address in addresses:
            if problem := address_problem(address):
                raise ConfigError(
                    f"{where}: {address[:100]!a} is no address of a bootstrap node, {problem}: "
                    "`shoal seed` prints it, with /p2p/ and its id at the end."
                )
        if addresses:
            return list(dict.fromkeys(addresses))[:MAX_SEEDS]
    raise ConfigError(
        f"No bootstrap node is known here: name one with {flag} MULTIADDR, in the variable "
        f"{VARIABLE}, or on a line of {path}. `shoal seed` prints the address of one that you run."
    )


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            text = file.read(MAX_FILE_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(
            f"Cannot read {path} ({error.strerror}): check its permissions."
        ) from error
    for line in text.splitlines():
        if address := line.partition("#")[0].strip():
            yield address


COLUMNS = (
    "name",
    "task",
    "method",
    "peers",
    "parameters",
    "sent a round",
    "memory",
    "device",
    "id",
)
WORDS = ("name", "task", "method", "device", "id")  # columns that are no numbers
BUILT_IN = ("text", "rl")
SHOWN_ID = 12
LEAST_OF_ID = 8
JOIN = "Join one by its name or the beginning of its id: shoal join NAME"
SAID = (
    "Bootstrap nodes say how many peers there are, a member what is sent and how much memory it "
    "takes."
)


def _text_parameters(options: Mapping[str, Any], reported: int) -> int:
    """Return the number of parameters to show for a swarm of the task ``text``: computed from its
    manifest's ``options``, otherwise what a member has ``reported``, which nobody checks.

    Of another tokenizer the vocabulary is unknown here: at least the rest of the model is counted.
    """
    size = TextSize(**{name: options[name] for name in TextSize._fields if name in options})
    if not all(is_within(name, value) for name, value in size._asdict().items()):
        return reported
    if options.get("tokenizer", BYTES) == BYTES:
        return size.parameter_count(BYTE_VOCABULARY)
    return max(reported, size.parameter_count(1))


def report(one: PublicSwarm) -> dict[str, Any]:
    """Return a swarm ready for JSON: sizes in bytes; ``memory`` is None where it was not
    measured.
    """
    params = one.params
    if one.title.task == "text":
        params = _text_parameters(one.options, params)
    # by the seed and the members that it named
    link = Link(one.swarm, one.addresses[:1]).also(one.addresses[1:])
    return {
        "name": one.title.name,
        "swarm": one.swarm,
        "task": one.title.task,
        "needs_task": one.title.task.partition(":")[0] not in BUILT_IN,
        "method": one.title.method,
        "peers": one.peers,
        "params": params,
        "round_bytes": one.round_bytes,
        "memory": one.memory or None,
        "device": one.device,
        "link": str(link),
    }


def list_swarms(seeds: Sequence[str]) -> dict[str, Any]:
    """Ask the seeds for their swarms. ``problems``: a sentence for each seed that did not answer.

    Raises:
        StartupError: the network daemon does not start.
        NetworkError: no seed answers.
    """
    public, problems = asyncio.run(look(seeds))
    if len(problems) == len(seeds):
        raise NetworkError("No bootstrap node answers: " + " ".join(problems))
    return {"seeds": list(seeds), "swarms": [report(one) for one in public], "problems": problems}


def chosen(name: str, swarms: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the one of ``swarms`` of that name, or whose id begins so.

    LinkError if there is none, or if there are several.
    """
    fits = [one for one in swarms if one["name"] == name]
    if not fits and len(name) >= LEAST_OF_ID:
        fits = [one for one in swarms if one["swarm"].startswith(name)]
    if not fits:
        raise LinkError(
            f"No public swarm is called {name[:80]!a}: `shoal swarms` lists those that the "
            "bootstrap nodes know."
        )
    if len(fits) > 1:
        ids = ", ".join(one["swarm"][:SHOWN_ID] for one in fits[:4])
        raise LinkError(
            f"{len(fits)} public swarms are called {name[:80]!a}: join one by the beginning of its "
            f"id ({ids})."
        )
    return fits[0]


def table(report: dict[str, Any]) -> str:
    """Return the swarms as a table, and below it what did not answer and how to join."""
    if not report["swarms"]:
        return "\n".join(
            [
                *report["problems"],
                "The bootstrap nodes list no public swarm: `shoal up --public --bootstrap "
                "MULTIADDR` makes one.",
            ]
        )
    shown = grid(COLUMNS, map(_cells, report["swarms"]), words=WORDS, width=140)
    return "\n".join([shown, *report["problems"], SAID, JOIN])


def described(one: dict[str, Any]) -> str:
    """Return what one should know before joining a swarm, in sentences."""
    needs = []
    if one["needs_task"]:
        needs.append(f"a copy of its task {one['task']} (--task)")
    if one["task"] == "text":
        needs.append("text to train on (--data; else what this machine has)")
    if one["memory"]:
        needs.append(f"{amount(one['memory'])} of memory beyond training alone")
    device = "a processor, without a GPU" if one["device"] == "cpu" else f"a GPU ({one['device']})"
    said = (
        f"{one['name']} ({one['swarm'][:SHOWN_ID]}): {one['task']} by {one['method']}, "
        f"{_peers(one['peers'])} as a bootstrap node says. As a member says, its model has "
        f"{amount(one['params'], '')} parameters, a node sends {amount(one['round_bytes'])} in a "
        f"round, and that member computes on {device}."
    )
    if needs:
        said += f" It needs {' and '.join(needs)}."
    return said


def _cells(one: dict[str, Any]) -> list[str]:
    return [
        one["name"],
        one["task"],
        one["method"],
        _peers(one["peers"]).partition(" peer")[0],
        amount(one["params"], ""),
        amount(one["round_bytes"]),
        "-" if one["memory"] is None else amount(one["memory"]),
        one["device"],
        one["swarm"][:SHOWN_ID],
    ]


def _peers(count: int) -> str:
    return f"{count} or more peers" if count >= MAX_MEMBERS else plural(count, "peer")
