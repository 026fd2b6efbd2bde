"""``shoal status``: show a swarm without being a member."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.swarm.access import Link
from shoal.swarm.errors import printable
from shoal.swarm.membership.admission import connected, open_directory
from shoal.swarm.membership.link_addresses import lasting_link
from shoal.swarm.membership.overview import ASK_S, clock_problem, compare_clocks, overview, totals_said
from shoal.swarm.p2p.stream import short
from shoal.swarm.topics.status import lag_label, reach_label

COLUMNS = (
    "name", "peer", "state", "round", "step", "loss", "s/step", "tokens/s", "exchange", "wait", "lag", "failed", "shard", "reach",
    "seen",
)  # fmt: skip
TALLY = ("peer", "range", "exchanges", "rounds", "tokens", "rollouts", "reward", "votes")
MOST = 64  # members that the table shows
NUMBERS = ("round", "step", "loss", "s/step", "tokens/s", "exchange", "wait", "lag")


def read_status(link: Link) -> dict[str, Any]:
    """Return the overview of the swarm of ``link``. Raises StartupError, NetworkError, MessageError or AdmissionError."""
    with connected(link) as (identity, host, manifest):
        clocks = host.submit(compare_clocks(host, host.entry()))  # members are not known yet, and with a wrong clock never
        with closing(open_directory(identity, host, link, manifest)) as directory:
            members, size = directory.members(), directory.size()
        answered = [address for address in link.bootstrap if address.rpartition("/p2p/")[2] in host.met]  # not the dead
        lasting = lasting_link(link.swarm, members, seeds=host.seeds(), met=host.met, otherwise=answered)
        seen = clocks.result(2 * ASK_S)
    found = overview(link.swarm, manifest, members, time.time(), size)
    problem = clock_problem(seen)
    found |= {"link": str(lasting), "invite_only": manifest.invite_only}
    return {**found, "findings": [*([f"{problem[:1].upper()}{problem[1:]}"] if problem else []), *found["findings"]]}


def table(report: dict[str, Any]) -> str:
    """Return the report in words: a table, and below it the health report in sentences."""
    about = "about " if report["totals"]["sampled"] else ""
    grid = Table(title=Text(f"{report['name']}: {report['task']} with {report['method']}, {about}{_peers(report['peers'])}"))
    for column in COLUMNS:
        grid.add_column(column, justify="right" if column in NUMBERS else "left")
    for member in report["members"][:MOST]:
        loss = "-" if member["loss"] is None else f"{member['loss']:.4f}"
        cells = [
            member["name"],
            short(member["peer"]),
            member["state"],
            str(member["round"]),
            str(member["step"]),
            loss,
            _seconds(member["step_s"]),
            _tokens(member["tokens_per_s"], member["mfu"]),
            _seconds(member["exchange_s"]),
            _seconds(member["wait_s"]),
            lag_label(member["lag"], member["lag_auto"], member["late"]),
            _failed(member),
            member["shard"],
            reach_label(member["reach"], member["throughput"]),
            f"{member['seen_s_ago']:.0f} s",
        ]
        grid.add_row(*[Text(cell) for cell in cells])  # Text: a stranger's name must not be markup
    console = Console(width=170)
    with console.capture() as capture:
        console.print(grid)
    # One line each, whatever the terminal's width, so that sentences can be copied.
    muon = ["Inner optimizer: Muon and AdamW (`shoal doctor LINK --parameters` names what each trains)."]
    left = len(report["members"]) - MOST
    more = [f"{left} more members are in view; --json lists all of them."] if left > 0 else []
    inner = muon if report["optimizer"] == "muon" else []
    said = [*more, totals_said(report["totals"]), *inner, *(printable(sentence) for sentence in report["findings"])]
    return "\n".join([capture.get().rstrip(), *said, link_line(report["link"], invite_only=report["invite_only"])])


def tally_table(tally: dict[str, Any]) -> str:
    """Return a node's tally in words: the sums, and a row for each partner."""
    if not tally["partners"]:
        return "Nobody has confirmed work of this node yet: partners sign for it within seconds of an exchange."
    grid = Table()
    for column in TALLY:
        grid.add_column(column, justify="left" if column in ("peer", "range") else "right")
    for one in tally["of"][:MOST]:
        grid.add_row(*[Text(cell) for cell in (short(one["peer"]), one["range"], *_work(one))])
    grid.add_row(*[Text(cell) for cell in (_peers(tally["partners"]), f"{tally['ranges']:,} in all", *_work(tally))])
    console = Console(width=120)
    with console.capture() as capture:
        console.print(grid)
    said = "Signed by those partners. Keys cost nothing, so several can be one person's; address ranges cost more."
    return f"{capture.get().rstrip()}\n{said}"


def _work(work: dict[str, Any]) -> list[str]:
    names = ("exchanges", "rounds", "tokens", "rollouts", "reward", "votes")
    return [f"{work[name]:,.3g}" if name == "reward" else f"{work[name]:,.0f}" for name in names]


def link_line(link: str, *, invite_only: bool) -> str:
    """Return the line that shows a link to copy; it never has an invitation."""
    return f"Link{', to look (its creator invites members: shoal invite)' if invite_only else ''}: {link}"


def _peers(count: int) -> str:
    return f"{count:,} peer{'' if count == 1 else 's'}"


def _seconds(value: float | None) -> str:
    return f"{value:.3g} s" if value else "-"


def _tokens(tokens_per_s: float, mfu: float | None) -> str:
    """Return tokens a second without waiting, and the share of the GPU's peak where it is known."""
    return "-" if not tokens_per_s else f"{tokens_per_s:,.0f}" + ("" if mfu is None else f" ({100 * mfu:.0f} % MFU)")


def _failed(member: dict[str, Any]) -> str:
    """Return how many exchanges failed of how many, and the most frequent kind of failure."""
    failures: dict[str, int] = member["failures"]
    if not member["exchanges"]:
        return "-"
    worst = f" {max(failures, key=lambda kind: failures[kind])}" if failures else ""
    return f"{sum(failures.values())}/{member['exchanges']}{worst}"
