"""Loading of the environment and the policy that a user names, and the task of them.

Code named by the swarm is never imported.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping

from shoal.node.config.rl_settings import served_by
from shoal.node.config.setting_types import spec_label
from shoal.node.config.settings import ConfigError, Settings
from shoal.node.rl.environment import (
    HELD_OUT,
    Env,
    EnvError,
    Environment,
    GuardedEnvironment,
    Option,
    canonical,
)
from shoal.node.rl.gym import Gym
from shoal.node.rl.hf import HF, load_hf
from shoal.node.rl.policy import Policy, PolicyError
from shoal.node.rl.serving import Served
from shoal.node.rl.strings import Strings
from shoal.node.rl.task import RLTask
from shoal.node.rl.tiny import Tiny, Warm
from shoal.node.tasks.user_class import HookError, find_class
from shoal.node.user_code import summary, user_trace
from shoal.swarm.errors import ShoalError

MAX_CONFIG_BYTES = 4096
MAX_VERSION_CHARS = 128
"""Of an environment, as rollouts and the manifest carry them."""


def _built_in(spec: str) -> Callable[..., Environment] | None:
    if spec == "strings":
        return Strings
    if re.fullmatch(r"[a-z0-9_]{1,64}", spec):
        return functools.partial(Gym, spec)
    return None


def load_env(spec: str, options: Mapping[str, Option]) -> Env:
    """Make the environment that ``spec`` names, with ``options``. Raises EnvError or HookError.

    ``spec``: ``strings``, a family of reasoning-gym, ``sapo9``, ``module:Class`` or
    ``path/file.py:Class``.
    """
    made_by = _built_in(spec) or find_class(spec, "environment")
    try:
        made = made_by(**options)
    except ShoalError:
        raise
    except Exception as error:
        said = f"The environment {spec!r} cannot be made, with {summary(error)}"
        trace = "" if _built_in(spec) else user_trace(error)
        raise EnvError(f"{said}: correct its options{_options_of(made_by)}.", trace) from error
    is_versioned = isinstance(made, Environment) and isinstance(made.version, str)
    if not is_versioned or not 0 < len(made.version) <= MAX_VERSION_CHARS:
        raise HookError(
            f"The environment {spec!r} needs version, question(seed, index) and reward(question, "
            "completion)."
        )
    if not type(made).__module__.startswith("shoal."):
        made = GuardedEnvironment(made, type(made).__name__)
    env = Env(spec_label(spec), canonical(options), made)
    if (
        not re.fullmatch(r"[A-Za-z0-9_.:+-]{1,128}", env.label)
        or len(env.config) > MAX_CONFIG_BYTES
    ):
        raise EnvError(
            f"The environment {spec!r} has too long a name or too long options: shorten them."
        )
    _try(env)
    return env


def _try(env: Env) -> None:
    """Judge an answer to the first held-out question, so that a fault shows before anything is
    trained.
    """
    try:
        question = env.made.question(HELD_OUT, 0)
        env.rewards(question, [question.answer or ""])
    except ShoalError:
        raise
    except Exception as error:
        raise EnvError(
            f"The environment {env.label!r} fails at its first question ({type(error).__name__}: "
            f"{error}): mend it."
        ) from error


def _options_of(made_by: Callable[..., Environment]) -> str:
    parameters = inspect.signature(made_by).parameters.values()
    names = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    return f", which are {', '.join(names)}" if names else ""


def load_policy(spec: str, env: Env, seed: int) -> Policy:
    """Make the policy, on the CPU; ``seed`` is for tiny.

    Raises PolicyError for a wrong name or a missing package.
    """
    kind, _, rest = spec.partition(":")
    if kind == "tiny":
        habit, _, steps = rest.partition(":")
        if not re.fullmatch(r"[0-9]{0,6}", steps):
            raise PolicyError(
                f"The policy {spec!r} has no number of steps: write it such as tiny:copy:400."
            )
        warm = Warm(steps=int(steps)) if steps else Warm()
        return Tiny(env.made, habit or "copy", seed=seed, warm=warm)
    if kind == "hf" and rest:
        where, url = served_by(rest)
        return load_hf(where, functools.partial(Served, url=url) if url else HF)
    raise PolicyError(
        f"There is no policy {spec!r}: choose tiny, tiny:HABIT, tiny:HABIT:STEPS, or hf: and a "
        "model's folder, file or name."
    )


def make_task(settings: Settings) -> RLTask:
    """Make the task of the settings.

    Raises ConfigError, EnvError, HookError or PolicyError; the model is made later.
    """
    unfit = ""
    if settings.train.accumulate != 1:
        unfit = "accumulate"
    elif settings.train.compile:
        unfit = "compile"
    if unfit:
        raise ConfigError(
            f"The task rl cannot have train.{unfit}, because a policy learns from all completions "
            "of a round together, of whatever length: leave it out."
        )
    rl = settings.rl
    if rl.follow and not settings.outer.alone:
        raise ConfigError(
            "A node that follows another's policy (rl.follow) cannot average weights too: leave "
            "rl.follow out, or use --method none."
        )
    env = load_env(rl.env, settings.task.options)
    seed = settings.train.seed

    def make_policy() -> Policy:
        policy = load_policy(rl.policy, env, seed)
        if isinstance(policy, Served) and rl.only != "share":
            # A server whose weights cannot change is refused before anything is learnt.
            policy.push()
        return policy

    frozen = rl.only == "share" and settings.outer.alone and not rl.follow
    return RLTask(env, make_policy, rl, seed=seed, frozen=frozen)
