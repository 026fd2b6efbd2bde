"""What bench/overlap.py compares, with the same few methods: ours by libp2p, DDP, torchft and
hivemind.
"""

from __future__ import annotations

import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench._link import DEVICE
from bench._pace import PacedModel

PATIENCE = 120.0  # seconds for one exchange, or for a library to find its peers
SWARM = "a" * 52
PAIRS = {"noloco", "noloco-blocking"}
IN_FRAGMENTS = {"noloco", "streaming"}


@dataclass(frozen=True)
class Setup:
    """What a node is told at its start."""

    method: str
    rank: int
    nodes: int
    ip: str
    port: int
    """To listen on, 0: any."""
    announced: int | None
    """The port that others must dial instead."""
    step_s: float
    every: int
    layers: int
    width: int
    fragments: int
    lag: int | None
    """Inner steps that an exchange of ours may take; None: what each node finds."""
    codec: str | None
    """Of ours; None: each method's own."""
    earlier: list[dict[str, Any]]
    """``address`` of the nodes that were started before, in order."""


class Method(ABC):
    """One node of one method. ``meet`` blocks until all are there."""

    sends_gradients = False
    """Whether every step must make real gradients."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @abstractmethod
    def address(self) -> dict[str, Any]:
        """What nodes that are started later must know."""

    @abstractmethod
    def meet(self, everybody: list[dict[str, Any]]) -> None:
        """Connect, given the addresses of all nodes in order, the own one included."""

    @abstractmethod
    def wrap(self, model: PacedModel, inner: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        """What to call for the loss, and what to call ``zero_grad`` and ``step`` of."""

    @abstractmethod
    def rounds(self) -> int:
        """Exchanges with others that have succeeded so far."""

    def alone(self) -> int | None:
        """Exchanges so far that found no partner; None if the method does not count them."""
        return None

    def waited(self) -> float | None:
        """Seconds blocked so far by the method's own meter; None if it has none."""
        return None

    def close(self) -> None:  # noqa: B027 - not every method has something to leave
        """Leave."""


class Alone(Method):
    """No exchange at all: what this machine costs the loop by itself."""

    def address(self) -> dict[str, Any]:
        return {}

    def meet(self, everybody: list[dict[str, Any]]) -> None:
        """Nobody to meet."""

    def wrap(self, model: PacedModel, inner: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        return model, inner

    def rounds(self) -> int:
        return 0


class Ours(Method):
    """A host with its daemon and an exchange over it: by pairs for NoLoCo, else among all.

    Settings are the methods' defaults.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        from shoal.swarm.identity import Identity
        from shoal.swarm.p2p.host import Host

        self.identity = Identity.ephemeral()
        announce = [] if setup.announced is None else [f"/ip4/{setup.ip}/tcp/{setup.announced}"]
        known = [address for node in setup.earlier for address in node["addresses"]]
        self.host = Host.start(
            self.identity,
            listen=[f"/ip4/{setup.ip}/tcp/{setup.port}"],
            announce=announce,
            bootstrap=known,
        )
        self._rounds = self._alone = 0

    def address(self) -> dict[str, Any]:
        return {
            "peer": self.host.peer_id,
            "addresses": self.host.addresses(),
            "step_s": self.setup.step_s,
        }

    def meet(self, everybody: list[dict[str, Any]]) -> None:
        from shoal.swarm.wire.messages import Member

        def member(peer: str, addresses: Sequence[str], step_s: float) -> Member:
            return Member(
                swarm=SWARM,
                peer=peer,
                name="bench",
                addresses=tuple(addresses),
                round=0,
                step=0,
                loss=None,
                steps_per_s=1 / step_s,
                shard=0,
                shards=1,
                model="0" * 64,
                state="training",
                issued=time.time(),
                version="0",
            )

        self.members = {
            at["peer"]: member(at["peer"], at["addresses"], at["step_s"]) for at in everybody
        }
        self.exchange = self.make_exchange()

    def make_exchange(self) -> Any:
        from shoal.swarm.exchange.context import PeerContext
        from shoal.swarm.exchange.group.exchange import GroupExchange
        from shoal.swarm.exchange.pair.exchange import PairExchange
        from shoal.swarm.exchange.timeouts import ExchangeTimeouts

        context = PeerContext(self.host, self.identity, SWARM, "0" * 64, 0, lambda: self.members)
        timeouts = ExchangeTimeouts(30.0, 15.0, PATIENCE)
        fragments = self.setup.fragments if self.setup.method in IN_FRAGMENTS else 1
        if self.setup.method in PAIRS:
            return PairExchange(
                context,
                ExchangeTimeouts(exchange=PATIENCE),
                fragments=fragments,
                overlap=self.setup.method == "noloco",
                speed=lambda member: member.steps_per_s,
            )
        return GroupExchange(context, timeouts, fragments=fragments)

    def wrap(self, model: PacedModel, inner: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        from shoal import optim

        every = self.setup.every
        options: dict[str, Any] = {"run": SWARM, "on_round": self._on_round, "model": model}
        if self.setup.method in IN_FRAGMENTS:
            options |= {"fragments": self.setup.fragments} | {
                "lag": "auto" if self.setup.lag is None else self.setup.lag
            }
        if self.setup.method == "noloco-blocking":
            options |= {"lag": 0}
        if self.setup.codec is not None:
            options |= {"codec": optim.codec_named(self.setup.codec)}
        makers: dict[str, Callable[..., optim.OuterOptimizer]] = {
            "noloco": optim.NoLoCo,
            "noloco-blocking": optim.NoLoCo,
            "diloco": optim.DiLoCo,
            "streaming": optim.StreamingDiLoCo,
            "co2": optim.CO2,
        }
        return model, makers[self.setup.method](inner, self.exchange, every=every, **options)

    def _on_round(self, info: Any) -> None:
        if len(info.members) > 1:
            self._rounds += 1
        else:
            self._alone += 1

    def rounds(self) -> int:
        return self._rounds

    def alone(self) -> int:
        return self._alone

    def waited(self) -> float | None:
        return float(self.exchange.waited)

    def close(self) -> None:
        self.host.close()


class Ddp(Method):
    """DistributedDataParallel over gloo: gradients every step, sent in buckets while earlier layers
    are still computed.
    """

    sends_gradients = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
        self._steps = 0

    def address(self) -> dict[str, Any]:
        return {"port": _free_port(self.setup.ip), "ip": self.setup.ip}

    def meet(self, everybody: list[dict[str, Any]]) -> None:
        first = everybody[0]
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{first['ip']}:{first['port']}",
            rank=self.setup.rank,
            world_size=self.setup.nodes,
            timeout=timedelta(seconds=PATIENCE),
        )

    def wrap(self, model: PacedModel, inner: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        inner.register_step_post_hook(self._count)
        return nn.parallel.DistributedDataParallel(model), inner

    def _count(self, *_: Any) -> None:
        self._steps += 1

    def rounds(self) -> int:
        return self._steps

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class TorchFt(Method):
    """torchft's DiLoCo over gloo, synchronous, or in fragments as far as it goes (one in flight,
    lag below every / fragments).
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
        from torchft.coordination import LighthouseServer

        self.lighthouse: Any = None
        if setup.rank == 0:
            self.lighthouse = LighthouseServer(
                bind=f"{setup.ip}:0", min_replicas=setup.nodes, join_timeout_ms=1000
            )

    def address(self) -> dict[str, Any]:
        if self.lighthouse is None:
            return {}
        return {
            "lighthouse": f"http://{self.setup.ip}:{self.lighthouse.address().rpartition(':')[2]}"
        }

    def meet(self, everybody: list[dict[str, Any]]) -> None:
        from torchft import Manager, ProcessGroupGloo

        patience = timedelta(seconds=PATIENCE)
        self.store = TCPStore(self.setup.ip, 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=patience),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=self.setup.nodes,
            use_async_quorum=False,
            timeout=patience,
            quorum_timeout=patience,
            rank=0,
            world_size=1,
            store_addr=self.setup.ip,
            store_port=self.store.port,
            lighthouse_addr=everybody[0]["lighthouse"],
            replica_id=f"bench{self.setup.rank}",
            hostname=self.setup.ip,
            init_sync=False,
        )

    def wrap(self, model: PacedModel, inner: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        from torchft.local_sgd import DiLoCo

        streaming = self.setup.method == "torchft-streaming"
        count = self.setup.fragments if streaming else 1
        layers = list(model.layers)
        fragments = [nn.ModuleList(layers[number::count]) for number in range(count)]
        outer = [
            torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True, foreach=True)
            for part in fragments
        ]
        lag = self.setup.every // count - 1 if streaming else 0  # the longest that it accepts
        self.diloco = DiLoCo(
            self.manager,
            fragments,
            inner,
            outer,
            sync_every=self.setup.every,
            pin_memory=False,
            fragment_sync_delay=lag,
            fragment_update_alpha=0.5 if streaming else 0.0,
        )
        self.diloco.__enter__()
        return model, inner

    def rounds(self) -> int:
        return int(self.manager.current_step())

    def close(self) -> None:
        self.manager.shutdown(wait=False)
        if self.lighthouse is not None:
            self.lighthouse.shutdown()


