"""Two peers that dial each other at the same moment: both get through, whoever's call arrives first."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench._link import LinkError, Namespaces
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.host import Host

ROOT = Path(__file__).resolve().parents[3]
DELAY = 0.1  # seconds one way: far longer than the two take to notice that it is time

PEER = """
import json, sys, time
from shoal.swarm.p2p.host import Host
from shoal.swarm.identity import Identity

async def echo(stream):
    await stream.send(await stream.receive(100, 30), 5)

async def ask(host, peer, addresses):
    stream = await host.open(peer, "/test/echo/1", addresses=addresses, timeout=30)
    try:
        await stream.send(b"x", 30)
        return (await stream.receive(10, 30)).decode()
    finally:
        stream.close()

with Host.start(Identity.ephemeral(), listen=[f"/ip4/{sys.argv[1]}/tcp/4001"]) as host:
    host.serve("/test/echo/1", echo)
    print(json.dumps([host.peer_id, host.addresses()]), flush=True)
    peer, addresses, at = json.loads(sys.stdin.readline())
    time.sleep(max(at - time.time(), 0))
    try:
        print(host.call(ask(host, peer, addresses), 20), flush=True)
    except Exception as error:
        print(repr(error), flush=True)
    sys.stdin.readline()
"""


def test_peers_that_dial_each_other_at_once_both_get_through():
    try:
        link = Namespaces(2, 12.5e6, DELAY)
    except LinkError as error:
        pytest.skip(f"no link with a delay: {error}")
    peers = []
    try:
        for node in range(2):
            command, env = [*link.enter(node), sys.executable, "-c", PEER, link.ip(node)], {**os.environ, "PYTHONPATH": str(ROOT)}
            peers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env))
        places = [json.loads(peer.stdout.readline()) for peer in peers]
        at = time.time() + 0.5
        for peer, place in zip(peers, reversed(places), strict=True):
            peer.stdin.write(json.dumps([*place, at]) + "\n")
            peer.stdin.flush()
        assert [peer.stdout.readline().strip() for peer in peers] == ["x", "x"]
    finally:
        for peer in peers:
            peer.communicate("\n", timeout=20)
        link.close()


def test_a_peer_does_not_dial_from_the_port_it_listens_on_and_is_remembered_by_that_port():
    with Host.start(Identity.ephemeral()) as a, Host.start(Identity.ephemeral(), bootstrap=a.addresses()) as b:
        (p2pd,) = psutil.Process(b._supervisor.daemon._child.pid).children()
        theirs, ours = (int(host.addresses()[0].split("/")[4]) for host in (a, b))
        used = [c.laddr.port for c in p2pd.net_connections("tcp") if c.raddr and c.raddr.port == theirs]
        assert used
        assert ours not in used
        assert a.call(a._supervisor.daemon.where(b.peer_id), 60) == b.addresses()
        assert a.call(a._supervisor.daemon.peers(), 60) == (b.peer_id,)
