"""Honest signed records of each kind, and what a liar makes of them."""

import time

import msgpack
import torch

from shoal.optim import FLOAT32, RoundKey
from shoal.optim.exchange.base import Contribution
from shoal.swarm.access.invitation import Invitation
from shoal.swarm.changes import Change, ChangePart
from shoal.swarm.exchange.contribution import encode_contribution
from shoal.swarm.exchange.group.butterfly import digest_of
from shoal.swarm.exchange.group.roster import ready_message
from shoal.swarm.gossip.envelope import BodyAnnouncement
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Manifest
from shoal.swarm.topics.attestation import Attestation, sign_record
from shoal.swarm.topics.policy_versions import PolicyVersion
from shoal.swarm.topics.receipts import Receipts
from shoal.swarm.topics.rollout import Rollout
from shoal.swarm.topics.status import Status
from shoal.swarm.wire.envelope import pack, seal
from shoal.swarm.wire.messages import GroupAverage, GroupDecision, GroupProbe, Offer
from tests.support.fake_network import MODEL, SWARM
from tests.support.records import in_groups, member_of

ELSEWHERE = "b" * 52
HONEST, LIAR, GUEST, VICTIM = (Identity.ephemeral() for _ in range(4))
ROUND = 5
ISSUED = time.time()


def member(**changes):
    return member_of(
        HONEST.peer_id,
        **{"round": ROUND, "step": 1, "steps_per_s": 1.0, "issued": time.time(), **changes},
    )


def status(**changes):
    fields = {
        "swarm": SWARM,
        "peer": HONEST.peer_id,
        "name": "x",
        "addresses": (),
        "state": "training",
        "round": ROUND,
        "step": 1,
        "steps_per_s": 1.0,
        "issued": time.time(),
        "version": "0",
    }
    return Status(**in_groups(Status, {**fields, **changes}))


def receipts(**changes):
    work = ((GUEST.peer_id, 1, 1.0, 10.0, 0, 0.0, 0),)
    fields = {"swarm": SWARM, "peer": HONEST.peer_id, "issued": time.time(), "work": work}
    return Receipts(**{**fields, **changes})


def rollout(**changes):
    fields = {
        "swarm": SWARM,
        "peer": HONEST.peer_id,
        "env": "add",
        "env_version": "1",
        "env_config": b"",
        "seed": 1,
        "index": 2,
        "completions": ("one",),
        "finish": ("stop",),
        "policy_version": 3,
        "temperature": 1.0,
        "round": ROUND,
        "nonce": bytes(16),
        "issued": time.time(),
    }
    return Rollout(**{**fields, **changes})


def attestation(**changes):
    fields = {
        "swarm": SWARM,
        "peer": HONEST.peer_id,
        "record": b"r",
        "signature": sign_record(HONEST, b"r"),
    }
    return Attestation(**{**fields, **changes})


def notice(**changes):
    fields = {
        "swarm": SWARM,
        "peer": HONEST.peer_id,
        "encoding": "zlib",
        "size": 300_000,
        "nbytes": 100,
        "sha256": bytes(32),
    }
    return BodyAnnouncement(**{**fields, **changes})


def manifest(**changes):
    fields = {
        "name": "x",
        "created": 1.0,
        "creator": HONEST.peer_id,
        "task": "bytes",
        "model": MODEL,
    }
    return Manifest(**{**fields, **changes})


def invitation(**changes):
    now = time.time()
    fields = {
        "swarm": SWARM,
        "id": bytes(16),
        "issued": now - 500,
        "expires": now + 500,
        "uses": 1,
        "peer": GUEST.peer_id,
    }
    return Invitation(**{**fields, **changes})


def change(**changes):
    parts = (ChangePart(round=ROUND, lr=0.5, steps=100),)
    fields = {"swarm": SWARM, "creator": HONEST.peer_id, "number": 7, "parts": parts}
    return Change(**{**fields, **changes})


def mine(round=ROUND):
    return encode_contribution(
        SWARM, Contribution(RoundKey(SWARM, round), [torch.zeros(4)], 1.0, FLOAT32)
    )


def offer(**changes):
    it = mine()
    fields = {
        "swarm": SWARM,
        "round": ROUND,
        "fragment": 0,
        "nbytes": it.payload.nbytes,
        "shapes": it.shapes,
        "dtype": "float32",
        "codec": "float32",
        "sha256": it.payload.sha256,
        "weight": 1.0,
        "model": MODEL,
        "nonce": bytes(16),
    }
    return Offer(**{**fields, **changes})


def ready(**changes):
    return ready_message(mine(), SWARM, MODEL, 5.0).model_copy(update=changes)


def probe(**changes):
    return GroupProbe(**{"swarm": SWARM, "round": ROUND, "fragment": 0, **changes})


def decision(**changes):
    return GroupDecision(**{"swarm": SWARM, "nonce": bytes(16), "mean": 3, **changes})


def average(**changes):
    digest = digest_of(torch.zeros(4, dtype=torch.uint8))
    return GroupAverage(**{"swarm": SWARM, "nonce": bytes(16), "sha256": digest, **changes})


def version(**changes):
    fields = {"swarm": SWARM, "peer": HONEST.peer_id, "version": 3, "nbytes": 8}
    return PolicyVersion(**{**fields, "sha256": bytes(32), "issued": ISSUED, **changes})


# -- what is forged --------------------------------------------------------------------------------


def rekeyed(message):
    """With the liar's key: in the honest peer's name, and in its own."""
    payload = pack(message)
    yield msgpack.packb(
        [HONEST.peer_id, payload, LIAR.sign(f"shoal/{message.KIND}/{message.VERSION}", payload)]
    )
    yield seal(message, LIAR)


def flipped(message):
    """Flip one bit of the signer, of the content, and of the signature."""
    sealed = seal(message, HONEST)
    content = sealed.index(pack(message))
    for at in (5, content + 20, len(sealed) - 1):
        yield sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]


def moved(message):
    """Signed by the honest peer as something else; and something else, well signed."""
    payload = pack(message)
    yield msgpack.packb([HONEST.peer_id, payload, HONEST.sign("shoal/another/1", payload)])
    other = member() if message.KIND != "member" else status()
    yield seal(other, HONEST)
