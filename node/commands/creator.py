"""What only the creator of a swarm can do, with the key by which it was made: invitations, and
changes of a swarm that runs.
"""

from __future__ import annotations

import difflib
import json
import re
import reprlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from statistics import median_low
from typing import Any

from pydantic import ValidationError

from shoal.node.commands.status import MAX_BYTES, RUNS, link_to_those_there
from shoal.node.config.links import LINK
from shoal.node.config.node_settings import default_identity_path
from shoal.node.config.settings import ConfigError, known_keys
from shoal.node.config.train_settings import OwnTraining
from shoal.node.console import plural
from shoal.swarm.access.invitation import invited, issue
from shoal.swarm.access.link import Link
from shoal.swarm.changes import ChangePart, described, extended, refusal
from shoal.swarm.errors import AdmissionError, IdentityError, NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Manifest
from shoal.swarm.membership.change_exchange import asking_order, newest_of, swap_with
from shoal.swarm.membership.last_step import at_their_end, still_training
from shoal.swarm.membership.visit import connected, open_directory, visited
from shoal.swarm.p2p.addresses import of_ranges
from shoal.swarm.p2p.host import Host
from shoal.swarm.training.partition_detector import some
from shoal.swarm.wire.envelope import MAX_COUNT, seal
from shoal.swarm.wire.messages import Member

# -- the creator's key -----------------------------------------------------------------------------

MAX_NODES = 256  # folders of nodes below runs/ that are looked at


def creator_key(manifest: Manifest, given: Path | None, what: str) -> Identity:
    """Return the key by which the swarm of ``manifest`` was made.

    Without a file ``given`` it is the default one, or that of a node whose folder is below runs/
    here, whichever is the creator's. ``what``: what only the creator can do, for people.

    Raises IdentityError: the given file cannot be read. AdmissionError: no such key is the
    creator's.
    """
    lost = "if it is lost, begin a new swarm (shoal up --resume-from)"
    if given is not None:
        identity = Identity.load(given)
        if identity.peer_id != manifest.creator:
            raise AdmissionError(
                f"Only the swarm's creator, {manifest.creator}, can {what}, and the key in {given} "
                f"is {identity.peer_id}: name the creator's key file with --identity; {lost}."
            )
        return identity
    looked = list(dict.fromkeys([default_identity_path(), *_keys_of_nodes(RUNS)]))
    for path in looked:
        with suppress(IdentityError):
            identity = Identity.load(path)
            if identity.peer_id == manifest.creator:
                return identity
    files = ", ".join(str(path) for path in looked[:4]) + (", …" if len(looked) > 4 else "")
    raise AdmissionError(
        f"Only the swarm's creator, {manifest.creator}, can {what}, and none of the key files that "
        f"were looked at is that one ({files}): name the one with which `shoal up` made the swarm "
        f"by --identity; {lost}."
    )


def _keys_of_nodes(runs: Path) -> list[Path]:
    """Return the key files of the nodes whose folders are in ``runs``, the newest first."""
    files = sorted(runs.glob(f"*/{LINK}"), key=_modified, reverse=True)[:MAX_NODES]
    found = []
    for file in files:
        with (
            suppress(OSError, ValueError, TypeError, KeyError, RecursionError),
            file.open(encoding="utf-8") as opened,
        ):
            found.append(Path(json.loads(opened.read(MAX_BYTES))["identity"]))
    return found


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


# -- invitations -----------------------------------------------------------------------------------

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
MAX_LIFE_S = 10 * 366 * 86_400


def seconds(text: str) -> float:
    """Return the seconds in ``text``, such as 30m, 12h, 7d or 2w. Raises AdmissionError."""
    parts = re.fullmatch(r"([0-9]{1,9})([smhdw])", text)
    life = int(parts[1]) * UNITS[parts[2]] if parts else 0
    if not 0 < life <= MAX_LIFE_S:
        raise AdmissionError(
            f"--expires {text[:40]!a} is no time up to ten years: write it such as 30m, 12h, 7d or "
            "2w."
        )
    return float(life)


def invite(
    link: Link, path: Path | None, *, uses: int, peer: str | None, lives: float
) -> dict[str, Any]:
    """Return a link to who is there of the swarm of ``link``, with an invitation by its creator's
    key (`creator_key`), and its terms.

    Raises:
        IdentityError, StartupError, NetworkError, MessageError.
        AdmissionError: the swarm is open, or no key here is its creator's.
    """
    with connected(link) as (visitor, host, manifest):
        identity = inviting_key(manifest, path)
        with closing(open_directory(visitor, host, link, manifest)) as directory:
            there = link_to_those_there(link, host, directory.members()).bootstrap
    now = time.time()
    invitation = issue(identity, link.swarm, lives=lives, uses=uses, peer=peer, now=now)
    return {
        "link": str(_inviting(link.swarm, there, invitation)),
        "swarm": link.swarm,
        "uses": uses,
        "peer": peer,
        "expires": now + lives,
    }


