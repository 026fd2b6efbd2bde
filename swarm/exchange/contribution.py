"""One peer's contribution to a round, and the attempt to have it averaged: what it sends, what came
of it, what judges the others.

`ExchangeStats` counts what failed. Its kinds of failures, as seen by the node that counts them:

    unreachable   the peers could not connect
    timeout       connected, and then nothing for longer than a deadline, or not there when its
                  group was formed
    refused       the peer said no, or called it off
    broken        the connection ended in the middle
    damaged       the received bytes are malformed, not as announced, or not finite
    suspicious    well formed, and too far from this node's own (`shoal.swarm.exchange.robust`)

That a peer is busy, or in another round, is no failure. Of each peer only the first failure in a
round counts.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import math
import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from shoal.optim.codecs.base import Codec, Shape, all_finite
from shoal.optim.codecs.floats import FLOAT32, FloatCodec
from shoal.optim.codecs.memory import buffer
from shoal.optim.codecs.mod4 import for_pairs
from shoal.optim.codecs.pair_message import PairMessage, Reading
from shoal.optim.exchange.base import Contribution, RoundKey
from shoal.optim.exchange.on_demand import OnDemand, slabs
from shoal.optim.exchange.update_screen import TRUSTING, UpdateScreen
from shoal.optim.parameters import AveragedParameters
from shoal.swarm.errors import MessageError, NetworkError, ShoalError, printable
from shoal.swarm.internal_errors import InternalError, InternalErrors, Place, TrialError
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.wire.envelope import (
    CHUNK,
    FAILURES,
    MAX_BLAMED,
    MAX_WEIGHT,
    Failure,
    Sketch,
    chunks,
    digest,
)
from shoal.swarm.wire.messages import MAX_REFUSED, Offer


class Payload:
    """Payload that is read from its beginning to its end, as often as wanted, also by several
    readers at once.

    Args:
        message: what reads the partner's payload, if the codec is one for pairs; this one is
            written when it is first read.
    """

    message: PairMessage | None = None

    def __init__(
        self,
        nbytes: int,
        whole: Callable[[], Tensor],
        tensors: Callable[[], Sequence[Tensor]],
        message: PairMessage | None = None,
    ) -> None:
        self.nbytes, self._whole, self._decoded, self.message = nbytes, whole, tensors, message

    def encoded(self) -> None:
        """Return once the codec has made it, if that is not done when it is read. Raises
        ContributionError, each time, if the codec refuses what was handed in.
        """

    @functools.cached_property
    def sha256(self) -> bytes:
        """The digest of its chunks."""
        return digest(self.blocks())

    def blocks(self) -> Iterator[memoryview]:
        """Return its chunks of 1 MiB, the last shorter."""
        return chunks(self.whole().numpy().data)

    def whole(self) -> Tensor:
        """Return all bytes as one flat tensor, which nobody may change."""
        return self._whole()

    def tensors(self) -> Sequence[Tensor]:
        """Return what the others decode, float32; `OnDemand`, or tensors that may be views into the
        payload.
        """
        return self._decoded()


class EncodedPayload(Payload):
    """Payload that ``codec`` makes of ``tensors`` once, when it is first read: in a worker thread,
    while training goes on.
    """

    def __init__(self, tensors: Sequence[Tensor], codec: Codec, shapes: Sequence[Shape]) -> None:
        self.nbytes = codec.nbytes(shapes)
        self._tensors: Sequence[Tensor] = tensors
        self._codec, self._shapes = codec, shapes
        self._made: Tensor | None = None
        self._refused: str | None = None
        self._lock = threading.Lock()

    def encoded(self) -> None:
        with self._lock:
            if self._made is None and self._refused is None:
                try:
                    with torch.no_grad():  # a setting of each thread
                        tensors = [tensor.float() for tensor in self._tensors]
                        self._made = self._codec.encode(tensors)
                except ValueError as error:
                    self._refused = str(error)
                self._tensors = ()
        if self._refused is not None:
            raise refusal(self._refused)

    def whole(self) -> Tensor:
        self.encoded()
        assert self._made is not None
        return self._made

    def tensors(self) -> Sequence[Tensor]:
        return self._codec.decode(self.whole(), self._shapes)


class BorrowedPayload(Payload):
    """Payload of plain floats that is made from ``tensors`` (on the CPU) as it is read, so nothing
    of their size is held.

    The tensors must not change while it is in use.

    Raises:
        ValueError: a finite value is too large for the codec.
    """

    def __init__(self, tensors: OnDemand, codec: FloatCodec) -> None:
        self._tensors, self._dtype = tensors.rounded(codec.dtype), codec.dtype
        self._ends = list(itertools.accumulate(math.prod(shape) for shape in tensors.shapes))
        self.nbytes = self._ends[-1] * codec.dtype.itemsize if self._ends else 0
        if codec.dtype != torch.float32:
            for place, start, stop in slabs(tensors):
                codec.check_range([tensors.values(place, start, stop)])

    def blocks(self) -> Iterator[memoryview]:
        step = CHUNK // self._dtype.itemsize
        for start in range(0, self.nbytes // self._dtype.itemsize, step):
            yield (
                self._made(start, min(start + step, self._ends[-1])).view(torch.uint8).numpy().data
            )

    def whole(self) -> Tensor:
        """Return a copy of everything."""
        flat = buffer(self.nbytes)
        data, offset = flat.numpy().data, 0
        for block in self.blocks():
            data[offset : offset + len(block)] = block
            offset += len(block)
        return flat

    def tensors(self) -> OnDemand:
        return self._tensors

    def _made(self, start: int, stop: int) -> Tensor:
        """Return the values from ``start`` to ``stop`` of all tensors together; a view where they
        are of one tensor.
        """
        pieces, place = [], bisect_right(self._ends, start)
        while start < stop:
            before = self._ends[place - 1] if place else 0
            end = min(stop, self._ends[place])
            if end > start:
                pieces.append(
                    self._tensors.values(place, start - before, end - before).to(self._dtype)
                )
            start, place = end, place + 1
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def float32_digest(tensors: Sequence[Tensor]) -> bytes:
    """Return the digest that a contribution of ``tensors`` in float32 has, whatever their type and
    device, 32 bytes.
    """
    return digest(BorrowedPayload(OnDemand(tensors), FLOAT32).blocks())


ENDED = "this node has done its last step, and is in no more rounds"
BARRED = "this node has banned its caller for a while, for what it said in verification"


@dataclass(frozen=True)
class EncodedContribution:
    """A contribution as it is sent: ``payload`` is what ``codec`` makes of tensors of
    ``shapes``.
    """

    key: RoundKey
    payload: Payload
    shapes: tuple[Shape, ...]
    codec: Codec
    weight: float
    unweighted_count: int = 0
    """How many of the first tensors get a plain mean, whatever the weights; the same at all peers
    of the method.
    """
    sketch: Sketch | None = None
    """Of the slow weights after the round that this node finished last."""

    def prepared(self) -> EncodedContribution:
        """Write and digest what is to be sent, and return this. Slow. Raises ContributionError."""
        self.payload.encoded()  # not in the digest, whose lock all payloads share
        assert self.payload.sha256
        return self

    def differs(self, theirs: Offer) -> str | None:
        """Return the reason why this cannot be averaged with the offered contribution, or None."""
        if theirs.codec != self.codec.name:
            return f"the codec is {self.codec.name} here and {theirs.codec} there"
        if theirs.fragment != self.key.fragment:
            return f"the fragment is {self.key.fragment} here and {theirs.fragment} there"
        reason = shapes_differ(self.shapes, theirs.shapes)
        if reason is None and theirs.nbytes != self.payload.nbytes:
            reason = f"the payload has {self.payload.nbytes} bytes here and {theirs.nbytes} there"
        return reason


class ContributionError(ShoalError, ValueError):
    """A contribution that cannot be sent: its values diverged, or the codec is not for them."""


def refusal(error: object) -> ContributionError:
    """Return what training is told of the ``error`` of a codec."""
    return ContributionError(f"Cannot send what was trained: {error}.")


def encode_contribution(swarm: str, contribution: Contribution) -> EncodedContribution:
    """Encode a contribution, of which tensors that are `OnDemand` are borrowed where the codec
    allows it.

    Of these, a codec's payload is made when it is first read (`EncodedPayload`), so that training
    does not wait for it.

    Raises:
        ValueError: it is of another run than ``swarm``.
        ContributionError: the codec refuses the tensors; of those that are read later `prepared`
            raises it.
    """
    key, tensors, codec = contribution.key, contribution.tensors, contribution.codec
    if key.run != swarm:
        raise ValueError(f"this exchange belongs to swarm {swarm}, the round to run {key.run}")
    shapes = tuple(
        tensors.shapes
        if isinstance(tensors, OnDemand)
        else (tuple(tensor.shape) for tensor in tensors)
    )
    try:
        payload = _encoded(contribution, shapes)
    except ContributionError:
        raise
    except ValueError as error:
        raise refusal(error) from error
    weight = min(float(contribution.weight), MAX_WEIGHT)
    return EncodedContribution(key, payload, shapes, codec, weight, contribution.unweighted_count)


def _encoded(contribution: Contribution, shapes: tuple[Shape, ...]) -> Payload:
    """Return what the codec makes of the tensors. ValueError if it refuses them."""
    tensors, codec = contribution.tensors, contribution.codec
    can_wait = isinstance(tensors, OnDemand) and tensors.on_cpu
    if isinstance(tensors, OnDemand) and isinstance(codec, FloatCodec) and can_wait:
        return BorrowedPayload(tensors, codec)
    pairs = for_pairs(codec)
    if pairs is None:
        payload = EncodedPayload(tensors, codec, shapes)
        if not can_wait:
            payload.encoded()
        return payload
    message = pairs[0].post(
        tensors if isinstance(tensors, OnDemand) else [tensor.clone() for tensor in tensors],
        pairs[1],
    )
    if len(message.own) > 8 * MAX_REFUSED:
        raise ValueError(
            f"{codec.name} cannot send {len(message.own)} blocks of 64 values at once: set "
            "more outer.fragments"
        )
    return Payload(message.nbytes, lambda: message.payload, message.tensors, message)


def model_digest(parameters: AveragedParameters) -> str:
    """Return the hex SHA-256 of the parameters' names, types and shapes.

    Peers average only if theirs are equal.
    """
    return outline_digest(Outline.of(parameters), parameters.dtypes)


@dataclass(frozen=True)
class Outline:
    """Names and shapes of a model's averaged parameters, in their order.

    Each name is empty where a model's parameters were handed in as a list. There are none at all
    where only the shapes are known.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]

    @classmethod
    def of(cls, parameters: AveragedParameters) -> Outline:
        return cls(parameters.names, parameters.shapes)

    def differs(self, theirs: Outline) -> str | None:
        """Return the first difference to the parameters of another peer, in words, or None."""
        shapes = shapes_differ(self.shapes, theirs.shapes, self.names)
        if len(self.names) != len(self.shapes) or len(theirs.names) != len(theirs.shapes):
            return shapes
        if any(self.names) == any(theirs.names):
            return _names_differ(self.names, theirs.names) or shapes
        where, other = ("here", "there") if any(self.names) else ("there", "here")
        return shapes or (
            f"the parameters have names {where} and none {other}, where a list of them is averaged "
            "in place of a module"
        )


