"""A membership with all that a status is made of."""

from types import SimpleNamespace

from shoal.swarm.identity import Identity
from shoal.swarm.internal_errors import InternalErrors
from shoal.swarm.manifest import swarm_id
from shoal.swarm.membership.own_record import OwnRecord
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.wire.record import LinkUse

PEERS = [Identity.ephemeral().peer_id for _ in range(12)]

ME = PEERS[0]
LINK = LinkUse(bytes_sent=100, bytes_received=50, bytes_per_s=1.5e6, reach="punched")


def membership(method="noloco", bucket=0, seen=25, sent=100, received=50):
    said = []
    own_record = OwnRecord(
        "a" * 52, ME, addresses=lambda: ("/p2p-circuit",), now=lambda: 0.0, ticket=bytes
    )
    own_record.traffic = lambda: (sent, received)
    own_record.exchanges = lambda: (True, 1.5e6)
    host = SimpleNamespace(
        peer_id=ME,
        restarts=0,
        internal_errors=InternalErrors(),
        traffic=SimpleNamespace(sent=sent, received=received, rate=lambda: None),
        addresses=lambda: tuple(f"/ip4/127.0.0.1/tcp/{port}/p2p/{ME}" for port in range(1, 9)),
        submit=lambda coroutine: (coroutine.close(), SimpleNamespace(cancel=lambda: None))[1],
    )
    gossip = SimpleNamespace(
        host=host,
        join=lambda kind, handler: SimpleNamespace(handler=handler, close=lambda: None),
    )
    return SimpleNamespace(
        host=host,
        swarm=swarm_id(b""),
        gossip=gossip,
        directory=SimpleNamespace(
            size=lambda: 400,
            members=lambda: dict.fromkeys(range(seen)),
            own_record=own_record,
            announce=lambda **fields: said.append(fields),
            leave=lambda seconds: None,
            said=said,
        ),
        manifest=SimpleNamespace(outer=OuterSettings(method=method), bucket=bucket),
    )