def inviting_key(manifest: Manifest, path: Path | None) -> Identity:
    """Return the creator's key.

    AdmissionError: the swarm of ``manifest`` is open, or no key here is its creator's.
    """
    if not manifest.invite_only:
        raise AdmissionError(
            f"The swarm {manifest.name!r} is open, so its link needs no invitation: share the "
            "link, or make a swarm with `shoal up --invite-only`."
        )
    return creator_key(manifest, path, "invite")


VISIT_S = 86_400.0  # for which the creator's key invites a command of this machine


def admitted(link: Link, manifest: Manifest, peer: str) -> Link:
    """Return a link by which ``peer``, a command that looks into the swarm of ``link``, may fetch
    weights: where an invitation is needed, the creator's key makes it if it is on this machine.

    AdmissionError: one is needed, the link has none or another peer's, and that key is not here.
    """
    if not manifest.invite_only:
        return link
    invited_peer = invited(link.invite)
    if link.invite and invited_peer in (None, peer):
        return link
    try:
        identity = creator_key(manifest, None, "invite")
    except AdmissionError:
        why = f"The swarm {manifest.name!r} gives its weights by invitation only"
        if invited_peer is not None:
            why = (
                f"The invitation in the link is for peer {invited_peer} alone, and this command "
                f"counts as a peer of its own in the swarm {manifest.name!r}"
            )
        raise AdmissionError(
            f"{why}: pull where its creator's node runs, or by a link that the creator makes for "
            "this (`shoal invite`)."
        ) from None
    invitation = issue(identity, link.swarm, lives=VISIT_S, peer=peer)
    return _inviting(link.swarm, link.bootstrap, invitation)


def _inviting(swarm: str, addresses: Sequence[str], invitation: str) -> Link:
    """Return a link with the invitation, and as many addresses as fit beside it."""
    return Link(swarm, tuple(addresses[:1]), invitation).also(addresses[1:])


# -- changes ---------------------------------------------------------------------------------------

MOST_ASKED = 64  # members that are asked, and get the change; the others take it from them
NEXT = 1  # rounds from now on at which a change counts, if no round is named


