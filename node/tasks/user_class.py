"""Finding the class or function that a user names, in a module or a file.

    find_class("my_task.py:MyTask")

What cannot be loaded is a ``HookError``, which says how to mend it.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from shoal.node.home import expanded
from shoal.node.user_code import (
    UserCodeError,
    belongs_to_user,
    import_beside,
    summary,
    user_trace,
)

BUILT_IN_NAMES = ("text", "rl")
"""The tasks that need no file (`shoal.node.tasks.loader`, `shoal.node.rl`)."""


class HookError(UserCodeError):
    """A task, or other class of the user's, that cannot be loaded."""


def _import_file(path: Path, spec_text: str, what: str) -> ModuleType:
    if not path.is_file():
        raise HookError(
            f"There is no file {str(path)!r} to load the {what} {spec_text!r} from: check the path."
        )
    path = path.resolve()
    # A private name: a file called optim.py or json.py must not hide another module.
    name = f"_shoal_hooks_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise HookError(
            f"The file {str(path)!r} is no Python source: name a file that ends in .py."
        )
    import_beside(path.parent)
    hidden = _hidden(path)
    if hidden is not None:
        raise HookError(
            f"The file {str(path)!r} imports {hidden!r}, and would not get the one beside it: an "
            "installed module has that name: give yours another."
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
        return (
            f"{path.name} is in no package, so write `import helper` in place of `from . import "
            "helper`"
        )
    return "mend the file"


def _hidden(path: Path) -> str | None:
    """Return a module that the file imports and that lies beside it, if the import finds another,
    which is installed.
    """
    try:
        found = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return None  # loading it says what is wrong
    names: set[str] = set()
    for item in ast.walk(found):
        if isinstance(item, ast.Import):
            names |= {alias.name for alias in item.names}
        elif isinstance(item, ast.ImportFrom) and item.module and not item.level:
            names.add(item.module)
    for name in sorted({name.partition(".")[0] for name in names} - {path.stem}):
        beside = [path.parent / f"{name}.py", path.parent / name / "__init__.py"]
        is_there = any(file.is_file() for file in beside)
        if is_there and _origin(name) not in [str(file) for file in beside]:
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
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise HookError(
                f"There is no module {missing!r} for the {what} {spec_text!r}: install it, put "
                "its folder on PYTHONPATH, or name a file as path/file.py:Class."
            ) from error
        said = f"The module {name!r} fails when it is imported, with {summary(error)}"
        raise HookError(f"{said}: mend it.", user_trace(error)) from error


def find_class(spec_text: str, what: str = "task") -> type[Any]:
    """Return the class that ``module:Class`` or ``path/file.py:Class`` names; messages call it a
    ``what``. Raises HookError.
    """
    found = _find(spec_text, what, "class", inspect.isclass)
    assert isinstance(found, type)
    return found


def find_function(spec_text: str, what: str) -> FunctionType:
    """Return the function that ``module:function`` or ``path/file.py:function`` names. Raises
    HookError.
    """
    found = _find(spec_text, what, "function", inspect.isfunction)
    assert isinstance(found, FunctionType)
    return found


def _find(spec_text: str, what: str, kind: str, fits: Callable[[object], bool]) -> object:
    """Return what ``spec_text`` names, a ``kind`` for people, if it ``fits``."""
    name_of_kind = kind if kind == "function" else kind.capitalize()
    where, colon, name = spec_text.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise HookError(
            f"The {what} {spec_text!r} is not of the form module:{name_of_kind} or "
            f"path/file.py:{name_of_kind} and is none of the built-in ones "
            f"({', '.join(BUILT_IN_NAMES)}): write it in one of these ways."
        )
    if where.endswith(".py") or "/" in where or "\\" in where:
        module = _import_file(Path(expanded(where)), spec_text, what)
    elif all(part.isidentifier() for part in where.split(".")):
        module = _import_module(where, spec_text, what)
    else:
        raise HookError(
            f"{where!r} in the {what} {spec_text!r} is no module name: write module:{name_of_kind} "
            f"or file.py:{name_of_kind}."
        )
    found = getattr(module, name, None)
    if fits(found):
        return found
    own = []
    for known, value in vars(module).items():
        if fits(value) and getattr(value, "__module__", None) == module.__name__:
            own.append(known)
    near = difflib.get_close_matches(name, own, 1) or own[:1]
    hint = f"it defines no {kind} at all."
    if near:
        hint = f"did you mean {near[0]!r}?"
    raise HookError(f"There is no {kind} {name!r} in {where!r}: {hint}")
