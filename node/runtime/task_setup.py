"""A stranger's signed manifest becomes settings and a task here, or a sentence that refuses it.

Nothing that a manifest names is imported, opened or allocated before it is checked. Code and paths
come from this user's own settings only: a name in the manifest must equal that of the user's file,
without its folder. The size of the model is computed before it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from shoal.node.config.rl_settings import RLSettings
from shoal.node.config.setting_types import spec_label
from shoal.node.config.settings import ConfigError, Settings
from shoal.node.config.swarm_settings import SwarmSettings, TaskSettings
from shoal.node.data.task_options import (
    DATA,
    DIGEST,
    TEXT,
    TOKENIZER,
    options_for_manifest,
    options_of_member,
)
from shoal.node.home import expanded
from shoal.node.task import Task
from shoal.node.tasks.loader import BUILT_IN, load_task
from shoal.node.tasks.text import TextTask
from shoal.node.tasks.user_class import HookError
from shoal.node.training import inner_optimizer, resources
from shoal.optim.parameters import AveragedParameters
from shoal.swarm.exchange.contribution import model_digest
from shoal.swarm.manifest import Manifest
from shoal.swarm.membership.membership import OWN_LOOP
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.settings.verification import Terms
from shoal.swarm.state.query import ModelDiffersError

RL = "rl"
BUILT_IN_TASKS = (*BUILT_IN, RL)
LOCAL_OPTIONS = (DATA, TOKENIZER, DIGEST)
"""Options of the text task in which a node may differ from the manifest without being refused."""
INNER = ("optimizer", *inner_optimizer.KNOBS)
"""Settings of the inner optimizer, whose state a checkpoint holds."""
LINK = "link"
CHECKPOINT = "checkpoint"


def enter(
    settings: Settings,
    manifest: Manifest,
    device: str = "cpu",
    log: Callable[[str], None] = lambda text: None,
    *,
    trains: bool = True,
) -> tuple[Settings, Task]:
    """Return this node's settings in the swarm of ``manifest``, and its task; no model is made yet.

    ``device``: the type of the one to train on. ``log``: gets a sentence for the user. ``trains``
    False: nothing will be trained (`shoal pull`), so memory is checked for the model alone.

    Raises as `swarm_settings` and `make_task`; MemoryBudgetError: there is no memory for the model;
    ModelDiffersError: the manifest's own options make another one; DataError: its tokenizer cannot
    be had.
    """
    agreed = swarm_settings(settings, manifest)
    task = make_task(agreed)
    check_size(task, agreed, device, log, manifest, trains=trains)
    return agreed, task


def check_size(
    task: Task,
    settings: Settings,
    device: str,
    log: Callable[[str], None],
    manifest: Manifest | None = None,
    *,
    trains: bool = True,
) -> None:
    """Check, before the built-in task's model is made, that it fits into memory.

    That of other tasks is checked once it is made (`make_trainer`). Without a ``manifest`` the
    sizes are the user's own: of too little free memory ``log`` gets a sentence, and the model is
    made.
    Raises MemoryBudgetError, ModelDiffersError or DataError.
    """
    if not isinstance(task, TextTask):
        return
    least = task.least_parameters()
    room = resources.room(settings.node.ram)
    # Before a tokenizer that the manifest names is fetched.
    if manifest is not None and 4 * least > room:
        way_out = (
            "end other programs, allow more with --ram, or join a smaller swarm"
            if trains
            else "end other programs"
        )
        raise resources.MemoryBudgetError(
            f"The swarm's model has {least:,} parameters or more, which take "
            f"{4 * least / resources.GB:,.2f} GB of memory, and this node may have "
            f"{room / resources.GB:.2f}: {way_out}."
        )
    params = AveragedParameters.of(task.sized())
    if manifest is not None and model_digest(params) != manifest.model:
        raise ModelDiffersError(
            "This node's model does not fit the swarm: names, shapes or types of its parameters "
            "differ; use the swarm's task, options and version."
        )
    if trains:
        node = settings.node
        resources.check(
            node.ram,
            params,
            log,
            method=settings.outer.method,
            device=device,
            working=task.working_bytes(),
            slow_here=node.slow_in_memory(device),
            own=manifest is None,
        )


def make_task(settings: Settings) -> Task:
    """Return a new task of the settings.

    Raises ConfigError, DataError, EnvError, HookError or PolicyError.
    """
    if settings.task.hooks == RL:
        from shoal.node.rl.loading import make_task as make_rl_task

        return make_rl_task(settings)
    own = {"data": settings.node.data} if settings.node.data else {}
    return load_task(settings.task.hooks, {**settings.task.options, **own})


def swarm_settings(settings: Settings, manifest: Manifest) -> Settings:
    """Return this node's settings with the swarm's in place of its outer, train and task settings.

    Raises:
        DataError: the swarm names a path as its data.
        HookError: the swarm trains a task that this node must be given with --task, or was given
            another one.
        ConfigError: this node was given other values of settings that the manifest fixes, or a node
            cannot have the manifest's.
    """
    task, rl = _task_of(settings, manifest, LINK)
    check_not_fixed(settings, manifest)
    if task.hooks == RL and isinstance(terms := manifest.terms, Terms):
        rl = rl.model_copy(
            update={
                "group": terms.group,
                "temperature": terms.temperature,
                "max_tokens": terms.max_tokens,
            }
        )
    fixed = {
        name: getattr(manifest, name)
        for name in ("name", "shards", "invite_only", "public", "bucket", "epoch_s")
    }
    try:
        swarm = SwarmSettings.model_validate(
            {**settings.swarm.model_dump(exclude_unset=True), **fixed}
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        what = first["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"The swarm's manifest has a swarm.{where} that no node can have ({what}): join "
            "another swarm."
        ) from None
    train = settings.train.of_swarm(manifest.train)
    if (steps := own_steps(settings, manifest)) is not None:
        train = train.model_copy(update={"steps": steps})
    agreed = {
        "outer": manifest.outer,
        "train": train,
        "task": task,
        "rl": rl,
        "swarm": swarm,
        "verify": manifest.verify,
    }
    return settings.model_copy(update=agreed)


def own_steps(settings: Settings, manifest: Manifest) -> int | None:
    """Return for how many steps this node takes part, as each may decide for itself; None: for as
    many as the swarm has.

    The number in the manifest, which the creator's own file has too, is the swarm's.
    """
    train = settings.train
    if "steps" not in train.model_fields_set or train.steps == manifest.train.steps:
        return None
    return train.steps


def continued(settings: Settings, manifest: Manifest) -> Settings:
    """Return ``settings`` of a new swarm that goes on from a checkpoint of the swarm of
    ``manifest``.

    It has that one's inner optimizer, task and options where the user gave none. HookError or
    DataError as `swarm_settings`.
    """
    train = settings.train
    if not train.model_fields_set & {*INNER}:
        train = train.model_copy(update=inner_settings(manifest.train))
        settings = settings.model_copy(update={"train": train})
    if settings.task.model_fields_set:
        return settings
    task, rl = _task_of(settings, manifest, CHECKPOINT)
    return settings.model_copy(update={"task": task, "rl": rl})


def inner_settings(train: TrainSettings) -> dict[str, Any]:
    """Return the settings of the inner optimizer; of one that the task makes its name only, for its
    rate comes from the task.
    """
    names = ("optimizer",) if train.optimizer == "task" else INNER
    return {name: getattr(train, name) for name in names}


def _task_of(
    settings: Settings, manifest: Manifest, carrier: str
) -> tuple[TaskSettings, RLSettings]:
    """Return the manifest's task and environment; code is loaded only by the name this user gave.

    ``carrier``: what brought the manifest, `LINK` or `CHECKPOINT`. Errors name it, and with
    `CHECKPOINT` the user may choose another environment.
    """
    hooks = settings.task.hooks
    rl = settings.rl
    if manifest.task in BUILT_IN_TASKS and "hooks" not in settings.task.model_fields_set:
        hooks = manifest.task
    if manifest.task == OWN_LOOP:
        raise HookError(
            "The members of this swarm train in loops of their own: join it with shoal.join(link, "
            "state=model)."
        )
    if spec_label(hooks) != manifest.task:
        if hooks != TEXT or manifest.task in BUILT_IN_TASKS:
            raise HookError(
                f"The swarm trains {manifest.task!r}, this node was given {hooks!r}"
                f"{_if_not_there(hooks)}: use the swarm's task."
            )
        raise HookError(f"The swarm trains {manifest.task!r}, {_no_code(carrier)} --task.")
    options = options_of_member(hooks, dict(manifest.task_options), settings.task.options)
    if hooks == RL:
        rl = rl.model_copy(update={"env": _own_env(rl, str(options.pop("env", "")), carrier)})
    return settings.task.model_copy(update={"hooks": hooks, "options": options}), rl


def _own_env(own: RLSettings, label: str, carrier: str) -> str:
    """Return the name by which this node loads the swarm's environment.

    A class that only the swarm names is never imported.
    """
    if spec_label(own.env) == label:
        return own.env
    if "env" in own.model_fields_set:
        # A new swarm may learn something else.
        if carrier == CHECKPOINT:
            return own.env
        raise HookError(
            f"The swarm learns {label!r}, this node was given {own.env!r}: use the swarm's "
            "environment."
        )
    if ":" in label:
        raise HookError(f"The swarm learns {label!r}, {_no_code(carrier)} --env.")
    return label


def _if_not_there(hooks: str) -> str:
    file = hooks.rpartition(":")[0]
    missing = file.endswith(".py") and not Path(expanded(file)).is_file()
    return ", a file that is not there" if missing else ""


def _no_code(carrier: str) -> str:
    return (
        f"and a {carrier} carries no code: get its files from whoever runs the swarm, then name "
        "your copy with"
    )


def check_not_fixed(settings: Settings, manifest: Manifest) -> None:
    """Raise ConfigError, which names them, if the user asks for other values of settings that
    ``manifest`` fixes.
    """
    outer = settings.outer
    # What a new swarm would have made of them.
    asked = (outer.guarded() if manifest.public else outer).resolved()

    def became(name: str, fixed: Any) -> bool:
        wanted = getattr(asked, name)
        return wanted == fixed or (name == "fragments" and wanted > fixed)  # of few layers fewer

    differ = _differing("outer", outer, manifest.outer, became)
    differ += _differing("swarm", settings.swarm, manifest)
    # Each node decides for itself how many steps it takes.
    differ += _differing(
        "train", settings.train, manifest.train, lambda name, fixed: name == "steps"
    )
    differ += _differing("verify", settings.verify, manifest.verify)
    if isinstance(terms := manifest.terms, Terms):
        # The policy's name there is shortened (no folder, no habit of tiny:HABIT): `check_terms` in
        # `shoal.node.verify.terms` compares it. An own value of 0 asks for nothing.
        differ += _differing(
            "rl",
            settings.rl,
            terms,
            lambda name, fixed: name == "policy" or not getattr(settings.rl, name),
        )
    text = manifest.task == TEXT
    for name, wanted in options_for_manifest(settings.task.hooks, settings.task.options).items():
        fixed = manifest.task_options.get(name)
        if wanted != fixed and not (text and name in LOCAL_OPTIONS):
            differ.append((f"task.options.{name}", wanted, fixed))
    if differ:
        raise ConfigError(
            f"The swarm has {_listed((name, fixed) for name, _, fixed in differ)}, and this node "
            f"was given {_listed((name, wanted) for name, wanted, _ in differ)}: leave that out; "
            "the creator can change train.lr and train.steps for all (`shoal change`), and another "
            "swarm can begin with the weights of this one (shoal up --resume-from)."
        )


def _differing(
    table: str, asked: BaseModel, fixed: Any, same: Any = lambda name, fixed: False
) -> list[tuple[str, Any, Any]]:
    """Return (name, asked, fixed) of each setting that was given and differs in ``fixed``, unless
    ``same(name, fixed)`` says that this does not matter.
    """
    found = []
    for name in sorted(asked.model_fields_set & type(fixed).model_fields.keys()):
        wanted = getattr(asked, name)
        theirs = getattr(fixed, name)
        if wanted is not None and wanted != theirs and not same(name, theirs):
            found.append((f"{table}.{name}", wanted, theirs))
    return found


def _listed(values: Any) -> str:
    return ", ".join(
        f"no {name}" if value is None else f"{name}={value!r}" for name, value in values
    )
