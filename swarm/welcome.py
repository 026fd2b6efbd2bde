"""What a newcomer asks of a member: the swarm's manifest, and the slow weights to start from.

The manifest is checked against the swarm id in the link, so any member can be asked. Weights are taken from one member, checked
for shape, size, digest and finiteness in scratch, and used as a whole or not at all.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from optim.codec import FLOAT32, Shape
from swarm.contribution import finite, shapes_differ
from swarm.digest import HashList, digest
from swarm.errors import MessageError, NetworkError, ShoalError
from swarm.fields import pack_shapes
from swarm.link import Link
from swarm.manifest import MANIFEST_PROTOCOL, Manifest, open_manifest
from swarm.messages import Answer, ManifestReply, ManifestRequest, StateHeader, StateRequest, pack, unpack

if TYPE_CHECKING:
    from swarm.host import Host
    from swarm.stream import Stream

STATE_PROTOCOL = "/shoal/state/1"
SMALL_S = 10.0  # seconds for one small message
ANSWER_S = 5.0  # seconds in which a peer that is awake says whether it will hand out its weights

log = logging.getLogger(__name__)


class ModelDiffersError(ShoalError):
    """This node's model has other shapes than the swarm's."""


class NoStateError(NetworkError):
    """A peer has no weights to hand out: it said so, or did not even answer."""


@dataclass(frozen=True)
class State:
    """Where a swarm is: slow weights (float32, CPU) before round ``round``, after ``step`` inner steps of the giver."""

    round: int
    step: int
    slow: list[Tensor]
    extra: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    """What the giver's rule shares beside them, DiLoCo's momentum for instance; float32, under the rule's own names."""
    applied: Sequence[int] = ()
    """For each fragment the round whose outcome is in it; -1: none."""


@dataclass(frozen=True)
class _Snapshot:
    """A ``State`` that no later step can change; ``payload`` is uint8."""

    round: int
    step: int
    payload: Tensor
    sha256: bytes
    extra: tuple[tuple[str, bytes], ...]
    applied: bytes


def serve_manifest(host: Host, swarm: str, sealed: bytes) -> None:
    """Hand the sealed manifest to whoever asks for this swarm."""

    async def answer(stream: Stream) -> None:
        request = unpack(await stream.receive(ManifestRequest.LIMIT, SMALL_S), ManifestRequest)
        known = request.swarm == swarm
        reason = "" if known else f"this peer belongs to swarm {swarm}"
        await stream.send(pack(ManifestReply(manifest=sealed if known else None, swarm=swarm, reason=reason)), SMALL_S)

    host.serve(MANIFEST_PROTOCOL, answer)


def fetch_manifest(host: Host, link: Link, timeout: float = 20.0) -> tuple[bytes, Manifest]:
    """Ask the peers through whom we got in, then the link's, in turn; the first that hands out this swarm's manifest will do.

    Raises:
        MessageError: none did, and one is in another swarm or speaks another version.
        NetworkError: none answered.
    """

    async def ask(peer: str, addresses: tuple[str, ...]) -> ManifestReply:
        stream = await host.open(peer, MANIFEST_PROTOCOL, addresses=addresses, timeout=SMALL_S)
        try:
            await stream.send(pack(ManifestRequest(swarm=link.swarm)), SMALL_S)
            return unpack(await stream.receive(ManifestReply.LIMIT, SMALL_S), ManifestReply)
        finally:
            stream.close()

    problem, wrong = "", None
    seeds, entry = host.seeds(), host.entry()
    sources = dict.fromkeys(entry, ()) | {a: (a,) for a in link.bootstrap if a.rpartition("/p2p/")[2] not in (*entry, *seeds)}
    for address, dial in sources.items():
        try:
            reply = host.call(ask(address.rpartition("/p2p/")[2], dial), timeout)
            if reply.manifest is not None:
                return reply.manifest, open_manifest(reply.manifest, link.swarm)
            wrong = wrong or MessageError(
                f"Wrong swarm id: the peer {address} belongs to swarm {reply.swarm}, the link asks for {link.swarm}; "
                "ask for a fresh link."
            )
        except NetworkError as error:
            problem = f"{address}: {error}"
        except MessageError as error:
            wrong = wrong or error
    if wrong is not None:
        raise wrong
    raise NetworkError(f"No peer of the link handed out the swarm's manifest ({problem}); ask for a fresh link.")


