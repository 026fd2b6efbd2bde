"""Checks of what this machine and the swarm must agree on: manifest, version, bucket and model."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING

from shoal.node.console import plural
from shoal.node.doctor.check import CheckOutcome, FaultError, Note, Skip, Tell
from shoal.node.doctor.machine_checks import GB
from shoal.node.doctor.visit import Visit
from shoal.node.free_memory import free_memory
from shoal.swarm.access.link import MAX_ADDRESSES, Link
from shoal.swarm.errors import NetworkError
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.messages import StateRequest

if TYPE_CHECKING:
    from torch import nn

    from shoal.node.task import Task
    from shoal.optim.inner import Split
    from shoal.optim.parameters import AveragedParameters
    from shoal.swarm.wire.messages import Member

ASKED_MEMBERS = 3
"""Whose buckets are read."""
BUCKET_S = 15.0
"""To read where one of them can be."""
MEET_S = 15.0
"""To connect to the members that answered."""
OFFER_S = 15.0
"""For a member to describe its model."""
ASKED_MODELS = 2
"""Members with another model that are asked where it differs."""
PARAMETER_BYTES = 28
"""That a node needs for each: seven copies in 4-byte numbers."""


def swarm(visit: Visit, tell: Tell) -> str:
    """Check that a member serves the manifest, with the hash in the link."""
    from shoal.swarm.membership.manifest_exchange import fetch_manifest
    from shoal.swarm.membership.visit import open_directory

    assert visit.link is not None
    host = visit.running()
    known = Link(visit.link.swarm, tuple(visit.reached[:MAX_ADDRESSES]))
    _, visit.manifest = fetch_manifest(host, known)
    # Its peers answer nothing else without an invitation.
    if visit.manifest.invite_only and not visit.link.invite:
        raise FaultError(
            "this swarm is by invitation only, and the link has none: ask its creator for one "
            "(`shoal invite`)."
        )
    host.call(host.meet(visit.reached), MEET_S)
    visit.directory = open_directory(visit.identity, host, visit.link, visit.manifest)
    manifest = visit.manifest
    named = manifest.outer.resolved()
    about = in_view(visit.members(), visit.directory.size())
    return f"{manifest.name!r} trains {manifest.task} by {named.method}, {named.codec_name}{about}"


def in_view(members: Mapping[str, Member], size: int) -> str:
    """Return how many ``members`` are in view, to go on with; of a swarm of buckets what all do,
    estimated by them.
    """
    from shoal.swarm.membership.overview import totals, totals_said
    from shoal.swarm.topics.status import reach_label

    if size > len(members):
        said = totals_said(totals(members, size))
        return f": {said[0].lower()}{said[1:].removesuffix('.')}"
    throughputs: dict[str, list[float]] = {}
    reaches: Counter[str] = Counter()
    for member in members.values():
        if member.reach == "unknown":
            continue
        reaches[member.reach] += 1
        if member.bytes_per_s:
            throughputs.setdefault(member.reach, []).append(member.bytes_per_s)
    ways: list[str] = []
    for reach, count in reaches.most_common():
        ways.append(f"{count} {reach_label(reach, median(throughputs.get(reach, [0.0])))}")
    described = f" ({'; '.join(ways)})" if ways else ""
    return f", {plural(len(members), 'peer')} in view{described}"


def version(visit: Visit, tell: Tell) -> str:
    """Compare the members' versions of shoal with this one."""
    from shoal.swarm.membership.membership import SHOAL_VERSION

    versions = Counter(member.version for member in visit.members().values())
    if not versions:
        raise Skip("no member is in view.")
    if set(versions) == {SHOAL_VERSION}:
        return f"{SHOAL_VERSION} here and on {plural(versions[SHOAL_VERSION], 'member')}"
    shown = ", ".join(f"{name} on {number}" for name, number in versions.most_common(4))
    usual = versions.most_common(1)[0][0]
    sentence = f"this is shoal {SHOAL_VERSION}, the members run another ({shown})"
    if SHOAL_VERSION in versions or usual.split(".")[:2] == SHOAL_VERSION.split(".")[:2]:
        raise Note(f"{sentence}: that may do, but one version everywhere is safer.")
    raise FaultError(f"{sentence}: install the swarm's version here, or ask its members to update.")


