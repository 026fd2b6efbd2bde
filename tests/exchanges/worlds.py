"""The exchanges under test, each as a world in which peers play scripts.

Another exchange needs a class here and a line in WORLDS. A world has ``size``, the peers that
average with each other; ``overlaps``, whether a peer may be in two exchanges at once; and
``play(scripts, wait)``: each peer's notes, None for a dead one. In ``members`` peers are named by
their index.
"""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest import mock

import psutil
import script
import torch.distributed as dist

from shoal.optim import Faults, Simulation, partner_of
from shoal.optim.exchange.pairing import order
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.round_time import RoundTime
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.host import Host
from tests.support.records import member_of

RANK = Path(__file__).parent / "rank.py"
# a net for what hangs, below the 300 s of a whole test: how long ranks take says how busy the
# machine is
LIMIT_S = 240.0


class Dead(BaseException):
    """Exception that ends the thread of a peer."""


class OnSimulation:
    overlaps = True

    def __init__(self, size):
        self.size = size

    def play(self, scripts, wait=10.0):
        names = [str(number) for number in range(len(scripts))]
        kill = {}  # grows while they play
        simulation = Simulation(names, size=self.size, wait=wait, faults=Faults(kill=kill))
        marks = set()

        def peer(exchange):
            def after(what):
                while what not in marks:
                    exchange.sleep(0.01)

            def die():
                kill[exchange.peer] = simulation.now
                exchange.sleep(0.0)

            return numbered(
                script.play(exchange, "run", scripts[int(exchange.peer)], marks.add, after, die),
                names,
            )

        notes = simulation.run(peer)
        return [notes.get(name) for name in names]

    def close(self):
        pass


class Ranks:
    """Processes of a torch.distributed job."""

    def __init__(self, nursery, count):
        self.count, self.whole = count, True
        self.store = dist.TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=LIMIT_S),
        )
        self.streams = []
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
            path = str(Path(folder) / "socket")
            listening.bind(path)
            listening.listen()
            listening.settimeout(LIMIT_S)
            for rank in range(count):
                order = {"port": self.store.port, "rank": rank, "world": count, "socket": path}
                nursery.stdin.write(json.dumps(order) + "\n")
                nursery.stdin.flush()
                connection, _ = listening.accept()
                connection.settimeout(LIMIT_S)
                self.streams.append(connection.makefile("rw"))

    def do(self, orders):
        """Send one order to each rank, all at once; return their answers, None for a dead one."""
        self.whole = (
            False  # without all answers the next order would get what is left of this one's
        )
        for stream, wanted in zip(self.streams, orders, strict=True):
            stream.write(json.dumps(wanted) + "\n")
            stream.flush()
        answers = [self.answer(stream) for stream in self.streams]
        self.whole = None not in answers
        return answers

    def answer(self, stream):
        try:
            line = stream.readline()
        except ConnectionResetError:
            return None
        if not line:
            return None
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def call(self, file, function, **arguments):
        return self.do(
            [{"file": str(file), "function": function, "arguments": arguments}] * self.count
        )

    def close(self):
        for stream in self.streams:
            with contextlib.suppress(OSError):
                stream.close()


def start_nursery():
    environment = {**os.environ, "PYTHONPATH": str(RANK.parents[2]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(RANK)], stdin=subprocess.PIPE, text=True, env=environment
    )


class OnTorchDistributed:
    overlaps = True
    _tests = itertools.count()

    def __init__(self, size, nursery):
        self.size, self._option, self._nursery = size, 0 if size > 2 else size, nursery
        self._ranks = {}

    def play(self, scripts, wait=10.0):
        count = len(scripts)
        if count not in self._ranks or not self._ranks[count].whole:
            self._ranks[count] = Ranks(self._nursery, count)
        options = {"size": self._option, "wait": wait, "exchange_timeout": 4.0}
        marks = f"marks/{next(self._tests)}"
        notes = self._ranks[count].do(
            [{"steps": steps, "options": options, "marks": marks} for steps in scripts]
        )
        return [
            None if note is None else numbered(note, [str(rank) for rank in range(count)])
            for note in notes
        ]

    def close(self):
        for ranks in self._ranks.values():
            ranks.close()


