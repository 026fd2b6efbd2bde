"""Who is in the swarm: every node publishes a signed, expiring record of itself in the DHT, and reads those of the others.

Nothing here waits for the network but `refresh`, `wait_for` and `leave`: the records are published and read in the background
on the host's loop, and `members` is the newest picture. See `swarm.trie` for why no key grows with the swarm.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Literal, Protocol, TypeVar

from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.membership import dht_index as trie
from shoal.swarm.membership.dht_record import MAX_TTL, Record, bits_of, key_of, make_record, open_record
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.member import Member

log = logging.getLogger(__name__)

T = TypeVar("T")
State = Literal["waiting", "training", "leaving", "done"]

TTL, PERIOD = 30.0, 5.0  # seconds: how long a record lives, and how often one is published and all are read
LIMIT = 1024  # about as many records are read
GAP = 1.0  # seconds between two publications or two readings, at least
HASTE = 0.5  # seconds between readings while somebody waits for members
CLOCK = 60.0  # seconds a record may be dated ahead of our clock
MAX_ADDRESSES = 8
HERE: tuple[State, ...] = ("waiting", "training")


class DHTClient(Protocol):
    """What a directory needs of a `shoal.swarm.p2p.host.Host`."""

    def addresses(self) -> tuple[str, ...]:
        """Where this node is reached."""

    def remember(self, addresses: Iterable[str]) -> None:
        """Keep addresses of peers for a restart."""

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop."""

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run a coroutine on the loop and wait for it."""

    async def store(self, key: str, subkey: str, value: bytes, ttl: float) -> bool:
        """Put a record into the DHT."""

    async def get(self, key: str) -> dict[str, bytes]:
        """The records under a key."""


class Directory:
    """The members of ``swarm``, as seen by the node with ``identity``. Start the host with a `MemberValidator`.

    ``ttl``: seconds after which a silent peer is no member any more, the same for all of a swarm. ``period``: seconds between
    two publications, and two readings. ``cap``: records per DHT key. ``limit``: about how many members are read at most.
    ``barred``: peers of which it is true are left out of ``members`` and ``departed``; it is asked often and from any thread, so it
    must be quick. It may be set later, for what knows about bans is made after the directory. ``door``: whom it does not let in is
    not there at all, whatever the records say.
    """

    def __init__(
        self,
        host: DHTClient,
        identity: Identity,
        swarm: str,
        *,
        ttl: float = TTL,
        period: float = PERIOD,
        cap: int = trie.CAP,
        limit: int = LIMIT,
        barred: Callable[[str], bool] = lambda peer: False,
        access_policy: AccessPolicy | None = None,
    ) -> None:
        if not 0 < period < ttl < MAX_TTL:
            raise ValueError(f"0 < period < ttl < {MAX_TTL:g} seconds, please")
        self._host = host
        self._identity = identity
        self._swarm = swarm
        self._ttl = ttl
        self._period = period
        self._cap = cap
        self._limit = limit
        self.barred = barred
        self.access_policy = access_policy or AccessPolicy()
        self._changed = threading.Condition()  # guards the next four
        self._seen: dict[str, Member] = {}  # the newest live record of every peer, those that left included
        self._mine: dict[str, Any] | None = None
        self._pressing = False  # what others should know at once was changed
        self._waiting = 0
        self._curious = False
        self._prefix: str | None = None  # where the own record stands
        self._keys: dict[str, trie.Names] = {}  # the trie as it was last read
        self._warned: set[str] = set()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._publishing: asyncio.Lock | None = None
        self._run_future = host.submit(self._run())

    # -- any thread ------------------------------------------------------------------------------------------------------

    def announce(
        self,
        *,
        name: str,
        round: int,
        step: int,
        loss: float | None,
        steps_per_s: float,
        shard: int,
        shards: int,
        model: str,
        state: State,
        version: str,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Set what is published about this node (`Member` says what the fields mean). Returns at once.

        ``details``: fields of `Member` that have defaults.

        A new round or state is published as soon as may be, anything else with the next period. Raises pydantic's
        ValidationError for a field that `Member` does not allow.
        """
        fields = {
            "name": name,
            "round": round,
            "step": step,
            "loss": loss,
            "steps_per_s": steps_per_s,
            "shard": shard,
            "shards": shards,
            "model": model,
            "state": state,
            "version": version,
            **(details or {}),
        }
        self._member(fields)
        with self._changed:
            old = self._mine
            self._mine = fields
            if old is None or (old["round"], old["state"]) != (round, state):
                self._pressing = True
            self._changed.notify_all()
        if self._pressing:
            self._rouse()

    def own(self) -> Member | None:
        """What is published about this node now; None before the first `announce`."""
        with self._changed:
            mine = self._mine
        return None if mine is None else self._member(mine)

    def members(self) -> dict[str, Member]:
        """Peer id -> newest record of all who are waiting or training, this node included, but for who is barred.

        Touches no network, nor does any other of these.
        """
        return {peer: member for peer, member in self.everyone().items() if not self.is_barred(peer)}

    def everyone(self) -> dict[str, Member]:
        """As ``members``, the barred ones too: they can still be reached, as by those who check what they said."""
        return {peer: member for peer, member in self._live().items() if member.state in HERE}

    def addresses(self, peer: str) -> tuple[str, ...]:
        """Where ``peer`` says that it can be reached, a barred one too; none if it is not known."""
        member = self.everyone().get(peer)
        return () if member is None else tuple(member.addresses)

    def is_barred(self, peer: str) -> bool:
        """Whether this node has nothing to do with ``peer``; never itself."""
        return peer != self._identity.peer_id and (self.access_policy.blocks(peer) or self.barred(peer))

    def knows(self, peer: str) -> bool:
        """Whether a record of ``peer`` was read lately; quick, for any thread."""
        return peer in self._seen

    def departed(self) -> dict[str, Member]:
        """Peer id -> last record of those who said within the last ``ttl`` seconds that they left or are done.

        Not of who is barred: nobody was paired with it, so who is behind must not take it for somebody's mate.
        """
        return {p: member for p, member in self._live().items() if member.state not in HERE and not self.is_barred(p)}

    def look(self) -> None:
        """Read soon, though at most once a second, because somebody unknown turned up. Returns at once; for any thread."""
        self._curious = True
        self._rouse()

    def refresh(self, timeout: float) -> None:
        """Read the directory now. Raises NetworkError if that fails or takes more than ``timeout`` seconds."""
        self._host.call(self._read(), timeout)

    def wait_for(self, count: int, timeout: float, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until there are ``count`` members, this node included; False after ``timeout`` seconds or a stop."""
        end = time.monotonic() + timeout
        with self._changed:
            self._waiting += 1
        self._rouse()
        try:
            while len(self.members()) < count:
                left = end - time.monotonic()
                if left <= 0 or self._closed or should_stop():
                    return False
                with self._changed:
                    self._changed.wait(min(left, 0.1))
            return True
        finally:
            with self._changed:
                self._waiting -= 1

    def leave(self, timeout: float) -> bool:
        """Tell the swarm that this node leaves, so that nobody waits for it; then `close`. False if nobody heard."""
        with self._changed:
            if self._mine is not None:
                self._mine = {**self._mine, "state": "leaving"}
        told = True
        try:
            if self._mine is not None:
                told = self._host.call(self._publish(), timeout)
        except NetworkError as error:
            log.info("the swarm was not told that this node leaves: %s", error)
            told = False
        self.close()
        return told

    def close(self) -> None:
        """Stop publishing and reading; the own record expires within ``ttl`` seconds."""
        self._closed = True
        self._run_future.cancel()

    def _live(self) -> dict[str, Member]:
        oldest = time.time() - self._ttl
        with self._changed:
            seen = {
                peer: member for peer, member in self._seen.items() if member.issued >= oldest and self.access_policy.admits(peer)
            }
            mine = self._mine
        if mine is not None:
            seen[self._identity.peer_id] = self._member(mine)
        else:
            seen.pop(self._identity.peer_id, None)  # of an earlier run
        return seen

    def _member(self, fields: dict[str, Any]) -> Member:
        return Member(
            swarm=self._swarm,
            peer=self._identity.peer_id,
            addresses=self._host.addresses()[:MAX_ADDRESSES],
            issued=time.time(),
            admission=self.access_policy.ticket,
            **fields,
        )

    def _rouse(self) -> None:
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None and not self._closed:
            try:
                loop.call_soon_threadsafe(wake.set)
            except RuntimeError:
                log.debug("the host closed before the directory")

    # -- on the loop -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        read = published = float("-inf")
        while not self._closed:
            self._wake.clear()
            now = time.monotonic()
            try:
                due = self._period * 0.75  # less than any pause below
                if self._waiting or now - read >= (GAP if self._curious else due) or self._prefix is None:
                    read, self._curious = now, False
                    await self._read()
                if self._mine is not None and (self._pressing or now - published >= due):
                    published = now
                    await self._publish()
            except NetworkError as error:
                log.info("the directory is not up to date: %s", error)
            except Exception:  # a bug must not make this node vanish from the swarm
                log.warning("the directory failed; trying again", exc_info=True)
            # Not in step with everybody else who started at the same moment.
            unheard = self._mine is not None and self._prefix is None
            pause = HASTE if self._waiting or unheard or self._curious else self._period * random.uniform(0.8, 1.0)
            await self._sleep(pause)
            since = time.monotonic() - published
            if self._pressing and since < GAP:
                await asyncio.sleep(GAP - since)

    async def _sleep(self, seconds: float) -> None:
        assert self._wake is not None
        try:
            await asyncio.wait_for(self._wake.wait(), seconds)
        except asyncio.TimeoutError:
            return

    async def _read(self) -> None:
        async def under(prefix: str) -> dict[str, Member]:
            values = await self._host.get(key_of(self._swarm, prefix))
            opened = ((peer, open_record(value)) for peer, value in values.items())
            return {p: r.member for p, r in opened if r is not None and self._credible(p, prefix, r)}

        own = bits_of(self._identity.peer_id)
        keys = await trie.read(under, own, now=self._prefix, cap=self._cap, limit=self._limit)
        self._keys = keys
        found = [member for names in keys.values() for member in names.values() if isinstance(member, Member)]
        oldest = time.time() - self._ttl
        with self._changed:
            seen = {peer: member for peer, member in self._seen.items() if member.issued >= oldest}
            for member in found:
                if member.peer not in seen or member.issued > seen[member.peer].issued:
                    seen[member.peer] = member
            self._seen = seen
            self._changed.notify_all()
        # One address each: a few peers are enough to find the swarm again.
        others = (m for m in found if m.peer != self._identity.peer_id and m.state in HERE)
        self._host.remember(a for m in others for a in m.addresses[:1] if a.endswith(f"/p2p/{m.peer}"))

    def _credible(self, peer: str, prefix: str, record: Record) -> bool:
        member = record.member
        if member.peer != peer or member.swarm != self._swarm or record.prefix != prefix:
            return False
        if member.issued > time.time() + CLOCK:
            if peer not in self._warned and len(self._warned) < 100:
                self._warned.add(peer)
                log.warning("peer %s is ignored: its clock, or ours, is wrong by more than %g s", short(peer), CLOCK)
            return False
        return self.access_policy.record(peer, member.admission, member.issued, member.state in HERE)

    async def _publish(self) -> bool:
        if self._publishing is None:
            self._publishing = asyncio.Lock()
        async with self._publishing:  # a leaving must not be overtaken by an earlier record
            with self._changed:
                fields = self._mine
                self._pressing = False
            if fields is None:
                return False
            me = self._identity.peer_id
            prefix = trie.place(me, self._prefix, self._keys, cap=self._cap)
            value = make_record(prefix, self._member(fields), self._identity)
            if not await self._host.store(key_of(self._swarm, prefix), me, value, self._ttl):
                raise NetworkError("no node of the swarm took this node's record.")
            self._prefix = prefix
            return True
