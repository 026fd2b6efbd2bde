"""Loading the task that a user names: ``text``, ``module:Class`` or ``path/file.py:Class``.

Only the command line and this node's own settings name a task; nothing that the swarm names is imported.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.node.task import Task
from shoal.node.tasks.text import TextTask
from shoal.swarm.errors import ShoalError

BUILT_IN: dict[str, type[Task]] = {"text": TextTask}
REQUIRED = ("model", "batches", "loss", "evaluate")


class HookError(ShoalError):
    """The named task cannot be loaded."""


def _why(error: BaseException, path: Path | None = None) -> str:
    """Return the exception in a few words, with the line of ``path`` that raised it."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if path and f.filename == str(path)]
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}{': ' if first else ''}{first}" + (f", line {lines[-1]}" if lines else "")


def _import_file(path: Path, spec_text: str, what: str) -> ModuleType:
    if not path.is_file():
        raise HookError(f"There is no file {str(path)!r} to load the {what} {spec_text!r} from: check the path.")
    path = path.resolve()
    # A private name, and no change of sys.path: a file called optim.py or json.py must not hide another module.
    name = f"_shoal_hooks_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise HookError(f"The file {str(path)!r} is no Python source: name a file that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script without a main guard may call sys.exit
        del sys.modules[name]
        hint = "mend the file"
        if isinstance(error, ModuleNotFoundError):
            hint = f"install that module; files that lie next to the {what}'s are not importable from it"
        raise HookError(f"The file {str(path)!r} fails when it is loaded ({_why(error, path)}): {hint}.") from error
    return module


def _import_module(name: str, spec_text: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name is not None
        if isinstance(error, ModuleNotFoundError) and missing and f"{name}.".startswith(f"{error.name}."):
            raise HookError(
                f"There is no module {error.name!r} for the {what} {spec_text!r}: "
                "install it, put its folder on PYTHONPATH, or name a file as path/file.py:Class."
            ) from error
        raise HookError(f"The module {name!r} fails when it is imported ({_why(error)}): mend it.") from error


def find_class(spec_text: str, what: str = "task", known: str = ", ".join((*BUILT_IN, "rl"))) -> type[Any]:
    """Return the class that ``module:Class`` or ``path/file.py:Class`` names; messages call it a ``what``. Raises HookError."""
    where, colon, name = spec_text.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise HookError(
            f"The {what} {spec_text!r} is not of the form module:Class or path/file.py:Class "
            f"and is none of the built-in ones ({known}): write it in one of these ways."
        )
    if where.endswith(".py") or "/" in where or "\\" in where:
        module = _import_file(Path(os.path.expanduser(where)), spec_text, what)
    elif all(part.isidentifier() for part in where.split(".")):
        module = _import_module(where, spec_text, what)
    else:
        raise HookError(f"{where!r} in the {what} {spec_text!r} is no module name: write module:Class or file.py:Class.")
    found = getattr(module, name, None)
    if isinstance(found, type):
        return found
    own = [n for n, c in vars(module).items() if isinstance(c, type) and c.__module__ == module.__name__]
    near = difflib.get_close_matches(name, own, 1) or own[:1]
    hint = f"did you mean {near[0]!r}?" if near else "it defines no class at all."
    raise HookError(f"There is no class {name!r} in {where!r}: {hint}")


def _check_options(cls: type[Any], options: Mapping[str, Any], spec_text: str) -> None:
    """Raise HookError for an option that the constructor of ``cls`` does not take, or one that it needs."""
    try:
        parameters = list(inspect.signature(cls).parameters.values())
    except (TypeError, ValueError):
        return  # a constructor that cannot be inspected: the call will fail if it must
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in named]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for option in options:
            if option not in names:
                takes = f"its options are {', '.join(names)}" if names else "it takes no options"
                raise HookError(f"The task {spec_text!r} has no option {option!r}: {takes}.")
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise HookError(f"The task {spec_text!r} needs the option {parameter.name!r}: set it under [task.options].")


def load_task(spec: str, options: Mapping[str, Any] | None = None) -> Task:
    """Return the task that ``spec`` names, constructed with ``options`` as keyword arguments.

    A class that does not derive from `Task` gets its defaults of the methods that it lacks.

    Raises:
        HookError: the name, the file, the class or the options are wrong; the sentence says how.
    """
    options = dict(options or {})
    cls = BUILT_IN.get(spec) or find_class(spec)
    if not issubclass(cls, Task):
        try:
            cls = type(cls.__name__, (cls, Task), {"__module__": cls.__module__, "__doc__": cls.__doc__})
        except TypeError as error:
            raise HookError(f"The class of {spec!r} cannot be a task ({error}): derive it from shoal.Task.") from error
    for method in REQUIRED:
        if getattr(cls, method) is getattr(Task, method) or not callable(getattr(cls, method)):
            raise HookError(f"The task {spec!r} has no method {method!r}: write it, as shoal.Task describes.")
    _check_options(cls, options, spec)
    try:
        task: Task = cls(**options)
    except ShoalError:
        raise
    except Exception as error:
        raise HookError(f"The task {spec!r} fails when it is made ({_why(error)}): mend it or its options.") from error
    return task
