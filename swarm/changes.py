"""Changes of a swarm that runs: what its creator signs to give all members another learning rate,
or another number of steps.

The manifest of a swarm never changes, because its hash is the swarm's id. A `Change` is a second
record of the creator, which holds all that was changed since. Each part of it says from which round
on it counts, so that all members take it at one moment, and those that come later, or return, know
what counts now. Of two records the one with the higher number counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from shoal.swarm.errors import MessageError
from shoal.swarm.manifest import Manifest
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.wire.envelope import (
    ENVELOPE,
    KIB,
    MAX_COUNT,
    Count,
    Message,
    PeerId,
    Reason,
    SwarmId,
    unseal,
)

CHANGE_PROTOCOL = "/shoal/change/1"
MAX_PARTS = 4
"""Parts of a change: what counts already is one part, so three may lie ahead."""
MIN_LR = 1e-12
CHANGEABLE = ("lr", "steps")
"""The settings of `TrainSettings` that a change may have."""
FIXED = {
    "outer": "partners compute with the same method, codec and length of rounds, and one that has "
    "another cannot meet the rest",
    "task": "the task is what all members train",
    "swarm": "the swarm's id follows from it",
    "verify": "what is claimed and checked must be the same for all from the first round on",
    "rl": "what is learnt must be the same for all from the first round on",
    "train": "the state of the inner optimizer, the data and the schedule were made with it",
}
"""Table of settings -> why a change of the swarm cannot have them."""
OWN = ("node", "peers")
"""Tables that are each node's own."""


class ChangePart(BaseModel):
    """What counts from ``round`` on; None: as before."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    round: Count
    lr: Annotated[float, Field(ge=MIN_LR, le=10)] | None = None
    steps: Count | None = None

    def settings(self) -> dict[str, Any]:
        """Return the settings that this part changes, by their names in `TrainSettings`."""
        found = {name: getattr(self, name) for name in CHANGEABLE}
        return {name: value for name, value in found.items() if value is not None}


class Change(Message):
    """All that the creator has changed of the swarm's settings of training; of one setting the
    later part counts.
    """

    KIND = "change"
    LIMIT = KIB
    AUTHOR = "creator"
    swarm: SwarmId
    creator: PeerId
    number: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    parts: Annotated[tuple[ChangePart, ...], Field(min_length=1, max_length=MAX_PARTS)]


SealedChange = Annotated[bytes, Field(max_length=Change.LIMIT + ENVELOPE)]


class ChangeRequest(Message):
    """Request for the newest change; ``change``: the sealed one that the sender has, if any."""

    KIND = "change-request"
    LIMIT = 2 * KIB
    swarm: SwarmId
    change: SealedChange = b""


class ChangeReply(Message):
    """The sealed change that the answering node has now, or nothing; ``reason``: why it did not
    take the sender's.
    """

    KIND = "change-reply"
    LIMIT = 4 * KIB
    change: SealedChange = b""
    reason: Reason = ""


def open_change(sealed: bytes, swarm: str, creator: str) -> Change:
    """Return a change of ``swarm``, verified to be its creator's. Raises MessageError."""
    signer, change = unseal(sealed, Change)
    if signer != creator:
        raise MessageError(
            "A change of the swarm's settings was refused: it was not signed by the creator of the "
            "swarm.",
            "not the creator's",
        )
    if change.swarm != swarm:
        raise MessageError(
            f"A change of the swarm's settings was refused: it is for swarm {change.swarm}.",
            "foreign-swarm",
        )
    return change


def rank_of(change: Change | None, sealed: bytes) -> tuple[int, bytes]:
    """Return what orders changes.

    The digest decides between two of one number, which a creator may sign unknowingly.
    """
    if change is None:
        return 0, b""
    return change.number, hashlib.sha256(sealed).digest()


def settings_at(change: Change | None, train: TrainSettings, round: int) -> TrainSettings:
    """Return the settings of training that count in ``round`` of a swarm whose manifest has
    ``train``.
    """
    if change is None:
        return train
    update: dict[str, Any] = {}
    for part in change.parts:
        if part.round <= round:
            update |= part.settings()
    return train.model_copy(update=update) if update else train


def changed(before: TrainSettings, now: TrainSettings) -> dict[str, Any]:
    """Return the changeable settings that are others ``now``, with their new values."""
    found = {}
    for name in CHANGEABLE:
        value = getattr(now, name)
        if value != getattr(before, name):
            found[name] = value
    return found


def extended(
    change: Change | None, manifest: Manifest, swarm: str, part: ChangePart, *, now: int, least: int
) -> Change:
    """Return ``change`` with one more part.

    ``now``: the swarm's round; ``least``: the lowest number that the result may have.

    What lies ahead stays, unless the new part changes the same setting in the same round. Raises
    ValueError, a clause: there are too many parts, or the settings do not go together any more.
    """
    known = () if change is None else change.parts
    ahead: dict[int, dict[str, Any]] = {}
    for one in (*known, part):
        ahead.setdefault(one.round, {}).update(one.settings())
    past = [round for round in sorted(ahead) if round <= now]
    parts = []
    if past:
        merged: dict[str, Any] = {}
        for round in past:
            merged |= ahead.pop(round)
        parts.append(ChangePart(round=past[-1], **merged))
    parts += [ChangePart(round=round, **ahead[round]) for round in sorted(ahead)]
    if len(parts) > MAX_PARTS:
        raise ValueError(
            f"{MAX_PARTS - 1} changes lie ahead already: wait until one of them has been taken"
        )
    number = max(least, 1 if change is None else change.number + 1)
    made = Change(swarm=swarm, creator=manifest.creator, number=number, parts=tuple(parts))
    for one in made.parts:
        _check_together(settings_at(made, manifest.train, one.round))
    return made


def _check_together(train: TrainSettings) -> None:
    """Raise ValueError if a schedule that leads to an end would have none."""
    if train.schedule in ("cosine", "wsd") and not train.steps:
        raise ValueError(f"the schedule {train.schedule} leads to an end: steps must be above 0")


def refusal(key: str, of_node: Iterable[str] = ()) -> str:
    """Return one sentence if a change cannot have the setting ``key`` (dotted), else nothing.

    ``of_node``: further settings, dotted, that each node has its own of.
    """
    table, _, name = key.partition(".")
    if table == "train" and name in CHANGEABLE:
        return ""
    if table in OWN or key in of_node:
        return (
            f"The setting {key} is each node's own: start that node again with it (--resume "
            "goes on from its checkpoint)."
        )
    able = " and ".join(f"train.{each}" for each in CHANGEABLE)
    return (
        f"The setting {key} cannot change while the swarm runs, because {FIXED[table]}; it can "
        f"change {able}. A new swarm with another value can begin with the weights of this one "
        "(shoal up --resume-from)."
    )


def described(settings: Mapping[str, Any]) -> str:
    """Return settings of training in words, such as "train.lr=0.0001, train.steps=4000"."""
    return ", ".join(f"train.{name}={value}" for name, value in settings.items())
