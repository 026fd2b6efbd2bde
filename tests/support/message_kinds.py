"""Every kind of message and of verification's records, a good one of each, and the fields of them
that state a number or a size.
"""

import importlib
import itertools
import pkgutil
import types
import typing
from typing import NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import shoal.node
import shoal.swarm
from shoal.swarm.changes import MAX_PARTS, ChangePart
from shoal.swarm.identity import Identity
from shoal.swarm.topics.receipts import MAX_PEERS_NAMED
from shoal.swarm.wire.envelope import Message
from shoal.swarm.wire.messages import MemberEnd
from shoal.swarm.wire.record import Checks, Faults, LinkUse, Loss, Progress, Rollouts, Round
from shoal.verification.consensus.records import VoteRecord

ME, OTHER = (Identity.ephemeral().peer_id for _ in range(2))
SKIPPED = (
    "shoal.node.templates",
    "shoal.node.cli",
    "shoal.node.integrations",
)  # whose modules need what may not be installed


class Leaf(NamedTuple):
    """A part of a field: ``path`` begins with the field's name; 0 stands for each element of a
    list.
    """

    path: tuple[str | int, ...]
    type: type
    rules: tuple[object, ...]

    def bound(self, *names):
        """Return the first bound of one of these names."""
        return next(
            (getattr(rule, name) for rule in self.rules for name in names if hasattr(rule, name)),
            None,
        )

    @property
    def states(self):
        """True where it states a number or a size; what has one length alone, as a hash, or one of
        a few words does not.
        """
        least, most = self.bound("min_length"), self.bound("max_length")
        return self.type in (int, float, tuple) or (
            self.type is bytes and (most is None or least != most)
        )


def kinds():
    """Return all classes of messages and records."""
    for package in (shoal.swarm, shoal.node):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not module.name.startswith(SKIPPED) and not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    found = [*_below(Message), *_below(VoteRecord)]
    return sorted(
        (kind for kind in found if kind.__module__.startswith("shoal.")), key=lambda kind: kind.KIND
    )


def _below(kind):
    return itertools.chain.from_iterable([below, *_below(below)] for below in kind.__subclasses__())


def leaves(kind):
    """Return the parts of all fields of a class."""
    return [
        leaf
        for name, field in kind.model_fields.items()
        for leaf in _leaves(field.annotation, field.metadata, (name,))
    ]


def _leaves(annotation, rules, path):
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        more = itertools.chain.from_iterable(
            rule.metadata if isinstance(rule, FieldInfo) else [rule] for rule in parts[1:]
        )
        yield from _leaves(parts[0], [*rules, *more], path)
    elif origin in (typing.Union, types.UnionType):
        for part in parts:
            if part is not type(None):
                yield from _leaves(part, rules, path)
    elif origin is tuple:
        yield Leaf(path, tuple, tuple(rules))
        if parts[1:] == (Ellipsis,):
            yield from _leaves(parts[0], [], (*path, 0))
        else:
            for place, part in enumerate(parts):
                yield from _leaves(part, [], (*path, place))
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from _leaves(field.annotation, field.metadata, (*path, name))
    else:
        yield Leaf(path, annotation, tuple(rules))


