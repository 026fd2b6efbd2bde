"""docs/wire.md says what the code does: every message with its limit and seal, every protocol, every bound it names."""

import re
from pathlib import Path

from swarm.attestations import MAX_RECORD, Attestation
from swarm.attestations import QUOTA as ATTESTED
from swarm.dial_back import ALL as DIALS
from swarm.dial_back import DIAL_PROTOCOL, LOWEST_PORT
from swarm.dial_back import EACH as DIALS_EACH
from swarm.directory import MAX_ADDRESSES
from swarm.entrance import ADMISSION_PROTOCOL, MAX_HANDLERS, MAX_HANDLERS_PER_PEER, MAX_STRANGERS, Rates
from swarm.evidence import EVIDENCE_PROTOCOL, MAX_BYTES
from swarm.group_allreduce import PART, SMALLEST
from swarm.group_decisions import DECISION_PROTOCOL
from swarm.group_join import LEADER_PROTOCOL
from swarm.group_line import BEATS
from swarm.group_messages import GroupDecision, GroupReady
from swarm.group_reduction import PAYLOAD_PROTOCOL
from swarm.invitation import Invitation
from swarm.link import MAX_ADDRESSES as LINK_ADDRESSES
from swarm.link import MAX_CHARS
from swarm.log_sync import LOG_PROTOCOL, MAX_LOG
from swarm.log_sync import QUOTA as LOGS
from swarm.manifest import MANIFEST_PROTOCOL, Manifest, OuterSettings
from swarm.messages import ENVELOPE, Member, Message, Offer
from swarm.parcel import Notice
from swarm.pieces import PIECES_PROTOCOL
from swarm.pubsub import MAX_MESSAGE
from swarm.quota import Quota
from swarm.rendezvous import EXCHANGE_PROTOCOL
from swarm.rollout_record import MAX_COMPLETIONS, MAX_TEXT, Rollout
from swarm.seed_messages import SEED_PROTOCOL, TOLD
from swarm.shelf import BODY_PROTOCOL
from swarm.snapshot import KEPT, UNUSED_S
from swarm.speed import ALL as TESTS
from swarm.speed import EACH as TESTS_EACH
from swarm.speed import MAX_BYTES as TEST_BYTES
from swarm.speed import MOVE_S, SPEED_PROTOCOL
from swarm.statements import SAMPLE, STATE_PROTOCOL
from swarm.status_record import PARTNERS, PER_SECOND, ROUNDS, Status
from swarm.transfer import OUTCOME_PROTOCOL
from swarm.trie import CAP

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "wire.md").read_text(encoding="utf-8")
SEALED = {
    kind.KIND
    for kind in (Member, Manifest, Offer, GroupReady, GroupDecision, Notice, Rollout, Attestation, Invitation, Status)
}


def test_every_message_is_in_the_table_with_its_limit():
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d+) \| (yes|no) \|", PAGE, re.M)
    documented = {kind: (int(limit), sealed == "yes") for kind, limit, sealed in rows}
    # What node/ makes of messages is no message of the swarm's, and there only if another test has imported it.
    sent = [kind for kind in Message.__subclasses__() if kind.__module__.startswith("swarm.")]
    assert documented == {kind.KIND: (kind.LIMIT, kind.KIND in SEALED) for kind in sent}


def test_every_protocol_is_in_the_table():
    rows = re.findall(r"^\| `(/shoal/[a-z-]+/\d+)` \|", PAGE, re.M)
    served = [EXCHANGE_PROTOCOL, OUTCOME_PROTOCOL, LEADER_PROTOCOL, PAYLOAD_PROTOCOL, DECISION_PROTOCOL, MANIFEST_PROTOCOL]
    served += [ADMISSION_PROTOCOL, DIAL_PROTOCOL, SPEED_PROTOCOL]
    served += [STATE_PROTOCOL, PIECES_PROTOCOL, BODY_PROTOCOL, SEED_PROTOCOL, EVIDENCE_PROTOCOL, LOG_PROTOCOL]
    assert sorted(rows) == sorted(served)


def test_deadlines_are_the_defaults():
    rows = re.findall(r"^\| `outer\.(\w+_s)` \| (\d+) s \|", PAGE, re.M)
    defaults = OuterSettings()
    assert {key: float(value) for key, value in rows} == {
        key: getattr(defaults, key) for key in OuterSettings.model_fields if key.endswith("_s")
    }


def test_bounds_in_the_text_are_those_of_the_code():
    assert f"at most {ENVELOPE} bytes longer" in PAGE
    assert f"at most {MAX_HANDLERS} streams at a time, {MAX_HANDLERS_PER_PEER} per peer" in PAGE
    assert f"{MAX_STRANGERS} of peers that are no members" in PAGE
    assert f"{Rates().streams} streams a minute" in PAGE
    assert f"{Rates().calls} calls and {Rates().call_bytes >> 20} MiB a minute" in PAGE
    assert f"parts of at most {PART // 1024} KiB" in PAGE
    assert (BEATS, SMALLEST) == (4, 4)
    assert "four times in each chunk timeout" in PAGE
    assert "four members or more" in PAGE
    assert f"holds fewer than {CAP} others" in PAGE
    assert f"holds 1 to {LINK_ADDRESSES} addresses and at most\n{MAX_CHARS} characters" in PAGE
    assert MAX_ADDRESSES <= LINK_ADDRESSES
    assert f"A message is at most {MAX_MESSAGE} bytes" in PAGE
    assert f"at most {MAX_COMPLETIONS} completions of at most {MAX_TEXT} bytes" in PAGE
    assert f"records of others, at most {TOLD} " in PAGE
    assert (KEPT, UNUSED_S, SAMPLE) == (2, 120.0, 4)
    assert "at most two snapshots, none two minutes after the last question" in PAGE
    assert "four chunks of both" in PAGE
    assert f"{Quota().messages} messages and {Quota().nbytes >> 20} MiB a minute" in PAGE
    assert f"its newest {ROUNDS} rounds" in PAGE
    assert f"at most {PARTNERS} partners" in PAGE
    assert f"about {PER_SECOND:g} a second" in PAGE
    assert f"at most {MAX_RECORD} bytes, and its author's signature" in PAGE
    assert f"{ATTESTED.messages} messages and {ATTESTED.nbytes >> 20} MiB a minute" in PAGE
    assert f"at most {MAX_BYTES >> 20} MiB a minute to one peer" in PAGE
    assert f"a port from {LOWEST_PORT} up" in PAGE
    assert f"{DIALS_EACH} times a minute for one address and {DIALS} times in all" in PAGE
    assert f"at most {TEST_BYTES >> 20} MiB each way in at most {MOVE_S:g} s, {TESTS_EACH} times a minute" in PAGE
    assert f"{TESTS} times in\nall, and never" in PAGE
    assert f"at most {MAX_LOG >> 20} MiB, {LOGS.messages} times a minute to one peer" in PAGE
