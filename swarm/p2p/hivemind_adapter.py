"""hivemind's DHT on a daemon of ours.

All private hooks of hivemind's host and DHT stand here, so pyproject.toml pins the release.

hivemind's own launcher keeps its sockets in the open temporary folder and leaves them there after a
crash; so `shoal.swarm.p2p.daemon.Daemon` launches the process, and hivemind gets no more than a
connection for the calls of its DHT.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from shoal.swarm.p2p import daemon
from shoal.swarm.p2p.daemon_process import parts_of_hivemind
from shoal.swarm.p2p.resource_manager import ResourceManager

with parts_of_hivemind():
    from hivemind.dht.node import DHTNode
    from hivemind.dht.protocol import ValidationError
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
    from hivemind.p2p import P2P, P2PDaemonError, PeerID
    from hivemind.p2p.p2p_daemon_bindings import p2pclient
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr

log = logging.getLogger(__name__)

# hivemind prints to stderr by itself. Its messages go through the usual logging instead, errors
# only: Shoal logs its failures.
use_hivemind_log_handler("nowhere")
if "HIVEMIND_LOGLEVEL" not in os.environ:
    logging.getLogger("hivemind").setLevel(logging.ERROR)
logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames the level for the whole program

# nodes that are asked for a key: the nearest, twice as many as hold its records; hivemind asks 20
NODES_ASKED = 10
LIGHT_S = 1.5  # for which a node that only looks waits for an answer
MEET_S = 1.0  # for which it waits for more peers than the first that answers
# records of one key that a node stores: 360 kB of members, where an answer of 4 MB could not be
# read
MAX_SUBKEYS = 64


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """hivemind's records, of each key the first `MAX_SUBKEYS` by the hash of the subkey, so that
    all nodes keep the same.
    """

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Store a record, in place of the last of them if there is no more room; return False if it
        comes after that.
        """
        held = self.get(key)
        names = held[0] if held is not None and isinstance(held[0], DictionaryDHTValue) else None
        if names is not None and names.get(subkey) is None and len(names.data) >= MAX_SUBKEYS:
            last = max(names.data, key=_rank)
            if _rank(subkey) >= _rank(last):
                return False
            del names.data[last], names.key_to_heap[last]
        return bool(super().store_subkey(key, subkey, value, expiration_time))


def _rank(subkey: Any) -> bytes:
    return hashlib.sha256(
        str(subkey).encode()
    ).digest()  # the order of `shoal.swarm.membership.records.bits_of`


class _Calls(P2P):  # type: ignore[misc]
    """hivemind's view of the daemon: unary calls between DHT nodes, over one connection that stays
    open.
    """

    def __init__(self, peer_id: str, resource_manager: ResourceManager) -> None:
        super().__init__()
        self.peer_id = PeerID.from_base58(peer_id)
        self.resource_manager = resource_manager
        self._owner = os.getpid()
        self._daemon_listen_maddr = self._client_listen_maddr = None

    async def open(self, control: str, inbound: str) -> None:
        self._client = await p2pclient.Client.create(
            Multiaddr(f"/unix{control}"), Multiaddr(f"/unix{inbound}")
        )
        self._alive = True

    def _terminate(self) -> None:
        if self._owner == os.getpid():  # a forked copy of this object owns nothing
            super()._terminate()

    async def call_protobuf_handler(self, *arguments: Any) -> Any:
        """Call, and count a peer whose node id is none as one that does not answer: `call_ping`
        reads it where nobody catches.
        """
        answer = await super().call_protobuf_handler(*arguments)
        DHTID.from_bytes(answer.peer.node_id)  # an AssertionError, within the call
        return answer

    async def _add_protobuf_unary_handler(
        self,
        handle_name: str,
        handler: Callable[[Any, Any], Awaitable[Any]],
        input_protobuf_type: Any,
        balanced: bool = False,
    ) -> None:
        """Add a refusal to hivemind's: its DHT node registers its calls by this."""

        async def guarded(request: Any, context: Any) -> Any:
            peer = context.remote_id.to_base58()
            if reason := self.resource_manager.calls(peer, request.ByteSize()):
                raise P2PDaemonError(f"refused: {reason}")
            return await self.resource_manager.answer_call(peer, handler(request, context))

        await super()._add_protobuf_unary_handler(
            handle_name, guarded, input_protobuf_type, balanced=balanced
        )


class SwarmNode(DHTNode):  # type: ignore[misc]
    """hivemind's DHT node; what the daemon refuses it is a `daemon.DaemonError`, as elsewhere."""

    async def store(self, *arguments: Any, **options: Any) -> Any:
        with _as_daemon_errors():
            return await super().store(*arguments, **options)

    async def get(self, *arguments: Any, **options: Any) -> Any:
        with _as_daemon_errors():
            return await super().get(*arguments, **{"beam_size": NODES_ASKED, **options})

    async def shutdown(self) -> None:
        with _as_daemon_errors():
            await super().shutdown()


@contextlib.contextmanager
def _as_daemon_errors() -> Iterator[None]:
    try:
        yield
    except P2PDaemonError as error:
        raise daemon.DaemonError(str(error)) from error


async def join_dht(
    at: daemon.Daemon,
    peers: Sequence[str],
    validator: Any,
    light: bool,
    resource_manager: ResourceManager,
) -> SwarmNode:
    """Start a DHT node on a daemon and let it meet ``peers`` (ids of connected peers).

    Takes some seconds if none answers.

    `count_peers` tells whether any of them takes part in the DHT. ``resource_manager``
    judges the calls of others. Raises one of `daemon.DAEMON_GONE`.
    """
    calls = _Calls(at.peer_id, resource_manager)
    at.at_end.append(calls._terminate)
    with _as_daemon_errors():
        await calls.open(str(at.control), str(at.inbound))
        node: SwarmNode = await SwarmNode.create(
            p2p=calls,
            node_id=DHTID.generate(source=at.peer_id),  # the same after a restart
            initial_peers=[f"/p2p/{peer}" for peer in peers],
            record_validator=validator,
            client_mode=light,
            wait_timeout=LIGHT_S if light else 3.0,
            bootstrap_timeout=MEET_S if light else 3.0,
            ensure_bootstrap_success=False,
            # doubled, a few lost answers would keep this node's records from a peer for longer than
            # they live
            backoff_rate=1.0,
            strict=False,
            cache_locally=False,  # we always ask for the newest
            cache_refresh_before_expiry=0,
        )
        # What was stored meanwhile is published again within seconds.
        node.protocol.storage = BoundedStorage()
        for peer in peers[:1]:
            try:
                await node.protocol.call_ping(PeerID.from_base58(peer), validate=True, strict=True)
            except ValidationError as error:
                if "time" in str(error):
                    log.warning(
                        "this machine's clock differs from peer %s's: set it by NTP (%s)",
                        peer,
                        error,
                    )
                else:
                    log.warning(
                        "peer %s cannot connect back to this node: open the port given by --listen "
                        "in the firewall, or others may be unable to start an exchange with it",
                        peer,
                    )
        return node


def count_peers(node: DHTNode) -> int:
    return len(node.protocol.routing_table.uid_to_peer_id)


def knows(node: DHTNode, peer_id: str) -> bool:
    return PeerID.from_base58(peer_id) in node.protocol.routing_table.peer_id_to_uid


async def ping(node: DHTNode, peer_id: str) -> None:
    """Let the DHT node meet a connected peer. Raises one of `daemon.DAEMON_GONE`."""
    with _as_daemon_errors():
        await node.protocol.call_ping(PeerID.from_base58(peer_id))
