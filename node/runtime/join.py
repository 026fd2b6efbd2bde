"""The manifest of a new swarm from settings; in a swarm, the wait for others and the choice of a shard."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from shoal.node.config.links import LINK
from shoal.node.config.rl import env_label
from shoal.node.config.settings import ConfigError, Settings
from shoal.node.data import manifest_options as agreement
from shoal.node.runtime.door import RL, task_label
from shoal.node.runtime.result import write_json
from shoal.node.task import Shard
from shoal.node.training.schedule import resolved
from shoal.optim import OuterOptimizer
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import TASK_NAME, Manifest, Terms
from shoal.swarm.membership.membership import Membership
from shoal.swarm.training.session_setup import waiting_for
from shoal.swarm.training.shard import least_used
from shoal.swarm.wire.envelope import seal
from shoal.swarm.wire.messages import Member

# The newest link to a running node's swarm, in a file of its folder for ``shoal link``.

REFRESH_S = 10.0

log = logging.getLogger(__name__)


class LinkFile:
    """The link file of one run in ``folder``; call `refresh` often: it writes every ten seconds, and uses no network."""

    def __init__(self, folder: Path, membership: Membership, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._membership, self._clock = folder.absolute() / LINK, membership, clock
        self._next = float("-inf")

    def refresh(self) -> None:
        """Write the link with the addresses that are known now, if it is time. A disk that is full costs only this file."""
        if self._clock() < self._next:
            return
        self._next = self._clock() + REFRESH_S
        manifest = self._membership.manifest
        link = {"link": str(self._membership.link_now()), "name": manifest.name, "invite_only": manifest.invite_only}
        try:
            write_json(self._path, {**link, "written": time.time()})
        except OSError as error:
            log.info("the link was not written to %s (%s)", self._path, error.strerror)


AWAIT_S = 20.0  # seconds that a node waits in a silent swarm that it returns to: two searches, and two readings of the directory
WAITING_S = 10.0  # seconds between two reminders that peers are missing


def task_options(settings: Settings) -> dict[str, int | float | str | bool]:
    """Return the task options that all peers share. For rl that is also the environment, but neither policy nor algorithm."""
    own = {"env": env_label(settings.rl.env)} if settings.task.hooks == RL else {}
    return {**agreement.shared(settings.task.hooks, settings.task.options), **own}


def for_new_swarm(settings: Settings) -> Settings:
    """Return the settings of a new swarm, with the defaults that depend on others.

    The built-in text task has Muon, unless the user chose an optimizer or the task's rate. A public swarm has its
    defences.
    """
    if settings.swarm.public:
        settings = settings.model_copy(update={"outer": settings.outer.guarded()})
    train, task = settings.train, settings.task
    chosen = "optimizer" in train.model_fields_set or "lr" in task.options
    if task.hooks != agreement.TEXT or chosen or not hasattr(torch.optim, "Muon"):
        return settings
    return settings.model_copy(update={"train": train.model_copy(update={"optimizer": "muon"})})


def new_manifest(
    settings: Settings,
    identity: Identity,
    model: str,
    terms: Terms | None = None,
    agreed: Mapping[str, int | float | str | bool] | None = None,
    fragments: int | None = None,
) -> bytes:
    """Return the sealed manifest of a new swarm.

    ``terms``: of claims, if any; ``agreed``: the task's ``agreed_options``; ``fragments``: those that the model is cut into.

    Raises ConfigError: settings that do not go together.
    """
    if settings.swarm.bucket and settings.verify.kind != "none":
        raise ConfigError("The settings swarm.bucket and verify.kind do not go together: verifiers are drawn among all members.")
    outer = settings.outer.resolved()
    label = task_label(settings.task.hooks)
    if re.fullmatch(TASK_NAME, label) is None:
        raise ConfigError(
            f"The task {label!r} cannot be a swarm's: give its file a name of ASCII letters, digits, dots, dashes and underscores, "
            "and its class one of ASCII letters."
        )
    manifest = Manifest(
        name=settings.swarm.name,
        created=time.time(),
        creator=identity.peer_id,
        task=label,
        task_options={**task_options(settings), **(agreed or {})},
        outer=outer if fragments is None else outer.fitted(fragments),
        train=resolved(settings.train.shared),
        verify=settings.verify,
        terms=terms,
        model=model,
        start_when=settings.swarm.start_when,
        shards=settings.swarm.shards,
        invite_only=settings.swarm.invite_only,
        public=settings.swarm.public,
        bucket=settings.swarm.bucket,
        epoch_s=settings.swarm.epoch_s,
    )
    return seal(manifest, identity)


def await_others(membership: Membership, log: Callable[[str], None], should_stop: Callable[[], bool]) -> None:
    """Wait a moment for known peers, if this node has returned to a swarm in which no peer answers, and log the outcome."""
    host, directory = membership.host, membership.directory
    if host.entry() or len(directory.members()) > 1:
        return
    log(f"nobody of this swarm answers: trying the link and {len(host.known())} addresses of known peers for {AWAIT_S:g} s")
    if not directory.wait_for(2, AWAIT_S, should_stop) and not should_stop():
        log(
            "nobody answered: going on without a partner from the checkpoint; others find this node again, or by the link "
            f"{membership.link()}"
        )


def wait_for_peers(
    membership: Membership, opt: OuterOptimizer, link_file: LinkFile, log: Callable[[str], None], should_stop: Callable[[], bool]
) -> None:
    """Wait until as many peers are there as the swarm wants at its start. Returns at once if it is under way."""
    directory, wanted = membership.directory, membership.manifest.start_when
    while opt.round == 0 and not should_stop():
        if directory.wait_for(wanted, WAITING_S, should_stop):
            return
        if any(member.state == "training" and member.round > 0 for member in directory.members().values()):
            return
        link_file.refresh()
        if line := membership.news():
            log(line)
        log(waiting_for(wanted - directory.size()))


def choose_shard(settings: Settings, manifest: Manifest, members: Mapping[str, Member], peer: str) -> Shard:
    """Return the shard that the user asked for, else the one that the fewest others hold (each peer breaks ties differently)."""
    seed = manifest.train.seed
    pair = settings.node.shard_pair
    if pair is not None:
        return Shard(pair[0], pair[1], seed)
    return Shard(least_used(members, manifest.shards, peer), manifest.shards, seed)
