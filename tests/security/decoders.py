"""Every function that makes something of a stranger's bytes, with good bytes for it and the
exceptions that it may raise.

`test_fuzz` finds such functions in the source, and fails for one that is neither here nor in `OWN`.
"""

import contextlib
import functools
import hashlib
import json
import math
import tempfile
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import torch
from safetensors.torch import save

from shoal.node.checkpoint import export, store
from shoal.node.commands import creator, status
from shoal.node.commands.sample import SampleError, load_pulled
from shoal.node.config.settings import load as load_settings
from shoal.node.data.source import DataError
from shoal.node.rl.environment import EnvError, PolicyError
from shoal.node.rl.serving import _said, _Server
from shoal.node.runtime import resume
from shoal.node.runtime.join import new_manifest
from shoal.node.task import Shard
from shoal.node.tasks.gpt import GPT
from shoal.node.tasks.text import TextTask
from shoal.node.training.trainer import Trainer
from shoal.node.training.training_error import TrainingError
from shoal.node.verify import audit, completions
from shoal.node.verify import material as claims
from shoal.node.verify.audit import VerifyError
from shoal.node.verify.history import _carried
from shoal.node.verify.material import Agreed, Coordinates, material_of
from shoal.node.verify.material import decode_material as decode_material
from shoal.node.watch.events import Unreachable, WatchError, event_of, line_of
from shoal.optim import Alone
from shoal.optim.codecs.mod4 import Mod4Codec
from shoal.optim.codecs.registry import codec_named
from shoal.swarm.access import Link, admission, entry_of, issue
from shoal.swarm.errors import AdmissionError, IdentityError, LinkError, MessageError
from shoal.swarm.exchange.group.roster import encode_roster, open_roster
from shoal.swarm.gossip import envelope
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import (
    Manifest,
    OuterSettings,
    TrainSettings,
    is_public,
    open_manifest,
    swarm_id,
    title_of,
)
from shoal.swarm.membership.records import MemberValidator, make_record, open_record
from shoal.swarm.membership.swarm_list import read_listed
from shoal.swarm.p2p import multiaddr
from shoal.swarm.topics.attestation import sign_record
from shoal.swarm.topics.rollout import Rollout
from shoal.swarm.wire.envelope import (
    Message,
    pack,
    pack_names,
    peek,
    seal,
    unpack,
    unpack_names,
    unseal,
)
from shoal.swarm.wire.messages import Announcement, GroupFormed, GroupReady, ListedSwarm, Member
from shoal.verification.calibration import Calibration, CalibrationError, Honest, Pair
from shoal.verification.calibration_file import load_calibration, save_calibration
from shoal.verification.consensus.log import Log, decode_log
from shoal.verification.consensus.log import encode as encode_log
from shoal.verification.consensus.records import Claim, Signed, VoteRecord
from shoal.verification.consensus.records import decode as decode_record
from shoal.verification.consensus.reputation import Standing, Table
from shoal.verification.consensus.sortition import Electorate
from shoal.verification.fingerprints.activations import ActivationProof
from shoal.verification.fingerprints.fingerprint import Evidence, Feature
from tests.security.hostile import (
    DIGESTED,
    INVITE,
    JSON,
    MSGPACK,
    PARTS,
    SAFETENSORS,
    SIGNERS,
    Form,
    frames,
)
from tests.support.message_kinds import good, kinds

ME, OTHER = Identity.ephemeral(), Identity.ephemeral()
SIGNERS.update({one.peer_id: one for one in (ME, OTHER)})
ASIDE = tempfile.TemporaryDirectory(prefix="fuzz-")  # it goes when this process ends
SWARM, HERE = "a" * 52, Path(ASIDE.name)
TINY = {"layers": 1, "width": 8, "heads": 2, "context": 8}


class Decoder(NamedTuple):
    """A decoder.

    ``covers``: the functions, as ``path:name``, that it goes through and that call what opens
    bytes.
    """

    name: str
    covers: tuple[str, ...]
    read: Callable[[bytes], Any]
    samples: Callable[[], list[bytes]]
    form: Form | None = None
    refuses: tuple[type[Exception], ...] = ()
    sentence: bool = True
    """Whether the exception's text is for people."""
    sound: Callable[[Any], bool] = lambda value: True
    """Whether a value is within its bounds."""
    tree: bool = True
    """Whether other values in one place are tried; not of messages, for which `test_message_fields`
    does that.
    """
    cases: int = 300
    """Of these, at most."""
    times: int = 24
    """How many bytes Python may hold for one that comes: a list of small numbers in JSON takes up
    to 20.
    """