COMMON = {
    "swarm": "a" * 52,
    "peer": ME,
    "creator": ME,
    "name": "x",
    "addresses": ("/ip4/1.2.3.4/tcp/5",),
    "loss": 1.5,
    "model": "0" * 64,
    "state": "training",
    "lag_auto": True,
    "astray": True,
    "version": "0",
    "sketch": (1, 0, (0.5, 0.5, 0.5, 0.5)),
    "sha256": bytes(32),
    "snapshot": bytes(32),
    "nonce": bytes(16),
    "shapes": ((2, 3), ()),
    "dtype": "float32",
    "codec": "none",
    "reason": "x",
    "encoding": "plain",
    "env": "e",
    "env_version": "1",
    "env_config": b"",
    "finish": ("stop",),
    "address": "1.2.3.4",
    "topics": ("status/2",),
    "token": bytes(16),
    "kernel": "k",
    "policy": "tiny",
    "before": bytes(32),
    "run": "r",
    "case": bytes(32),
    "digest": bytes(32),
    "prompt": bytes(32),
    "claim": bytes(32),
    "sampling": bytes(32),
    "output": bytes(32),
    "fingerprint": bytes(32),
    "salt": bytes(32),
    "anchor": bytes(32),
    "link": bytes(32),
    "operator": "o",
    "root": bytes(32),
    "table": bytes(32),
    "device": "cpu",
    "id": bytes(16),
    "after": "a" * 52,
    "task": "text",
    "failures": (("timeout", 1),),
    "blamed": ((OTHER, "timeout", 1),),
    "partnerless": ("timeout", 1),
    "missing_names": ("y",),
    "mfu": 0.5,
    "leader": OTHER,
    "rounds": (
        Round(
            round=1,
            step=1,
            loss=1.0,
            members=2,
            partners=("y" * 8,),
            bytes_sent=1,
            bytes_received=1,
            wait_s=1.0,
        ),
    ),
    "progress": Progress(state="training", doing="x", round=1, tokens_per_s=1.0, mfu=0.5),
    "faults": Faults(
        failures=(("timeout", 1),),
        blamed=((OTHER, "timeout", 1),),
        partnerless=("timeout", 1),
        missing_names=("y",),
    ),
    "rollouts": Rollouts(reward=1.0, unused=(("no_spread", 1),)),
    "unused": (0.5, "no_spread"),
    "checks": Checks(banned=(OTHER,)),
    "projection": (1, 1.0, (0.5,) * 16),
    "tokens_per_s": 1.0,
    "lag_steps": 1,
    "late": 1,
    "mean": 3,
    "lost": 1,
    "held": 3,
    "members": b"x",
    "extra": (("momentum", bytes(32)),),
    "more": False,
    "alone": False,
}
"""What a field of that name holds where its bounds do not say."""
OWN = {
    "status": {"link": LinkUse(), "loss": Loss(training=1.5)},
    "member": {"shard": 0, "shards": 2, "end": MemberEnd(members=2, names=("y",), loss_before=1.0)},
    "group-ready": {"shapes": bytes(32)},
    "invitation": {"key": None, "peer": OTHER, "uses": 1},
    "attestation": {"signature": bytes(64)},
    "seed-request": {"topics": ("status/1",)},
    "seed-reply": {"members": (b"x",)},
    "listed-swarm": {"contacts": (b"x",)},
    "swarms-reply": {"swarms": (b"x",)},
    "shuffle": {"offered": (b"x",)},
    "shuffle-reply": {"offered": (b"x",)},
    "claim-material": {"tokens": (bytes(8),), "snapshot": 1},
    "training-material": {"snapshot": 1, "projection": b"x"},
    "rollout": {
        "completions": ("x",),
        "tokens": (bytes(8),),
        "logps": (bytes(8),),
        "tokenizer": "0" * 64,
    },
    "claim": {"model": bytes(32)},
    "view": {"table": bytes(32)},
    "verdict": {"marks": ("valid", "absent")},
    "receipts": {"work": ((OTHER, 1, 1.0, 1.0, 1, 1.0, 1),)},
    "policy-version": {"version": 1, "links": ((bytes(32), bytes(32), 1),)},
    "change": {"parts": (ChangePart(round=1, lr=0.5, steps=1),)},
    "change-request": {"change": b"x"},
    "change-reply": {"change": b"x"},
    "punch": {"addresses": ("/ip4/1.2.3.4/udp/4001/quic-v1",), "proof": bytes(64)},
}
"""The same of one kind of message."""


