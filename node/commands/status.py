"""``shoal status``: show a swarm without being a member, and what a node here has refused, by its
metrics.

That is in no record for other peers: this node may be wrong, and no peer should learn exactly what
another refuses.

``shoal link``: the newest link of a node here.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from shoal.node.config.links import LINK
from shoal.node.console import plural
from shoal.node.console import table as grid
from shoal.swarm.access.link import Link
from shoal.swarm.errors import LinkError, printable
from shoal.swarm.figures import duration
from shoal.swarm.membership.change_exchange import newest_change
from shoal.swarm.membership.clock_check import ASK_S, clock_problem, compare_clocks
from shoal.swarm.membership.link_addresses import lasting_link
from shoal.swarm.membership.overview import changes_said, overview, totals_said
from shoal.swarm.membership.visit import connected, open_directory
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.stream import short
from shoal.swarm.refusals import listed
from shoal.swarm.topics.status import lag_label, reach_label, tokens_label
from shoal.swarm.wire.messages import Member

STALE_S = 120.0  # seconds without a new link after which its node may have ended
MAX_BYTES = 64 * 1024
RUNS = Path("runs")


def folder_of(name: str | None, folder: Path | None) -> Path | None:
    """Return the folder of the node that the user names, as `shoal.node.config.settings` places it.

    Raises LinkError.
    """
    if name is None:
        return folder
    if folder is not None:
        raise LinkError("Pass either --name or --folder.")
    if name in ("", ".", "..") or Path(name).name != name:
        raise LinkError(f"{name[:80]!r} is no name of a node: pass --folder to name a folder.")
    return RUNS / name


def current_link(folder: Path | None, now: float | None = None) -> dict[str, Any]:
    """Return the link that the node of ``folder`` wrote last, and notes about it; by default of the
    newest below ``runs``.

    Raises LinkError: there is none, or it is unreadable.
    """
    path = folder / LINK if folder is not None else _newest(RUNS)
    if path is None:
        raise LinkError(
            "No folder runs/NAME here has a link: name the folder of a node with --folder, or "
            "start one (shoal join)."
        )
    saved = _saved_link(path)
    age = (time.time() if now is None else now) - saved["written"]
    invite_only = saved["invite_only"]
    notes = []
    if age > STALE_S:
        notes.append(
            f"The node of {str(path.parent)!r} wrote this link {_ago(age)} ago and may have ended; "
            "the link works while a peer in it is there."
        )
    if invite_only:
        notes.append(
            "This swarm is by invitation only: the link shows it, and its creator admits others "
            "(shoal invite LINK)."
        )
    return {
        "link": saved["link"],
        "name": saved["name"],
        "folder": str(path.parent),
        "invite_only": invite_only,
        "notes": notes,
    }


def _saved_link(path: Path) -> dict[str, Any]:
    """Return what the file of a node's link holds. Raises LinkError."""
    try:
        with path.open(encoding="utf-8") as file:
            saved = json.loads(file.read(MAX_BYTES))
        return {
            "link": str(Link.parse(str(saved["link"]))),
            "written": float(saved["written"]),
            "name": str(saved["name"]),
            "invite_only": bool(saved["invite_only"]),
        }
    except FileNotFoundError:
        raise LinkError(
            f"There is no link in {str(path.parent)!r}: name the folder of a node, such as "
            "runs/NAME."
        ) from None
    except OSError as error:
        raise LinkError(
            f"Cannot read {str(path)!r} ({error.strerror}): check its permissions."
        ) from error
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise LinkError(
            f"The file {str(path)!r} is damaged: start its node again, which writes it anew."
        ) from error


def _newest(runs: Path) -> Path | None:
    files = [(path.stat().st_mtime, path) for path in runs.glob(f"*/{LINK}")]
    return max(files)[1] if files else None


def _ago(seconds: float) -> str:
    if seconds >= 2 * 86_400:
        return f"{seconds / 86_400:.0f} days"
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.0f} hours"
    return f"{seconds / 60:.0f} minutes"


COLUMNS = (
    "name",
    "peer",
    "state",
    "round",
    "step",
    "loss",
    "s/step",
    "tokens/s",
    "exchange",
    "wait",
    "lag",
    "failed",
    "shard",
    "reach",
    "seen",
)
TALLY = ("peer", "range", "exchanges", "shares", "tokens", "rollouts", "reward", "votes")
MOST = 64  # members that the table shows
WIDTH = 200  # characters
# columns that are no numbers
WORDS = ("name", "peer", "state", "failed", "shard", "reach", "seen", "end", "unused groups")


