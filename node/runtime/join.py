"""Joining a swarm by settings: settings to a manifest, a manifest to settings, and the choice of a shard."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import PurePath

import torch

from shoal.node.config.rl import RLSettings, env_label
from shoal.node.config.settings import ConfigError, Settings
from shoal.node.data import manifest_options as agreement
from shoal.node.runtime.fixed_settings import check_not_fixed
from shoal.node.runtime.link_file import LinkFile
from shoal.node.task import Shard, Task
from shoal.node.tasks.loader import BUILT_IN, HookError, load_task
from shoal.node.training.schedule import resolved
from shoal.optim import OuterOptimizer
from shoal.swarm.identity import Identity
from shoal.swarm.manifest.manifest import TASK_NAME, Manifest
from shoal.swarm.manifest.verify import StretchTerms, Terms
from shoal.swarm.membership.membership import OWN_LOOP, Membership
from shoal.swarm.training.session_setup import waiting_for
from shoal.swarm.training.shard import least_used
from shoal.swarm.wire.envelope import seal
from shoal.swarm.wire.member import Member

AWAIT_S = 20.0  # seconds that a node waits in a silent swarm that it returns to: two searches, and two readings of the directory
WAITING_S = 10.0  # seconds between two reminders that peers are missing
RL = "rl"
BUILT_IN_TASKS = (*BUILT_IN, RL)


def task_label(hooks: str) -> str:
    """Return the name of a task in the manifest: without the folder, which differs between machines."""
    where, colon, name = hooks.rpartition(":")
    return PurePath(where).name + colon + name


def task_options(settings: Settings) -> dict[str, int | float | str | bool]:
    """Return the task options that all peers share. For rl that is also the environment, but neither policy nor algorithm."""
    if settings.task.hooks == agreement.TEXT:
        return agreement.shared(settings.task.options)
    own = {"env": env_label(settings.rl.env)} if settings.task.hooks == RL else {}
    return {**settings.task.options, **own}


def for_new_swarm(settings: Settings) -> Settings:
    """Return the settings of a new swarm, with the defaults that depend on others.

    The built-in text task has Muon, unless the user chose an optimizer or the task's rate. Where training is verified it keeps its
    own: the thresholds and figures of docs/verification.md are AdamW's. A public swarm has its defences.
    """
    if settings.swarm.public:
        settings = settings.model_copy(update={"outer": settings.outer.guarded()})
    train, task = settings.train, settings.task
    chosen = "optimizer" in train.model_fields_set or "lr" in task.options or settings.verify.kind == "training"
    if task.hooks != agreement.TEXT or chosen or not hasattr(torch.optim, "Muon"):
        return settings
    return settings.model_copy(update={"train": train.model_copy(update={"optimizer": "muon"})})


def new_manifest(
    settings: Settings,
    identity: Identity,
    model: str,
    terms: Terms | StretchTerms | None = None,
    agreed: Mapping[str, int | float | str | bool] | None = None,
    fragments: int | None = None,
) -> bytes:
    """Return the sealed manifest of a new swarm.

    ``terms``: of claims, if any; ``agreed``: the task's ``agreed_options``; ``fragments``: those that the model is cut into.

    Raises:
        ConfigError: settings that do not go together.
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


def swarm_settings(settings: Settings, manifest: Manifest) -> Settings:
    """Return this node's settings with the swarm's in place of its outer, train and task settings.

    Raises:
        DataError: the swarm names a path as its data.
        HookError: the swarm trains a task that this node must be given with --task, or was given another one.
        ConfigError: this node was given other values of settings that the manifest fixes.
    """
    hooks = settings.task.hooks
    if manifest.task in BUILT_IN_TASKS and "hooks" not in settings.task.model_fields_set:
        hooks = manifest.task
    if manifest.task == OWN_LOOP:
        raise HookError("The members of this swarm train in loops of their own: join it with swarm.join(link, state=model).")
    if task_label(hooks) != manifest.task:
        if hooks != "text" or manifest.task in BUILT_IN_TASKS:
            raise HookError(f"The swarm trains {manifest.task!r}, this node was given {hooks!r}: use the swarm's task.")
        raise HookError(
            f"The swarm trains {manifest.task!r}, and a link carries no code: get its files from whoever runs the swarm, then name "
            "your copy with --task."
        )
    check_not_fixed(settings, manifest)
    options = dict(manifest.task_options)
    if hooks == agreement.TEXT:
        options = agreement.taken(options, settings.task.options)
    rl = settings.rl
    if hooks == RL:
        rl = rl.model_copy(update={"env": _agreed_env(rl, str(options.pop("env", "")))})
        if isinstance(terms := manifest.terms, Terms):
            rl = rl.model_copy(update={"group": terms.group, "temperature": terms.temperature, "max_tokens": terms.max_tokens})
    task = settings.task.model_copy(update={"hooks": hooks, "options": options})
    swarm = settings.swarm.model_copy(
        update={name: getattr(manifest, name) for name in ("name", "shards", "invite_only", "public", "bucket", "epoch_s")}
    )
    train = settings.train.of_swarm(manifest.train)
    if "steps" in settings.train.model_fields_set:  # each node decides how long it takes part
        train = train.model_copy(update={"steps": settings.train.steps})
    agreed = {"outer": manifest.outer, "train": train, "task": task, "rl": rl, "swarm": swarm, "verify": manifest.verify}
    return settings.model_copy(update=agreed)


def _agreed_env(own: RLSettings, label: str) -> str:
    """Return the name by which this node loads the swarm's environment. A class that only the swarm names is never imported."""
    if env_label(own.env) == label:
        return own.env
    if "env" in own.model_fields_set:
        raise HookError(f"The swarm learns {label!r}, this node was given {own.env!r}: use the swarm's environment.")
    if ":" in label:
        raise HookError(
            f"The swarm learns {label!r}, and a link carries no code: get its files from whoever runs the swarm, then name your "
            "copy with --env."
        )
    return label


def own_data(settings: Settings) -> dict[str, str]:
    """Return the task option that differs between nodes: the place of the data."""
    return {"data": settings.node.data} if settings.node.data else {}


def make_task(settings: Settings) -> Task:
    """Return a new task of the settings. EnvError, HookError or PolicyError."""
    if settings.task.hooks == RL:
        from shoal.node.rl.rollout_sharing import make_task as make_rl_task

        return make_rl_task(settings)
    return load_task(settings.task.hooks, {**settings.task.options, **own_data(settings)})


def choose_shard(settings: Settings, manifest: Manifest, members: Mapping[str, Member], peer: str) -> Shard:
    """Return the shard that the user asked for, else the one that the fewest others hold (each peer breaks ties differently)."""
    seed = manifest.train.seed
    pair = settings.node.shard_pair
    if pair is not None:
        return Shard(pair[0], pair[1], seed)
    return Shard(least_used(members, manifest.shards, peer), manifest.shards, seed)
