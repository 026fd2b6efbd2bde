"""Loading the task that a user names: ``text``, ``module:Class`` or ``path/file.py:Class``.

    task = load_task("my_task.py:MyTask", {"width": 64})

Only the command line and this node's own settings name a task; nothing that the swarm names is
imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from shoal.node.task import Task
from shoal.node.tasks.guarded import Guarded
from shoal.node.tasks.text import TextTask
from shoal.node.tasks.user_class import HookError, find_class
from shoal.node.user_code import summary, user_trace
from shoal.swarm.errors import ShoalError

BUILT_IN: dict[str, type[Task]] = {"text": TextTask}
REQUIRED = ("model", "batches", "loss", "evaluate")
"""Methods without a default."""


def load_task(spec: str, options: Mapping[str, Any] | None = None) -> Task:
    """Return the task that ``spec`` names, constructed with ``options`` as keyword arguments.

    A class that does not derive from `Task` gets its defaults of the methods that it lacks. Of a
    class of the user's every method is guarded (`Guarded`): what it raises or returns wrongly is a
    UserCodeError.

    Raises HookError: the name, the file, the class or the options are wrong; the sentence says how.
    """
    options = dict(options or {})
    cls = BUILT_IN.get(spec) or find_class(spec)
    if not issubclass(cls, Task):
        try:
            cls = type(
                cls.__name__, (cls, Task), {"__module__": cls.__module__, "__doc__": cls.__doc__}
            )
        except TypeError as error:
            raise HookError(
                f"The class of {spec!r} cannot be a task ({error}): derive it from shoal.Task."
            ) from error
    for method in REQUIRED:
        if getattr(cls, method) is getattr(Task, method) or not callable(getattr(cls, method)):
            raise HookError(
                f"The task {spec!r} has no method {method!r}: write it, as shoal.Task describes."
            )
    _check_options(cls, options, spec)
    try:
        task: Task = cls(**options)
    except ShoalError:
        raise
    except Exception as error:
        said = f"The task {spec!r} fails when it is made, with {summary(error)}"
        raise HookError(f"{said}: mend it or its options.", user_trace(error)) from error
    if type(task).__module__.startswith("shoal."):
        return task
    return Guarded(task, cls.__name__)


def option_defaults(spec: str) -> dict[str, Any]:
    """Return the options of the task that ``spec`` names that have a default. Raises HookError."""
    cls = BUILT_IN.get(spec) or find_class(spec)
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):
        return {}  # a constructor that cannot be inspected
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def _check_options(cls: type[Any], options: Mapping[str, Any], spec_text: str) -> None:
    """Raise HookError for an option that the constructor of ``cls`` does not take, or one that it
    needs.
    """
    try:
        parameters = list(inspect.signature(cls).parameters.values())
    except (TypeError, ValueError):
        return  # a constructor that cannot be inspected: the call will fail if it must
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    names = [one.name for one in named]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    for option in options:
        if option not in names and not takes_any:
            takes = f"its options are {', '.join(names)}" if names else "it takes no options"
            raise HookError(f"The task {spec_text!r} has no option {option!r}: {takes}.")
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise HookError(
                f"The task {spec_text!r} needs the option {parameter.name!r}: set it under "
                "[task.options]."
            )
