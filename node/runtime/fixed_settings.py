"""Settings that a swarm's manifest fixes: a node that asks for other ones is refused, not overruled in silence."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from shoal.node.config.settings import ConfigError, Settings
from shoal.node.data import manifest_options as agreement
from shoal.swarm.manifest.manifest import Manifest
from shoal.swarm.manifest.verify import Terms

LOCAL_OPTIONS = (agreement.DATA, agreement.TOKENIZER, agreement.DIGEST)
"""Options of the text task that each node has its own of."""


def check_not_fixed(settings: Settings, manifest: Manifest) -> None:
    """Raise ConfigError, which names them, if the user asks for other values of settings that ``manifest`` fixes."""
    outer, asked = settings.outer, settings.outer.resolved()
    differ = _differing("outer", outer, manifest.outer, lambda name, fixed: getattr(asked, name) == fixed)
    differ += _differing("swarm", settings.swarm, manifest)
    differ += _differing("train", settings.train, manifest.train, lambda name, fixed: name == "steps")  # each node's own affair
    differ += _differing("verify", settings.verify, manifest.verify)
    if isinstance(terms := manifest.terms, Terms):
        differ += _differing("rl", settings.rl, terms, lambda name, fixed: not getattr(settings.rl, name))
    text = manifest.task == agreement.TEXT
    for name, wanted in settings.task.options.items():
        fixed = manifest.task_options.get(name)
        if wanted != fixed and not (text and name in LOCAL_OPTIONS):
            differ.append((f"task.options.{name}", wanted, fixed))
    if differ:
        raise ConfigError(
            f"The swarm has {_listed((name, fixed) for name, _, fixed in differ)}, and this node was given "
            f"{_listed((name, wanted) for name, wanted, _ in differ)}: leave that out, a swarm's settings never change; another "
            "swarm can go on from a checkpoint of this one (shoal up --resume-from)."
        )


def _differing(table: str, asked: BaseModel, fixed: Any, same: Any = lambda name, fixed: False) -> list[tuple[str, Any, Any]]:
    """Return (name, asked, fixed) of each setting that was given, that ``fixed`` has too, and that is another there."""
    found = []
    for name in sorted(asked.model_fields_set & type(fixed).model_fields.keys()):
        wanted, theirs = getattr(asked, name), getattr(fixed, name)
        if wanted is not None and wanted != theirs and not same(name, theirs):
            found.append((f"{table}.{name}", wanted, theirs))
    return found


def _listed(values: Any) -> str:
    return ", ".join(f"no {name}" if value is None else f"{name}={value!r}" for name, value in values)
