"""A swarm in memory whose network a test cuts in two and heals: real exchanges, a thread each."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from shoal.optim import CO2, Alone, DiLoCo, NoLoCo, StreamingDiLoCo
from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.membership.membership import NetworkOptions
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.training.factories import make_screen
from shoal.swarm.training.outer_sync import OuterSync

SWARM, MODEL = "a" * 52, "0" * 64
EVERY = 4
WAIT = 60.0  # seconds for a group: never waited for, as all steps are in step
METHODS = {
    "diloco": lambda inner, exchange, net, **o: DiLoCo(inner, exchange, every=EVERY, **o),
    "streaming": lambda inner, exchange, net, **o: StreamingDiLoCo(
        inner, exchange, every=EVERY, fragments=2, lag=1, model=net, **o
    ),
    "co2": lambda inner, exchange, net, **o: CO2(inner, exchange, every=EVERY, **o),
    "noloco": lambda inner, exchange, net, **o: NoLoCo(inner, exchange, every=EVERY, **o, lag=0),
    "overlapped": lambda inner, exchange, net, **o: NoLoCo(
        inner, exchange, every=EVERY, fragments=2, lag=3, model=net, **o
    ),
}


@dataclass
class Cut:
    """A map of hosts to sides; a host that is not named is on side 0."""

    side: dict[str, int] = field(default_factory=dict)

    def between(self, one, other):
        return self.side.get(one, 0) != self.side.get(other, 0)


class Node:
    """A node around its optimizer, with a directory that is always up to date."""

    def __init__(self, network, cut, method, number, wait):
        self.network, self.cut, self.number = network, cut, number
        self.host = network.host()
        self.id = self.host.peer_id
        reach = self.host.open

        async def open_if_whole(peer, protocol, **options):
            if cut.between(self.id, peer):
                raise NetworkError("the network is cut.", "unreachable")
            return await reach(peer, protocol, **options)

        self.host.open = open_if_whole
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        self.data = torch.Generator().manual_seed(number)
        context = PeerContext(self.host, self.host.identity, SWARM, MODEL, 0, self.members)
        timeouts = ExchangeTimeouts(
            wait, 60.0, 60.0
        )  # a silence is the machine's here: who is cut off cannot be opened
        inner = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.opt = METHODS[method](inner, Alone(), self.model, run=SWARM, on_round=self.on_round)
        if method in ("noloco", "overlapped"):
            self.exchange = PairExchange(
                context, timeouts, fragments=self.opt.fragments, overlap=self.opt.lag > 0
            )
        else:
            self.exchange = GroupExchange(context, timeouts, fragments=self.opt.fragments)
        self.opt.exchange = self.exchange
        membership = SimpleNamespace(
            identity=self.host.identity,
            directory=SimpleNamespace(members=self.members, access_policy=AccessPolicy()),
            host=self.host,
            swarm=SWARM,
            manifest=SimpleNamespace(outer=OuterSettings()),
            network=NetworkOptions(),
        )
        self.outer_sync = OuterSync(
            membership, MODEL, self.opt, self.exchange, make_screen(OuterSettings())
        )
        self.outer_sync.begin()
        self.rounds, self.took_over = [], 0
        self.everybody = [self]

    def members(self):
        made = {}
        for node in self.everybody:
            if not self.cut.between(self.id, node.id):
                record = self.network.member(node.id, node.opt.round)
                sync = node.outer_sync
                made[node.id] = record.model_copy(
                    update={
                        **sync.diagnosis.seconds(),
                        **sync.diagnosis.faults(),
                        "sketch": sync.sketch(),
                        "issued": float(node.opt.steps),
                    }
                )
        return made

    def on_round(self, info):
        self.outer_sync.on_round(info)
        self.rounds.append(self.opt.round)

    def step(self):
        x = torch.randn(8, 3, generator=self.data)
        (self.model(x) - x.sum(1, keepdim=True) - self.number / 10).square().mean().backward()
        self.opt.step()
        self.opt.zero_grad()

    def between_steps(self):
        self.took_over += self.outer_sync.after_step()

    def flat(self):
        return torch.cat([tensor.flatten() for tensor in self.opt.slow]).clone()


class Swarm:
    def __init__(self, network, method, count, wait=WAIT):
        self.cut = Cut()
        self.nodes = sorted(
            (Node(network, self.cut, method, number, wait) for number in range(count)),
            key=lambda node: node.id,
        )
        self.pool = ThreadPoolExecutor(count)
        for node in self.nodes:
            node.everybody = self.nodes

    def quiet(self):
        """Wait until what is in flight has arrived, so that every exchange is before a change of
        the network or after it.
        """
        for node in self.nodes:
            for flight in node.opt._in_flight:
                flight.handle.result()

    def split(self, first):
        """So many nodes, in the order of their ids, and the rest."""
        self.quiet()
        self.cut.side.update({node.id: 1 for node in self.nodes[:first]})
        return self.nodes[:first], self.nodes[first:]

    def heal(self):
        self.quiet()
        self.cut.side.clear()

    def train(self, rounds, nodes=None):
        """So many rounds' steps of ``nodes``, step by step together; what a node fetches comes
        before the next step.
        """
        nodes = nodes or self.nodes
        for _ in range(rounds * EVERY):
            list(self.pool.map(Node.step, nodes))
            for _ in range(100):
                for node in nodes:
                    node.between_steps()
                if all(node.outer_sync._resynchronizer._pending is None for node in nodes):
                    break
                threading.Event().wait(
                    0.01
                    # and if they do not come, training goes on: the source may wait for its next
                    # round
                )

    def spread(self):
        weights = torch.stack([node.flat() for node in self.nodes])
        return (weights - weights.mean(0)).norm(dim=1).max().item()

    def together_after_a_round(self):
        self.train(1)
        return self.spread() < 1e-6 and len({node.opt.round for node in self.nodes}) == 1

    def monotone(self):
        return all(node.rounds == sorted(node.rounds) for node in self.nodes)
