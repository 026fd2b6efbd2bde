"""Courts for test_forgery.py: what a node does with the bytes of a signed record that a sender
brings it, in one word. Each runs the code that judges such bytes when they come from the network.
It says nothing if it takes them."""

import asyncio
import hashlib
import logging
import time
import zlib
from concurrent.futures import Future
from typing import ClassVar

import msgpack
import torch
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord

from shoal.node.watch.source import RecordFilter
from shoal.optim import FLOAT32
from shoal.optim.exchange.base import Contribution
from shoal.swarm.access.invitation import Admission
from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.errors import MessageError
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.contribution import ExchangeAttempt
from shoal.swarm.exchange.group.butterfly import check_average
from shoal.swarm.exchange.group.decisions import DecisionLog
from shoal.swarm.exchange.group.leader import LEADER_PROTOCOL
from shoal.swarm.exchange.group.roster import encode_list, open_roster
from shoal.swarm.exchange.pair.calls import EXCHANGE_PROTOCOL
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.gossip.envelope import Body, make_envelope
from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.manifest import open_manifest, swarm_id
from shoal.swarm.membership.change_keeper import ChangeKeeper
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.peer_exchange import PeerExchange
from shoal.swarm.membership.records import MemberValidator, key_of
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.seed.registry import SeedRegistry
from shoal.swarm.topics.attestation import Attestations
from shoal.swarm.topics.policy_versions import PolicyFollower
from shoal.swarm.topics.receipts import Receipts
from shoal.swarm.topics.rollout_pool import RolloutPool
from shoal.swarm.topics.status import Status
from shoal.swarm.topics.tally import Tally
from shoal.swarm.wire.envelope import ENVELOPE, NONCES, pack, seal, unpack
from shoal.swarm.wire.messages import (
    Announcement,
    Answer,
    GroupFormed,
    GroupReceipt,
    Offer,
    SeedRequest,
    SwarmsRequest,
)
from tests.support.directory_hosts import Quiet
from tests.support.fake_network import MODEL, SWARM, FakeHost, GroupPeer
from tests.support.waiting import until
from tests.swarm.security.forgeries import (
    ELSEWHERE,
    GUEST,
    HONEST,
    LIAR,
    ROUND,
    VICTIM,
    attestation,
    average,
    change,
    decision,
    invitation,
    manifest,
    member,
    mine,
    notice,
    offer,
    probe,
    ready,
    receipts,
    rollout,
    status,
    version,
)

WORDS = {
    "wrong signature": "forged",
    "another peer than its": "forged",
    "malformed or forged": "forged",
    "another peer": "another's",
    "not signed by the creator": "not the creator's",
    "in place of": "kind",
    "he wrong swarm id": "another id",
    "in swarm": "foreign-swarm",
    "is for swarm": "foreign-swarm",
    "is for peer": "another's",
    "expired": "expired",
    "it is of round": "another round",
    "not the one of peer": "another decision",
    "the nonce": "another nonce",
    "has not signed it for this group": "another average",
}


def word(text):
    """Return the first of `WORDS` that is in a sentence."""
    return next((short for said, short in WORDS.items() if said in text), text)


def reason_of(work, *arguments):
    """Return the reason of the MessageError raised; nothing if none is."""
    try:
        work(*arguments)
    except MessageError as error:
        return error.reason if error.reason != "malformed" else word(str(error))
    return ""


def stream_from(peer, pipe):
    return Stream(peer, *pipe, TrafficMeter())


class Court:
    """``make``: an honest record, with changes.

    ``old``: those of an old one. ``swarm``: those of another swarm's. ``author``: it
    has to come from who signed it. ``again``: anybody may pass it on, but it is taken once.
    """

    old, swarm, author, again = None, {"swarm": ELSEWHERE}, True, False

    def __init__(self, network):
        self.network = network


class Directories(Court):
    """A node of the DHT that is asked to store it; and a directory that reads it there, if some
    other node did.
    """

    make, old = staticmethod(member), {"issued": time.time() - 100}

    def __init__(self, network):
        self.values = {}

    def addresses(self):
        return ()

    def remember(self, addresses):
        assert not list(addresses)

    def submit(self, coroutine):
        coroutine.close()
        return Future()

    async def get(self, key):
        return self.values

    def judge(self, sealed, sender):
        value, now = msgpack.packb(["", sealed]), time.time()
        record = DHTRecord(
            DHTID.generate(source=key_of(SWARM, "")).to_bytes(),
            DHTProtocol.serializer.dumps(sender.peer_id),
            DHTProtocol.serializer.dumps(value),
            now + 20,
        )
        stored = MemberValidator(SWARM).validate(record)
        self.values = {sender.peer_id: value}
        directory = Directory(self, VICTIM, SWARM)
        asyncio.run(directory._read())
        read = bool(directory.members())
        assert stored == read
        return "" if stored else "not stored"


