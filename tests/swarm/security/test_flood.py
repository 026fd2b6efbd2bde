"""Floods of connections to a real daemon: what it holds open is bounded, and a member's exchanges
go on all the while.

What bounds it are the daemon's connection manager (`swarm.daemon_process.CONNECTIONS`) and its own
deadline for a handshake.
"""

import itertools
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from shoal.optim import FLOAT32, RoundKey
from shoal.optim.exchange.base import Contribution
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.daemon_process import CONNECTIONS
from shoal.swarm.p2p.host import Host
from tests.support.fake_network import MODEL, SWARM
from tests.swarm.security.forgeries import member

pytestmark = pytest.mark.slow(reason="hundreds of real connections wait for their deadlines")

COUNT, IDENTITIES = 600, 20
FEW = 64  # descriptors of the daemon's own, and connections that are being made or ended
MUCH = 200 << 20  # bytes: some 60 kB for each connection, several times over
pytest.importorskip("trio", reason="py-libp2p is not installed: make libp2p")
FLOOD = Path(__file__).with_name("flood.py")


class Members:
    """Two members that exchange a megabyte in each round."""

    def __init__(self):
        self.rounds = itertools.count()
        identities = [Identity.ephemeral() for _ in range(2)]
        self.hosts = [Host.start(identities[0], timeout=60)]
        self.hosts.append(
            Host.start(identities[1], timeout=60, bootstrap=self.hosts[0].addresses())
        )
        records = {
            host.peer_id: member(peer=host.peer_id, addresses=host.addresses())
            for host in self.hosts
        }
        self.exchanges = [
            PairExchange(
                PeerContext(host, identity, SWARM, MODEL, 0, lambda: records),
                ExchangeTimeouts(30.0, 15.0, 60.0),
            )
            for host, identity in zip(self.hosts, identities, strict=True)
        ]
        (self.daemon,) = psutil.Process(self.hosts[0]._supervisor.daemon._child.pid).children()

    def exchange(self):
        key = RoundKey(SWARM, next(self.rounds))
        handles = [
            exchange.start(Contribution(key, [torch.ones(1 << 18)], 1.0, FLOAT32))
            for exchange in self.exchanges
        ]
        means = [handle.result() for handle in handles]
        assert [len(mean.members) for mean in means] == [2, 2]

    def until_few(self, most, seconds=90.0):
        """Exchange until the daemon holds no more than so many descriptors; the most that it held
        meanwhile.
        """
        peak, end = 0, time.monotonic() + seconds
        while True:
            held = self.daemon.num_fds()
            peak = max(peak, held)
            if held <= most:
                return peak
            assert time.monotonic() < end, f"{held} descriptors are still open"
            self.exchange()
            threading.Event().wait(0.2)


@pytest.fixture
def two():
    members = Members()
    try:
        members.exchange()
        yield members
    finally:
        for host in members.hosts:
            host.close()


def test_many_identities_are_cut_down(two):
    """Connections of several identities are cut down and a member exchanges meanwhile."""
    before = two.daemon.memory_info().rss
    command = [sys.executable, FLOOD, two.hosts[0].addresses()[0], str(COUNT), str(IDENTITIES)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as flood:
        try:
            said = []
            reading = threading.Thread(
                target=lambda: said.append(flood.stdout.readline()), daemon=True
            )
            reading.start()
            peak = 0
            while reading.is_alive():
                two.exchange()
                peak = max(peak, two.daemon.num_fds())
                reading.join(0.2)
            assert int(re.fullmatch(r"open (\d+)\n", said[0])[1]) > CONNECTIONS[1]  # it was a flood
            assert peak <= COUNT + FEW
            # No connection is cut in its first 20 s; then all but the number that are kept.
            two.until_few(CONNECTIONS[1] + FEW)
            two.exchange()
            assert two.daemon.memory_info().rss - before < MUCH
        finally:
            flood.kill()
    two.until_few(FEW)
    two.exchange()


def test_silent_connections_are_ended(two):
    """Connections that say nothing are ended and a member exchanges meanwhile."""
    before = two.daemon.memory_info().rss
    port = int(re.search(r"/tcp/(\d+)", two.hosts[0].addresses()[0])[1])
    silent = []
    try:
        for _ in range(COUNT):
            silent.append(socket.create_connection(("127.0.0.1", port), 10))
        two.exchange()
        two.until_few(FEW)  # a handshake may take 15 s
        assert two.daemon.memory_info().rss - before < MUCH
    finally:
        for each in silent:
            each.close()
    two.exchange()
