"""``shoal pull --average``: the mean of the newest weights of all members that can be reached.

Each member's snapshot is downloaded into a folder of its own and mapped from there, so that main
memory holds one mean, in float32, and one tensor in float64, however many members there are; the
disk holds all snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from shoal.node.console import plural
from shoal.optim.codecs.base import all_finite
from shoal.swarm.errors import ShoalError
from shoal.swarm.p2p.stream import short
from shoal.swarm.state.download import Peer
from shoal.swarm.wire.messages import Member, StateHeader

MOST = 64
"""Members that are asked, at most."""
WORSE = 0.1
"""Share of the median's held-out loss beyond which a member's weights are left out."""

Fetched = tuple[StateHeader, list[Tensor]]


@dataclass
class Part:
    """One member, and whether its weights are in the mean; ready for JSON."""

    peer: str
    name: str
    round: int | None = None
    loss: float | None = None
    """Held-out loss of its weights, nats; None where it was not computed."""
    left_out: str = ""
    """Why its weights are not in the mean, for people."""


@dataclass
class Average:
    """The mean, and what it is made of."""

    header: StateHeader
    """Of the newest snapshot in it."""
    tensors: list[Tensor]
    parts: list[Part] = field(default_factory=list)

    def report(self) -> list[dict[str, Any]]:
        return [asdict(part) for part in self.parts]

    @property
    def used(self) -> int:
        """The number of members in the mean."""
        return sum(not part.left_out for part in self.parts)

    def note(self) -> str:
        """Return a sentence for the model card."""
        return f"The weights are the mean of the newest ones of {plural(self.used, 'member')}."


def average(
    sources: Sequence[Peer],
    members: Mapping[str, Member],
    fetch: Callable[[int, Peer], Fetched],
    held_out_loss: Callable[[Sequence[Tensor]], float] | None,
    say: Callable[[str], None] = lambda line: None,
    fragments: int = 1,
) -> Average:
    """Return the mean of what ``fetch(number, source)`` brings from each of ``sources``.

    A member that cannot be reached, or whose weights do not fit or are not finite, is left out;
    with ``held_out_loss`` also one whose loss lies more than `WORSE` above the median.

    Raises what ``fetch`` raised for the first member, if no member's weights can be used.
    """
    parts = []
    usable: list[tuple[Part, Fetched]] = []
    problem: ShoalError | None = None
    for number, source in enumerate(sources[:MOST]):
        peer = source[0]
        member = members.get(peer)
        part = Part(peer, member.name if member is not None else short(peer))
        parts.append(part)
        try:
            header, tensors = fetch(number, source)
        except ShoalError as error:
            part.left_out = str(error).rstrip(".")
            problem = problem or error
            continue
        part.round = header.round
        if not all_finite(tensors):
            part.left_out = "its weights hold NaN or infinity"
            continue
        if held_out_loss is not None:
            part.loss = held_out_loss(tensors)
        say(_said(part, part.round // fragments))
        usable.append((part, (header, tensors)))
    _leave_out_worst([part for part, _ in usable])
    used = [fetched for part, fetched in usable if not part.left_out]
    if not used:
        raise problem or ShoalError(
            "No member has weights that are finite: the training of this swarm has failed."
        )
    newest = max((header for header, _ in used), key=lambda header: header.round)
    columns = zip(*(tensors for _, tensors in used), strict=True)
    return Average(newest, [_mean(column) for column in columns], parts)


def _leave_out_worst(parts: Sequence[Part]) -> None:
    """Leave out those whose held-out loss is known, and far above the median, or no number."""
    losses = [part.loss for part in parts if part.loss is not None]
    if not losses:
        return
    bound = median_low(losses) + WORSE * abs(median_low(losses))
    for part in parts:
        if part.loss is not None and not part.loss <= bound:
            part.left_out = "its held-out loss is more than a tenth above the median's"


def _said(part: Part, rounds: int) -> str:
    loss = "" if part.loss is None else f", held-out loss {part.loss:.4f}"
    return f"{part.name}: weights after {plural(rounds, 'round')}{loss}"


@torch.no_grad()
def _mean(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].double()
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total.div_(len(tensors)).float()


def lines(parts: Sequence[Mapping[str, Any]], mean_loss: float | None) -> Iterator[str]:
    """Yield lines about ``parts`` (`Average.report`) and the mean, for people."""
    used = [part for part in parts if not part["left_out"]]
    names = ", ".join(part["name"] for part in used[:8])
    more = f" and {len(used) - 8} more" if len(used) > 8 else ""
    yield f"mean of {plural(len(used), 'member')}: {names}{more}"
    losses = [part["loss"] for part in used if part["loss"] is not None]
    if losses and mean_loss is not None:
        each = ", ".join(f"{loss:.4f}" for loss in losses[:8])
        yield f"held-out losses of each: {each}; of the mean: {mean_loss:.4f}"
        if round(mean_loss, 4) > round(min(losses), 4):
            yield "the mean is worse than the best member: their weights may lie far apart still"
    for part in parts:
        if part["left_out"]:
            yield f"without {part['name']}: {part['left_out']}"