class Seeds(Court):
    make = staticmethod(member)

    def __init__(self, network):
        self.book = SeedRegistry()

    def judge(self, sealed, sender):
        return self.book.answer(sender.peer_id, SeedRequest(swarm=SWARM, record=sealed)).reason


class Manifests(Court):
    """A newcomer with a link, which is handed a manifest; by whom does not matter."""

    make, swarm, author = staticmethod(manifest), {"name": "y"}, False

    def judge(self, sealed, sender):
        honest = seal(manifest(), HONEST)
        other = sealed == seal(manifest(**self.swarm), HONEST)
        return reason_of(open_manifest, sealed, swarm_id(honest if other else sealed))


class Policies(Court):
    """An invitation by the honest creator for a peer, which shows it itself if it came from there,
    else the sender does.
    """

    make, old = staticmethod(invitation), {"expires": time.time() - 400}

    def __init__(self, network):
        self.access_policy = AccessPolicy(VICTIM.peer_id, swarm=SWARM, creator=HONEST.peer_id)

    def judge(self, sealed, sender):
        peer = GUEST if sender is HONEST else sender
        return word(
            self.access_policy.refusal(
                peer.peer_id, pack(Admission.model_construct(invitation=sealed))
            )
        )


class Pairs(Court):
    """A node before its round, to which the sender opens a stream with an offer."""

    make, old = staticmethod(offer), {"round": ROUND - 1}

    def __init__(self, network):
        self.network, self.host = network, network.host()
        self.members = [HONEST.peer_id, self.host.peer_id]
        members = lambda: {peer: network.member(peer, ROUND) for peer in self.members}  # noqa: E731
        context = PeerContext(self.host, self.host.identity, SWARM, MODEL, 0, members)
        self.exchange = PairExchange(context, ExchangeTimeouts(1.0, 1.0, 5.0))
        self.exchange.next_round = ROUND

    def judge(self, sealed, sender):
        stream = called(self.network, self.host, EXCHANGE_PROTOCOL, sender, sealed)
        handle = None
        if (
            sealed == seal(offer(), HONEST) and sender is HONEST
        ):  # it is held until this node comes to its round
            until(lambda: self.exchange.held.calls)
            handle = self.exchange.start(
                Contribution(mine().key, mine().payload.tensors(), 1.0, FLOAT32)
            )
        answer = unpack(self.host.call(stream.receive(Answer.LIMIT, 5), 6), Answer)
        self.network.loop.call_soon_threadsafe(stream.abort)
        if answer.verdict == "accept":
            assert handle.result() is None  # the stream ended
            return ""
        return word(answer.reason) if answer.verdict == "refuse" else answer.verdict


def called(network, host, protocol, sender, data):
    """Return a stream of ``protocol`` that ``sender`` opened to ``host``, and its first message."""

    async def call():
        caller, callee = await network.wire()
        network.tasks.add(
            asyncio.ensure_future(host.answer(protocol, stream_from(sender.peer_id, callee)))
        )
        stream = stream_from(host.peer_id, caller)
        await stream.send(data, 2)
        return stream

    return host.call(call(), 60)


class Answers(Pairs):
    """A node that has called its partner, the sender, which accepts and answers with this."""

    old, swarm = {"nonce": bytes(15) + b"1"}, {"swarm": ELSEWHERE, "nonce": bytes(15) + b"1"}

    def judge(self, sealed, sender):
        partner = self.network.hosts[sender.peer_id] = FakeHost(self.network, sender)
        self.members = [sender.peer_id, self.host.peer_id]
        said = []

        async def answer(stream):
            await stream.receive(Offer.LIMIT + ENVELOPE, 2)
            await stream.send(pack(Answer(verdict="accept", round=ROUND)), 2)
            await stream.send(sealed, 2)

        async def repeating():
            NONCES.set(bytes)
            exchange = self.exchange
            return await exchange.meet(ExchangeAttempt(mine()), exchange.rounds.hand_in(ROUND))

        class Hearing(logging.Handler):
            def emit(self, record):
                said.append(record.getMessage())

        partner.serve(EXCHANGE_PROTOCOL, answer)
        logger, hearing = logging.getLogger("shoal"), Hearing()
        logger.addHandler(hearing)
        level = logger.level
        logger.setLevel(logging.INFO)
        try:
            received = self.host.call(repeating(), 60)
        finally:
            logger.removeHandler(hearing)
            logger.setLevel(level)
        assert received == ()  # not even the honest one sends more
        found = word(" ".join(said))
        return found if found in WORDS.values() else ""


