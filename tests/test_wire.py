"""docs/wire.md says what the code does: every message with its limit and seal, every protocol,
every bound it names.
"""

import importlib
import pkgutil
import re

import shoal.swarm
from shoal.optim.codecs.registry import CODECS
from shoal.swarm.access.link import MAX_ADDRESSES as LINK_ADDRESSES
from shoal.swarm.access.link import MAX_CHARS
from shoal.swarm.changes import CHANGE_PROTOCOL
from shoal.swarm.exchange.cost import ALL_REDUCED
from shoal.swarm.exchange.group.decisions import DECISION_PROTOCOL
from shoal.swarm.exchange.group.leader import LEADER_PROTOCOL
from shoal.swarm.exchange.group.reduction import PART
from shoal.swarm.exchange.group.roster import BEATS
from shoal.swarm.exchange.group.streams import PAYLOAD_PROTOCOL
from shoal.swarm.exchange.pair.calls import EXCHANGE_PROTOCOL
from shoal.swarm.exchange.pair.transfer import OUTCOME_PROTOCOL
from shoal.swarm.gossip.bodies import BODY_PROTOCOL
from shoal.swarm.manifest import MANIFEST_PROTOCOL
from shoal.swarm.membership.own_record import MAX_ADDRESSES
from shoal.swarm.membership.peer_exchange import (
    LOOK_S,
    MAX_AGE_S,
    MAX_OFFERED,
    SHUFFLE_PROTOCOL,
    SHUFFLE_S,
)
from shoal.swarm.membership.peer_exchange import SHUFFLES_OF_ALL as SHUFFLES
from shoal.swarm.membership.peer_exchange import SHUFFLES_OF_EACH as SHUFFLES_EACH
from shoal.swarm.membership.peer_views import ACTIVE_PEERS, MAX_OF_SOURCE, PASSIVE_PEERS
from shoal.swarm.membership.trie import CAP
from shoal.swarm.p2p.processor_time import MEMBERS, STRANGERS
from shoal.swarm.p2p.punch import PUNCH_PROTOCOL
from shoal.swarm.p2p.rate_limit import RateLimit
from shoal.swarm.p2p.reachability import DIAL_PROTOCOL, LOWEST_PORT
from shoal.swarm.p2p.reachability import MAX_DIALS as DIALS
from shoal.swarm.p2p.reachability import MAX_DIALS_EACH as DIALS_EACH
from shoal.swarm.p2p.resource_manager import (
    ADMISSION_PROTOCOL,
    MAX_HANDLERS,
    MAX_HANDLERS_PER_PEER,
    MAX_STRANGERS,
    Rates,
)
from shoal.swarm.p2p.throughput import MAX_BYTES as TEST_BYTES
from shoal.swarm.p2p.throughput import MAX_TESTS, MAX_TESTS_EACH, MOVE_S, SPEED_PROTOCOL
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.state.chunk_server import CHUNKS_PROTOCOL
from shoal.swarm.state.offers import STATE_PROTOCOL
from shoal.swarm.state.selection import SAMPLE_CHUNKS
from shoal.swarm.state.snapshot_cache import MAX_SNAPSHOTS, UNUSED_S
from shoal.swarm.topics.attestation import MAX_RECORD_BYTES
from shoal.swarm.topics.attestation import QUOTA as ATTESTED
from shoal.swarm.topics.evidence import EVIDENCE_PROTOCOL, MAX_BYTES
from shoal.swarm.topics.policy_versions import POLICY_PROTOCOL
from shoal.swarm.topics.receipts import MAX_PEERS_NAMED
from shoal.swarm.topics.rollout import MAX_COMPLETIONS, MAX_TEXT_BYTES
from shoal.swarm.topics.status import PER_SECOND, RECEIPTS_S, ROUNDS
from shoal.swarm.topics.verification_log import LOG_PROTOCOL, MAX_LOG_BYTES
from shoal.swarm.topics.verification_log import LOG_QUOTA as LOGS
from shoal.swarm.wire.envelope import ENVELOPE, MAX_MESSAGE, Message
from shoal.swarm.wire.messages import (
    GOSSIP_PROTOCOL,
    MAX_CONTACTS,
    MAX_LISTED,
    MAX_NAMED,
    SEED_PROTOCOL,
    SEEN_PROTOCOL,
    SWARMS_PROTOCOL,
)
from shoal.swarm.wire.record import MAX_PARTNERS
from tests.support.wire_page import DOCS, PAGE, SEALED


