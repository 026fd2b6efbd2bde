"""What a node asks of a state that it can use, and the check of what peers offer."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.optim.codecs.base import Shape
from shoal.optim.codecs.floats import FLOAT32
from shoal.swarm.errors import MessageError, ShoalError
from shoal.swarm.exchange.contribution import Outline
from shoal.swarm.p2p.stream import short
from shoal.swarm.state.snapshot import shapes_digest
from shoal.swarm.wire.envelope import MAX_COUNT, unpack_names
from shoal.swarm.wire.messages import StateHeader, StateRequest

ATTEMPTS = 3  # times that the sources are asked
PATIENCE_S = 10.0  # after the first offer in which a second peer may confirm it
LAST_ROUND = MAX_COUNT // 2  # whoever begins in it can go on for as many rounds again
ROUND_FORMAT = "<Q"


class ModelDiffersError(ShoalError):
    """This node's model has other names or shapes than the swarm's."""


@dataclass(frozen=True)
class StateQuery:
    """Query for a state that a node can use."""

    request: StateRequest
    shapes: Sequence[Shape]
    """Of the slow weights."""
    extra: Mapping[str, Sequence[Shape]] = field(default_factory=dict)
    """Shapes of what the outer rule takes over beside them, by name; a source may have less, never
    other.
    """
    equal: bool = False
    """Whether peers hold the same weights in this method."""
    confirmed: bool = True
    """Whether a second peer must confirm the weights; otherwise the latest offer will do."""
    fragments: int | None = None
    """Of this node's optimizer; None: a state without their rounds will do."""
    patience: float = PATIENCE_S
    attempts: int = ATTEMPTS
    names: Sequence[str] = ()
    """Of the parameters; without them those are not compared."""
    is_swarms: bool = False
    """Whether this node's model is known to be the swarm's."""

    def check(self, peer: str, header: StateHeader) -> None:
        """Check that an offer fits: what is allocated follows from this node's own shapes, whatever
        the peer says.

        Raises ModelDiffersError, MessageError.
        """
        self._check_model(peer, header)
        self._check_extra(peer, header)
        self._check_size(peer, header)
        self._check_rounds(peer, header)

    def wanted(self, header: StateHeader) -> int:
        """Return how many of the snapshot's first bytes are to be fetched."""
        return header.nbytes

    def _check_model(self, peer: str, header: StateHeader) -> None:
        theirs = Outline(unpack_names(header.names), header.shapes)
        difference = Outline(tuple(self.names), tuple(self.shapes)).differs(theirs)
        if difference is None:
            return
        if self.is_swarms:
            raise MessageError(
                f"peer {short(peer)} serves weights of another model than the swarm's: {difference}"
            )
        raise ModelDiffersError(
            f"This node's model does not fit the swarm: {difference} (in the swarm); use the "
            "swarm's model, task and options."
        )

    def _check_extra(self, peer: str, header: StateHeader) -> None:
        names = [name for name, _ in header.extra]
        unknown = []
        for name, digest in header.extra:
            if name not in self.extra or digest != shapes_digest(self.extra[name]):
                unknown.append(name)
        if unknown or len(set(names)) < len(names):
            raise MessageError(
                f"peer {short(peer)} serves a state {unknown or names} that does not fit this "
                "node's outer rule."
            )

    def _check_size(self, peer: str, header: StateHeader) -> None:
        shapes = list(self.shapes)
        for name, _ in header.extra:
            shapes += self.extra[name]
        if header.nbytes != FLOAT32.nbytes(shapes) or header.dtype != "float32":
            raise MessageError(
                f"peer {short(peer)} announced weights of {header.nbytes} bytes, "
                f"{FLOAT32.nbytes(shapes)} fit here."
            )

    def _check_rounds(self, peer: str, header: StateHeader) -> None:
        if len(header.applied) % struct.calcsize(ROUND_FORMAT):
            raise MessageError(f"peer {short(peer)} sent a malformed list of rounds.")
        applied = [round for (round,) in struct.iter_unpack(ROUND_FORMAT, header.applied)]
        if self.fragments is not None and len(applied) != self.fragments:
            raise MessageError(
                f"peer {short(peer)} states the rounds of {len(applied)} fragments, here are "
                f"{self.fragments}."
            )
        if header.round > LAST_ROUND or max(applied, default=0) > header.round:
            raise MessageError(
                f"peer {short(peer)} states a round that cannot be: "
                f"{max(header.round, *applied, 0)}."
            )