def outline_digest(outline: Outline, dtypes: Iterable[torch.dtype]) -> str:
    """Return the `model_digest` of parameters of which only these are known."""
    rows = [
        [name, str(dtype), list(shape)]
        for name, dtype, shape in zip(outline.names, dtypes, outline.shapes, strict=True)
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _names_differ(mine: Sequence[str], theirs: Sequence[str]) -> str | None:
    """Return the first difference between two lists of names, in words, or None."""
    if len(mine) != len(theirs):
        counts = f"the model has {len(mine)} parameters here and {len(theirs)} there"
        for own, others, where in ((mine, theirs, "here"), (theirs, mine, "there")):
            lacking = set(others)
            only = next((name for name in own if name and name not in lacking), None)
            if only is not None:
                return f"{counts}: {printable(only)!r} is only {where}"
        return counts
    for number, (here, there) in enumerate(zip(mine, theirs, strict=True)):
        if here != there:
            said = f"parameter {number} is {printable(here)!r} here and {printable(there)!r} there"
            same = sorted(mine) == sorted(theirs)
            return f"{said}, the same names in another order" if same else said
    return None


def shapes_differ(
    mine: tuple[Shape, ...], theirs: tuple[Shape, ...], names: Sequence[str] = ()
) -> str | None:
    """Return the first difference between two lists of shapes, in words, or None.

    ``names``: of the tensors, here.
    """
    if len(mine) != len(theirs):
        return f"the model has {len(mine)} tensors here and {len(theirs)} there"
    for number, (here, there) in enumerate(zip(mine, theirs, strict=True)):
        if here != there:
            name = names[number] if number < len(names) else ""
            what = f"{printable(name)!r}" if name else f"tensor {number}"
            return f"{what} has shape {list(here)} here and {list(there)} there"
    return None


# exchanges that are remembered: minutes to hours of rounds, so that a mended fault is soon
# forgotten
WINDOW = 64
# transfers whose median is reported: with different partners, so that a slow link shows at its
# owner
RECENT = 8


# Exchanges in a row that went well with a peer, after which its failures before them are over.
MENDED = 2


class Problem(NamedTuple):
    """The reason, in a few words, why a contribution cannot be used."""

    kind: Failure
    text: str


def kind_of(error: NetworkError | MessageError) -> Failure:
    other: Failure = "broken" if isinstance(error, NetworkError) else "damaged"
    return next((kind for kind in FAILURES if kind == error.reason), other)


@dataclass
class ExchangeNotes:
    """What one exchange met until it was over."""

    own_error: str = ""
    """The first line of an error of this node's own code."""
    failures: list[tuple[str, Failure]] = field(default_factory=list)
    """The peers with which it failed, and how, in order of time."""
    passed: dict[str, bool] = field(default_factory=dict)
    """Where nobody could be met: peer that was passed over -> whether as slow."""


class ExchangeStats:
    """The counters of one node's exchanges. Thread-safe. ``errors``: of the node's own code.

    The key of an exchange is the one under which training handed its contribution in, also after
    that has moved to another round: several may be in flight, and each is told what was its own.
    """

    def __init__(self, errors: InternalErrors | None = None) -> None:
        self._lock = threading.Lock()
        self.errors = InternalErrors() if errors is None else errors
        self._notes = Newest[RoundKey, ExchangeNotes](WINDOW)
        self._events: deque[tuple[RoundKey, str, Failure | None]] = deque(maxlen=WINDOW)
        self._unread: deque[tuple[RoundKey, str]] = deque(maxlen=WINDOW)
        """Those of them, with no failure, in which most of what the peer sent could not be read
        yet.
        """
        self._seconds: deque[float] = deque(maxlen=RECENT)
        # Peer -> exchanges in a row that went well with it.
        self._in_a_row = Newest[str, int](WINDOW)

    def begin(self, key: RoundKey) -> None:
        """Note that exchange ``key`` begins: a node that went back has had another one of that
        number.
        """
        with self._lock:
            self._notes[key] = ExchangeNotes()

    def of(self, key: RoundKey) -> ExchangeNotes:
        """Return what exchange ``key`` has met so far."""
        with self._lock:
            return copy.deepcopy(self._notes.get(key, ExchangeNotes()))

    def _note(self, key: RoundKey) -> ExchangeNotes:
        if key not in self._notes:
            self._notes[key] = ExchangeNotes()
        return self._notes[key]

    def failed(
        self, key: RoundKey, peer: str, problem: NetworkError | MessageError | Failure
    ) -> None:
        """Count a failed exchange of round ``key`` with ``peer``."""
        kind = problem if isinstance(problem, str) else kind_of(problem)
        with self._lock:
            if not any(known == key and other == peer for known, other, _ in self._events):
                self._events.append((key, peer, kind))
            failures = self._note(key).failures
            if (peer, kind) not in failures:  # a leader may repeat who is lost without end
                failures.append((peer, kind))
            self._in_a_row[peer] = 0

    def caught(self, key: RoundKey, place: Place, error: Exception) -> None:
        """Count an error of this node's own code in exchange ``key``; no peer is to blame."""
        first = self.errors.caught(place, error)
        with self._lock:
            self._note(key).own_error = first

    def done(self, key: RoundKey, peers: Collection[str], seconds: float) -> None:
        """Count a committed exchange with ``peers`` whose bytes took ``seconds`` to move."""
        with self._lock:
            for peer in peers:
                self._in_a_row[peer] = self._in_a_row.get(peer, 0) + 1
            self._events.append((key, "", None))
            self._seconds.append(seconds)

    def unread(self, key: RoundKey, peer: str) -> None:
        """Count a committed exchange, the first with ``peer``, of which most could not be read;
        nobody is to blame for it.
        """
        with self._lock:
            self._events.append((key, peer, None))
            self._unread.append((key, peer))

    def pass_over(self, key: RoundKey, peers: Collection[str], slow: Collection[str]) -> None:
        """Note that in round ``key`` nobody can be met, for ``peers`` are passed over; the ``slow``
        ones for the time they cost.
        """
        with self._lock:
            self._note(key).passed = {peer: peer in slow for peer in sorted(peers)}

    def passed(self, key: RoundKey) -> list[tuple[str, Failure | None]]:
        """Return the peers that were passed over in exchange ``key``: how each failed last, or None
        for what it cost.
        """
        with self._lock:
            failures = {peer: kind for _, peer, kind in self._events}
        passed = self.of(key).passed
        return [(peer, None if slow else failures.get(peer)) for peer, slow in passed.items()]

    def turned_down(self) -> int:
        """Return how many peers in a row refused this node, or were rejected by it or not read,
        since its last exchange that went well.
        """
        found = set()
        with self._lock:
            for key, peer, kind in reversed(self._events):
                unread = (key, peer) in self._unread
                if kind is None and not unread:
                    break
                if unread or kind in ("refused", "suspicious"):
                    found.add(peer)
        return len(found)

    def exchange_s(self) -> float:
        """Return the seconds of transfer in one exchange, recently."""
        with self._lock:
            seconds = list(self._seconds)
        return median(seconds) if seconds else 0.0

    def report(self) -> dict[str, Any]:
        """Return the fields of `shoal.swarm.wire.record.Faults` that describe the exchanges.

        The failures with a peer are over, and not among them, once two exchanges in a row with it
        have gone well: a mended line or relay is nobody's fault any more.
        """
        with self._lock:
            events = list(self._events)
            mended = {peer for peer, count in self._in_a_row.items() if count >= MENDED}
        blamed = Counter(
            (peer, kind) for _, peer, kind in events if kind is not None and peer not in mended
        )
        kinds = Counter[Failure]()
        for (_, kind), count in blamed.items():
            kinds[kind] += count
        return {
            "recent": len(events),
            "failures": tuple((kind, kinds[kind]) for kind in FAILURES if kind in kinds),
            "blamed": tuple(
                (peer, kind, count) for (peer, kind), count in blamed.most_common(MAX_BLAMED)
            ),
        }


R = TypeVar("R")
Received = list[Tensor] | Reading
"""A decoded contribution, or one of a codec for pairs as the own weights read it."""


@dataclass
class CommitState(Generic[R]):
    """The outcome of an attempt so far: decided once, by the host's loop that commits or by the
    training thread that closes it, whichever comes first.
    """

    received: R | None = None
    """Set at the commit."""
    closed: bool = False
    """True once the training thread has gone on: nothing may be committed any more."""
    awaited: bool = False
    """True once the training thread waits for the outcome."""
    leave_out: Callable[[], bool] | None = None
    """While the transfer with a partner is under way: leaves the next round out, unless the
    transfer has just begun.
    """
    _wake: Callable[[], object] = lambda: None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def commit(self, received: R) -> bool:
        """Set the outcome, in one assignment.

        Returns False, and changes nothing, if the training thread has gone on.
        """
        with self._lock:
            if not self.closed:
                self.received = received
            return not self.closed

    def when_awaited(self, wake: Callable[[], object]) -> None:
        """Have ``wake`` called once the training thread waits for the outcome, at once if it
        does.
        """
        with self._lock:
            self._wake, awaited = wake, self.awaited
        if awaited:
            wake()

    def await_outcome(self) -> None:
        """Note that the training thread waits from now on."""
        with self._lock:
            self.awaited, wake = True, self._wake
        wake()

    def close(self) -> R | None:
        """Return the outcome; None is final.

        Waits for nothing, so that a loop that hangs holds no training thread.
        """
        with self._lock:
            self.closed = True
            return self.received


@dataclass(frozen=True)
class ExchangeAttempt(Generic[R]):
    """A contribution, its commit state, and the screen and the statistics of the node that sends
    it.
    """

    contribution: EncodedContribution
    commit: CommitState[R] = field(default_factory=CommitState)
    second: CommitState[R] = field(default_factory=CommitState)
    """That of the second exchange with the same contribution, which the middle of a chain makes."""
    screen: UpdateScreen = TRUSTING
    stats: ExchangeStats = field(default_factory=ExchangeStats)
    moved_from: RoundKey | None = None
    """The key under which training handed it in, if it has moved to another round since."""

    @property
    def key(self) -> RoundKey:
        return self.contribution.key

    @property
    def handed_in(self) -> RoundKey:
        """The key under which training handed it in, by which all that happens to it counts."""
        return self.key if self.moved_from is None else self.moved_from

    def moved_to(self, round: int) -> ExchangeAttempt[R]:
        """Return the attempt to have the same contribution averaged in another round.

        The commit states are shared.
        """
        moved = replace(self.contribution, key=replace(self.key, round=round))
        return replace(self, contribution=moved, moved_from=self.handed_in)

    def beside(self) -> ExchangeAttempt[R]:
        """Return the attempt to have the same contribution averaged in a second exchange too."""
        return replace(self, commit=self.second)

    def outcomes(self) -> tuple[R, ...]:
        """Return what was committed so far, of each exchange."""
        states = (self.commit, self.second)
        return tuple(state.received for state in states if state.received is not None)

    def close(self) -> None:
        """Let nothing be committed from now on."""
        self.commit.close()
        self.second.close()

    def leave_out(self) -> bool:
        """Leave the next round out if a transfer is under way."""
        for state in (self.commit, self.second):
            leave_out = state.leave_out
            if leave_out is not None and leave_out():
                return True
        return False

    def failed(self, peer: str, problem: NetworkError | MessageError | Failure) -> None:
        self.stats.failed(self.handed_in, peer, problem)

    def caught(self, place: Place, error: Exception) -> InternalError:
        """Count an error of this node's own code, and return what to raise in its place, to end the
        exchange.
        """
        if isinstance(error, InternalError):  # counted where it arose
            return error
        self.stats.caught(self.handed_in, place, error)
        return InternalError("this node had an error of its own")

    def problem(self, peer: str, payload: Tensor) -> tuple[Problem | None, Received]:
        """Return why the payload of ``peer`` cannot be used, or None, and what it says.

        Slow: for a worker thread.

        Raises InternalError, counted, where this node's own code failed and the payload tells
        nothing.
        """
        try:
            problem, received, tensors = self._decoded(payload)
        except Exception as error:
            raise self.caught("codec", error) from error
        if problem is not None:
            return problem, received
        try:
            own = self.contribution.payload.tensors
            distrust = self.screen.problem(self.key, own, peer, tensors)
        except TrialError as error:
            raise self.caught("trial", error.cause) from error.cause
        except Exception as error:
            raise self.caught("screen", error) from error
        return None if distrust is None else Problem("suspicious", distrust), received

    def _decoded(self, payload: Tensor) -> tuple[Problem | None, Received, Sequence[Tensor]]:
        """Return what is wrong with a payload, what it says, and the tensors in that."""
        mine, message = self.contribution, self.contribution.payload.message
        try:
            read = None if message is None else message.read(payload)
            tensors = (
                mine.codec.decode(payload, mine.shapes)
                if message is None or read is None
                else message.seen(read)
            )
        except (
            ValueError
        ) as error:  # raised by codecs at bytes that no peer of this version encodes
            return Problem("damaged", f"it is not {mine.codec.name}: {error}"), [], []
        received = tensors if read is None else read
        if not all_finite(tensors):
            return Problem("damaged", "it holds NaN or infinity"), received, tensors
        return None, received, tensors