class Leaders(Court):
    """The leader of a round, to which the sender opens a stream with a ready message."""

    make, old = staticmethod(ready), {"round": ROUND - 1}

    def __init__(self, network):
        self.network, self.peer = network, GroupPeer(network)
        self.peer.exchange.next_round = ROUND

    def judge(self, sealed, sender):
        stream = called(self.network, self.peer.host, LEADER_PROTOCOL, sender, sealed)
        receipt = unpack(
            self.peer.host.call(stream.receive(GroupReceipt.LIMIT, 5), 6), GroupReceipt
        )
        self.network.loop.call_soon_threadsafe(stream.abort)
        return (
            ""
            if receipt.verdict == "noted"
            else word(receipt.reason)
            if receipt.verdict == "refuse"
            else receipt.verdict
        )


class Asked(Leaders):
    """A member to which a leader opens a stream to ask where it is."""

    make = staticmethod(probe)

    def __init__(self, network):
        super().__init__(network)
        self.peer.exchange.rounds.begin(ROUND, 0)


class Rosters(Court):
    """A member that gets its group from its leader.

    The leader needs only a ready message of each peer that it lists.
    """

    make, old, author = staticmethod(ready), {"round": ROUND - 1}, False

    def __init__(self, network):
        self.mine = seal(ready(), VICTIM)

    def judge(self, sealed, sender):
        formed = GroupFormed(
            nonce=bytes(16),
            reduction="gather",
            alone=True,
            members=encode_list([self.mine, sealed]),
        )
        return reason_of(open_roster, formed, LIAR.peer_id, self.mine, 32)


class Judgements(Court):
    """A member that gets the decision of its leader, the sender, on its group."""

    make, old = staticmethod(decision), {"nonce": bytes(15) + b"1"}

    def __init__(self, network):
        self.decisions = DecisionLog(network.host(), VICTIM, SWARM, 1.0)

    def judge(self, sealed, sender):
        return reason_of(self.decisions.open, sealed, sender.peer_id, bytes(16))


class Averages(Court):
    """A member that gets the average of a share from the sender, its owner."""

    make, old = staticmethod(average), {"nonce": bytes(15) + b"1"}

    def judge(self, sealed, sender):
        payload = torch.zeros(4, dtype=torch.uint8)
        return reason_of(check_average, sealed, sender.peer_id, SWARM, bytes(16), payload)


class Topics(Court):
    """A node that takes part in a topic; what it hears the sender hands over, each time packed
    another way.
    """

    again = True

    def __init__(self, network):
        self.network = network
        self.host = host = network.host()
        self.gossip = Gossip(host, host.identity, SWARM, members=dict, fetch_s=1.0)
        self.topic = self.join()
        self.level = 0

    def judge(self, sealed, sender):
        before = self.topic.counters.rejected()
        ended = sum(before.values()) + self.topic.counters.events().get("accepted", 0)
        body = Body("zlib", len(sealed), zlib.compress(sealed, self.level))
        self.level += 1
        data = make_envelope(SWARM, body)
        digest = hashlib.sha256(data).digest()
        self.network.call(self.topic.take(sender.peer_id, digest, data), 60)
        until(
            lambda: (
                sum(self.topic.counters.rejected().values())
                + self.topic.counters.events().get("accepted", 0)
                == ended + 1
            )
        )
        return next(
            (
                reason
                for reason, count in self.topic.counters.rejected().items()
                if count != before.get(reason, 0)
            ),
            "",
        )


class Pools(Topics):
    make, old = staticmethod(rollout), {"issued": time.time() - 10_000_000}

    def join(self):
        pool = RolloutPool(self.gossip, lambda *env: True)
        pool.advance(ROUND)
        return pool.topic


class Notices(Topics):
    """A notice that is believed is fetched, which nobody hands out here."""

    make = staticmethod(notice)

    def join(self):
        return RolloutPool(self.gossip, lambda *env: True).topic

    def judge(self, sealed, sender):
        said = super().judge(sealed, sender)
        return "" if said == "unavailable" else said


class PolicyVersions(Topics):
    """An older version than the newest is no fault, and changes nothing."""

    make = staticmethod(version)

    def join(self):
        return PolicyFollower(self.gossip, self.host, HONEST.peer_id, always=True)._topic


class Records(Topics):
    make = staticmethod(attestation)

    def join(self):
        return Attestations(self.gossip, lambda author, record, signature: None).topic


