"""All settings of a node: defaults, then a TOML file, then the flags of the command line
(``examples/swarm.toml``).

The tables ``swarm``, ``task``, ``outer``, ``train`` and ``verify`` become the manifest of a swarm
that this node creates, and with the task rl also ``rl.env``; a node that joins takes them from the
manifest, except for the part of ``train`` that is each node's own. The tables ``rl``, ``node`` and
``peers`` concern this node alone.
"""

from __future__ import annotations

import difflib
import re
import reprlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from shoal.node.config.node_settings import NodeSettings, PeersSettings
from shoal.node.config.rl_settings import RLSettings
from shoal.node.config.setting_types import SettingsTable
from shoal.node.config.swarm_settings import SwarmSettings, TaskSettings
from shoal.node.config.train_settings import TrainTable
from shoal.optim.methods import ALONE
from shoal.swarm.errors import ShoalError
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.verification import VerifySettings

MAX_FILE_BYTES = 2**20
FIXED_BY_SWARM = ("train", "outer", "verify")
"""Tables that a swarm fixes for all its members."""


class ConfigError(ShoalError):
    """A setting, the settings file, or the device cannot be used."""


class Settings(SettingsTable):
    """All settings of a node; `load` returns them."""

    swarm: SwarmSettings = Field(default_factory=SwarmSettings)
    task: TaskSettings = Field(default_factory=TaskSettings)
    outer: OuterSettings = Field(default_factory=OuterSettings)
    train: TrainTable = Field(default_factory=TrainTable)
    verify: VerifySettings = Field(default_factory=VerifySettings)
    rl: RLSettings = Field(default_factory=RLSettings)
    node: NodeSettings = Field(default_factory=NodeSettings)
    peers: PeersSettings = Field(default_factory=PeersSettings)


def load(
    path: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    joins: bool = False,
) -> Settings:
    """Return the defaults, changed by the TOML file at ``path`` and then by ``overrides``.

    The keys of ``overrides`` are dotted, such as ``outer.every``; a value of None means not given.

    ``joins``: for a node that joins a swarm.

    Raises ConfigError: the sentence names the file and line, or the key, its value and the problem.
    """
    values = _read(path) if path is not None else {}
    merge(values, overrides or {})
    only_rollouts = _sets_no_method(values)
    if only_rollouts:
        # Rollouts are shared then, weights only if a setting says so.
        values.setdefault("outer", {})["method"] = ALONE
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error, joins)) from None
    if only_rollouts:
        # The user did not ask for it.
        settings.outer.model_fields_set.discard("method")
    return settings


def _sets_no_method(values: Mapping[str, Any]) -> bool:
    """Return whether ``values`` are of the task rl, and leave the method to it."""
    task = values.get("task")
    outer = values.get("outer", {})
    is_rl = isinstance(task, dict) and task.get("hooks") == "rl"
    return is_rl and isinstance(outer, dict) and "method" not in outer


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"There is no settings file {str(path)!r}: check the path.") from None
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"Cannot read the settings file {str(path)!r} ({what}): check the path."
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(
            f"The settings file {str(path)!r} is over 1 MiB: name a TOML file of settings."
        )
    try:
        values: dict[str, Any] = tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"The settings file {str(path)!r} is not UTF-8 text: save it as UTF-8, as TOML asks "
            "for."
        ) from error
    except (ValueError, RecursionError) as error:  # it has too many digits, or is no TOML
        raise ConfigError(
            f"The settings file {str(path)!r} is not TOML ({error}): correct that place."
        ) from error
    return values


def merge(values: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Put ``overrides``, with dotted keys, into the tables of ``values``; None is a flag that was
    not given.
    """
    for dotted, value in overrides.items():
        if value is None:
            continue
        table = values
        *parents, key = dotted.split(".")
        for i, parent in enumerate(parents):
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                name = ".".join(parents[: i + 1])
                raise ConfigError(
                    f"{name!r} must be a table of settings: write [{name}] and its keys below it."
                )
        table[key] = value


def assignment(text: str) -> tuple[str, Any]:
    """Split ``KEY=VALUE``; the value is read as TOML or else as plain text, and the key may be
    dotted. Raises ConfigError.
    """
    key, equals, value = text.partition("=")
    if not equals or not all(part.isidentifier() for part in key.split(".")):
        raise ConfigError(
            f"The option {text!r} is not of the form KEY=VALUE: write it so, such as width=256."
        )
    # TOML would read on in the next line, or drop a comment.
    if re.search(r"[\n#]", value):
        return key, value
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except ValueError:  # it is no TOML, or has too many digits
        return key, value


def known_keys() -> list[str]:
    """Return all keys, dotted, in the order of the tables."""
    keys: list[str] = []
    for name, field in Settings.model_fields.items():
        table: Any = field.annotation
        keys += [f"{name}.{key}" for key in table.model_fields]
    return keys


def _explain(error: ValidationError, joins: bool) -> str:
    """Return the first error as one sentence; ``joins``: for a node that joins a swarm."""
    first = error.errors(include_url=False)[0]
    place = first["loc"]
    dotted = ".".join(str(part) for part in place)
    if place[:2] == ("task", "options") and len(place) > 2:
        return (
            f"The option 'task.options.{place[2]}' must be a number, a text, or true or false: "
            "correct it."
        )
    if first["type"] == "extra_forbidden":
        return f"There is no setting {dotted!r}: {_suggestion(dotted)}"
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"{dotted!r} must be a table of settings: write [{dotted}] and its keys below it."
    problem = first["msg"].removeprefix("Value error, ")
    is_table = first["type"] == "value_error" and isinstance(first["input"], Mapping)
    if is_table and joins and dotted in FIXED_BY_SWARM:
        given = ", ".join(f"{dotted}.{key}" for key in first["input"])
        return (
            f"The swarm fixes the settings of {dotted!r} for all its members, and this node was "
            f"given {given}: leave that out; the creator can change train.lr and train.steps for "
            "all (`shoal change`)."
        )
    if is_table:
        return f"The settings of {dotted!r} do not go together: {problem}."
    problem = re.sub(r"^(Input|String|List) should", "it should", problem)
    if first["type"] == "path_type":
        problem = "it should be a path"
    return f"The setting {dotted}={reprlib.repr(first['input'])} cannot be used: {problem}."


def _suggestion(dotted: str) -> str:
    """Return which key the user may have meant by ``dotted``, which there is not."""
    names = known_keys() + list(Settings.model_fields)
    near = difflib.get_close_matches(dotted, names, 1, cutoff=0.5)
    if "." not in dotted:
        # The same key in whatever table, for nothing says which was meant.
        same = [name for name in names if name.endswith(f".{dotted}")]
        if same:
            near = [*same, f"task.options.{dotted}"]
    if not near:
        return f"the tables are {', '.join(Settings.model_fields)}."
    return f"did you mean {' or '.join(map(repr, near))}?"
