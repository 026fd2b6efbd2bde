"""Who is slow or failing in a swarm, and which partitions are suspected, with a remedy for each.

By what the members report of themselves and of each other (`shoal.swarm.wire.messages.Member`). One
peer's word does not prove another's fault: a failing member is named by at least two others, or by
itself; otherwise the fault is of the pair.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from statistics import median_low

from shoal.swarm.figures import duration
from shoal.swarm.wire.envelope import Failure
from shoal.swarm.wire.messages import Member

# Multiple of the median inner step (of two the quicker's): in rounds of steps the quicker partner
# then waits half of its time.
SLOW_STEP_FACTOR = 2.0
# Multiple of the median exchange, and seconds beyond it, because on a quick network three times
# almost nothing is harmless.
SLOW_EXCHANGE_FACTOR = 3.0
SLOW_EXCHANGE_S = 1.0
# One crash causes one or two failures for its partners, which needs no report.
MIN_FAILURES = 3
MIN_FAILURE_SHARE = 0.25  # of the exchanges
MIN_ACCUSERS = 2
# Three renewals of a record: half of the time after which a silent peer is no longer a member.
SILENT_S = 15.0

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
    "unreachable": (
        f"partners {FAILED['unreachable']}",
        "who has stopped is forgotten within half a minute; if they still run, `shoal doctor LINK` "
        "on both machines shows which port to open",
    ),
    "nobody": (
        "nobody else is here",
        "give others the link (`shoal link` shows a node's, `session.link` that of a loop of "
        "yours); if they run already, `shoal doctor LINK` shows what is in the way",
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
    found: list[str] = []
    suspecting: list[Member] = []
    for member in members.values():
        if (member.missing, member.missing_of) == (1, 2):
            found.append(
                f"{member.name} has nobody left: {', '.join(member.missing_names)} stopped without "
                "leaving, or is cut off."
            )
        elif member.missing:
            suspecting.append(member)
    if not suspecting:
        return found
    most = max(suspecting, key=lambda member: (member.missing, member.name))
    names = ", ".join(most.missing_names)
    if most.missing > len(most.missing_names):
        names += ", …"
    said = (
        f"A partition is suspected: {most.missing} of {most.missing_of} members vanished within "
        f"{most.missing_within_s:.0f} s ({names}), says "
        f"{_and(member.name for member in suspecting)}; training goes on, and they come together "
        "again by themselves."
    )
    return [*found, said]


def _silent(members: Mapping[str, Member], now: float) -> list[str]:
    return [
        f"{member.name} has not been heard of for {duration(round(now - member.issued))}: it may "
        "be asleep, stopped or cut off, and the sums still count it."
        for member in members.values()
        if now - member.issued > SILENT_S
    ]


def partner_remedy(reason: str, speeds: Iterable[float], *, in_seconds: bool) -> str:
    """Return what to do where rounds have no partner for ``reason``, a key of `PARTNERLESS`.

    ``speeds``: the members' inner steps a second. Only where these differ, and a round is so many
    steps, do nodes miss each other for their speed, and only then would rounds of seconds help.
    """
    known = [speed for speed in speeds if speed > 0]
    if reason != "taken" or in_seconds or not known or max(known) < SLOW_STEP_FACTOR * min(known):
        return PARTNERLESS[reason][1]
    return (
        f"the quickest member is {max(known) / min(known):.1f} times as quick as the slowest: a "
        "swarm with --round seconds:auto would suit them"
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
        f"rounds or more ({PARTNERLESS[reason][0]}); "
        f"{partner_remedy(reason, speeds, in_seconds=in_seconds)}."
        for reason, those in sorted(of_reason.items())
    ]


def _erring(members: Mapping[str, Member]) -> list[str]:
    return [
        f"{member.name} met {member.internal_errors:,} error{'s' * (member.internal_errors > 1)} "
        "of its own, in the code of shoal or of its task and not in the network: node.log in its "
        "folder has the traceback; please report it."
        for member in members.values()
        if member.internal_errors
    ]


def _unreachable(members: Mapping[str, Member]) -> list[str]:
    return [
        f"{member.name} can be dialled by nobody and has no relay, so it exchanges only with those "
        f"that it can dial: {REMEDY['unreachable']}."
        for member in members.values()
        if member.reach == "unreachable"
    ]


def _slow(members: Mapping[str, Member], in_seconds: bool) -> list[str]:
    rest = (
        "free its processor, or begin a swarm with --round seconds:auto, in which nobody waits "
        "for it"
    )
    if in_seconds:
        rest = "it makes fewer steps in a round, and nobody waits for it"
    steps = {
        peer: 1 / member.steps_per_s for peer, member in members.items() if member.steps_per_s > 0
    }
    found = []
    usual = median_low(steps.values()) if steps else 0.0
    for peer, seconds in steps.items():
        if seconds > SLOW_STEP_FACTOR * usual:
            found.append(
                f"{members[peer].name} is slow: an inner step takes it {duration(seconds)}, "
                f"{seconds / usual:.1f} times the median of all ({duration(usual)}); {rest}."
            )
    return found + _slow_links(members)


def _slow_links(members: Mapping[str, Member]) -> list[str]:
    moves = {peer: member.exchange_s for peer, member in members.items() if member.exchange_s > 0}
    found = []
    usual = median_low(moves.values()) if moves else 0.0
    for peer, seconds in moves.items():
        if seconds > max(SLOW_EXCHANGE_FACTOR * usual, usual + SLOW_EXCHANGE_S):
            found.append(
                f"{members[peer].name} has a slow link: an exchange takes it {duration(seconds)}, "
                f"{seconds / usual:.1f} times the median of all ({duration(usual)}); a smaller "
                "codec (--codec int8), or a better link, would help."
            )
    return found


def _failing(members: Mapping[str, Member]) -> list[str]:
    accused: defaultdict[str, Counter[Failure]] = defaultdict(Counter)
    accusers: defaultdict[str, set[str]] = defaultdict(set)
    for peer, member in members.items():
        for other, kind, count in member.blamed:
            if other in members and other != peer:
                accused[other][kind] += count
                accusers[other].add(peer)
    failing = set()
    for peer in members:
        if len(accusers[peer]) >= MIN_ACCUSERS and accused[peer].total() >= MIN_FAILURES:
            failing.add(peer)
    found = []
    if len(failing) > max(len(members) / 2, 2):
        kinds = sum((accused[peer] for peer in failing), Counter[Failure]())
        return [
            f"{len(failing)} of {len(members)} members fail with each other ({_kinds(kinds)}), so "
            "none is to blame: look after what they share, as the bootstrap node that relays for "
            "them."
        ]
    for peer in members:
        if peer in failing:
            (kind, _), *_ = accused[peer].most_common(1)
            found.append(
                f"{members[peer].name} fails: {len(accusers[peer])} of {len(members) - 1} others "
                f"met {_kinds(accused[peer])} with it; {REMEDY[kind]}."
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
    least = max(MIN_FAILURES, MIN_FAILURE_SHARE * member.recent)
    if peer in failing or left.total() < least:
        return []
    worst = max(of_pair, key=lambda other: (of_pair[other].total(), other), default=None)
    if worst is not None and 2 * of_pair[worst].total() > left.total():
        back = any(other == peer for other, _, _ in members[worst].blamed)
        if back and worst < peer:  # reported for the other one
            return []
        (kind, _), *_ = of_pair[worst].most_common(1)
        return [
            f"{member.name} and {members[worst].name} fail with each other: {member.name} met "
            f"{_kinds(of_pair[worst])} in its last {member.recent} exchanges; {REMEDY[kind]}."
        ]
    (kind, _), *_ = left.most_common(1)
    return [
        f"{member.name} fails: of its last {member.recent} exchanges it met {_kinds(left)}; "
        f"{REMEDY[kind]}."
    ]


def _kinds(counts: Counter[Failure]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in counts.most_common())


def _and(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