def read_status(link: Link) -> dict[str, Any]:
    """Return the overview of the swarm of ``link``.

    Raises StartupError, NetworkError, MessageError or AdmissionError.
    """
    with connected(link) as (identity, host, manifest):
        # Members are not known yet, and with a wrong clock never.
        clocks = host.submit(compare_clocks(host, host.entry()))
        with closing(open_directory(identity, host, link, manifest)) as directory:
            members = directory.members()
            size = directory.size()
            departed = directory.departed()
            change = newest_change(host, link.swarm, manifest, members)
        lasting = link_to_those_there(link, host, members)
        seen = clocks.result(2 * ASK_S)
    view = overview(link.swarm, manifest, members, time.time(), size, change, departed)
    view["link"] = str(lasting)
    view["invite_only"] = manifest.invite_only
    problem = clock_problem(seen)
    if problem:
        view["findings"] = [problem[:1].upper() + problem[1:], *view["findings"]]
    return view


def link_to_those_there(link: Link, host: Host, members: Mapping[str, Member]) -> Link:
    """Return a link to the swarm of ``link`` by its members, bootstrap nodes, and the addresses of
    ``link`` that answered a visitor's ``host``: none of the dead.
    """
    answered: list[str] = []
    for address in link.bootstrap:
        if address.rpartition("/p2p/")[2] in host.met:
            answered.append(address)
    return lasting_link(link.swarm, members, seeds=host.seeds(), met=host.met, otherwise=answered)


def table(report: dict[str, Any]) -> str:
    """Return the report in words: a table, and below it the health report in sentences."""
    about = "about " if report["totals"]["sampled"] else ""
    title = (
        f"{report['name']}: {report['task']} with {report['method']}, "
        f"{about}{plural(report['peers'], 'peer')}"
    )
    members = report["members"][:MOST]
    rows = [_cells(member, report["fragments"]) for member in members]
    columns: tuple[str, ...] = COLUMNS
    if any(member["progress"]["finished"] or member["end"] for member in members):
        columns = (*COLUMNS, "end")
        rows = [[*cells, _end(member)] for cells, member in zip(rows, members, strict=True)]
    if any(member.get("rollouts") for member in members):
        columns = (*columns, "unused groups")
        rows = [[*cells, _unused(member)] for cells, member in zip(rows, members, strict=True)]
    shown = grid(columns, rows, words=WORDS, width=WIDTH, title=title)
    # One line each, whatever the terminal's width, so that sentences can be copied.
    lines = [shown]
    left = len(report["members"]) - MOST
    if left > 0:
        lines.append(f"{left} more members are in view; --json lists all of them.")
    lines.append(totals_said(report["totals"]))
    if report["optimizer"] == "muon":
        lines.append(
            "Inner optimizer: Muon and AdamW (`shoal doctor LINK --parameters` names what each "
            "trains)."
        )
    lines += changes_said(report["changes"])
    lines += [printable(sentence) for sentence in report["findings"]]
    lines.append(link_line(report["link"], invite_only=report["invite_only"]))
    return "\n".join(lines)


