"""A membership with all that a status is made of."""

from types import SimpleNamespace

from shoal.swarm.identity import Identity
from shoal.swarm.internal_errors import InternalErrors
from shoal.swarm.manifest import swarm_id
from shoal.swarm.settings.outer import OuterSettings

PEERS = [Identity.ephemeral().peer_id for _ in range(12)]

ME = PEERS[0]


def membership(method="noloco", bucket=0, seen=25):
    host = SimpleNamespace(
        peer_id=ME,
        restarts=0,
        internal_errors=InternalErrors(),
        traffic=SimpleNamespace(sent=100, received=50),
        addresses=lambda: tuple(f"/ip4/127.0.0.1/tcp/{port}/p2p/{ME}" for port in range(1, 9)),
        submit=lambda coroutine: (coroutine.close(), SimpleNamespace(cancel=lambda: None))[1],
    )
    gossip = SimpleNamespace(
        host=host, join=lambda kind, handler: SimpleNamespace(close=lambda: None)
    )
    return SimpleNamespace(
        host=host,
        swarm=swarm_id(b""),
        gossip=gossip,
        directory=SimpleNamespace(
            size=lambda: 400,
            members=lambda: dict.fromkeys(range(seen)),
            own_record=SimpleNamespace(reach=lambda: {"reach": "punched", "throughput": 1.5e6}),
        ),
        manifest=SimpleNamespace(outer=OuterSettings(method=method), bucket=bucket),
    )
