"""Getting into a swarm: the manifest made or fetched, the settings that follow from it, the shard."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

from node.config import Settings
from node.hooks import BUILT_IN, HookError
from node.peers_setting import lists
from node.rl.settings import RLSettings, env_label
from node.task import Shard
from swarm.admission import Introductions
from swarm.dial_back import DIAL_PROTOCOL, DialBack
from swarm.directory import MAX_ADDRESSES, Directory
from swarm.door import Door
from swarm.errors import AdmissionError
from swarm.gossip import Gossip
from swarm.host import Host
from swarm.identity import Identity
from swarm.invitation import admission
from swarm.link import Link, address_problem
from swarm.manifest import Manifest, open_manifest, swarm_id
from swarm.messages import Member, seal
from swarm.presence import Presence
from swarm.records import MemberValidator
from swarm.shelf import MAX_SHELF
from swarm.speed import SPEED_PROTOCOL, SpeedTest
from swarm.verify_setting import StretchTerms, Terms
from swarm.welcome import fetch_manifest, serve_manifest

SHOAL_VERSION = "0.1.0"
SEED_S = 5.0  # seconds that telling the seeds may take before the link is shown
READ_S = 10.0  # seconds for the directory, to see who came by the same invitation
BYTES_OF_MBIT = 1e6 / 8
KNOWN_PEERS = "peers.json"
RL = "rl"
BUILT_IN_TASKS = (*BUILT_IN, RL)
log = logging.getLogger(__name__)


@dataclass
class Membership:
    """A node that is on the network of its swarm."""

    identity: Identity
    host: Host
    directory: Directory
    swarm: str
    sealed: bytes
    manifest: Manifest
    presence: Presence
    shelf: int = MAX_SHELF
    """Bytes of own gossiped records that are kept to be fetched."""

    def news(self) -> str:
        """One sentence when this node's invitation is about to expire, and when it has; else nothing."""
        return self.directory.door.news()

    def link(self) -> Link:
        """The link by which others join: through its seeds, who are told of it first, and this node's addresses."""
        self.presence.report(SEED_S)
        seeds = [address for addresses in self.host.seeds().values() for address in addresses[:2]][: MAX_ADDRESSES // 2]
        own = [address for address in self.host.addresses() if address_problem(address) is None]
        return Link(self.swarm, (*seeds, *own[: MAX_ADDRESSES - len(seeds)]))

    @cached_property
    def gossip(self) -> Gossip:
        """The one gossip of this node: what is too large for it is handed out under one protocol name."""
        at = self.directory
        return Gossip(
            self.host, self.identity, self.swarm, addresses=at.addresses, door=at.door, look=at.look, shelf=self.shelf
        )

    def close(self) -> None:
        """Leave the network."""
        self.presence.report(1.0)  # after `Directory.leave` this says goodbye
        self.presence.close()
        self.directory.close()
        self.host.close()


def task_label(hooks: str) -> str:
    """The name of a task in the manifest: without the folder, which is each machine's own affair."""
    where, colon, name = hooks.rpartition(":")
    return PurePath(where).name + colon + name


def task_options(settings: Settings) -> dict[str, int | float | str | bool]:
    """What all peers must agree on: for rl that is also what is learnt, while how and by which model is each node's own affair."""
    own = {"env": env_label(settings.rl.env)} if settings.task.hooks == RL else {}
    return {**settings.task.options, **own}


def new_manifest(settings: Settings, identity: Identity, model: str, terms: Terms | StretchTerms | None = None) -> bytes:
    """The sealed manifest of a new swarm; ``terms`` if claims are made in it."""
    manifest = Manifest(
        name=settings.swarm.name,
        created=time.time(),
        creator=identity.peer_id,
        task=task_label(settings.task.hooks),
        task_options=task_options(settings),
        outer=settings.outer.resolved(),
        train=settings.train,
        verify=settings.verify,
        terms=terms,
        model=model,
        start_when=settings.swarm.start_when,
        shards=settings.swarm.shards,
        invite_only=settings.swarm.invite_only,
    )
    return seal(manifest, identity)


def create(settings: Settings, identity: Identity, sealed: bytes) -> Membership:
    """Start the first node of the swarm of ``sealed``. AdmissionError if that is by invitation only, and another's."""
    manifest, swarm = open_manifest(sealed), swarm_id(sealed)
    if manifest.invite_only and manifest.creator != identity.peer_id:
        raise AdmissionError(
            f"The swarm {manifest.name!r} is by invitation only, and this node's key is not its creator's ({manifest.creator}): "
            "join by a link with an invitation, or begin a new swarm with --resume-from."
        )
    door = _door(settings, identity)
    host = _start(settings, identity, swarm, settings.node.bootstrap, door, must_join=False)
    return _membership(identity, host, swarm, sealed, manifest, door)


def join(settings: Settings, identity: Identity, link: Link) -> Membership:
    """Start a node in the swarm of ``link``. A ShoalError, and nothing left running."""
    ticket = admission(link.invite, identity) if link.invite else b""
    door = _door(settings, identity)
    host = _start(settings, identity, link.swarm, (*link.bootstrap, *settings.node.bootstrap), door)
    try:
        sealed, manifest = fetch_manifest(host, link)
        membership = _membership(identity, host, link.swarm, sealed, manifest, door, ticket)
        if manifest.invite_only:
            membership.directory.door.check_own()  # what the invitation itself says
            membership.directory.refresh(READ_S)
            membership.directory.door.check_own()  # and whether others came by it
        return membership
    except BaseException:
        host.close()
        raise


def _door(settings: Settings, identity: Identity) -> Door:
    """The node's own lists; the swarm's manifest is not known yet."""
    return Door(identity.peer_id, lists=lists(settings.peers))


def _start(
    settings: Settings, identity: Identity, swarm: str, bootstrap: Sequence[str], door: Door, *, must_join: bool = True
) -> Host:
    """A host of this node in ``swarm``, which also tries the peers it met in an earlier run. StartupError."""
    return Host.start(
        identity,
        listen=settings.node.listen,
        announce=settings.node.announce,
        bootstrap=tuple(dict.fromkeys(bootstrap)),
        validator=MemberValidator(swarm),
        relay=settings.node.relay,
        swarm=swarm,
        known=settings.node.run_folder / KNOWN_PEERS,
        must_join=must_join,
        door=door,
        upload=settings.node.upload * BYTES_OF_MBIT,
    )


def _membership(
    identity: Identity, host: Host, swarm: str, sealed: bytes, manifest: Manifest, door: Door, ticket: bytes = b""
) -> Membership:
    if manifest.invite_only:
        door = Door(identity.peer_id, lists=door.lists, swarm=swarm, creator=manifest.creator, ticket=ticket)
        host.entrance.door = door
        host.introduce = Introductions(host, door).before
    serve_manifest(host, swarm, sealed)
    host.serve(DIAL_PROTOCOL, DialBack().answer)
    host.serve(SPEED_PROTOCOL, SpeedTest().answer)
    directory = Directory(host, identity, swarm, door=door)
    host.entrance.known = directory.knows
    return Membership(identity, host, directory, swarm, sealed, manifest, Presence(host, directory, identity, swarm))


def swarm_settings(settings: Settings, manifest: Manifest) -> Settings:
    """This node's own settings with the swarm's in place of its outer, train and task settings.

    Raises:
        HookError: the swarm trains a task that this node must be given with --hooks, or was given another one.
    """
    hooks = settings.task.hooks
    if manifest.task in BUILT_IN_TASKS and "hooks" not in settings.task.model_fields_set:
        hooks = manifest.task
    if task_label(hooks) != manifest.task:
        if hooks != "text" or manifest.task in BUILT_IN_TASKS:
            raise HookError(f"The swarm trains {manifest.task!r}, this node was given {hooks!r}: use the swarm's task.")
        raise HookError(f"The swarm trains {manifest.task!r}, which this node must have: name your copy of it with --hooks.")
    options = dict(manifest.task_options)
    rl = settings.rl
    if hooks == RL:
        rl = rl.model_copy(update={"env": _agreed_env(rl, str(options.pop("env", "")))})
        if isinstance(terms := manifest.terms, Terms):
            rl = rl.model_copy(
                update={"group": terms.group, "temperature": terms.temperature, "max_tokens": terms.max_tokens}
            )
    task = settings.task.model_copy(update={"hooks": hooks, "options": options})
    swarm = settings.swarm.model_copy(
        update={"name": manifest.name, "shards": manifest.shards, "invite_only": manifest.invite_only}
    )
    train = manifest.train
    if "steps" in settings.train.model_fields_set:  # how long a node takes part is its own affair
        train = train.model_copy(update={"steps": settings.train.steps})
    agreed = {"outer": manifest.outer, "train": train, "task": task, "rl": rl, "swarm": swarm, "verify": manifest.verify}
    return settings.model_copy(update=agreed)


def _agreed_env(own: RLSettings, label: str) -> str:
    """How this node finds the swarm's environment. What comes from the swarm is never imported, so a class must be named here."""
    if env_label(own.env) == label:
        return own.env
    if "env" in own.model_fields_set:
        raise HookError(f"The swarm learns {label!r}, this node was given {own.env!r}: use the swarm's environment.")
    if ":" in label:
        raise HookError(f"The swarm learns {label!r}, which this node must have: name your copy of it with --env.")
    return label


def own_data(settings: Settings) -> dict[str, str]:
    """The task option that is each node's own affair."""
    return {"data": settings.node.data} if settings.node.data else {}


def choose_shard(settings: Settings, manifest: Manifest, members: Mapping[str, Member], peer: str) -> Shard:
    """The shard the user asked for, else the one that the fewest others hold (ties fall differently on each peer)."""
    seed = manifest.train.seed
    pair = settings.node.shard_pair
    if pair is not None:
        return Shard(pair[0], pair[1], seed)
    held = Counter(m.shard for m in members.values() if m.shards == manifest.shards and m.peer != peer)

    def preference(index: int) -> tuple[int, bytes]:
        return held[index], hashlib.sha256(f"{peer}:{index}".encode()).digest()

    return Shard(min(range(manifest.shards), key=preference), manifest.shards, seed)