def _cells(member: dict[str, Any], fragments: int) -> list[str]:
    progress = member["progress"]
    exchanges = member["exchanges"]
    link = member["link"]
    loss = member["loss"]["training"]
    speed = progress["steps_per_s"]
    return [
        member["name"],
        short(member["peer"]),
        progress["state"],
        str(progress["round"] // fragments),
        str(progress["step"]),
        "-" if loss is None else f"{loss:.4f}",
        _seconds(1 / speed if speed else None),
        tokens_label(progress["tokens_per_s"], progress["mfu"]),
        _seconds(exchanges["exchange_s"]),
        _seconds(exchanges["round_wait_s"]),
        lag_label(exchanges["lag_steps"], exchanges["lag_auto"], exchanges["late"]),
        _failed(member["faults"]),
        member["shard"],
        reach_label(link["reach"], link["bytes_per_s"]),
        f"{member['seen_s_ago']:.0f} s",
    ]


def _unused(member: dict[str, Any]) -> str:
    """Return which share of groups of rollouts was of no use, and the most frequent reason."""
    rollouts = member.get("rollouts")
    if not rollouts:
        return "-"
    return f"{100 * rollouts['unused_share']:.0f} %, most {rollouts['unused_most']}"


def tally_table(tally: dict[str, Any]) -> str:
    """Return a node's tally in words: the sums, and a row for each partner."""
    if not tally["partners"]:
        return (
            "Nobody has confirmed work of this node yet: partners sign for it within seconds of "
            "an exchange."
        )
    rows = [(short(one["peer"]), one["range"], *_work(one)) for one in tally["of"][:MOST]]
    total = (plural(tally["partners"], "peer"), f"{tally['ranges']:,} in all", *_work(tally))
    said = (
        "Signed by those partners. Keys cost nothing, so several can be one person's; address "
        "ranges cost more.\n"
    )
    said += (
        "exchanges: one for each fragment of a round; shares: of a group of n, each of the n - "
        "1 others has one part of n - 1."
    )
    return f"{grid(TALLY, [*rows, total], words=('peer', 'range'), width=120)}\n{said}"


def _work(work: dict[str, Any]) -> list[str]:
    names = ("exchanges", "rounds", "tokens", "rollouts", "reward", "votes")
    return [f"{work[name]:,.3g}" if name == "reward" else f"{work[name]:,.0f}" for name in names]


def link_line(link: str, *, invite_only: bool) -> str:
    """Return the line that shows a link to copy; it never has an invitation."""
    if invite_only:
        return f"Link, to look (its creator invites members: shoal invite): {link}"
    return f"Link: {link}"


RECENT_S = 600.0  # "recently"


def read_refusals(path: Path, now: float | None = None) -> dict[str, Any]:
    """Return what the newest run in the metrics ``path`` refused, in all and in the 10 minutes
    before ``now`` (Unix). LinkError.
    """
    since = (time.time() if now is None else now) - RECENT_S
    total: dict[str, int] = {}
    before: dict[str, int] = {}
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for event in _refusal_events(lines):
                if event["event"] == "start":
                    total = {}
                    before = total
                    continue
                total = {name: event[name] for name in event.keys() - {"event", "time"}}
                if event["time"] < since:
                    before = total
    except OSError as error:
        raise LinkError(
            f"Cannot read {str(path)!r} ({error.strerror}): name the folder of a node on this "
            "machine, such as runs/NAME."
        ) from error
    return {"recent_s": RECENT_S, "recent": dict(Counter(total) - Counter(before)), "total": total}


def _refusal_events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of metrics that begin a run, or say what was refused so far."""
    for line in lines:
        if '"event": "start"' not in line and '"event": "refused"' not in line:
            continue
        # the node was killed while it wrote this line, or is writing it now
        with suppress(ValueError):
            event = json.loads(line)
            if event["event"] in ("start", "refused"):
                yield event


def refusals_said(found: Mapping[str, Any]) -> str:
    """Describe the result of `read_refusals` for people."""
    if not found["total"]:
        return "This node has refused nothing of others since it started."
    recent = listed(found["recent"]) or "nothing"
    minutes = found["recent_s"] / 60
    return (
        f"This node refused, in the last {minutes:.0f} minutes: {recent}; since it started: "
        f"{listed(found['total'])}."
    )


def _seconds(value: float | None) -> str:
    return duration(value) if value else "-"


def _end(member: dict[str, Any]) -> str:
    """Return with whom a member averaged at its end, and how much lower its held-out loss is."""
    end = member["end"]
    if end is None:
        return "waits for others" if member["progress"]["finished"] else "-"
    if end["refused"]:
        return "own model: the mean was worse"
    if not end["members"]:
        return "own model"
    said = f"with {', '.join(end['names'])}"
    more = end["members"] - 1 - len(end["names"])
    if more > 0:
        said += f" and {more} more"
    if end["loss_before"] is not None and end["loss_after"] is not None:
        said += f": loss {end['loss_after'] - end['loss_before']:+.4f}"
    return said


def _failed(faults: dict[str, Any]) -> str:
    """Return how many exchanges failed of how many, and the most frequent kind of failure."""
    if not faults["recent"]:
        return "-"
    failures = dict(faults["failures"])
    said = f"{sum(failures.values())}/{faults['recent']}"
    if failures:
        said += f" {max(failures, key=lambda kind: failures[kind])}"
    return said
