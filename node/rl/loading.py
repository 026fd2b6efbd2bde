"""Loading of the environment and the policy that a user names.

Code named by the swarm is never imported.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping

from shoal.node.config.settings import env_label, served_by
from shoal.node.rl.environment import (
    HELD_OUT,
    Env,
    EnvError,
    Environment,
    GuardedEnvironment,
    Gym,
    Option,
    Policy,
    PolicyError,
    Strings,
    canonical,
)
from shoal.node.rl.hf import HF, load_hf
from shoal.node.rl.serving import Served
from shoal.node.rl.tiny import Tiny, Warm
from shoal.node.tasks.loader import HookError, find_class
from shoal.node.user_code import summary, user_trace
from shoal.swarm.errors import ShoalError


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
    if (
        not isinstance(made, Environment)
        or not isinstance(made.version, str)
        or not 0 < len(made.version) <= 128
    ):
        raise HookError(
            f"The environment {spec!r} needs version, question(seed, index) and reward(question, "
            "completion)."
        )
    if not type(made).__module__.startswith("shoal."):
        made = GuardedEnvironment(made, type(made).__name__)
    env = Env(env_label(spec), canonical(options), made)
    if not re.fullmatch(r"[A-Za-z0-9_.:+-]{1,128}", env.label) or len(env.config) > 4096:
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
    names = [
        p.name
        for p in inspect.signature(made_by).parameters.values()
        if p.kind is not p.VAR_KEYWORD
    ]
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
        return Tiny(
            env.made, habit or "copy", seed=seed, warm=Warm(steps=int(steps)) if steps else Warm()
        )
    if kind == "hf" and rest:
        where, url = served_by(rest)
        return load_hf(where, functools.partial(Served, url=url) if url else HF)
    raise PolicyError(
        f"There is no policy {spec!r}: choose tiny, tiny:HABIT, tiny:HABIT:STEPS, or hf: and a "
        "model's folder, file or name."
    )
