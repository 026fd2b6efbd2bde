"""Loading the task that a user names: ``text``, ``module:Class`` or ``path/file.py:Class``.

Only the command line and this node's own settings name a task; nothing that the swarm names is imported.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.node.task import Task
from shoal.node.tasks.guarded import Guarded
from shoal.node.tasks.text import TextTask
from shoal.node.user_code import UserCodeError, belongs_to_user, import_beside, summary, user_trace
from shoal.swarm.errors import ShoalError

BUILT_IN: dict[str, type[Task]] = {"text": TextTask}
REQUIRED = ("model", "batches", "loss", "evaluate")


class HookError(UserCodeError):
    """A task, or other class of the user's, that cannot be loaded."""


def _import_file(path: Path, spec_text: str, what: str) -> ModuleType:
    if not path.is_file():
        raise HookError(f"There is no file {str(path)!r} to load the {what} {spec_text!r} from: check the path.")
    path = path.resolve()
    # A private name: a file called optim.py or json.py must not hide another module.
    name = f"_shoal_hooks_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise HookError(f"The file {str(path)!r} is no Python source: name a file that ends in .py.")
    import_beside(path.parent)
    if hidden := _hidden(path):
        raise HookError(
            f"The file {str(path)!r} imports {hidden!r}, and would not get the one beside it: an installed module has that name: "
            "give yours another."
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script without a main guard may call sys.exit
        del sys.modules[name]
        said = f"The file {str(path)!r} fails when it is loaded, with {summary(error)}"
        raise HookError(f"{said}: {_import_hint(error, path)}.", user_trace(error)) from error
    return module


def _import_hint(error: BaseException, path: Path) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"install that module, or put its file into {str(path.parent)!r}, beside {path.name}"
    if isinstance(error, ImportError) and "relative import" in str(error):
        return f"{path.name} is in no package, so write `import helper` in place of `from . import helper`"
    return "mend the file"


def _hidden(path: Path) -> str | None:
    """Return a module that the file imports and that lies beside it, if the import finds another, which is installed."""
    try:
        found = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return None  # loading it says what is wrong
    names = {alias.name for item in ast.walk(found) if isinstance(item, ast.Import) for alias in item.names}
    names |= {item.module for item in ast.walk(found) if isinstance(item, ast.ImportFrom) and item.module and not item.level}
    for name in sorted({name.partition(".")[0] for name in names} - {path.stem}):
        beside = [path.parent / f"{name}.py", path.parent / name / "__init__.py"]
        if any(file.is_file() for file in beside) and _origin(name) not in [str(file) for file in beside]:
            return name
    return None


def _origin(name: str) -> str | None:
    """Return the file that an import of ``name`` loads, without loading it."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin


def _import_module(name: str, spec_text: str, what: str) -> ModuleType:
    belongs_to_user(module=name)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name is not None
        if isinstance(error, ModuleNotFoundError) and missing and f"{name}.".startswith(f"{error.name}."):
            raise HookError(
                f"There is no module {error.name!r} for the {what} {spec_text!r}: "
                "install it, put its folder on PYTHONPATH, or name a file as path/file.py:Class."
            ) from error
        said = f"The module {name!r} fails when it is imported, with {summary(error)}"
        raise HookError(f"{said}: mend it.", user_trace(error)) from error


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

    A class that does not derive from `Task` gets its defaults of the methods that it lacks. Of a class of the user's every method
    is guarded (`Guarded`): what it raises or returns wrongly is a UserCodeError.

    Raises HookError: the name, the file, the class or the options are wrong; the sentence says how.
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
        said = f"The task {spec!r} fails when it is made, with {summary(error)}"
        raise HookError(f"{said}: mend it or its options.", user_trace(error)) from error
    return task if type(task).__module__.startswith("shoal.") else Guarded(task, cls.__name__)