class StateServer:
    """Serves this node's slow weights; the training thread makes the snapshot, so that it is never a half-updated one."""

    def __init__(self, host: Host, swarm: str, model: str, shapes: Sequence[tuple[int, ...]]) -> None:
        self._host, self._swarm, self._model = host, swarm, model
        self._shapes = tuple(shapes)
        self._wanted: list[asyncio.Future[_Snapshot]] = []
        self.astray = False
        """This node's own weights have drifted away from the group's."""
        host.serve(STATE_PROTOCOL, self._answer)

    def offer(self, snapshot: Callable[[], State]) -> None:
        """Called by the training thread between steps; makes a snapshot only if somebody waits for one.

        Not of weights that have drifted: who waits gets them when they are the group's again.
        """
        if self._wanted and not self.astray:
            state = snapshot()
            names = sorted(state.extra)
            tensors = [*state.slow, *(tensor for name in names for tensor in state.extra[name])]
            payload = FLOAT32.encode(tensors)  # here, for the next step changes the weights
            extra = tuple((name, _shapes_digest([tuple(t.shape) for t in state.extra[name]])) for name in names)
            applied = struct.pack(f"<{len(state.applied)}Q", *(round + 1 for round in state.applied))
            taken = _Snapshot(state.round, state.step, payload, digest(payload.numpy().data), extra, applied)
            self._host.call(self._hand_out(taken), SMALL_S)

    async def _hand_out(self, snapshot: _Snapshot) -> None:
        waiting, self._wanted = self._wanted, []
        for future in waiting:
            if not future.done():
                future.set_result(snapshot)

    async def _answer(self, stream: Stream) -> None:
        request = unpack(await stream.receive(StateRequest.LIMIT, SMALL_S), StateRequest)
        if request.swarm != self._swarm:
            await stream.send(pack(Answer(verdict="refuse", reason="this peer is in another swarm", round=0)), SMALL_S)
            return
        if request.model != self._model:
            # The shapes in the header name the difference, so that the newcomer's user can mend it; no weights follow.
            nothing = _Snapshot(0, 0, torch.empty(FLOAT32.nbytes(self._shapes), dtype=torch.uint8), bytes(32), (), b"")
            await stream.send(pack(self._header(nothing)), SMALL_S)
            return
        # Those that have drifted from each other must not swap their weights. So each waits for those with lower peer ids (see
        # ``offer``), and whom all others refuse keeps its own.
        if request.astray and self.astray and stream.peer_id < self._host.peer_id:
            await stream.send(pack(Answer(verdict="refuse", reason="its own have drifted too", round=0)), SMALL_S)
            return
        future: asyncio.Future[_Snapshot] = asyncio.get_running_loop().create_future()
        self._wanted.append(future)
        await stream.send(pack(Answer(verdict="wait", round=0)), SMALL_S)  # a peer that sleeps would not say so much
        try:
            taken = await asyncio.wait_for(future, 60.0)
        except asyncio.TimeoutError:
            await stream.send(pack(Answer(verdict="busy", reason="no step was finished in 60 s", round=0)), SMALL_S)
            return
        await stream.send(pack(self._header(taken)), SMALL_S)
        await stream.swap(taken.payload.numpy().data, memoryview(bytearray()), chunk_timeout=SMALL_S, deadline=_in(600.0))
        await stream.drained(SMALL_S)

    def _header(self, taken: _Snapshot) -> StateHeader:
        return StateHeader(
            round=taken.round,
            step=taken.step,
            nbytes=taken.payload.numel(),
            shapes=self._shapes,
            dtype="float32",
            sha256=taken.sha256,
            extra=taken.extra,
            applied=taken.applied,
        )


