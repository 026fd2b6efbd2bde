"""One peer of an exchange in a process of its own, which can end or stop itself at a named point of
the protocol.

Run as a program it is a nursery: it has everything imported and forks a worker for each line on
stdin (a path of a Unix socket to which the worker connects and takes its orders, one JSON object a
line). The points are reached by wrapping methods of the product here, in the worker; the product
knows nothing of it.
"""

import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch._dynamo  # a process's first optimizer does, for a second: here once for all workers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench._attacks import ATTACKS, Scene
from shoal.node.checkpoint.writer import CheckpointWriter
from shoal.optim import NoLoCo, RoundKey, codec_named
from shoal.optim.exchange.base import Contribution
from shoal.optim.exchange.update_screen import TRUSTING
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.group.decisions import DecisionLog
from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.exchange.group.reduction import AllReduce
from shoal.swarm.exchange.pair import calls
from shoal.swarm.exchange.pair import exchange as exchange_module
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.pair.held_calls import HeldCalls
from shoal.swarm.exchange.pair.transfer import PairTransfer
from shoal.swarm.exchange.robust import DistanceScreen
from shoal.swarm.exchange.round_time import RoundTime
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.host import Host
from shoal.swarm.state import chunk_server
from shoal.swarm.state.download import MemorySink
from shoal.swarm.state.query import StateQuery
from shoal.swarm.state.snapshot import State
from shoal.swarm.state.state_server import StateServer
from shoal.swarm.state.sync import begin_fetch
from shoal.swarm.wire import envelope
from shoal.swarm.wire.messages import Commit, Ready, StateRequest
from tests.support.records import member_of

SWARM, MODEL = "a" * 52, "0" * 64
EVERY = 2


def values(number, floats):
    """The tensors of peer ``number``, known to whoever wants to check."""
    return torch.empty(floats).uniform_(-1, 1, generator=torch.Generator().manual_seed(number))


def train(
    number,
    floats,
    exchange,
    on_step=lambda step, opt: None,
    steps=EVERY + 1,
    lag=0,
    codec="float32",
):
    """A plain loop with ``NoLoCo``: one exchange after step 2, then the next inner step.

    Returns the slow weights.
    """
    weight = torch.nn.Parameter(torch.zeros(floats))
    opt = NoLoCo(
        torch.optim.SGD([weight], lr=0.1),
        exchange,
        every=EVERY,
        run=SWARM,
        lag=lag,
        codec=codec_named(codec),
    )
    target = values(number, floats)
    for step in range(1, steps + 1):
        weight.grad = weight.detach() - target
        opt.step()
        on_step(step, opt)
    return opt.slow[0]


def sha256(tensor):
    return hashlib.sha256(tensor.numpy().data).hexdigest()


def memory():
    """Resident bytes: now, and at most since the last call."""
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    return tuple(int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))


def member(peer, addresses):
    return member_of(peer, name="worker", addresses=tuple(addresses), issued=time.time())