def one(name, covers, read, sample, form=None, *refuses, **more):
    """Return a decoder of which ``sample`` makes good bytes; ``covers``: its functions, between
    spaces.
    """
    return Decoder(name, tuple(covers.split()), read, lambda: [sample()], form, refuses, **more)


@functools.cache
def manifest(**changes):
    plain = open_manifest(
        new_manifest(load_settings(None, {"task.options": {**TINY, "batch": 1}}), ME, "0" * 64)
    )
    return seal(
        Manifest.model_validate(
            {**{name: getattr(plain, name) for name in Manifest.model_fields}, **changes}
        ),
        ME,
    )


def member(identity=ME):
    return good(Member).model_copy(update={"peer": identity.peer_id})


def messages():
    for kind in kinds():
        if issubclass(kind, Message) and kind is not Manifest:
            yield one(
                f"message {kind.KIND}",
                "swarm/wire/envelope.py:_kind swarm/wire/envelope.py:_decode",
                lambda data, kind=kind: unpack(data, kind),
                lambda kind=kind: pack(good(kind)),
                MSGPACK,
                MessageError,
                tree=False,
            )
        elif kind is not Manifest:
            yield one(
                f"record {kind.KIND}",
                "verification/consensus/records.py:decode",
                decode_record,
                lambda kind=kind: good(kind).encoded,
                MSGPACK,
                ValueError,
                sentence=False,
                tree=False,
                sound=lambda record: decode_record(record.encoded) == record,
            )


def listed():
    sealed = manifest(public=True)
    fields = {"swarm": swarm_id(sealed), "peer": ME.peer_id, "manifest": sealed}
    return pack(
        good(ListedSwarm).model_copy(
            update={
                "announcement": seal(good(Announcement).model_copy(update=fields), ME),
                "contacts": (seal(member().model_copy(update={"swarm": swarm_id(sealed)}), ME),),
            }
        )
    )


def log():
    records = [good(kind) for kind in kinds() if issubclass(kind, VoteRecord)]
    voters = Electorate(8, bytes(32), {ME.peer_id: "o"}, frozenset([bytes(32)]))
    everybody = Electorate(9, bytes(32), {OTHER.peer_id: "o"}, None)
    table = Table(7, {ME.peer_id: Standing(score=-5, until=9, bans=1)}, {})
    return encode_log(
        Log(table, (voters, everybody), tuple(Signed(record, bytes(64)) for record in records))
    )


@functools.cache
def readies():
    mine, theirs = (seal(good(GroupReady), one) for one in (ME, OTHER))
    return mine, theirs


def roster(data):
    formed = good(GroupFormed).model_copy(update={"members": data})
    return open_roster(formed, OTHER.peer_id, readies()[0], 8)


def dht(data):
    """Judge what a stranger asks this node to store, as a value and as its subkey."""
    found = False
    for value, subkey in (
        (data, msgpack.packb(ME.peer_id)),
        (msgpack.packb(make_record("", member(), ME)), data),
    ):
        found |= MemberValidator(SWARM).validate(
            types.SimpleNamespace(value=value, subkey=subkey, key=bytes(20), expiration_time=1.0)
        )
    return found


def body(data):
    return envelope.open_body("plain", len(data), data, Rollout)


def packed_body(data):
    return envelope.open_body("zlib", len(rollout()), data, Rollout)


@functools.cache
def rollout():
    return seal(good(Rollout).model_copy(update={"peer": ME.peer_id}), ME)


def text(read):
    """Return a reader of text, of which a user passes any."""
    return lambda data: read(data.decode("utf-8", "surrogateescape"))


LINK = f"shoal://{SWARM}?peer=/ip4/203.0.113.5/tcp/4001/p2p/{ME.peer_id}&peer=/dns/a.example/udp/4001/quic-v1/p2p/{ME.peer_id}"
INVITED = issue(ME, SWARM, lives=1e6, uses=2)