async def _fetch(
    host: Host,
    peer: str,
    addresses: Sequence[str],
    request: StateRequest,
    shapes: Sequence[Shape],
    extra: Mapping[str, Sequence[Shape]],
) -> State:
    try:
        stream = await host.open(peer, STATE_PROTOCOL, addresses=addresses, timeout=ANSWER_S)
    except NetworkError as error:
        raise NoStateError(str(error)) from error
    try:
        try:
            await stream.send(pack(request), ANSWER_S)
            reply = unpack(await stream.receive(StateHeader.LIMIT, ANSWER_S), StateHeader, Answer)
        except NetworkError as error:
            raise NoStateError(str(error)) from error
        if isinstance(reply, Answer) and reply.verdict == "wait":
            reply = unpack(await stream.receive(StateHeader.LIMIT, 70.0), StateHeader, Answer)
        if isinstance(reply, Answer):
            kind = NoStateError if reply.verdict == "refuse" else NetworkError
            raise kind(f"peer …{peer[-8:]} hands out no weights: {reply.reason}.")
        assert isinstance(reply, StateHeader)
        difference = shapes_differ(tuple(shapes), reply.shapes)
        if difference is not None:
            raise ModelDiffersError(
                f"This node's model does not fit the swarm: {difference} (in the swarm); use the task and options of the swarm."
            )
        names = [name for name, _ in reply.extra]
        unknown = [name for name, shaped in reply.extra if name not in extra or shaped != _shapes_digest(extra[name])]
        if unknown or len(set(names)) < len(names):
            raise MessageError(f"peer …{peer[-8:]} hands out a state {unknown or names} that does not fit this node's outer rule.")
        # What is allocated follows from this node's own shapes, whatever the peer says.
        every = [*shapes, *(shape for name in names for shape in extra[name])]
        if reply.nbytes != FLOAT32.nbytes(every) or reply.dtype != "float32":
            raise MessageError(f"peer …{peer[-8:]} announced weights of {reply.nbytes} bytes, {FLOAT32.nbytes(every)} fit here.")
        if len(reply.applied) % 8:
            raise MessageError(f"peer …{peer[-8:]} sent a malformed list of rounds.")
        applied = [round - 1 for (round,) in struct.iter_unpack("<Q", reply.applied)]
        scratch = torch.empty(reply.nbytes, dtype=torch.uint8)
        incoming = scratch.numpy().data
        hashes = HashList(incoming)
        await stream.swap(
            memoryview(b""), incoming, chunk_timeout=SMALL_S, deadline=_in(600.0), on_progress=hashes.advance
        )
    finally:
        stream.close()
    tensors = FLOAT32.decode(scratch, every)
    if hashes.digest() != reply.sha256 or not finite(tensors):
        raise MessageError(f"the weights from peer …{peer[-8:]} are damaged or not finite and were not used.")
    rest = iter(tensors[len(shapes) :])
    shared = {name: [next(rest) for _ in extra[name]] for name in names}
    return State(reply.round, reply.step, tensors[: len(shapes)], shared, applied)


def fetch_state(
    host: Host,
    swarm: str,
    model: str,
    shapes: Sequence[Shape],
    givers: Sequence[tuple[str, Sequence[str]]],
    extra: Mapping[str, Sequence[Shape]] | None = None,
) -> State | None:
    """Slow weights from the first of ``givers`` (peer id, addresses) that hands them out whole; None if none does.

    ``extra``: the shapes of what this node's rule takes over beside them, under its names. A giver may have less, never other.

    Raises:
        ModelDiffersError: a giver's model has other shapes; the sentence names the first difference.
    """
    try:
        return begin_fetch(host, StateRequest(swarm=swarm, model=model), shapes, givers, extra).result(700.0 * max(len(givers), 1))
    except NetworkError:
        return None


def begin_fetch(
    host: Host,
    request: StateRequest,
    shapes: Sequence[Shape],
    givers: Sequence[tuple[str, Sequence[str]]],
    extra: Mapping[str, Sequence[Shape]] | None = None,
) -> concurrent.futures.Future[State | None]:
    """As ``fetch_state``, but without waiting; None only if all refused or are gone, NetworkError if one began and failed."""

    async def ask() -> State | None:
        nobody = True
        for peer, addresses in givers:
            try:
                return await asyncio.wait_for(_fetch(host, peer, addresses, request, shapes, extra or {}), 700.0)
            except (NetworkError, MessageError, asyncio.TimeoutError) as error:
                nobody &= isinstance(error, NoStateError)
                log.warning("no weights from peer …%s: %s", peer[-8:], str(error) or "it took longer than 700 s")
        if not nobody:
            raise NetworkError("none of the peers that were asked could hand out weights.")
        return None

    return host.submit(ask())


def _shapes_digest(shapes: Sequence[Shape]) -> bytes:
    return hashlib.sha256(pack_shapes(tuple(shapes))).digest()


def _in(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds
