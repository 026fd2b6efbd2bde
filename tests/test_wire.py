"""docs/wire.md says what the code does: every message with its limit and seal, every protocol, every bound it names."""

import re
from pathlib import Path

from swarm.directory import MAX_ADDRESSES
from swarm.host import MAX_HANDLERS, MAX_HANDLERS_PER_PEER
from swarm.link import MAX_ADDRESSES as LINK_ADDRESSES
from swarm.link import MAX_CHARS
from swarm.manifest import Manifest, OuterSettings
from swarm.messages import ENVELOPE, Member, Message, Offer
from swarm.parcel import Notice
from swarm.pubsub import MAX_MESSAGE
from swarm.quota import Quota
from swarm.rendezvous import EXCHANGE_PROTOCOL
from swarm.rollout_record import MAX_COMPLETIONS, MAX_TEXT, Rollout
from swarm.shelf import BODY_PROTOCOL
from swarm.transfer import OUTCOME_PROTOCOL
from swarm.trie import CAP
from swarm.welcome import MANIFEST_PROTOCOL, STATE_PROTOCOL

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "wire.md").read_text(encoding="utf-8")
SEALED = {Member.KIND, Manifest.KIND, Offer.KIND, Notice.KIND, Rollout.KIND}


def test_every_message_is_in_the_table_with_its_limit():
    rows = re.findall(r"^\| `([a-z-]+)` \| (\d+) \| (yes|no) \|", PAGE, re.M)
    documented = {kind: (int(limit), sealed == "yes") for kind, limit, sealed in rows}
    assert documented == {kind.KIND: (kind.LIMIT, kind.KIND in SEALED) for kind in Message.__subclasses__()}


def test_every_protocol_is_in_the_table():
    rows = re.findall(r"^\| `(/shoal/[a-z]+/\d+)` \|", PAGE, re.M)
    assert sorted(rows) == sorted([EXCHANGE_PROTOCOL, OUTCOME_PROTOCOL, MANIFEST_PROTOCOL, STATE_PROTOCOL, BODY_PROTOCOL])


def test_deadlines_are_the_defaults():
    rows = re.findall(r"^\| `outer\.(\w+_s)` \| (\d+) s \|", PAGE, re.M)
    defaults = OuterSettings()
    assert {key: float(value) for key, value in rows} == {
        key: getattr(defaults, key) for key in OuterSettings.model_fields if key.endswith("_s")
    }


def test_bounds_in_the_text_are_those_of_the_code():
    assert f"at most {ENVELOPE} bytes longer" in PAGE
    assert f"at most {MAX_HANDLERS} streams at a time, {MAX_HANDLERS_PER_PEER} per peer" in PAGE
    assert f"holds fewer than {CAP} others" in PAGE
    assert f"holds 1 to {LINK_ADDRESSES} addresses and at most\n{MAX_CHARS} characters" in PAGE
    assert MAX_ADDRESSES <= LINK_ADDRESSES
    assert f"most {MAX_MESSAGE} bytes and is a `parcel`" in PAGE
    assert f"at most {MAX_COMPLETIONS} completions of at most {MAX_TEXT} bytes" in PAGE
    assert f"{Quota().messages} messages and {Quota().nbytes >> 20} MiB a minute" in PAGE
