"""What a host does while its daemon starts."""

import threading

import psutil
import pytest

from shoal.swarm.identity import Identity
from shoal.swarm.p2p import hivemind_adapter
from shoal.swarm.p2p.daemon_supervisor import DaemonSupervisor
from shoal.swarm.p2p.host import Host


def test_a_host_imports_while_its_daemon_starts_and_meets_the_swarm_after(monkeypatch):
    launch, join, launched, done = DaemonSupervisor._launch, hivemind_adapter.join_dht, threading.Event(), []

    async def noted_launch(*arguments):
        daemon = await launch(*arguments)
        launched.set()
        return daemon

    async def noted_join(*arguments):
        done.append("DHT")
        return await join(*arguments)

    def meanwhile():
        done.append("launched" if launched.wait(60) else "the daemon waits for the imports")

    monkeypatch.setattr(DaemonSupervisor, "_launch", noted_launch)
    monkeypatch.setattr(hivemind_adapter, "join_dht", noted_join)
    with Host.start(Identity.ephemeral(), timeout=15, meanwhile=meanwhile):
        assert done == ["launched", "DHT"]


def test_an_import_that_fails_leaves_no_daemon_running():
    identity, before = Identity.ephemeral(), set(psutil.Process().children(recursive=True))

    def meanwhile():
        raise ImportError("no such module")

    with pytest.raises(ImportError, match="no such module"):
        Host.start(identity, timeout=15, meanwhile=meanwhile)
    assert psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, 30)[1] == []
    with identity.lock():  # and its key is free again
        pass