class OnSwarm:
    """Real hosts in this process, each with its own daemon."""

    size, overlaps = 2, True
    _tests = itertools.count()

    def __init__(self):
        self._hosts = []

    def play(self, scripts, wait=10.0):
        while len(self._hosts) < len(scripts):
            identity = Identity.ephemeral()
            known = self._hosts[0][0].addresses() if self._hosts else ()
            self._hosts.append((Host.start(identity, bootstrap=known, timeout=30), identity))
        hosts = self._hosts[: len(scripts)]
        swarm = "".join(
            "abcdefghij"[int(digit)] for digit in f"{next(self._tests):052d}"
        )  # of its own: no late call from before
        ids = [host.peer_id for host, _ in hosts]
        seed = next(
            seed for seed in itertools.count() if self.suits(seed, ids)
        )  # the ids are new each time
        members = {
            host.peer_id: member_of(
                host.peer_id, swarm=swarm, addresses=host.addresses(), issued=time.time()
            )
            for host, _ in hosts
        }
        exchanges = [
            self.exchange(
                PeerContext(host, identity, swarm, "0" * 64, seed, lambda: members),
                ExchangeTimeouts(wait, 1.0, 20.0),
            )
            for host, identity in hosts
        ]
        marks = {
            step[1]: threading.Event() for steps in scripts for step in steps if step[0] == "mark"
        }

        def after(what):
            assert marks[what].wait(LIMIT_S)

        def peer(number):
            def die():
                host, _ = hosts[number]
                (daemon,) = psutil.Process(host._supervisor.daemon._child.pid).children()
                os.kill(daemon.pid, signal.SIGKILL)
                host.close()
                raise Dead

            try:
                mark = lambda what: marks[what].set()  # noqa: E731
                return numbered(
                    script.play(exchanges[number], swarm, scripts[number], mark, after, die), ids
                )
            except Dead:
                self._hosts.remove(hosts[number])

        # What others are waited for follows from the time of a round, and rounds of real nodes take
        # minutes.
        with (
            mock.patch.object(RoundTime, "period", return_value=4 * wait),
            ThreadPoolExecutor(len(scripts)) as pool,
        ):
            return [
                played.result(LIMIT_S)
                for played in [pool.submit(peer, number) for number in range(len(scripts))]
            ]

    def suits(self, seed, ids):
        """Return True if, of three, the last has a partner in round 1, and the others are partners
        from round 4 on.
        """
        partners = {1: (1, 2), **dict.fromkeys(range(4, 8), (0, 1))} if len(ids) == 3 else {}
        return all(partner_of(seed, r, ids[a], ids) == ids[b] for r, (a, b) in partners.items())

    def exchange(self, context, timeouts):
        return PairExchange(context, timeouts)

    def close(self):
        for host, _ in self._hosts:
            host.close()


class OnSwarmGroup(OnSwarm):
    """Real hosts in this process, all of them in one group."""

    size, overlaps = 3, True

    def suits(self, seed, ids):
        """Return True if the peer that informs a latecomer of round 1 also waits for it in round
        2.
        """
        return order(seed, 1, ids)[0] == order(seed, 2, ids)[0] == ids[0]

    def exchange(self, context, timeouts):
        """Drop a contribution that is too late, as the other exchanges do, instead of sending it in
        the next round.
        """
        return GroupExchange(context, timeouts, follow=False)


def numbered(notes, ids):
    """Replace the ids of the members by their indices."""
    for note in notes:
        if isinstance(note, dict):
            note["members"] = sorted(ids.index(member) for member in note["members"])
    return notes


WORLDS = {
    "simulation-pairs": lambda nursery: OnSimulation(2),
    "simulation-group": lambda nursery: OnSimulation(3),
    "distributed-pairs": lambda nursery: OnTorchDistributed(2, nursery()),
    "distributed-group": lambda nursery: OnTorchDistributed(3, nursery()),
    "swarm-pairs": lambda nursery: OnSwarm(),
    "swarm-group": lambda nursery: OnSwarmGroup(),
}