def codecs():
    shapes = [(64, 64), (5000,), (), (0,), (3,)]
    torch.manual_seed(1)
    tensors = [torch.randn(shape) for shape in shapes]
    names = "float32 bfloat16 float16 int8 e3m0 topk2 topk2:0.1 topk2-senders sign auto:4 int8+ef"
    for name in [*names.split(), "sign+matrices"]:
        codec = codec_named(name)
        size = codec.nbytes(shapes)

        def read(data, codec=codec, size=size):
            # A payload of another size is refused before it is received; the rest is filled as it
            # comes.
            whole = (
                data
                if len(data) >= size // 2
                else (data * (size // max(len(data), 1) + 1))[:size]
                if data
                else b""
            )
            return codec.decode(
                torch.frombuffer(bytearray(whole), dtype=torch.uint8)
                if whole
                else torch.zeros(0, dtype=torch.uint8),
                shapes,
            )

        yield one(
            f"payload {name}",
            "optim/codecs/topk.py:_restore",
            read,
            lambda codec=codec: codec.encode(tensors).numpy().tobytes(),
            None,
            ValueError,
            sound=lambda found: [tuple(one.shape) for one in found] == shapes,
            sentence=False,
        )
    message = Mod4Codec().post(tensors)
    half = Mod4Codec().post([tensor * 2 for tensor in tensors]).payload
    yield one(
        "payload mod4",
        "optim/codecs/mod4.py:_stream",
        lambda data: message.read(torch.frombuffer(bytearray(data or b"-"), dtype=torch.uint8)),
        lambda: half.numpy().tobytes(),
        None,
        ValueError,
        sound=lambda reading: (
            reading.kept.shape == message.own.sizes.shape
            and bool(reading.values[reading.kept].isfinite().all())
        ),
        sentence=False,
    )
    yield Decoder(
        "refused blocks of mod4",
        ("optim/codecs/mod4.py:PairMessage.refused",),
        message.refused,
        lambda: [bytes(-(-len(message.own.sizes) // 8)), b"\xa5" * -(-len(message.own.sizes) // 8)],
        refuses=(ValueError,),
        sound=lambda refused: refused.shape == message.own.sizes.shape,
        sentence=False,
    )


def proofs():
    torch.manual_seed(2)
    states, made = torch.randn(40, 64), ActivationProof()
    yield one(
        f"proof {made.name}",
        "verification/fingerprints/activations.py:ActivationProof._pairs",
        lambda data: made.compare(data, states),
        lambda: made.make(states),
        sound=lambda found: isinstance(found, Evidence),
    )


class Folder:
    """A folder in which one file is a stranger's; the others are as they should be."""

    def __init__(self, name: str, **files: bytes):
        self.path = HERE / name
        self.path.mkdir(exist_ok=True)
        for other, data in files.items():
            (self.path / other.replace("__", ".")).write_bytes(data)

    def reader(self, name, read):
        def put(data):
            (self.path / name).write_bytes(data)
            return read(self.path)

        return put


@functools.cache
def trainer(seed=0, steps=2):
    made = Trainer(
        TextTask(**TINY, batch=1), OuterSettings(method="noloco"), TrainSettings(seed=seed)
    )
    made.connect(Alone(), "x", Shard(0, 2, 0))
    for _ in range(steps):
        made.step()
    return made


@functools.cache
def checkpoint():
    folder = HERE / "checkpoint"
    state = {
        "swarm": swarm_id(manifest()),
        "manifest": manifest().hex(),
        "trainer": trainer().state(),
    }
    path = store.save(folder, 1, state)
    return path, (path / store.STATE).read_bytes(), (path / store.TENSORS).read_bytes()


def resumed(path):
    """What ``up --resume-from`` makes of a folder: the run, its settings, and a trainer that goes
    on from it.
    """
    saved = resume._read(path)
    own = trainer(1, 0)
    resume.restore(own, saved, "b" * 52)
    return saved


def read_state(data):
    path, _, _ = checkpoint()
    aside = HERE / "strange"
    aside.mkdir(exist_ok=True)
    if not (aside / store.TENSORS).exists():
        (aside / store.TENSORS).write_bytes((path / store.TENSORS).read_bytes())
    (aside / store.STATE).write_bytes(data)
    return resumed(aside)


def read_tensors(data):
    _, state, _ = checkpoint()
    aside = HERE / "tensors"
    aside.mkdir(exist_ok=True)
    (aside / store.TENSORS).write_bytes(data)
    tree = DIGESTED.open(state)
    (aside / store.STATE).write_bytes(
        DIGESTED.make({**tree, "tensors_sha256": hashlib.sha256(data).hexdigest()})
    )
    return resumed(aside)


def merged(data):
    (HERE / "one.safetensors").write_bytes(data)
    return export.merge([HERE / "one.safetensors"] * 2, HERE / "out.safetensors", force=True)


def merged_state(data):
    read_aside = HERE / "merge"
    read_aside.mkdir(exist_ok=True)
    _, _, tensors = checkpoint()
    (read_aside / store.TENSORS).write_bytes(tensors)
    (read_aside / store.STATE).write_bytes(data)
    return export.merge([read_aside], HERE / "out.safetensors", force=True, slow=True)


@functools.cache
def pulled():
    torch.manual_seed(3)
    about = {
        "swarm": "s",
        "name": "n",
        "round": 7,
        "task": "text",
        "task_options": {},
        "model": TINY,
        "named": True,
    }
    return save(GPT(**TINY).state_dict()), json.dumps(about).encode()


def pulled_weights(data):
    return Folder("pulled", shoal__json=pulled()[1]).reader("model.safetensors", load_pulled)(data)


def pulled_about(data):
    return Folder("about", **{"model__safetensors": pulled()[0]}).reader("shoal.json", load_pulled)(
        data
    )


@functools.cache
def calibration():
    features = (Feature("error", 0.1),)
    evidence = [Evidence(features, ((0.1,), (0.2,)), (1.0, 0.5))] * 20
    save_calibration(
        Calibration({Pair("f", "m", "float32", "float32"): Honest.of(evidence)}),
        HERE / "calibration",
    )
    return (HERE / "calibration").read_bytes()


@functools.cache
def policy():
    torch.manual_seed(4)
    return torch.nn.Linear(3, 2)


def policy_snapshot():
    return save({name: value.detach().clone() for name, value in policy().named_parameters()})


def material(data=b"{}"):
    return material_of(
        Coordinates("strings", "1", data, 5, 6), [[1, 2]], ["stop"],
        proof=b"p", policy="tiny", dtype="float32", kernel="k", snapshot=1,
    )  # fmt: skip


MATERIAL = pack(material())


@functools.cache
def stored():
    claim = good(Claim).model_copy(update={"peer": ME.peer_id})
    signed = Signed(claim, sign_record(ME, claim.encoded))
    return claims.save_claim(
        HERE / "claims", signed, MATERIAL, Agreed(1.0, 8, 2), None
    ).read_bytes()


def inspected(data):
    """What ``shoal verify claim`` makes of a file before it computes anything."""
    (HERE / "one.claim").write_bytes(data)
    found = claims.load_claim(HERE / "one.claim")
    try:
        read = decode_material(found.material)
    except MessageError:
        return found
    return completions._environment(read, None)


def environment(data):
    return completions._environment(material(data[:4096]), None)


def current(data):
    return Folder("linked").reader("link.json", status.current_link)(data)


ADDRESS = multiaddr.to_bytes(f"/ip4/203.0.113.5/tcp/4001/p2p/{ME.peer_id}")


def finite(value):
    return not isinstance(value, float) or math.isfinite(value)


@functools.cache
def decoders():
    """Return all of them."""
    return [
        *messages(),
        one(
            "sealed message",
            "swarm/wire/envelope.py:_decode",
            lambda data: unseal(data, Member),
            lambda: seal(member(), ME),
            MSGPACK,
            MessageError,
            tree=False,
        ),
        one(
            "fields of a sealed message",
            "",
            lambda data: peek(data, 4096),
            lambda: seal(member(), ME),
            MSGPACK,
            MessageError,
        ),
        one(
            "manifest",
            "swarm/manifest.py:open_manifest",
            open_manifest,
            manifest,
            MSGPACK,
            MessageError,
        ),
        one(
            "title of a manifest",
            "swarm/manifest.py:title_of",
            title_of,
            manifest,
            MSGPACK,
            MessageError,
        ),
        one(
            "whether it is public",
            "swarm/manifest.py:is_public",
            is_public,
            manifest,
            MSGPACK,
            MessageError,
        ),
        one(
            "listed swarm",
            "swarm/membership/swarm_list.py:read_listed",
            lambda data: read_listed(data, f"/ip4/1.2.3.4/tcp/5/p2p/{ME.peer_id}"),
            listed,
            MSGPACK,
            MessageError,
        ),
        one(
            "record of the directory",
            "swarm/membership/records.py:open_record",
            open_record,
            lambda: make_record("", member(), ME),
            MSGPACK,
        ),
        Decoder(
            "value to store",
            ("swarm/membership/records.py:_unpacked",),
            dht,
            lambda: [msgpack.packb(make_record("", member(), ME)), msgpack.packb("subkey")],
            MSGPACK,
        ),
        one(
            "members of a group",
            "swarm/exchange/group/roster.py:_each swarm/exchange/group/roster.py:open_roster",
            roster,
            lambda: encode_roster(readies()),
            frames(2),
            MessageError,
        ),
        one(
            "gossiped record",
            "swarm/gossip/envelope.py:open_body",
            body,
            rollout,
            MSGPACK,
            MessageError,
        ),
        one(
            "gossiped envelope",
            "swarm/gossip/envelope.py:open_envelope",
            lambda data: envelope.open_envelope(data, SWARM, 1 << 20),
            lambda: envelope.make_envelope(
                SWARM, envelope.Body("plain", len(rollout()), rollout())
            ),
            MSGPACK,
            MessageError,
        ),
        one(
            "compressed record",
            "swarm/gossip/envelope.py:expand",
            packed_body,
            lambda: zlib.compress(rollout()),
            None,
            MessageError,
        ),
        Decoder(
            "link",
            ("swarm/access.py:Link.parse", "swarm/access.py:_is_relay_id"),
            text(Link.parse),
            lambda: [
                LINK.encode(),
                f"{LINK}&invite={INVITED}".encode(),
                LINK.replace(
                    "/p2p/",
                    "/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N/p2p-circuit/p2p/",
                    1,
                ).encode(),
            ],
            PARTS,
            (LinkError,),
        ),
        one(
            "invitation",
            "swarm/access.py:_parts swarm/access.py:admission",
            text(lambda invite: admission(invite, OTHER)),
            lambda: INVITED.encode(),
            INVITE,
            AdmissionError,
        ),
        one(
            "shown invitation",
            "swarm/access.py:entry_of",
            lambda data: entry_of(data, OTHER.peer_id, SWARM, ME.peer_id),
            lambda: admission(INVITED, OTHER),
            MSGPACK,
        ),
        one(
            "address",
            "swarm/p2p/multiaddr.py:to_text",
            multiaddr.to_text,
            lambda: ADDRESS,
            None,
            ValueError,
            sentence=False,
        ),
        one(
            "address in words",
            "swarm/p2p/multiaddr.py:peer_bytes",
            text(multiaddr.to_bytes),
            lambda: multiaddr.to_text(ADDRESS).encode(),
            PARTS,
            ValueError,
            sentence=False,
        ),
        one("origin", "", multiaddr.origin, lambda: ADDRESS[:8]),
        one(
            "log of verification",
            "verification/consensus/log.py:_frames",
            decode_log,
            log,
            frames(4),
            ValueError,
            sound=lambda log: decode_log(encode_log(log)) == log,
            sentence=False,
        ),
        one(
            "odds in a vote",
            "node/verify/history.py:_carried",
            _carried,
            lambda: b'{"odds": 3.5}',
            JSON,
            sound=finite,
        ),
        *codecs(),
        *proofs(),
        one(
            "material of a claim",
            "node/verify/material.py:decode_material node/verify/material.py:Material.rows",
            lambda data: decode_material(data).rows(),
            lambda: MATERIAL,
            MSGPACK,
            MessageError,
        ),
        one(
            "stored claim",
            "node/verify/material.py:_opened",
            inspected,
            stored,
            MSGPACK,
            VerifyError,
            EnvError,
        ),
        one(
            "environment of a claim",
            "node/verify/completions.py:_environment",
            environment,
            lambda: b'{"letters": 4}',
            JSON,
            VerifyError,
            EnvError,
        ),
        one(
            "weights of a policy",
            "",
            lambda data: audit.load_snapshot(policy(), data),
            policy_snapshot,
            SAFETENSORS,
            VerifyError,
        ),
        one(
            "calibration",
            "verification/calibration_file.py:load_calibration",
            lambda data: calibrated(data),
            calibration,
            SAFETENSORS,
            CalibrationError,
            sentence=False,
        ),
        one(
            "calibrated pairs",
            "verification/calibration_file.py:load_calibration",
            pairs,
            lambda: pairs_of(calibration()),
            JSON,
            CalibrationError,
            sentence=False,
        ),
        one(
            "state of a checkpoint",
            "node/checkpoint/store.py:_read "
            "node/checkpoint/packing.py:_unpack_array "
            "node/checkpoint/packing.py:_unpack_bytes node/runtime/resume.py:_read",
            read_state,
            lambda: checkpoint()[1],
            DIGESTED,
            store.CheckpointError,
            TrainingError,
        ),
        one(
            "tensors of a checkpoint",
            "node/checkpoint/store.py:load",
            read_tensors,
            lambda: checkpoint()[2],
            SAFETENSORS,
            store.CheckpointError,
            TrainingError,
        ),
        one(
            "weights to merge",
            "node/checkpoint/export.py:merge",
            merged,
            lambda: pulled()[0],
            SAFETENSORS,
            export.MergeError,
        ),
        one(
            "checkpoint to merge",
            "node/checkpoint/export.py:merge",
            merged_state,
            lambda: checkpoint()[1],
            DIGESTED,
            export.MergeError,
            store.CheckpointError,
        ),
        one(
            "pulled weights",
            "node/commands/sample.py:_model",
            pulled_weights,
            lambda: pulled()[0],
            SAFETENSORS,
            SampleError,
            DataError,
        ),
        one(
            "what was pulled",
            "node/commands/sample.py:_about",
            pulled_about,
            lambda: pulled()[1],
            JSON,
            SampleError,
            DataError,
        ),
        one(
            "link of a node",
            "node/commands/status.py:current_link",
            current,
            lambda: json.dumps(
                {"link": LINK, "written": 1.0, "name": "n", "invite_only": False}
            ).encode(),
            JSON,
            LinkError,
        ),
        one(
            "names of parameters",
            "swarm/wire/envelope.py:unpack_names",
            unpack_names,
            lambda: pack_names(("0.weight", "0.bias")),
            None,
            MessageError,
        ),
        one(
            "key of a node",
            "node/commands/creator.py:_keys_of_nodes",
            keys_named,
            lambda: json.dumps({"link": LINK, "identity": "anna.key"}).encode(),
            JSON,
        ),
        one(
            "completions of a server",
            "node/rl/serving.py:_Server.read",
            lambda data: _Server("http://[::1]:1").read(data, 1, 4, 9),
            lambda: (
                b'{"choices": [{"index": 0, "logprobs": {"tokens": ["token_id:3"], '
                b'"token_logprobs": [-0.5]}}]}'
            ),
            JSON,
            PolicyError,
        ),
        one(
            "error of a server",
            "node/rl/serving.py:_said",
            _said,
            lambda: b'{"error": {"message": "no such model"}}',
            JSON,
        ),
        one(
            "recording",
            "node/watch/events.py:event_of",
            text(event_of),
            lambda: line_of(Unreachable(time=1.0, peer=ME.peer_id, reason="x")).encode(),
            JSON,
            WatchError,
        ),
    ]


def calibrated(data):
    (HERE / "read").write_bytes(data)
    return load_calibration(HERE / "read")


def keys_named(data):
    """Return the key files that a node's link file names, each of which is then tried."""
    folder = HERE / "runs" / "anna"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "link.json").write_bytes(data)
    found = creator._keys_of_nodes(HERE / "runs")
    for path in found:
        with contextlib.suppress(IdentityError):
            Identity.load(path)
    return found


def pairs_of(data):
    return SAFETENSORS.open(data)[0]["__metadata__"]["pairs"].encode()


def pairs(data):
    """Read a calibration whose description is the stranger's."""
    header, content = SAFETENSORS.open(calibration())
    header["__metadata__"]["pairs"] = data.decode("utf-8", "replace")
    return calibrated(SAFETENSORS.make([header, content]))
