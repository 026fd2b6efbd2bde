"""A bootstrap node under siege: a thousand keys of three address ranges, and honest swarms that are
to be listed and joined.

python -m tests.security.test_siege SECONDS      # prints the figures of docs/security.md
"""

import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Manifest, swarm_id
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.records import MemberValidator
from shoal.swarm.membership.seed_announcer import SeedAnnouncer
from shoal.swarm.membership.swarm_list import look
from shoal.swarm.p2p.host import Host
from shoal.swarm.wire.envelope import seal

pytestmark = pytest.mark.slow(reason="a thousand real clients renew for a minute")

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1024  # descriptors of each process of the bootstrap node
KEYS, PERIOD_S = 1000, 20.0  # and seconds between two reports of one, as honest nodes have them
WITHIN_S = 10.0
MUCH = 300 << 20  # bytes of memory of its processes


class Siege:
    """The bootstrap node as processes of their own, and after `begin` its attackers."""

    def __init__(self, home):
        self.seed = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "shoal",
                "seed",
                "--relay",
                "--json",
                "--listen",
                "/ip4/127.0.0.1/tcp/0",
                "--identity",
                f"{home}/seed.key",
            ],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT)),
        )
        (self.address,) = json.loads(self.seed.stdout.readline())["addresses"]
        self.processes = [
            psutil.Process(self.seed.pid),
            *psutil.Process(self.seed.pid).children(recursive=True),
        ]
        self.attackers, self.most = None, {"descriptors": 0, "bytes": 0}

    def begin(self, honest):
        """Let the attackers come; return when each has had its turn."""
        command = [
            sys.executable,
            "-m",
            "tests.security.siege",
            self.address,
            honest,
            str(KEYS),
            str(PERIOD_S),
        ]
        self.attackers = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        return self.counts()

    def counts(self):
        """What the attackers counted in one more period."""
        return json.loads(self.attackers.stdout.readline())

    def look(self):
        """Note what the bootstrap node's processes hold; all of them must be there."""
        assert all(process.is_running() for process in self.processes)
        self.most["descriptors"] = max(
            self.most["descriptors"], *(process.num_fds() for process in self.processes)
        )
        self.most["bytes"] = max(
            self.most["bytes"], sum(process.memory_info().rss for process in self.processes)
        )

    def end(self):
        if self.attackers is not None:
            self.attackers.kill()
            self.attackers.communicate(timeout=30)
        self.seed.terminate()
        assert self.seed.wait(60) == 0
        self.seed.stdout.close()


class Node:
    """An honest node of the swarm of ``manifest``, announced if it is public; it knows the
    bootstrap node alone.
    """

    def __init__(self, address, identity, manifest, *, first):
        swarm = swarm_id(seal(manifest, identity)) if first else manifest
        self.host = Host.start(
            identity,
            bootstrap=[address],
            validator=MemberValidator(swarm),
            swarm=swarm,
            must_join=not first,
            timeout=WITHIN_S,
        )
        self.directory = Directory(self.host, identity, swarm, ttl=10, period=1)
        self.announcer = SeedAnnouncer(self.host, self.directory, identity, swarm)
        if first and manifest.public:
            self.announcer.announce(
                seal(manifest, identity), params=1, round_bytes=1, memory=0, device="cpu"
            )
        self.directory.announce(
            name="x",
            round=0,
            step=0,
            loss=None,
            steps_per_s=0.0,
            shard=0,
            shards=1,
            model="0" * 64,
            state="waiting",
            version="0",
        )

    def close(self):
        self.announcer.close()
        self.directory.close()
        self.host.close()


def seconds_until(condition):
    """Seconds until it holds, at most `WITHIN_S`."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() < begun + WITHIN_S, "it did not happen in time"
        threading.Event().wait(0.05)
    return time.monotonic() - begun


def besieged(seconds, say=lambda row: None):
    """Run a siege for so many seconds; return the seconds that honest people waited for each thing,
    and what the seed held.
    """
    took = {"listed": [], "join public": [], "join private": []}
    nodes = []
    with tempfile.TemporaryDirectory() as home:
        siege = Siege(home)
        try:
            ada, bob = Identity.ephemeral(), Identity.ephemeral()
            made = {"name": "x", "created": 0.0, "task": "text", "model": "0" * 64}
            public = Manifest(creator=ada.peer_id, public=True, **made)
            private = Manifest(creator=bob.peer_id, **made)
            swarms = {
                who: swarm_id(seal(manifest, who))
                for who, manifest in ((ada, public), (bob, private))
            }
            say(siege.begin(swarms[ada]))
            begun, later = time.monotonic(), []

            def is_listed():
                siege.look()
                return swarms[ada] in [one.swarm for one in asyncio.run(look([siege.address]))[0]]

            nodes += [
                Node(siege.address, who, manifest, first=True)
                for who, manifest in ((ada, public), (bob, private))
            ]
            while not later or time.monotonic() < begun + seconds:
                took["listed"].append(seconds_until(is_listed))
                for what, who in (("join public", ada), ("join private", bob)):
                    start = time.monotonic()
                    newcomer = Node(siege.address, Identity.ephemeral(), swarms[who], first=False)
                    try:
                        seconds_until(
                            lambda one=newcomer, who=who: who.peer_id in one.directory.members()
                        )
                        took[what].append(time.monotonic() - start)
                    finally:
                        newcomer.close()
                later.append(siege.counts())
                say(
                    {
                        **later[-1],
                        **siege.most,
                        **{what: round(found[-1], 2) for what, found in took.items()},
                    }
                )
            return took, siege.most, later
        finally:
            for node in nodes:
                node.close()
            siege.end()


def test_an_honest_swarm_is_listed_and_joined_during_a_siege():
    took, most, later = besieged(40.0)
    assert max(max(found) for found in took.values()) < WITHIN_S
    assert (
        most["descriptors"] < 3 * LIMIT / 4
    )  # all of them where crowded ranges keep their connections
    assert most["bytes"] < MUCH
    assert all(counts["record full"] > KEYS for counts in later), "the attackers are at work"


if __name__ == "__main__":
    found, held, _ = besieged(
        float(sys.argv[1]), say=lambda row: print(json.dumps(row), flush=True)
    )
    for what, seconds in found.items():
        print(
            f"{what}: {len(seconds)} times, median {sorted(seconds)[len(seconds) // 2]:.2f} s, at "
            f"most {max(seconds):.2f} s"
        )
    print(f"at most {held['descriptors']} of {LIMIT} descriptors, {held['bytes'] / 1e6:.0f} MB")
