"""Events of a swarm that is watched: types, and the JSON lines that ``--json`` prints and
``--record`` keeps.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shoal.node.console import dumps
from shoal.swarm.changes import MAX_PARTS, ChangePart
from shoal.swarm.errors import ShoalError
from shoal.swarm.topics.receipts import Receipts
from shoal.swarm.topics.status import Status
from shoal.swarm.wire.envelope import PeerId, Reason, SwarmId

MAX_LINE = 64 * 1024  # characters


class WatchError(ShoalError):
    """Failure to watch a swarm, or to read or write a recording of one."""


class _Event(BaseModel):
    """Base of events. ``time``: of reception, Unix seconds."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    time: Annotated[float, Field(ge=0)]


class Watching(_Event):
    """First event: the swarm that is watched."""

    event: Literal["watching"] = "watching"
    swarm: SwarmId


class Described(_Event):
    """Settings that the creator fixed for the swarm, from its manifest."""

    event: Literal["described"] = "described"
    name: Annotated[str, Field(max_length=64)]
    task: Annotated[str, Field(max_length=1024)]
    method: Annotated[str, Field(max_length=64)]
    fragments: Annotated[int, Field(ge=1, le=1024)] = 1


class Connected(_Event):
    """New connection of this watcher to ``peer``."""

    event: Literal["connected"] = "connected"
    peer: Annotated[str, Field(max_length=64)]


class Disconnected(_Event):
    """Lost connection to ``peer``."""

    event: Literal["disconnected"] = "disconnected"
    peer: Annotated[str, Field(max_length=64)]


class Unreachable(_Event):
    """Failed connection to ``peer``."""

    event: Literal["unreachable"] = "unreachable"
    peer: Annotated[str, Field(max_length=64)]
    reason: Reason


class BootstrapNode(_Event):
    """A connected peer that answered as a bootstrap node does."""

    event: Literal["bootstrap"] = "bootstrap"
    peer: Annotated[str, Field(max_length=64)]


class Changed(_Event):
    """All that the creator has changed of the swarm's settings, with a valid signature."""

    event: Literal["changed"] = "changed"
    parts: Annotated[tuple[ChangePart, ...], Field(min_length=1, max_length=MAX_PARTS)]


class Heard(_Event):
    """Status of a node, with a valid signature."""

    event: Literal["status"] = "status"
    peer: PeerId
    status: Status


class Signed(_Event):
    """Work of others that a node has signed for, with a valid signature."""

    event: Literal["receipts"] = "receipts"
    peer: PeerId
    receipts: Receipts


class MessageRefused(_Event):
    """Event of a refused message; ``reason`` is one word, as in `shoal.swarm.gossip`."""

    event: Literal["refused"] = "refused"
    reason: Annotated[str, Field(max_length=64)]


Event = (
    Watching
    | Described
    | Connected
    | Disconnected
    | Unreachable
    | BootstrapNode
    | Changed
    | Heard
    | Signed
    | MessageRefused
)
_any: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


def line_of(event: Event) -> str:
    return dumps(event.model_dump(mode="json"))


def event_of(line: str, where: str = "the recording") -> Event:
    """Decode the event in ``line``.

    Raises WatchError if it is none; ``where`` names the place for the sentence.
    """
    if len(line) > MAX_LINE:
        raise WatchError(
            f"Cannot replay: {where} is longer than {MAX_LINE} characters: give a file that "
            "--record wrote."
        )
    try:
        return _any.validate_json(line)
    except ValidationError as error:
        what = error.errors(include_url=False, include_context=False, include_input=False)[0]["msg"]
        said = ascii(what)[1:-1][:120]
        raise WatchError(
            f"Cannot replay: {where} is no event ({said}): give a file that --record wrote."
        ) from None
