"""What a newcomer asks of a member: the swarm's manifest, and the slow weights to start from.

The manifest is checked against the swarm id in the link, so any member can be asked. Weights are taken from one member, checked
for shape, size, digest and finiteness in scratch, and used as a whole or not at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from optim.codec import FLOAT32
from swarm.contribution import shapes_differ
from swarm.digest import HashList, digest
from swarm.errors import MessageError, NetworkError, ShoalError
from swarm.link import Link
from swarm.manifest import Manifest, open_manifest
from swarm.messages import Answer, ManifestReply, ManifestRequest, StateHeader, StateRequest, pack, unpack

if TYPE_CHECKING:
    from swarm.host import Host
    from swarm.stream import Stream

MANIFEST_PROTOCOL = "/shoal/manifest/1"
STATE_PROTOCOL = "/shoal/state/1"
SMALL_S = 10.0  # seconds for one small message

log = logging.getLogger(__name__)


class ModelDiffersError(ShoalError):
    """This node's model has other shapes than the swarm's."""


@dataclass(frozen=True)
class State:
    """Where a swarm is: slow weights (float32, CPU) before round ``round``, after ``step`` inner steps of the giver."""

    round: int
    step: int
    slow: list[Tensor]


@dataclass(frozen=True)
class _Snapshot:
    """A ``State`` that no later step can change; ``payload`` is uint8."""

    round: int
    step: int
    payload: Tensor
    sha256: bytes


def serve_manifest(host: Host, swarm: str, sealed: bytes) -> None:
    """Hand the sealed manifest to whoever asks for this swarm."""

    async def answer(stream: Stream) -> None:
        request = unpack(await stream.receive(ManifestRequest.LIMIT, SMALL_S), ManifestRequest)
        known = request.swarm == swarm
        reason = "" if known else f"this peer belongs to swarm {swarm}"
        await stream.send(pack(ManifestReply(manifest=sealed if known else None, swarm=swarm, reason=reason)), SMALL_S)

    host.serve(MANIFEST_PROTOCOL, answer)


def fetch_manifest(host: Host, link: Link, timeout: float = 20.0) -> tuple[bytes, Manifest]:
    """Ask the link's peers in turn; the first that hands out this swarm's manifest will do.

    Raises:
        MessageError: none did, and one is in another swarm or speaks another version.
        NetworkError: none answered.
    """

    async def ask(address: str) -> ManifestReply:
        peer = address.rsplit("/p2p/", 1)[-1]
        stream = await host.open(peer, MANIFEST_PROTOCOL, addresses=(address,), timeout=SMALL_S)
        try:
            await stream.send(pack(ManifestRequest(swarm=link.swarm)), SMALL_S)
            return unpack(await stream.receive(ManifestReply.LIMIT, SMALL_S), ManifestReply)
        finally:
            stream.close()

    problem, wrong = "", None
    for address in link.bootstrap:
        try:
            reply = host.call(ask(address), timeout)
            if reply.manifest is not None:
                return reply.manifest, open_manifest(reply.manifest, link.swarm)
            wrong = wrong or MessageError(
                f"Wrong swarm id: the peer at {address} belongs to swarm {reply.swarm}, the link asks for {link.swarm}; "
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
        host.serve(STATE_PROTOCOL, self._answer)

    def offer(self, snapshot: Callable[[], State]) -> None:
        """Called by the training thread between steps; makes a snapshot only if somebody waits for one."""
        if self._wanted:
            state = snapshot()
            payload = FLOAT32.encode(state.slow)  # here, for the next step changes the weights
            taken = _Snapshot(state.round, state.step, payload, digest(payload.numpy().data))
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
            await self._send_header(stream, 0, 0, bytes(32))
            return
        future: asyncio.Future[_Snapshot] = asyncio.get_running_loop().create_future()
        self._wanted.append(future)
        try:
            taken = await asyncio.wait_for(future, 60.0)
        except asyncio.TimeoutError:
            await stream.send(pack(Answer(verdict="busy", reason="no step was finished in 60 s", round=0)), SMALL_S)
            return
        await self._send_header(stream, taken.round, taken.step, taken.sha256)
        await stream.swap(taken.payload.numpy().data, memoryview(bytearray()), chunk_timeout=SMALL_S, deadline=_in(600.0))
        await stream.drained(SMALL_S)

    async def _send_header(self, stream: Stream, round: int, step: int, sha256: bytes) -> None:
        header = StateHeader(
            round=round,
            step=step,
            nbytes=FLOAT32.nbytes(self._shapes),
            shapes=self._shapes,
            dtype="float32",
            sha256=sha256,
        )
        await stream.send(pack(header), SMALL_S)


async def _fetch(
    host: Host, peer: str, addresses: Sequence[str], request: StateRequest, shapes: Sequence[tuple[int, ...]]
) -> State:
    stream = await host.open(peer, STATE_PROTOCOL, addresses=addresses, timeout=SMALL_S)
    try:
        await stream.send(pack(request), SMALL_S)
        reply = unpack(await stream.receive(StateHeader.LIMIT, 70.0), StateHeader, Answer)
        if isinstance(reply, Answer):
            raise NetworkError(f"peer …{peer[-8:]} hands out no weights: {reply.reason}.")
        assert isinstance(reply, StateHeader)
        difference = shapes_differ(tuple(shapes), reply.shapes)
        if difference is not None:
            raise ModelDiffersError(
                f"This node's model does not fit the swarm: {difference} (in the swarm); use the task and options of the swarm."
            )
        if reply.nbytes != FLOAT32.nbytes(shapes) or reply.dtype != "float32":
            raise MessageError(f"peer …{peer[-8:]} announced weights of {reply.nbytes} bytes, {FLOAT32.nbytes(shapes)} fit here.")
        scratch = torch.empty(reply.nbytes, dtype=torch.uint8)
        incoming = scratch.numpy().data
        hashes = HashList(incoming)
        await stream.swap(
            memoryview(b""), incoming, chunk_timeout=SMALL_S, deadline=_in(600.0), on_progress=hashes.advance
        )
    finally:
        stream.close()
    slow = FLOAT32.decode(scratch, shapes)
    if hashes.digest() != reply.sha256 or not all(bool(tensor.isfinite().all()) for tensor in slow):
        raise MessageError(f"the weights from peer …{peer[-8:]} are damaged or not finite and were not used.")
    return State(reply.round, reply.step, slow)


def fetch_state(
    host: Host,
    swarm: str,
    model: str,
    shapes: Sequence[tuple[int, ...]],
    givers: Sequence[tuple[str, Sequence[str]]],
) -> State | None:
    """Slow weights from the first of ``givers`` (peer id, addresses) that hands them out whole; None if none does.

    Raises:
        ModelDiffersError: a giver's model has other shapes; the sentence names the first difference.
    """
    for peer, addresses in givers:
        try:
            return host.call(_fetch(host, peer, addresses, StateRequest(swarm=swarm, model=model), shapes), 700.0)
        except (NetworkError, MessageError) as error:
            log.warning("no weights from peer …%s: %s", peer[-8:], error)
    return None


def _in(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds
