"""A node that cannot become a member leaves nothing running."""

from types import SimpleNamespace

import pytest

from shoal.node.config.settings import load
from shoal.node.runtime.join import new_manifest
from shoal.node.runtime.run_options import network
from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.membership import membership


def test_failed_creation_closes_its_host(monkeypatch):
    """Mutant: the host, and its daemon, run on until the process ends."""
    closed = []

    def serve(*_):
        raise NetworkError("the daemon has ended")

    policy = SimpleNamespace(access_policy=None)
    host = SimpleNamespace(
        resource_manager=policy, serve=serve, close=lambda: closed.append("host")
    )
    monkeypatch.setattr(membership.Host, "start", lambda *_, **__: host)
    settings, creator = load(None, {}), Identity.ephemeral()
    with pytest.raises(NetworkError, match="the daemon has ended"):
        membership.create(creator, new_manifest(settings, creator, "0" * 64), network(settings))
    assert closed == ["host"]