def test_every_message_is_in_the_table_with_its_limit():
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d+) \| (yes|no) \|", PAGE, re.M)
    documented = {kind: (int(limit), sealed == "yes") for kind, limit, sealed in rows}
    for module in pkgutil.walk_packages(shoal.swarm.__path__, "shoal.swarm."):
        importlib.import_module(
            module.name
        )  # else only those messages are known that this file or another test imports
    # What node/ makes of messages is no message of the swarm's, and there only if another test has
    # imported it.
    sent = [kind for kind in Message.__subclasses__() if kind.__module__.startswith("shoal.swarm.")]
    assert documented == {kind.KIND: (kind.LIMIT, kind.KIND in SEALED) for kind in sent}


def test_every_message_is_said_with_its_version():
    """In its row, and wherever else the page names one; without a number it is the first."""
    versions = {kind.KIND: kind.VERSION for kind in Message.__subclasses__()}
    for name, what in re.findall(r"^\| `([a-z-]+)` \| \d+ \| (?:yes|no) \|(.*)", PAGE, re.M):
        said = re.findall(r"\(version (\d+)\)", what)
        assert said == [str(versions[name])] or (not said and versions[name] == 1), name
    for name, version in re.findall(r"`([a-z-]+)`(?: record)? \(version (\d+)\)", PAGE):
        assert int(version) == versions[name], name


def test_every_protocol_is_in_the_table():
    rows = re.findall(r"^\| `(/shoal/[a-z-]+/\d+)` \|", PAGE, re.M)
    served = [
        EXCHANGE_PROTOCOL,
        OUTCOME_PROTOCOL,
        LEADER_PROTOCOL,
        PAYLOAD_PROTOCOL,
        DECISION_PROTOCOL,
        MANIFEST_PROTOCOL,
        CHANGE_PROTOCOL,
    ]
    served += [
        ADMISSION_PROTOCOL,
        DIAL_PROTOCOL,
        SPEED_PROTOCOL,
        SHUFFLE_PROTOCOL,
        SEEN_PROTOCOL,
        PUNCH_PROTOCOL,
    ]
    served += [
        STATE_PROTOCOL,
        CHUNKS_PROTOCOL,
        BODY_PROTOCOL,
        GOSSIP_PROTOCOL,
        SEED_PROTOCOL,
        EVIDENCE_PROTOCOL,
        POLICY_PROTOCOL,
        LOG_PROTOCOL,
        SWARMS_PROTOCOL,
    ]
    assert sorted(rows) == sorted(served)


def test_deadlines_are_the_defaults():
    rows = re.findall(r"^\| `outer\.(\w+_s)` \| (\d+) s \|", PAGE, re.M)
    defaults = OuterSettings()
    assert {key: float(value) for key, value in rows} == {
        key: getattr(defaults, key) for key in OuterSettings.model_fields if key.endswith("_s")
    }


def test_bounds_of_streams_and_calls_are_those_of_the_code():
    page, rates = (DOCS / "security.md").read_text(encoding="utf-8"), Rates()
    assert f"| {MAX_HANDLERS} at a time (and {MAX_HANDLERS} first ones" in page
    assert f", {MAX_HANDLERS_PER_PEER} of one peer, {MAX_STRANGERS} of non-members; " in page
    assert f"; {rates.streams:,} a minute of one peer. " in page
    assert f"| {rates.calls:,} a minute and {rates.call_bytes >> 20} MiB of one peer |" in page
    for limits, who in ((STRANGERS, "no member"), (MEMBERS, "a member")):
        said = f"{limits.of_peer_s:g} s in {limits.period_s:g} s of one peer that is {who}"
        assert f"{said}, {limits.of_range_s:g} s of all such " in page