class Hivemind(Method):
    """hivemind.Optimizer(use_local_updates=True) as it comes: parameters are averaged in the
    background.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        os.environ["HIVEMIND_MEMORY_SHARING_STRATEGY"] = (
            "file_descriptor"  # leaves no manager process behind
        )
        import hivemind

        self.hivemind: Any = hivemind
        self.opt: Any = None
        options: dict[str, Any] = {"host_maddrs": [f"/ip4/{setup.ip}/tcp/{setup.port}"]}
        if setup.announced is not None:
            options["announce_maddrs"] = [f"/ip4/{setup.ip}/tcp/{setup.announced}"]
        known = [address for node in setup.earlier for address in node["addresses"]]
        self.dht: Any = hivemind.DHT(initial_peers=known, start=True, use_ipfs=False, **options)

    def address(self) -> dict[str, Any]:
        return {"addresses": [str(address) for address in self.dht.get_visible_maddrs()]}

    def meet(self, everybody: list[dict[str, Any]]) -> None:
        """Done by the DHT."""

    def wrap(self, model: PacedModel, inner: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        setup = self.setup
        self.opt = self.hivemind.Optimizer(
            dht=self.dht,
            run_id="bench",
            optimizer=inner,
            batch_size_per_step=1,
            target_batch_size=setup.every * setup.nodes,
            use_local_updates=True,
            matchmaking_time=3.0,  # its advice for small runs
            averaging_timeout=PATIENCE,
            averager_opts={"target_group_size": setup.nodes},
        )
        return model, self.opt

    def rounds(self) -> int:
        return int(self.opt.local_epoch)

    def close(self) -> None:
        if self.opt is not None:
            self.opt.shutdown()
        self.dht.shutdown()


def _free_port(ip: str) -> int:
    with socket.socket() as probe:
        probe.bind((ip, 0))
        return int(probe.getsockname()[1])


KINDS: dict[str, Callable[[Setup], Method]] = {
    "alone": Alone,
    "ddp": Ddp,
    "torchft": TorchFt,
    "torchft-streaming": TorchFt,
    "hivemind": Hivemind,
    "noloco": Ours,
    "streaming": Ours,
    "co2": Ours,
    "noloco-blocking": Ours,
    "diloco": Ours,
}