class Worker:
    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.lock = threading.Lock()

    def say(self, event, **fields):
        with self.lock:
            self.socket.sendall(
                json.dumps({"event": event, "at": time.monotonic(), **fields}).encode() + b"\n"
            )

    def run(self):
        for line in self.socket.makefile():
            order = json.loads(line)
            getattr(self, "do_" + order.pop("do"))(**order)
        self.host.close()

    def do_host(self):
        self.identity = Identity.ephemeral()
        self.host = Host.start(self.identity)
        self.say("host", peer=self.host.peer_id, addresses=self.host.addresses())

    def do_meet(self, other, screen=None, attack=None, overlap=False, **timeouts):
        # What an exchange may hold of training follows from the time of a round, and rounds of real
        # nodes take minutes.
        RoundTime.period = lambda *_: 4 * timeouts["wait"]
        self.screen = TRUSTING if screen is None else DistanceScreen(**screen)
        if attack is not None:
            self.lie(ATTACKS[attack])
        members = {
            other["peer"]: member(**other),
            self.host.peer_id: member(self.host.peer_id, self.host.addresses()),
        }
        hold = HeldCalls.hold

        async def held(calls, stream, offer):
            self.say("held")
            return await hold(calls, stream, offer)

        HeldCalls.hold = held
        self.exchange = PairExchange(
            PeerContext(self.host, self.identity, SWARM, MODEL, 0, lambda: members),
            ExchangeTimeouts(**timeouts),
            overlap=overlap,
            screen=self.screen,
        )
        self.say("met")

    def lie(self, attack):
        """Contribute what ``attack`` makes of it; whoever does so sees no other peer's."""
        honest = exchange_module.encode_contribution

        def lying(swarm, contribution):
            own = list(contribution.tensors)
            scene = Scene(own, [own], [torch.zeros_like(t) for t in own], own)
            return honest(swarm, replace(contribution, tensors=attack(scene)))

        exchange_module.encode_contribution = lying

    def do_suspicions(self):
        self.say(
            "suspicions",
            found=[[found.key.round, str(found)] for found in self.screen.rejections()],
        )

    def do_group(self, places, **timeouts):
        members = {network["peer"]: member(**network) for network in places}
        self.exchange = GroupExchange(
            PeerContext(self.host, self.identity, SWARM, MODEL, 0, lambda: members),
            ExchangeTimeouts(**timeouts),
        )
        self.say("met")

    def do_mean(self, number, floats, round):
        mean = self.exchange.start(
            Contribution(RoundKey(SWARM, round), [values(number, floats)])
        ).result()
        got = {} if mean is None else {"members": mean.members, "sha256": sha256(mean.tensors[0])}
        self.say("mean", round=round, **got)

    def do_train(self, number, floats, **options):
        train(
            number,
            floats,
            self.exchange,
            lambda step, opt: self.say("step", step=step, slow=sha256(opt.slow[0])),
            **options,
        )
        self.say("trained")

    def do_measure(self, number, floats, round):
        own = list(values(number, floats).tensor_split(7))
        memory()
        before, _ = memory()
        mean = self.exchange.start(Contribution(RoundKey(SWARM, round), own)).result()
        peak = memory()[1]
        theirs = values(1 - number, floats).tensor_split(7)
        right = mean is not None and all(
            torch.equal(m, (a + b) / 2) for m, a, b in zip(mean.tensors, own, theirs, strict=True)
        )
        self.say("measured", right=right, grown=peak - before)

    def do_serve(self, floats):
        """Hand out a state to whoever asks, as a node that trains: between two steps of a thread of
        its own.
        """
        state = State(round=3, slow=[values(7, floats)])
        server = StateServer(self.host, SWARM, MODEL, [(floats,)])

        def steps():
            pause = threading.Event()
            while not pause.wait(0.02):
                server.offer(lambda: state)

        threading.Thread(target=steps, daemon=True).start()
        self.say("serving")

    def do_fetch(self, sources, floats):
        query = StateQuery(StateRequest(swarm=SWARM, model=MODEL), [(floats,)], equal=True)
        state = begin_fetch(
            self.host, query, [(source["peer"], source["addresses"]) for source in sources]
        ).result(60)
        self.say("fetched", round=state.round, sha256=sha256(state.slow[0]))

    def do_save(self, folder, step, floats, number=0):
        """Write a checkpoint, and send myself the signal ``number`` in the middle of it."""

        once = iter(
            [True]
        )  # there are more blocks than one, and who was let go on goes on to the end

        def at(reached):
            if number and reached == "block" and next(once, False):
                self.die(number)

        saver = CheckpointWriter(
            Path(folder),
            keep=3,
            state=lambda: {"weights": [values(0, floats)]},
            notify=print,
            at=at,
        )
        assert saver.last(step, patience_s=600.0) is None  # of which it may be stopped for minutes
        self.say("saved", step=step)

    def die(self, number):
        """Or stop, in this very call, and go on from here later."""
        self.say("point")
        signal.pthread_kill(threading.get_ident(), number)

    def do_arm(self, point, number):
        """Send myself the signal ``number`` at ``point``."""

        def now():
            self.say("point")
            os.kill(os.getpid(), number)
            threading.Event().wait(60)  # a stop reaches this thread a little after the call

        offer, advance = calls.make_offer, envelope.HashList.advance
        hear, tell = PairTransfer._receive, PairTransfer._send

        def at_offer(*args):
            now()
            return offer(*args)

        def at_chunk(hashes, available):
            if len(hashes._payload) // 3 <= available < len(hashes._payload):
                now()
            return advance(hashes, available)

        async def at_ready(transfers, stream, *types):
            if Commit in types:  # the callee's READY is out
                now()
            reply = await hear(transfers, stream, *types)
            if isinstance(reply, Ready):  # the caller has it, and has not decided
                now()
            return reply

        async def at_decided(transfers, stream, message):
            if isinstance(message, Commit):
                now()
            await tell(transfers, stream, message)

        async def at_commit(transfers, stream, message):
            await tell(transfers, stream, message)
            if isinstance(message, Commit):
                now()

        async def at_heard(transfers, stream, *types):
            reply = await hear(transfers, stream, *types)
            if isinstance(reply, Commit):
                now()
            return reply

        chunk_of, write = chunk_server._chunk, MemorySink.write

        def at_snapshot_chunk(snapshot, chunk):
            if chunk:  # neither the digests nor the first
                now()
            return chunk_of(snapshot, chunk)

        def at_write(sink, chunk, data):
            if sink.have:
                now()
            write(sink, chunk, data)

        received, settle = AllReduce._received, DecisionLog.settle

        async def at_part(reduction, *args):
            now()
            return await received(reduction, *args)

        def at_settle(*args):
            now()
            return settle(*args)

        network, name, wrapped = {
            "snapshot-chunk": (chunk_server, "_chunk", at_snapshot_chunk),
            "write": (MemorySink, "write", at_write),
            "part": (AllReduce, "_received", at_part),
            "settle": (DecisionLog, "settle", at_settle),
            "offer": (calls, "make_offer", at_offer),
            "chunk": (envelope.HashList, "advance", at_chunk),
            "ready": (PairTransfer, "_receive", at_ready),
            "decided": (PairTransfer, "_send", at_decided),
            "commit": (PairTransfer, "_send", at_commit),
            "heard": (PairTransfer, "_receive", at_heard),
        }[point]
        setattr(network, name, wrapped)
        self.say("armed")


def main():
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how the workers ended
    print("ready", flush=True)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            Worker(line.rstrip("\n")).run()
            os._exit(0)


if __name__ == "__main__":
    main()