def wanted(assigned: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `ChangePart` of dotted settings.

    ConfigError names the first that a change cannot have.
    """
    if not assigned:
        raise ConfigError(
            "Nothing would change: name a setting, such as --set train.lr=1e-4 or --set "
            "train.steps=4000."
        )
    for key in assigned:
        _check_changeable(key)
    fields = {key.partition(".")[2]: value for key, value in assigned.items()}
    try:
        ChangePart(round=0, **fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        what = re.sub(r"^Input should", "it should", first["msg"])
        raise ConfigError(
            f"The setting train.{name}={reprlib.repr(fields[name])} cannot be used: {what}."
        ) from None
    return fields


def _check_changeable(key: str) -> None:
    """Raise ConfigError if a change cannot have the setting ``key`` (dotted)."""
    known = known_keys()
    if key not in known and not key.startswith("task.options."):
        near = difflib.get_close_matches(key, known, 1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "`shoal change --help` names them."
        raise ConfigError(f"There is no setting {key!r}: {hint}")
    of_node = [f"train.{name}" for name in OwnTraining.model_fields]
    problem = refusal(key, of_node)
    if problem:
        raise ConfigError(problem)


def change(
    link: Link, assigned: Mapping[str, Any], path: Path | None, at: int | None = None
) -> dict[str, Any]:
    """Change settings of the swarm of ``link`` for all its members, from round ``at`` on (None: the
    next); return what was done.

    Raises:
        ConfigError: a setting that cannot be changed, or not so; a round that is over.
        AdmissionError, IdentityError: no key here is the creator's.
        StartupError, NetworkError, MessageError: the swarm is not reached, or no member took the
            change.
    """
    fields = wanted(assigned)
    return _changed(link, lambda manifest, members, round: fields, _said_of_change, path, at)


def end(link: Link, path: Path | None, at: int | None = None) -> dict[str, Any]:
    """End the run of the swarm of ``link`` in round ``at`` (None: the next): a change of its steps.

    Raises as `change`.
    """
    return _changed(link, _steps_to_end, _said_of_end, path, at)


def _steps_to_end(
    manifest: Manifest, members: Mapping[str, Member], round: int
) -> Mapping[str, Any]:
    """Return the steps at which members end that take them in ``round``: all in that round, also
    who came late, and so has done fewer steps than its round says.
    """
    every = manifest.outer.resolved().every
    if manifest.outer.round != "steps" or not every:
        return {"steps": max(min(member.step for member in members.values()), 1)}
    fragments = manifest.outer.fragments_a_round
    behind = min(member.step - member.round // fragments * every for member in members.values())
    return {"steps": max(round * every + min(behind, 0), 1)}


def _changed(
    link: Link,
    fields_of: Callable[[Manifest, Mapping[str, Member], int], Mapping[str, Any]],
    said_of: Callable[[Manifest, Mapping[str, Member], ChangePart], str],
    path: Path | None,
    at: int | None,
) -> dict[str, Any]:
    """Make the change of the fields that ``fields_of`` returns for the manifest, the members and
    the round.

    ``said_of``: returns what the change does, for people.
    """
    with visited(link) as (host, manifest, members, _):
        identity = creator_key(manifest, path, "change its settings")
        asked = asking_order(members.values(), host.met)[:MOST_ASKED]
        replies, _ = swap_with(host, link.swarm, asked, b"")
        there = still_training({peer: members[peer] for peer in replies})
        if not there:
            raise NetworkError(
                "No member of the swarm is there to take the change, or all have done their last "
                "step: start a node first, or try again."
            )
        now = _round_of(manifest, there.values(), host.met)
        if at is not None and at <= now:
            raise ConfigError(
                f"Round {at} is over, for the swarm is in round {now}: leave --at out, or name a "
                "later one."
            )
        last = MAX_COUNT // (manifest.outer.resolved().every or 1)
        if at is not None and at > last:
            raise ConfigError(
                f"The last round that --at can name is {last}: leave it out, or name an earlier "
                "one."
            )
        before = newest_of(replies.values(), link.swarm, manifest)
        round = now + NEXT if at is None else at
        part = ChangePart(round=round, **fields_of(manifest, there, round))
        try:
            made = extended(before, manifest, link.swarm, part, now=now, least=int(time.time()))
        except ValueError as error:
            raise ConfigError(f"The swarm's settings cannot change so: {error}.") from None
        told, problems = _tell(host, link.swarm, list(there.values()), seal(made, identity))
        if not told:
            raise NetworkError(
                f"No member took the change ({next(iter(problems), 'none answered')}): try again."
            )
    report = _report(said_of(manifest, there, part), part, members, told, now)
    newest = 0 if before is None else before.number
    unserved = [member for member in members.values() if member.change > newest]
    if unserved:
        report["said"] += (
            f" {plural(len(unserved), 'member')} stated an earlier change that nobody served: if "
            "you made one, set its values again, for this change replaces it."
        )
    return report


def _round_of(manifest: Manifest, members: Iterable[Member], met: Mapping[str, str]) -> int:
    """Return the round that the swarm is in: the lower median of ``members``, with one vote for
    each address range at which some were ``met``.

    It is bounded so that the next round and its steps are counts.
    """
    fragments = manifest.outer.fragments_a_round
    every = manifest.outer.resolved().every or 1
    rounds = ((member.peer, member.round // fragments) for member in members)
    return min(median_low(of_ranges(rounds, met)), MAX_COUNT // every - NEXT)


def _tell(
    host: Host, swarm: str, members: Sequence[Member], sealed: bytes
) -> tuple[list[str], list[str]]:
    """Hand a change to members; return which took it, and what was wrong with the others."""
    replies, problems = swap_with(host, swarm, members, sealed)
    took = []
    for peer, reply in replies.items():
        if reply.change == sealed:
            took.append(peer)
        else:
            problems.append(reply.reason.rstrip(".") or "a member has another change")
    return took, problems


def _said_of_change(manifest: Manifest, members: Mapping[str, Member], part: ChangePart) -> str:
    every = manifest.outer.resolved().every
    said = f"{described(part.settings())} from round {part.round} on"
    if manifest.outer.round == "steps" and every:
        said += f", which begins at step {part.round * every:,} of a member of the first round"
    over = [member for member in members.values() if part.steps and member.step >= part.steps]
    if over:
        said += f" ({plural(len(over), 'member')} did as many steps already, and will end then)"
    return said


def _said_of_end(manifest: Manifest, members: Mapping[str, Member], part: ChangePart) -> str:
    return (
        f"the run ends in round {part.round}, for members that came late too "
        f"({described(part.settings())})"
    )


def _report(
    head: str, part: ChangePart, members: Mapping[str, Member], told: list[str], now: int
) -> dict[str, Any]:
    """Return what was done, ready for JSON, with a sentence for people that begins with ``head``.

    Members whose last step is done follow no change.
    """
    training = len(still_training(members))
    said = (
        f"{head}; the swarm is in round {now}. {len(told)} of {plural(training, 'member')} took "
        "the change"
    )
    said += "." if len(told) == training else ", and the others take it from them."
    ended = sorted(member.name for member in at_their_end(members).values())
    if ended:
        said += f" It does not reach {some(ended)}, whose last step is done."
    return {
        "changed": part.settings(),
        "round": part.round,
        "now": now,
        "told": len(told),
        "members": training,
        "said": said,
    }