class Tallies(Topics):
    make = staticmethod(receipts)

    def join(self):
        tally = Tally(GUEST.peer_id, SWARM)
        topic = self.gossip.join(
            Receipts, lambda author, record: tally.take(record, topic.sealed, "")
        )
        return topic


class Gates(Court):
    """A watcher."""

    make, old, again = staticmethod(status), {"issued": time.time() - 1000}, True

    def __init__(self, network):
        self.gate = RecordFilter(Status, SWARM)

    def judge(self, sealed, sender):
        data = make_envelope(SWARM, Body("plain", len(sealed), sealed))
        return reason_of(self.gate.open, data)


class Counters(Gates):
    """A watcher that adds up what is confirmed."""

    make = staticmethod(receipts)

    def __init__(self, network):
        self.gate = RecordFilter(Receipts, SWARM)


class Changes(Court):
    """A member that holds an earlier change, and is handed this one; by whom does not matter."""

    make, old, author = staticmethod(change), {"number": 5}, False

    def __init__(self, network):
        host = network.host()
        self.keeper = ChangeKeeper(host, Directory(Quiet(), VICTIM, SWARM), SWARM, manifest())
        self.keeper.close()
        self.keeper.take(seal(change(number=6), HONEST))

    def judge(self, sealed, sender):
        taken = []
        said = reason_of(lambda: taken.append(self.keeper.take(sealed)))
        return said or ("" if taken == [True] else "older")


COURTS = {
    "`member`, in the DHT": Directories,
    "`member`, at a bootstrap node": Seeds,
    "`manifest`": Manifests,
    "`change`": Changes,
    "`invitation`": Policies,
    "`offer`, of a caller": Pairs,
    "`offer`, in answer": Answers,
    "`group-ready`, at the leader": Leaders,
    "`group-probe`, at a member": Asked,
    "`group-ready`, in a group": Rosters,
    "`group-decision`": Judgements,
    "`group-average`": Averages,
    "`rollout`": Pools,
    "`notice`": Notices,
    "`policy-version`": PolicyVersions,
    "`attestation`": Records,
    "`status`": Gates,
    "`receipts`, at a node": Tallies,
    "`receipts`, at a watcher": Counters,
}


class Unheard(Quiet):
    """A host that meets nobody."""

    met: ClassVar = {}

    def serve(self, protocol, handler):
        pass


class Shuffles(Court):
    """A member to which the sender shows a record of its own in a shuffle."""

    make, old = staticmethod(member), {"issued": time.time() - 200}

    def __init__(self, network):
        self.exchange = PeerExchange(Unheard(), Directory(Unheard(), VICTIM, SWARM), VICTIM, SWARM)

    def judge(self, sealed, sender):
        return reason_of(self.exchange._hear, sender.peer_id, sealed, sender.peer_id)


class Offers(Shuffles):
    """The same member, to which the sender offers the record of another."""

    old, author = {"issued": time.time() - 4000}, False

    @staticmethod
    def make(**changes):
        return member(addresses=(f"/ip4/192.0.2.1/tcp/1/p2p/{HONEST.peer_id}",), **changes)

    def judge(self, sealed, sender):
        before = self.exchange.counters.rejected()
        self.exchange._take(sender.peer_id, [sealed])
        now = self.exchange.counters.rejected()
        assert bool(self.exchange.views.hints) == (now == before)
        return "".join(reason for reason in now if now[reason] != before.get(reason))


SHUFFLES = {"`member`, in a shuffle": Shuffles, "`member`, offered in a shuffle": Offers}


SEALED = seal(manifest(public=True), HONEST)
PUBLIC = swarm_id(SEALED)


def announcement(**changes):
    fields = {
        "swarm": PUBLIC,
        "peer": HONEST.peer_id,
        "manifest": SEALED,
        "params": 1,
        "round_bytes": 1,
        "memory": 0,
        "device": "cpu",
        "issued": 1.0,
    }
    return Announcement(**{**fields, **changes})


class Boards(Court):
    make = staticmethod(announcement)

    def __init__(self, network):
        registry = SeedRegistry()
        for who in (HONEST, LIAR):  # membership proves nothing: anybody may be a member
            record = seal(member(swarm=PUBLIC, peer=who.peer_id), who)
            assert (
                registry.answer(who.peer_id, SeedRequest(swarm=PUBLIC, record=record)).reason == ""
            )
        self.registry = registry

    def judge(self, sealed, sender):
        return self.registry.listing(sender.peer_id, SwarmsRequest(announcement=sealed)).reason


ANNOUNCEMENTS = {"`announcement`, at a bootstrap node": Boards}
