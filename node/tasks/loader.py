"""Loading the task that a user names: ``text``, ``module:Class`` or ``path/file.py:Class``.

Only the command line and this node's own settings name a task; nothing that the swarm names is
imported.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shoal.node.home import expanded
from shoal.node.task import (
    NAMED,
    Batches,
    LoadedBatches,
    NumberedBatches,
    Shard,
    Task,
    iterator_of,
)
from shoal.node.tasks.text import TextTask
from shoal.node.user_code import (
    UserCodeError,
    belongs_to_user,
    calling,
    import_beside,
    summary,
    user_trace,
)
from shoal.optim.outer.averaged import fault_of
from shoal.swarm.errors import ShoalError

# The user's task as Shoal calls it: each method behind a boundary, and each result of the type that
# training needs.

_END = object()


class Guarded(Task):
    """Task that calls the user's ``task``; ``name`` is that of its class.

    Other attributes are the task's own.

    Methods raise UserCodeError, or a ShoalError that the task raised itself.
    """

    user_subject: str

    def __init__(self, task: Task, name: str) -> None:
        self._task = task
        self.user_subject = f"Your task {name!r}"
        self.draws_with_model = bool(task.draws_with_model)

    def __getattr__(self, name: str) -> Any:
        if name in ("_task", "user_subject"):  # not there yet while it is copied
            raise AttributeError(name)
        return getattr(self._task, name)

    def _wrong(self, function: str, found: Any, needed: str) -> UserCodeError:
        kind = "None" if found is None else f"an object of type {type(found).__name__}"
        return UserCodeError(
            f"{self.user_subject}: {function} returned {kind}, and must return {needed}."
        )

    def _fault(self, function: str, what: str) -> UserCodeError:
        return UserCodeError(f"{self.user_subject}: {function} {what}.")

    def _call(self, name: str, *args: Any) -> Any:
        with calling(self, f"{name}()"):
            return getattr(self._task, name)(*args)

    def model(self) -> nn.Module:
        """Return the user's model, with at least one trainable parameter, all of known shape."""
        found = self._call("model")
        if not isinstance(found, nn.Module):
            raise self._wrong("model()", found, "a torch.nn.Module")
        trained = [parameter for parameter in found.parameters() if parameter.requires_grad]
        if not trained:
            raise self._fault(
                "model()",
                "returned a model of which every parameter is frozen: let some require a gradient",
            )
        for name, parameter in found.named_parameters():
            if parameter.requires_grad and (fault := fault_of(parameter)):
                raise self._fault("model()", f"returned a model whose {name!r} {fault}")
        return found

    def batches(self, shard: Shard) -> Iterator[Any]:
        return self._iterator(self._call("batches", shard), shard, "batches()")

    def batches_from(self, shard: Shard, step: int) -> Iterator[Any]:
        """Return the user's batches after the first ``step`` ones; their iterator is guarded
        too.
        """
        return self._iterator(self._call("batches_from", shard, step), shard, "batches_from()")

    def _iterator(self, found: Any, shard: Shard, function: str) -> Iterator[Any]:
        with calling(self, function):
            found = iterator_of(found, shard)
        if not hasattr(found, "__next__"):
            raise self._wrong(
                function,
                found,
                "an iterator without end (write `while True: yield batch`), a Dataset or a "
                "DataLoader",
            )
        if isinstance(found, NumberedBatches):
            return _Numbered(self, found, function)
        return (
            _OwnPlace(self, found, function)
            if isinstance(found, Batches)
            else _Iterator(self, found, function)
        )

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        found = self._call("loss", model, batch)
        needed = "a scalar tensor with a gradient"
        if not isinstance(found, torch.Tensor):
            raise self._wrong("loss()", found, needed)
        if found.ndim != 0 or found.is_complex():
            raise self._fault(
                "loss()",
                f"returned a {found.dtype} tensor of shape {list(found.shape)}, and must return "
                f"{needed}",
            )
        if torch.is_grad_enabled() and not found.requires_grad:
            raise self._fault(
                "loss()",
                "returned a tensor without a gradient: compute it from the model, without detach()",
            )
        return found

    def evaluate(self, model: nn.Module) -> float:
        return self._number(
            "evaluate()", self._call("evaluate", model), "the held-out loss as a number"
        )

    def _number(self, function: str, found: Any, needed: str) -> float:
        try:
            return float(found)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise self._wrong(function, found, needed) from None

    def tokens(self, batch: Any) -> int:
        number = self._number(
            "tokens()", self._call("tokens", batch), "a whole number of at least 1"
        )
        if not math.isfinite(number) or number < 1:
            raise self._fault(
                "tokens()", f"returned {number:g}, and must return a whole number of at least 1"
            )
        return int(number)

    def agreed_options(self) -> dict[str, int | float | str | bool]:
        found: dict[str, int | float | str | bool] = self._call("agreed_options")
        if not _is_flat(found, (int, float, str)):
            raise self._wrong(
                "agreed_options()", found, "a dict of names with numbers, texts or truth values"
            )
        return found

    def extra_results(self, loss: float) -> dict[str, int | float]:
        found: dict[str, int | float] = self._call("extra_results", loss)
        if not _is_flat(found, (int, float)):
            raise self._wrong("extra_results()", found, "a dict of names with Python's own numbers")
        return found

    def optimizer_takes_names(self) -> bool:
        return NAMED in inspect.signature(self._task.inner_optimizer).parameters

    def inner_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the user's optimizer of ``params``, or of pairs with names if it asks for them."""
        found = self._call("inner_optimizer", params)
        if not isinstance(found, torch.optim.Optimizer):
            raise self._wrong("inner_optimizer()", found, "a torch.optim.Optimizer")
        return found

    def hidden_matrices(self, model: nn.Module) -> list[str]:
        """Return the user's names of the parameters that Muon trains."""
        with calling(self, "hidden_matrices()"):
            found = self._task.hidden_matrices(model)
            names = None if isinstance(found, str) else list(found)
        if names is None or not all(isinstance(name, str) for name in names):
            raise self._wrong("hidden_matrices()", found, "a list of names of parameters")
        return names

    def lr_scheduler(
        self, optimizer: torch.optim.Optimizer, steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler | None:
        found: torch.optim.lr_scheduler.LRScheduler | None = self._call(
            "lr_scheduler", optimizer, steps
        )
        if found is not None and not (hasattr(found, "step") and hasattr(found, "state_dict")):
            raise self._wrong(
                "lr_scheduler()", found, "a scheduler of torch.optim.lr_scheduler, or None"
            )
        return found


def _is_flat(found: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(found, dict) and all(
        isinstance(key, str) and isinstance(value, kinds) for key, value in found.items()
    )


class _Iterator(Iterator[Any]):
    """The user's batches."""

    def __init__(self, task: Guarded, inner: Iterator[Any], function: str) -> None:
        self._of = task
        self._inner = inner
        self._function = function
        self.own_workers = inner.own_workers if isinstance(inner, LoadedBatches) else None

    def __next__(self) -> Any:
        with calling(self._of, self._function):
            batch = next(self._inner, _END)
        if batch is _END:
            raise StopIteration
        return batch


class _Numbered(NumberedBatches):
    """The user's batches by number."""

    def __init__(self, task: Guarded, inner: NumberedBatches, function: str) -> None:
        self._of = task
        self._inner = inner
        self._function = function
        self.next_number = inner.next_number

    def batch(self, number: int) -> Any:
        with calling(self._of, self._function):
            return self._inner.batch(number)


class _OwnPlace(_Iterator, Batches):
    """The user's batches that save their position."""

    _inner: Batches

    def state_dict(self) -> dict[str, Any]:
        with calling(self._of, "batches().state_dict()"):
            return self._inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with calling(self._of, "batches().load_state_dict()"):
            self._inner.load_state_dict(state)


BUILT_IN: dict[str, type[Task]] = {"text": TextTask}
REQUIRED = ("model", "batches", "loss", "evaluate")


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
    if hidden := _hidden(path):
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
    names = {
        alias.name
        for item in ast.walk(found)
        if isinstance(item, ast.Import)
        for alias in item.names
    }
    names |= {
        item.module
        for item in ast.walk(found)
        if isinstance(item, ast.ImportFrom) and item.module and not item.level
    }
    for name in sorted({name.partition(".")[0] for name in names} - {path.stem}):
        beside = [path.parent / f"{name}.py", path.parent / name / "__init__.py"]
        if any(file.is_file() for file in beside) and _origin(name) not in [
            str(file) for file in beside
        ]:
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
        if (
            isinstance(error, ModuleNotFoundError)
            and missing
            and f"{name}.".startswith(f"{error.name}.")
        ):
            raise HookError(
                f"There is no module {error.name!r} for the {what} {spec_text!r}: install it, put "
                "its folder on PYTHONPATH, or name a file as path/file.py:Class."
            ) from error
        said = f"The module {name!r} fails when it is imported, with {summary(error)}"
        raise HookError(f"{said}: mend it.", user_trace(error)) from error


def find_class(spec_text: str, what: str = "task") -> type[Any]:
    """Return the class that ``module:Class`` or ``path/file.py:Class`` names; messages call it a
    ``what``. Raises HookError.
    """
    where, colon, name = spec_text.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise HookError(
            f"The {what} {spec_text!r} is not of the form module:Class or path/file.py:Class "
            f"and is none of the built-in ones ({', '.join((*BUILT_IN, 'rl'))}): write it in one "
            "of these ways."
        )
    if where.endswith(".py") or "/" in where or "\\" in where:
        module = _import_file(Path(expanded(where)), spec_text, what)
    elif all(part.isidentifier() for part in where.split(".")):
        module = _import_module(where, spec_text, what)
    else:
        raise HookError(
            f"{where!r} in the {what} {spec_text!r} is no module name: write module:Class or "
            "file.py:Class."
        )
    found = getattr(module, name, None)
    if isinstance(found, type):
        return found
    own = [
        n
        for n, c in vars(module).items()
        if isinstance(c, type) and c.__module__ == module.__name__
    ]
    near = difflib.get_close_matches(name, own, 1) or own[:1]
    hint = f"did you mean {near[0]!r}?" if near else "it defines no class at all."
    raise HookError(f"There is no class {name!r} in {where!r}: {hint}")


def _check_options(cls: type[Any], options: Mapping[str, Any], spec_text: str) -> None:
    """Raise HookError for an option that the constructor of ``cls`` does not take, or one that it
    needs.
    """
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
            raise HookError(
                f"The task {spec_text!r} needs the option {parameter.name!r}: set it under "
                "[task.options]."
            )


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
    return task if type(task).__module__.startswith("shoal.") else Guarded(task, cls.__name__)