def good(kind):
    """Return a good message of that class, with something in each of its fields where that goes
    together.
    """
    fields = {}
    for name, field in kind.model_fields.items():
        given = {**COMMON, **OWN.get(kind.KIND, {})}
        first = next(iter(_leaves(field.annotation, field.metadata, (name,))))
        if name in given:
            fields[name] = given[name]
        elif isinstance(field.default, BaseModel):
            fields[name] = field.default
        elif first.type in (int, float):
            fields[name] = first.type(first.bound("ge") or 0)
        elif first.type is bytes:
            fields[name] = bytes(max(first.bound("min_length") or 0, 1))
        elif typing.get_origin(first.type) is typing.Literal:
            fields[name] = typing.get_args(first.type)[0]
        elif field.is_required():
            raise AssertionError(f"give {kind.KIND} a good {name} in this file")
    return kind(**fields)


WIDE = "\U0001d538"  # a character of four bytes
LONGEST = {
    r"^[!-~]{1,64}$": "v" * 64,
    r"^[a-z2-7]{52}$": "a" * 52,
    r"^[0-9a-f]{64}$": "f" * 64,
    r"^[a-z0-9_.:,=+-]{1,64}$": "x" * 64,
    r"^[0-9a-f.:]*$": "f" * 64,
    r"^/[\x21-\x7e]+$": "/" + "a" * 255,
    r"^[1-9A-HJ-NP-Za-km-z]{8}$": "y" * 8,
    r"^[A-Za-z0-9_.:+-]{1,128}$": "x" * 128,
    r"^[a-z0-9_]{1,32}$": "x" * 32,
    r"^[a-z][a-z_-]{0,15}$": "x" * 16,
    r"^[a-z-]{1,32}/[0-9]{1,4}$": "x" * 32 + "/9999",
}
PEERS = {"peer", "creator", "leader", "banned", "blamed"}
LARGEST = {
    "member": {"shard": 2**53 - 1, "end": None},
    "invitation": {"key": OTHER, "peer": None},
    "offer": {"shapes": ((2**32 - 1, 2**32 - 1),) * 65_536},
    "state-header": {"shapes": ((2**32 - 1, 2**32 - 1),) * 65_536},
    "change": {
        "parts": tuple(
            ChangePart(round=2**53 - at, lr=1 / 3, steps=2**53) for at in range(MAX_PARTS)[::-1]
        )
    },
    "parcel": {"body": bytes(256 * 1024 - 512)},
    "receipts": {
        "work": tuple(
            (Identity.ephemeral().peer_id, 2**53, 1.0, 1.0, 2**53, -1.0, 2**53)
            for _ in range(MAX_PEERS_NAMED)
        )
    },
}
"""What does not follow from the bounds of single fields."""


def largest(kind):
    """Return a message of that class in which each field is as long as it may be."""
    given = LARGEST.get(kind.KIND, {})
    fields = {name: field for name, field in kind.model_fields.items() if name not in given}
    return kind(
        **given,
        **{
            name: _longest(field.annotation, field.metadata, name) for name, field in fields.items()
        },
    )


def _longest(annotation, rules, name):
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    leaf = Leaf((name,), annotation, tuple(rules))
    if origin is typing.Annotated:
        more = itertools.chain.from_iterable(
            rule.metadata if isinstance(rule, FieldInfo) else [rule] for rule in parts[1:]
        )
        return _longest(parts[0], [*rules, *more], name)
    if origin in (typing.Union, types.UnionType):
        return _longest(parts[0], rules, name)
    if origin is tuple and parts[1:] == (Ellipsis,):
        return (_longest(parts[0], [], name),) * leaf.bound("max_length")
    if origin is tuple:
        return tuple(_longest(part, [], name) for part in parts)
    if origin is typing.Literal:
        return max(parts, key=len)
    if annotation is bool:
        return True
    if annotation is int:
        return leaf.bound("lt") - 1 if leaf.bound("le") is None else leaf.bound("le")
    if annotation is float:
        return leaf.bound("le") / 3
    if annotation is bytes:
        return bytes(leaf.bound("max_length"))
    if annotation is str:
        return (
            OTHER
            if name in PEERS
            else LONGEST.get(leaf.bound("pattern")) or WIDE * leaf.bound("max_length")
        )
    return annotation(
        **{
            inside: _longest(field.annotation, field.metadata, inside)
            for inside, field in annotation.model_fields.items()
        }
    )