def test_bounds_in_the_text_are_those_of_the_code():
    assert f"at most {ENVELOPE} bytes longer" in PAGE
    assert f"parts of at most {PART // 1024} KiB" in PAGE
    assert (BEATS, ALL_REDUCED) == (4, 4)
    assert "four times in each chunk timeout" in PAGE
    assert "four members or more" in PAGE
    assert f"holds fewer than {CAP} others" in PAGE
    assert f"holds 1 to {LINK_ADDRESSES} addresses and at most\n{MAX_CHARS} characters" in PAGE
    assert MAX_ADDRESSES <= LINK_ADDRESSES
    assert f"A message is at most {MAX_MESSAGE} bytes" in PAGE
    assert f"at most {MAX_COMPLETIONS} completions of at most {MAX_TEXT_BYTES} bytes" in PAGE
    assert f"records of others, at most {MAX_NAMED} " in PAGE
    assert f"at most {MAX_LISTED} packed `listed-swarm`" in PAGE
    assert f"records of at most {MAX_CONTACTS} members" in PAGE
    assert f"at most {MAX_OFFERED} sealed records of others" in PAGE
    assert f"view of {ACTIVE_PEERS} peers and a passive one of {PASSIVE_PEERS} places" in PAGE
    assert f"older than an hour is not offered, and at most {MAX_OF_SOURCE} of the peers" in PAGE
    assert (MAX_AGE_S, SHUFFLE_S, LOOK_S) == (3600.0, 60.0, 10.0)
    assert f"{SHUFFLES_EACH} shuffles a minute of one peer and {SHUFFLES} of all" in PAGE
    assert (MAX_SNAPSHOTS, UNUSED_S, SAMPLE_CHUNKS) == (2, 120.0, 4)
    assert "at most two snapshots, each until two minutes after the last request for it" in PAGE
    assert "four chunks of both" in PAGE
    assert f"{RateLimit().messages} messages and {RateLimit().nbytes >> 20} MiB a minute" in PAGE
    assert f"its newest {ROUNDS} rounds" in PAGE
    assert f"at most {MAX_PARTNERS} partners" in PAGE
    assert f"about {PER_SECOND:g} a second" in PAGE
    assert f"for at most {MAX_PEERS_NAMED} others, and sends one every {RECEIPTS_S:g} s" in PAGE
    assert f"at most {MAX_RECORD_BYTES} bytes, and its author's signature" in PAGE
    assert f"{ATTESTED.messages} messages and {ATTESTED.nbytes >> 20} MiB a minute" in PAGE
    assert f"at most {MAX_BYTES >> 20} MiB a minute to one peer" in PAGE
    assert f"a port from {LOWEST_PORT} up" in PAGE
    assert f"{DIALS_EACH} times a minute for one address and {DIALS} times in all" in PAGE
    assert (
        f"at most {TEST_BYTES >> 20} MiB each way in at most {MOVE_S:g} s, {MAX_TESTS_EACH} times "
        "a minute" in PAGE
    )
    assert f"{MAX_TESTS} times in all, and\nnever" in PAGE
    assert f"at most {MAX_LOG_BYTES >> 20} MiB, {LOGS.messages} times a minute to one peer" in PAGE


def test_payload_of_every_codec_is_in_the_table():
    section = PAGE.partition("## Payloads of codecs")[2].partition("\n## ")[0]
    rows = " ".join(re.findall(r"^\| (.*)", section, re.MULTILINE))
    assert [name for name in (*CODECS, "auto", "mod4") if f"`{name}" not in rows] == []
