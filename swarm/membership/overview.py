"""Overview of a swarm from the records of its members, for ``shoal status`` and
`shoal.swarm.training.session.Session.status`.

The health report says who is slow or failing, with a remedy for each, and which partitions are
suspected, by what the members report of themselves and of each other
(`shoal.swarm.wire.messages.Member`). One peer's word does not prove another's fault: a failing
member is named by at least two others, or by itself; otherwise the fault is of the pair.

Also this machine's clock against those of other peers, and whether they can dial it. The records of
a swarm are dated, and the DHT drops those that seem to be of the past or of the future. So a node
whose clock is wrong sees nobody, or is seen by nobody, and trains alone; it is told so, and what to
do, for as long as that lasts. Its directory meanwhile goes by the clock of the majority, as far as
the DHT, which has this machine's, lets it: it dates records by it, and is in the epoch that the
others are in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, median_high, median_low
from typing import TYPE_CHECKING, Any

from shoal.swarm.changes import CHANGEABLE, Change, described
from shoal.swarm.errors import ShoalError
from shoal.swarm.figures import duration
from shoal.swarm.manifest import Manifest
from shoal.swarm.membership.dht import AHEAD
from shoal.swarm.p2p.addresses import by_peer, host_of, known_first, of_ranges
from shoal.swarm.p2p.reachability import DIAL_PROTOCOL, DialBackView, ask, dialled_port, reach_of
from shoal.swarm.wire.envelope import Failure
from shoal.swarm.wire.messages import Member

if TYPE_CHECKING:
    from shoal.swarm.membership.directory import Directory
    from shoal.swarm.p2p.host import Host

# seconds by which clocks may differ: hivemind's DHT, which holds the membership, refuses more
CLOCK_S = 3.0
ASKED = 3  # peers whose clocks are read; the median of three stands one that lies
# seconds for one answer, and for one after a dial
ASK_S = 5.0
DIAL_S = 10.0
PATIENCE_S = 1.0  # seconds for the others to answer once one has
LOOK_S = (
    5.0  # seconds between two looks at the own addresses: when they change, others are asked again
)
FIRST_S = 10.0  # seconds to the first comparison
# seconds to the next one while this node is alone or its clock wrong, and while all is well
SOON_S = 60.0
LATER_S = 600.0

log = logging.getLogger(__name__)


def clock_skew(seen: Sequence[DialBackView], met: Mapping[str, str] | None = None) -> float:
    """Return the seconds that this machine's clock is behind that of the peers that answered; 0.0
    if that does no harm.

    Of two that differ that one counts which is nearer to this machine: two against one are more
    than one against one. ``met``: the hosts of peers, of which each address range has one voice,
    because keys cost nothing.
    """
    if not seen:
        return 0.0
    skews = of_ranges(((view.peer, view.skew) for view in seen), met or {})
    low = median_low(skews)
    high = median_high(skews)
    skew = 0.0 if low < 0 < high else min(low, high, key=abs)
    return 0.0 if abs(skew) <= CLOCK_S + max(view.error for view in seen) else skew


def clock_problem(seen: Sequence[DialBackView], met: Mapping[str, str] | None = None) -> str:
    """Return one sentence if this machine's clock is not that of the peers that answered; else, or
    without answers, nothing.
    """
    if not (skew := clock_skew(seen, met)):
        return ""
    off = f"{min(abs(skew), 1e9):.1f} s"
    way = "behind" if skew > 0 else "ahead of"
    if len(seen) == 1:
        return (
            f"this machine's clock is {off} {way} that of the only peer that answered, so yours or "
            "theirs is wrong: set both by "
            "NTP (`timedatectl set-ntp true`), or records are refused."
        )
    return (
        f"this machine's clock is {off} {way} that of {len(seen)} peers: set it by NTP "
        "(`timedatectl set-ntp true`), "
        "or its records are refused."
    )


async def compare_clocks(
    host: Host, peers: Iterable[str], port: int | None = None
) -> list[DialBackView]:
    """Return what a bootstrap node and the first of ``peers`` that answer say of their clocks;
    takes `ASK_S` seconds at most.

    ``port``: have up to twice as many dial it too, which takes `DIAL_S`. On the host's loop.
    """
    seeds = host.seeds()
    loop = asyncio.get_running_loop()
    seen: list[DialBackView] = []

    async def one(peer: str) -> None:
        try:
            with contextlib.closing(
                await host.open(peer, DIAL_PROTOCOL, addresses=seeds.get(peer, ()), timeout=ASK_S)
            ) as stream:
                seen.append(await ask(stream, port))
        except (ShoalError, OSError, EOFError) as error:
            log.debug("a clock was not read: %r", error)
        except Exception as error:  # one answer must not end the comparison
            host.internal_errors.caught("clock", error)
        if seen and port is None and not limit.expired():
            limit.reschedule(
                min(limit.when() or 0.0, loop.time() + (PATIENCE_S if len(seen) < ASKED else 0.0))
            )

    asked = list(dict.fromkeys([*list(seeds)[:1], *peers, *seeds]))[: 2 * ASKED]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ASK_S if port is None else DIAL_S) as limit:
            await asyncio.gather(*map(one, asked))
    return seen


class ClockCheck:
    """Comparisons of a member's clock with others', and dials by them, from time to time until
    `close`.
    """

    def __init__(self, host: Host, directory: Directory) -> None:
        self._host = host
        self._directory = directory
        self._unread = ""
        self._running = host.submit(self._run())

    def news(self) -> str:
        """Return one sentence after each comparison that found the clock wrong; else nothing.

        For any thread.
        """
        found = self._unread
        self._unread = ""
        return found

    def close(self) -> None:
        self._running.cancel()

    async def _run(self) -> None:
        await asyncio.sleep(FIRST_S)
        loop = asyncio.get_running_loop()
        while True:
            addresses = self._host.addresses()
            try:
                members = self._directory.everyone().items()
                claimed = [
                    (peer, host_of(next(iter(member.addresses), ""))) for peer, member in members
                ]
                others = known_first(
                    ((peer, host) for peer, host in claimed if peer != self._host.peer_id),
                    self._host.met,
                )
                asked = [
                    *others,
                    *self._host.entry(),
                    *by_peer(self._host.known()),
                ]  # with a wrong clock no member is listed
                seen = await compare_clocks(self._host, asked, dialled_port(addresses))
                self._directory.dialled = reach_of(seen, addresses) or self._directory.dialled
                problem = self._take(seen)
                pause = SOON_S if problem or not others else LATER_S
            except Exception as error:  # a bug must not end the node
                self._host.internal_errors.caught("clock", error)
                pause = LATER_S
            end = loop.time() + pause
            while loop.time() < end and self._host.addresses() == addresses:
                await asyncio.sleep(min(LOOK_S, pause))

    def _take(self, seen: Sequence[DialBackView]) -> bool:
        """Keep what to say of a comparison, go by the clock of the majority, and return whether
        this machine's is wrong.
        """
        problem = clock_problem(seen, self._host.met)
        skew = clock_skew(seen, self._host.met)
        self._unread = f"This node cannot meet the others: {problem}" if problem else ""
        if len(seen) < ASKED and skew:  # one or two peers are no majority
            return True
        if seen and abs(skew) <= AHEAD:
            self._directory.skew = skew
            if skew:
                self._unread += (
                    " Until then it dates its records, and counts epochs, by their clock."
                )
        return bool(problem)


SLOW_STEP = 2.0
"""Multiple of the median inner step (of two the quicker's).

In rounds of steps the quicker partner then waits half of its time.
"""
SLOW_EXCHANGE = 3.0
SLOW_EXCHANGE_S = 1.0
"""Multiple of the median exchange, and seconds beyond it, because on a quick network three times
almost nothing is harmless.
"""
FAILS = 3
FAILS_SHARE = 0.25
"""Failures, and their share of the exchanges: one crash causes one or two for its partners, which
needs no report.
"""
SILENT_S = 15.0
"""Three renewals of a record: half of the time after which a silent peer is no longer a member."""

REMEDY: dict[str, str] = {
    "unreachable": "open the port given by --listen, check --announce, or give the swarm a "
    "bootstrap node with --relay",
    "timeout": "its machine or its link is too slow, or asleep: free it, or leave it out",
    "refused": "see its log and theirs for the reason: another version, other options, a ban, or "
    "an error of its own",
    "broken": "its connection ends in the middle of transfers: look after its link, and whether "
    "its machine runs out of memory",
    "damaged": "what it sends is not whole or not finite: check its machine and its version of "
    "shoal",
    "suspicious": "its contributions lie far from the others': let it join anew, or leave it out "
    "if you do not know whose it is",
}

FAILED: dict[Failure, str] = {
    "unreachable": "could not be reached",
    "timeout": "did not answer in time",
    "refused": "refused",
    "broken": "broke off",
    "damaged": "sent damaged bytes",
    "suspicious": "sent weights that are too far away",
}
"""What a peer did with which an exchange failed, for people."""
PARTNERLESS: dict[str, tuple[str, str]] = {
    **{kind: (f"partners {did}", REMEDY[kind]) for kind, did in FAILED.items()},
    "nobody": (
        "nobody else is here",
        "give others the link (`shoal link` shows a node's, `session.link` that of a loop of "
        "yours); if they run already, "
        "`shoal doctor LINK` shows what is in the way",
    ),
    "model": (
        "all others train another model",
        "start all nodes with the same model, which this swarm averages",
    ),
    "taken": (
        "all others were taken, or in other rounds",
        "`shoal status` shows in which rounds they are; a node that is behind or ahead comes to "
        "them by itself",
    ),
}
"""Reason why rounds have no partner -> in words, and what to do."""


def health_report(
    members: Mapping[str, Member], now: float, *, in_seconds: bool = False
) -> list[str]:
    """Return sentences about ``members`` (peer id -> record) at ``now`` (Unix seconds); none if all
    is well.

    ``in_seconds``: the swarm's rounds last so many seconds, not steps, so nobody waits for a slow
    member.
    """
    there = dict(sorted(members.items(), key=lambda item: (item[1].name, item[0])))
    found = [
        *_partition(there),
        *_silent(there, now),
        *_slow(there, in_seconds),
        *_failing(there),
        *_erring(there),
        *_partnerless(there, in_seconds),
    ]
    return [*found, *_unreachable(there)]


def _partition(members: Mapping[str, Member]) -> list[str]:
    suspecting = [member for member in members.values() if member.missing]
    if not suspecting:
        return []
    most = max(suspecting, key=lambda member: (member.missing, member.name))
    names = ", ".join(most.missing_names) + (
        ", …" if most.missing > len(most.missing_names) else ""
    )
    return [
        f"A partition is suspected: {most.missing} of {most.missing_of} members vanished within "
        f"{most.missing_within_s:.0f} s "
        f"({names}), says {_and(member.name for member in suspecting)}; training goes on, and they "
        "come together again by "
        "themselves."
    ]


def _silent(members: Mapping[str, Member], now: float) -> list[str]:
    return [
        f"{member.name} has not been heard of for {duration(round(now - member.issued))}: it may "
        "be asleep, stopped or cut off."
        for member in members.values()
        if now - member.issued > SILENT_S
    ]


def partner_remedy(reason: str, speeds: Iterable[float], *, in_seconds: bool) -> str:
    """Return what to do where rounds have no partner for ``reason``, a key of `PARTNERLESS`.

    ``speeds``: the members' inner steps a second. Only where these differ, and a round is so many
    steps, do nodes miss each other for their speed, and only then would rounds of seconds help.
    """
    known = [speed for speed in speeds if speed > 0]
    if reason != "taken" or in_seconds or not known or max(known) < SLOW_STEP * min(known):
        return PARTNERLESS[reason][1]
    return (
        f"the quickest member is {max(known) / min(known):.1f} times as quick as the slowest: a "
        "swarm with --round seconds:auto "
        "would suit them"
    )


def _partnerless(members: Mapping[str, Member], in_seconds: bool) -> list[str]:
    """Return a sentence for each reason: in a small swarm it is often that of several members."""
    of_reason: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for member in members.values():
        if member.partnerless is not None:
            reason, rounds = member.partnerless
            of_reason[reason].append((member.name, rounds))
    speeds = [member.steps_per_s for member in members.values()]
    return [
        f"{_and(name for name, _ in those)} had no partner in {min(rounds for _, rounds in those)} "
        "rounds or more "
        f"({PARTNERLESS[reason][0]}); {partner_remedy(reason, speeds, in_seconds=in_seconds)}."
        for reason, those in sorted(of_reason.items())
    ]


def _erring(members: Mapping[str, Member]) -> list[str]:
    return [
        f"{member.name} met {member.internal_errors:,} error{'s' * (member.internal_errors > 1)} "
        "of its own, in the code "
        "of shoal or of its task and not in the network: node.log in its folder has the traceback; "
        "please report it."
        for member in members.values()
        if member.internal_errors
    ]


def _unreachable(members: Mapping[str, Member]) -> list[str]:
    return [
        f"{member.name} can be dialled by nobody and has no relay, so it exchanges only with those "
        "that it can dial: "
        f"{REMEDY['unreachable']}."
        for member in members.values()
        if member.reach == "unreachable"
    ]


def _slow(members: Mapping[str, Member], in_seconds: bool) -> list[str]:
    rest = (
        "free its processor, or begin a swarm with --round seconds:auto, in which nobody waits "
        "for it"
    )
    rest = "it makes fewer steps in a round, and nobody waits for it" if in_seconds else rest
    steps = {
        peer: 1 / member.steps_per_s for peer, member in members.items() if member.steps_per_s > 0
    }
    moves = {peer: member.exchange_s for peer, member in members.items() if member.exchange_s > 0}
    step, move = (median_low(seconds.values()) if seconds else 0.0 for seconds in (steps, moves))
    found = [
        f"{members[peer].name} is slow: an inner step takes it {duration(seconds)}, "
        f"{seconds / step:.1f} times the "
        f"median of all ({duration(step)}); {rest}."
        for peer, seconds in steps.items()
        if seconds > SLOW_STEP * step
    ]
    return found + [
        f"{members[peer].name} has a slow link: an exchange takes it {duration(seconds)}, "
        f"{seconds / move:.1f} times the "
        f"median of all ({duration(move)}); a smaller codec (--codec int8), or a better link, "
        "would help."
        for peer, seconds in moves.items()
        if seconds > max(SLOW_EXCHANGE * move, move + SLOW_EXCHANGE_S)
    ]


def _failing(members: Mapping[str, Member]) -> list[str]:
    accused: defaultdict[str, Counter[Failure]] = defaultdict(Counter)
    accusers: defaultdict[str, set[str]] = defaultdict(set)
    for peer, member in members.items():
        for other, kind, count in member.blamed:
            if other in members and other != peer:
                accused[other][kind] += count
                accusers[other].add(peer)
    failing = {
        peer for peer in members if len(accusers[peer]) >= 2 and accused[peer].total() >= FAILS
    }
    found = []
    if len(failing) > max(len(members) / 2, 2):
        kinds = sum((accused[peer] for peer in failing), Counter[Failure]())
        return [
            f"{len(failing)} of {len(members)} members fail with each other ({_kinds(kinds)}), so "
            "none is to blame: look "
            "after what they share, as the bootstrap node that relays for them."
        ]
    for peer in members:
        if peer in failing:
            (kind, _), *_ = accused[peer].most_common(1)
            found.append(
                f"{members[peer].name} fails: {len(accusers[peer])} of {len(members) - 1} others "
                "met "
                f"{_kinds(accused[peer])} with it; {REMEDY[kind]}."
            )
    for peer, member in members.items():
        found += _own(peer, member, members, failing)
    return found


def _own(peer: str, member: Member, members: Mapping[str, Member], failing: set[str]) -> list[str]:
    """Return sentences about the failures that ``member`` reports itself, except those that are
    others' fault.
    """
    theirs: Counter[Failure] = Counter()
    of_pair: defaultdict[str, Counter[Failure]] = defaultdict(Counter)
    for other, kind, count in member.blamed:
        if other in failing or other not in members:  # reported already, or gone
            theirs[kind] += count
        else:
            of_pair[other][kind] += count
    left = Counter(dict(member.failures)) - theirs
    if peer in failing or left.total() < FAILS or left.total() < FAILS_SHARE * member.exchanges:
        return []
    worst = max(of_pair, key=lambda other: (of_pair[other].total(), other), default=None)
    if worst is not None and 2 * of_pair[worst].total() > left.total():
        back = any(other == peer for other, _, _ in members[worst].blamed)
        if back and worst < peer:  # reported for the other one
            return []
        (kind, _), *_ = of_pair[worst].most_common(1)
        return [
            f"{member.name} and {members[worst].name} fail with each other: {member.name} met "
            f"{_kinds(of_pair[worst])} "
            f"in its last {member.exchanges} exchanges; {REMEDY[kind]}."
        ]
    (kind, _), *_ = left.most_common(1)
    return [
        f"{member.name} fails: of its last {member.exchanges} exchanges it met {_kinds(left)}; "
        f"{REMEDY[kind]}."
    ]


def _kinds(counts: Counter[Failure]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in counts.most_common())


def _and(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


SHOWN = (
    "name",
    "peer",
    "state",
    "step",
    "loss",
    "steps_per_s",
    "tokens_per_s",
    "mfu",
    "exchange_s",
    "wait_s",
    "lag",
    "lag_auto",
    "late",
    "exchanges",
    "internal_errors",
    "reach",
    "throughput",
    "version",
    "ended",
)
"""Fields of a record that are shown as they are."""
# standard error, of fewer than 16 in view, beyond which a number of peers says more than is known
ROUGH = 0.25


def totals(members: Mapping[str, Member], size: int) -> dict[str, Any]:
    """Return what the whole swarm of about ``size`` peers does, by its ``members`` in view, ready
    for JSON.

    Where these are a sample, sums are theirs times the share that they are, and ``error`` is the
    standard error of the size as a part of it, as far as chance makes it: peers fall into buckets
    like balls into boxes. ``loss`` is the median.
    """
    sampled = size > len(members)
    training = [member for member in members.values() if member.state == "training"]
    losses = [member.loss for member in members.values() if member.loss is not None]
    scale = size / max(len(members), 1)
    return {
        "peers": size,
        "listed": len(members),
        "sampled": sampled,
        "error": round(math.sqrt(1 / max(len(members), 1)), 3) if sampled else 0.0,
        "training": round(len(training) * scale),
        "tokens_per_s": sum(member.tokens_per_s for member in training) * scale,
        "steps_per_s": fmean(member.steps_per_s for member in training) if training else None,
        "loss": median(losses) if losses else None,
    }


def totals_said(found: Mapping[str, Any]) -> str:
    """Return `totals` in one sentence, which says so where they are estimates."""
    number = f"{found['peers']:,} peer{'' if found['peers'] == 1 else 's'}"
    if found["sampled"]:
        number = (
            f"About {number} (± {100 * found['error']:.0f} %), estimated from the "
            f"{found['listed']} in view"
        )
        if found["error"] > ROUGH:
            least, most = (
                found["peers"] * (1 + 2 * error) for error in (-found["error"], found["error"])
            )
            number = (
                f"{max(least, found['listed']):,.0f} to {most:,.0f} peers; the "
                f"{found['listed']} in view say no more"
            )
    said = [f"{found['tokens_per_s']:,.0f} tokens a second in all"] if found["tokens_per_s"] else []
    said += [f"median loss {found['loss']:.4f}"] if found["loss"] is not None else []
    return f"{number}{': ' if said else ''}{', '.join(said)}."


def changes_shown(change: Change | None, members: Mapping[str, Member]) -> list[dict[str, Any]]:
    """Return what the creator has changed, ready for JSON: from which round on, and how many
    ``members`` have the change.
    """
    if change is None:
        return []
    have = sum(member.change >= change.number for member in members.values())
    return [
        {"round": part.round, **part.settings(), "members": have, "of": len(members)}
        for part in change.parts
    ]


def changes_said(changes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return `changes_shown` in sentences."""
    found = []
    for one in changes:
        settings = {name: one[name] for name in CHANGEABLE if name in one}
        found.append(
            f"Changed by the creator, from round {one['round']} on: {described(settings)} "
            f"({one['members']} of {one['of']} members "
            "have the change)."
        )
    return found


def _by_name(member: Member) -> tuple[str, str]:
    return member.name, member.peer


def overview(
    swarm: str,
    manifest: Manifest,
    members: Mapping[str, Member],
    now: float,
    size: int | None = None,
    change: Change | None = None,
    departed: Mapping[str, Member] | None = None,
) -> dict[str, Any]:
    """Return the swarm, its ``members`` (peer id -> record) at ``now`` (Unix seconds) and the
    health report, ready for JSON.

    ``size``: of the whole swarm, if ``members`` are a part of it. In a round each fragment is
    exchanged. ``change``: the newest of its settings. ``departed``: who left lately; of these the
    ones that came to their end are shown too.
    """
    ended = [member for member in (departed or {}).values() if member.end is not None]
    shown = sorted(members.values(), key=_by_name) + sorted(ended, key=_by_name)
    fragments = int(manifest.outer.overlap().get("fragments", 1))
    return {
        "swarm": swarm,
        "name": manifest.name,
        "task": manifest.task,
        "method": manifest.outer.method,
        "every": manifest.outer.resolved().every,
        "optimizer": manifest.train.optimizer,
        "changes": changes_shown(change, members),
        "peers": len(members) if size is None else size,
        "totals": totals(members, len(members) if size is None else size),
        "members": [
            {
                **{name: getattr(member, name) for name in SHOWN},
                "round": member.round // fragments,
                "step_s": 1 / member.steps_per_s if member.steps_per_s else None,
                "failures": dict(member.failures),
                "missing": list(member.missing_names),
                "shard": f"{member.shard}/{member.shards}",
                "seen_s_ago": round(max(now - member.issued, 0.0), 1),
                "end": None if member.end is None else member.end.model_dump(mode="json"),
            }
            for member in shown
        ],
        "findings": health_report(
            members, now, in_seconds=manifest.outer.round.startswith("seconds")
        ),
    }