def bucket(visit: Visit, tell: Tell) -> str:
    """Check, in a swarm of buckets, that each member that answered has its record where those of
    its bucket look for it.
    """
    from shoal.swarm.membership.bucket_index import is_in_its_bucket

    manifest = visit.agreed()
    link = visit.link
    host = visit.running()
    if not manifest.bucket:
        return "no buckets: every member reads all others"
    assert link is not None
    peers = list(dict.fromkeys(address.rpartition("/p2p/")[2] for address in visit.reached))[
        :ASKED_MEMBERS
    ]
    if not peers:
        raise Skip("no member answered whose bucket could be read.")
    epoch = int(visit.now() // manifest.epoch_s)
    missing = []
    for peer in peers:
        if not host.call(is_in_its_bucket(host.get, link.swarm, peer, epoch), BUCKET_S):
            missing.append(short(peer))
    if missing:
        raise Note(
            f"{' and '.join(missing)} never showed up in the bucket of this epoch, so nobody is "
            "paired with it: if it has run for more than a minute, set its clock by NTP "
            "(`timedatectl set-ntp true`) and restart it."
        )
    return f"{plural(len(peers), 'member')} looked for, and found in the bucket of this epoch"


def model(visit: Visit, tell: Tell) -> str:
    """Check that the task loads with the swarm's options, and that its model has the swarm's
    parameters.
    """
    import torch

    from shoal.node.config.settings import load
    from shoal.node.data.source import DataError
    from shoal.node.runtime.task_setup import RL, make_task, swarm_settings
    from shoal.node.tasks.text import TextTask
    from shoal.optim.parameters import AveragedParameters
    from shoal.swarm.exchange.contribution import model_digest
    from shoal.swarm.membership.membership import OWN_LOOP

    manifest = visit.agreed()
    if manifest.task == OWN_LOOP:
        raise Skip("its members train in loops of their own: shoal.join compares the model.")
    settings = swarm_settings(load(None, {"task.hooks": visit.hooks}), manifest)
    if settings.task.hooks == RL:
        if manifest.outer.alone:
            raise Skip(
                "in this swarm only rollouts are shared, so every node may have a model of its own."
            )
        raise Skip("with the task rl the model depends on --policy: `shoal join` compares it.")
    task = make_task(settings)
    torch.manual_seed(settings.train.seed)
    try:
        # Not every model can be made without memory.
        built = task.sized() if isinstance(task, TextTask) else task.model()
        params = AveragedParameters.of(built)
    except DataError as error:
        raise Skip(
            "its tokenizer is not found by its name here: `shoal join --tokenizer` compares a copy "
            "of it."
        ) from error
    count = sum(parameter.numel() for parameter in params)
    if model_digest(params) != manifest.model:
        _name_difference(visit, params)
        raise FaultError(
            f"this node's model ({count:,} parameters) has other names, shapes or types than the "
            "swarm's: use its task, options and version."
        )
    said = f"{manifest.task}, {count:,} parameters, as in the swarm"
    if settings.train.optimizer == "muon":
        said += f"; {_split(visit, task, built, tell)}"
    need = count * PARAMETER_BYTES
    free, _ = free_memory()
    if need > free:
        raise Note(
            f"{said}; a node with it takes some {need / GB:.1f} GB, and {free / GB:.1f} are free: "
            "end other programs."
        )
    return said


def _name_difference(visit: Visit, params: AveragedParameters) -> None:
    """Raise the error that names where a member's model differs from ``params``; return if none
    tells.
    """
    from shoal.optim.codecs.floats import FLOAT32
    from shoal.swarm.exchange.contribution import model_digest
    from shoal.swarm.state.offers import ask
    from shoal.swarm.state.query import StateQuery

    assert visit.link is not None
    host = visit.running()
    digest = model_digest(params)
    request = StateRequest(swarm=visit.link.swarm, model=digest)
    query = StateQuery(request, params.shapes, names=params.names)
    others = [member for member in visit.members().values() if member.model != digest]
    for member in others[:ASKED_MODELS]:
        source = (member.peer, member.addresses)
        with contextlib.suppress(NetworkError):
            asked = ask(host, source, query.request, FLOAT32.nbytes(params.shapes))
            header = host.call(asked, OFFER_S)
            query.check(member.peer, header)


def _split(visit: Visit, task: Task, built: nn.Module, tell: Tell) -> Split:
    """Return what Muon and AdamW train; report the names too if the visit is to name them."""
    from shoal.optim.inner import split

    try:
        division = split(built, task.hidden_matrices(built))
    except ValueError as error:
        raise FaultError(f"the optimizer muon cannot train this model: {error}.") from error
    if visit.parameters:
        for optimizer, named in (("muon", division.muon), ("adamw", division.adamw)):
            names = ", ".join(f"{name} ({size:,})" for name, size in named.items())
            tell(CheckOutcome(optimizer, "ok", names or "nothing"))
    return division
