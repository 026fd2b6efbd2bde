"""The contenders of bench/exchange.py: one end each of ours, a pair or a group, raw TCP and
hivemind, with the same few methods.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

PIECES = 16  # tensors of a payload
SWARM = "a" * 52
PATIENCE = 120.0  # seconds for one exchange
FLOATS_PER_MB = 250_000
GROUP = 4  # members of a group, from which on it all-reduces
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
T = TypeVar("T")


def payload(mb: int, number: int) -> list[Tensor]:
    """``mb`` million bytes of float32 that both ends can make: the tensors of peer ``number``."""
    flat = torch.empty(mb * FLOATS_PER_MB).uniform_(
        -1, 1, generator=torch.Generator().manual_seed(1000 * mb + number)
    )
    return list(flat.tensor_split(PIECES))


class Peer(ABC):
    """One end. ``prepare`` is not timed, ``exchange`` is."""

    def __init__(self, number: int, ip: str) -> None:
        self.number, self.ip = number, ip
        self.mb = 0
        self.own: list[Tensor] = []

    @abstractmethod
    def address(self) -> dict[str, Any]:
        """What the other end must know."""

    @abstractmethod
    def meet(self, other: dict[str, Any], *more: dict[str, Any]) -> None:
        """Connect to the other end, or to all others of a group."""

    def prepare(self, mb: int) -> None:
        if mb != self.mb:
            self.own, self.mb = [], mb
            self.own = payload(mb, self.number)

    @abstractmethod
    def exchange(self) -> None:
        """From the tensors here to the result here."""

    @abstractmethod
    def right(self) -> bool:
        """Whether the last exchange did what it should have."""

    def sent(self) -> int:
        """Bytes that have left this end so far, where they are counted."""
        return 0

    def close(self) -> None:  # noqa: B027 - not every contender has something to leave
        """Leave."""

    def mean(self) -> Iterator[Tensor]:
        """The pair's mean, correctly rounded; one tensor after the other, so that it does not count
        among what a node holds.
        """
        for mine, theirs in zip(self.own, payload(self.mb, 1 - self.number), strict=True):
            yield (mine + theirs) / 2


class Ours(Peer):
    """A host with its daemon and a PairExchange: encoding, digest, meeting, transfer, verification,
    confirm, mean.
    """

    def __init__(self, number: int, ip: str) -> None:
        super().__init__(number, ip)
        from shoal.swarm.identity import Identity
        from shoal.swarm.p2p.host import Host

        self.identity = Identity.ephemeral()
        self.host = Host.start(self.identity, listen=[f"/ip4/{ip}/tcp/0"])
        self.rounds = 0
        self.got: Any = None
        self.options: dict[str, Any] = {}

    def address(self) -> dict[str, Any]:
        return {"peer": self.host.peer_id, "addresses": self.host.addresses()}

    def meet(self, other: dict[str, Any], *more: dict[str, Any]) -> None:
        from shoal.optim.exchange.base import Contribution, RoundKey
        from shoal.swarm.exchange.context import PeerContext
        from shoal.swarm.wire.messages import Member

        def member(peer: str, addresses: Sequence[str]) -> Member:
            return Member(
                swarm=SWARM,
                peer=peer,
                name="bench",
                addresses=tuple(addresses),
                round=0,
                step=0,
                loss=None,
                steps_per_s=0.0,
                shard=0,
                shards=1,
                model="0" * 64,
                state="training",
                issued=time.time(),
                version="0",
            )

        members = {
            at["peer"]: member(at["peer"], at["addresses"]) for at in (self.address(), other, *more)
        }
        self.key, self.contribution = RoundKey, Contribution
        context = PeerContext(self.host, self.identity, SWARM, "0" * 64, 0, lambda: members)
        self.swarm = self.exchange_of(context)

    def exchange_of(self, context: Any) -> Any:
        from shoal.swarm.exchange.pair.exchange import PairExchange
        from shoal.swarm.exchange.timeouts import ExchangeTimeouts

        return PairExchange(context, ExchangeTimeouts(exchange=PATIENCE))

    def prepare(self, mb: int) -> None:
        self.got = None
        super().prepare(mb)

    def exchange(self) -> None:
        self.got = self.swarm.start(
            self.contribution(self.key(SWARM, self.rounds), self.own, **self.options)
        ).result()
        self.rounds += 1

    def right(self) -> bool:
        return self.got is not None and all(map(torch.equal, self.got.tensors, self.mean()))

    def sent(self) -> int:
        return self.host.traffic.sent

    def close(self) -> None:
        self.host.close()


class Reduced(Ours):
    """One of a group of `GROUP`, which all-reduces float32."""

    def exchange_of(self, context: Any) -> Any:
        from shoal.swarm.exchange.group.exchange import GroupExchange
        from shoal.swarm.exchange.timeouts import ExchangeTimeouts

        return GroupExchange(context, ExchangeTimeouts(exchange=PATIENCE))

    def right(self) -> bool:
        return self.got is not None and len(self.got.members) == GROUP


class Gathered(Reduced):
    """One of a group of `GROUP`, which gathers payloads of ``mb`` in int8."""

    def __init__(self, number: int, ip: str) -> None:
        super().__init__(number, ip)
        from shoal.optim.codecs.registry import INT8

        self.options = {"codec": INT8}

    def prepare(self, mb: int) -> None:
        super().prepare(4 * mb)


class Member(Reduced):
    """One of a group of ``members`` whose contributions, ``mb`` in float32, have this codec."""

    def __init__(self, number: int, ip: str, members: int, codec: str) -> None:
        super().__init__(number, ip)
        self.members, self.named = members, codec

    def prepare(self, mb: int) -> None:
        from shoal.optim.codecs.registry import codec_named

        super().prepare(mb)
        self.codec = codec_named(self.named)  # error feedback is kept for values of one shape
        self.options = {"codec": self.codec}

    def exchange(self) -> None:
        super().exchange()
        if self.got is not None:
            self.codec.accepted()  # type: ignore[attr-defined]

    def right(self) -> bool:
        return self.got is not None and len(self.got.members) == self.members


class Tcp(Peer):
    """The bytes alone, over one asyncio connection in the plainest way: no digest, no encryption,
    no confirm, no mean.

    Reading piece by piece with ``read`` into memory made beforehand takes a third less time than
    ``readexactly``.
    """

    STEP = 1 << 20

    def __init__(self, number: int, ip: str) -> None:
        super().__init__(number, ip)
        # The loop goes on between the exchanges: what is sent may still be on its way when the last
        # of the other's arrives.
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.connected: concurrent.futures.Future[Ends] = concurrent.futures.Future()
        self.port = self._call(self._listen()) if number == 0 else 0

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE)

    async def _listen(self) -> int:
        self.server = await asyncio.start_server(
            lambda *ends: self.connected.set_result(ends), "127.0.0.1", 0
        )
        return int(self.server.sockets[0].getsockname()[1])

    def address(self) -> dict[str, Any]:
        return {"port": self.port}

    def meet(self, other: dict[str, Any], *more: dict[str, Any]) -> None:
        if other["port"]:
            self.connected.set_result(
                self._call(asyncio.open_connection("127.0.0.1", other["port"]))
            )
        self.reader, self.writer = self.connected.result(PATIENCE)

    def prepare(self, mb: int) -> None:
        if mb != self.mb:
            super().prepare(mb)
            self.outgoing = torch.cat(self.own).numpy().data.cast("B")
        self.incoming = b""

    async def _send(self) -> None:
        for start in range(0, len(self.outgoing), self.STEP):
            self.writer.write(self.outgoing[start : start + self.STEP])
            await self.writer.drain()

    async def _receive(self) -> None:
        self.incoming = await self.reader.readexactly(len(self.outgoing))

    async def _both(self) -> None:
        await asyncio.gather(self._send(), self._receive())

    def exchange(self) -> None:
        self._call(self._both())

    def right(self) -> bool:
        return self.incoming == torch.cat(payload(self.mb, 1 - self.number)).numpy().data.cast("B")


class HivemindAllReduce(Peer):
    """DecentralizedAverager, two peers, no compression.

    Only its all-reduce is timed. With ``require_trigger`` a step finds its group and then waits in
    the stage AWAITING_TRIGGER, which is visible here in shared memory; when both peers are there,
    the benchmark's signal sets both triggers, and the time is that from the trigger to the result.
    """

    def __init__(self, number: int, ip: str) -> None:
        super().__init__(number, ip)
        # hivemind's default keeps a manager process and files, which outlive it if it dies; this
        # leaves nothing behind.
        os.environ["HIVEMIND_MEMORY_SHARING_STRATEGY"] = "file_descriptor"
        import hivemind

        # The first peer is where the second one joins, so the peers are started one after the other
        # by ``meet``.
        self.hivemind: Any = hivemind
        self.dht: Any = hivemind.DHT(start=True, use_ipfs=False) if number == 0 else None
        self.averager: Any = None
        self.step: Any = None

    def address(self) -> dict[str, Any]:
        return {
            "addresses": [str(address) for address in self.dht.get_visible_maddrs()]
            if self.dht
            else []
        }

    def meet(self, other: dict[str, Any], *more: dict[str, Any]) -> None:
        if self.dht is None:
            self.dht = self.hivemind.DHT(
                initial_peers=other["addresses"], start=True, use_ipfs=False
            )

    def prepare(self, mb: int) -> None:
        from hivemind.averaging.control import AveragingStage

        if mb != self.mb:
            if self.averager is not None:
                self.averager.shutdown()
            super().prepare(mb)
            self.averager = self.hivemind.DecentralizedAverager(
                [tensor.clone() for tensor in self.own],
                self.dht,
                prefix=f"bench{mb}",
                target_group_size=2,  # full with two: no waiting for more
                min_matchmaking_time=1.0,
                request_timeout=0.5,
                allow_state_sharing=False,
                start=True,
            )
        with self.averager.get_tensors() as tensors:
            for tensor, own in zip(tensors, self.own, strict=True):
                tensor.copy_(own)
        self._find_group(AveragingStage.AWAITING_TRIGGER)

    def _find_group(self, found: Any) -> None:
        self.step = self.averager.step(wait=False, require_trigger=True, timeout=PATIENCE)
        until = time.monotonic() + PATIENCE
        while self.step.stage != found:
            if time.monotonic() > until:
                raise RuntimeError("hivemind's averagers did not find each other")
            if (
                self.step.done()
            ):  # "could not find a group", which happens now and then: not timed, so ask again
                self.step = self.averager.step(wait=False, require_trigger=True, timeout=PATIENCE)
            time.sleep(0.01)

    def exchange(self) -> None:
        self.step.allow_allreduce()
        self.step.result(PATIENCE)

    def right(self) -> bool:
        with self.averager.get_tensors() as tensors:
            return all(
                torch.allclose(*pair, atol=1e-5) for pair in zip(tensors, self.mean(), strict=True)
            )

    def close(self) -> None:
        if self.averager is not None:
            self.averager.shutdown()
        self.dht.shutdown()


class Hivemind(HivemindAllReduce):
    """The same averager as its user calls it: from ``step`` to the result, finding the partner
    included, as it is in ours.
    """

    def _find_group(self, found: Any) -> None:
        """Left to the exchange."""

    def exchange(self) -> None:
        self.averager.step(timeout=PATIENCE)


MEMBER = "member"


def peer_of(kind: str, number: int, ip: str) -> Peer:
    """The end of a kind in `KINDS`, or of "member MEMBERS CODEC"."""
    name, *how = kind.split()
    if name == MEMBER:
        return Member(number, ip, int(how[0]), how[1])
    return KINDS[kind](number, ip)


KINDS: dict[str, Callable[[int, str], Peer]] = {
    "ours": Ours,
    "reduced": Reduced,
    "gathered": Gathered,
    "tcp": Tcp,
    "hivemind": Hivemind,
    "allreduce": HivemindAllReduce,
}
