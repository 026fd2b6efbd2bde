"""Options that several commands share.

One that sets a setting is made of the setting's field: its type, help and default.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import click

from shoal.node.logs import log_to_stderr

TITLES = (
    "Options",
    "The run",
    "Task and data",
    "This node",
    "Averaging, alike on all nodes",
    "Computing, each node its own way",
    "Network and limits",
    "Reinforcement learning, with --task rl",
    "Output",
)
"""Groups of options, in the order in which `--help` shows them."""
OPTIONS, RUN, TASK, NODE, AVERAGING, COMPUTING, NETWORK, RL, OUTPUT = TITLES

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on the last line of stdout."
)
verbose_option = click.option(
    "--verbose", is_flag=True, help="Log what the network does on stderr."
)
logging_option = click.option(
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=lambda context, option, verbose: log_to_stderr(verbose),
    help="Log what the network does on stderr.",
)
"""``--verbose`` of a command that has nothing else to do with it."""
set_option = click.option(
    "--set",
    "assigned",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a setting of examples/swarm.toml, such as outer.lr=0.5.",
)

TASK_FLAGS = {TASK: ("task.hooks", "task.options")}
NODE_FLAGS = {
    TASK: ("task.hooks", "node.data", "task.options.tokenizer", "node.shard", "task.options"),
    NODE: (
        "node.name",
        "node.device",
        "node.folder",
        "node.identity",
        "node.threads",
        "node.resume",
        "node.resume_from",
        "node.lag",
    ),
    COMPUTING: ("train.precision", "train.compile", "node.gpus", "node.parallel"),
    NETWORK: (
        "node.listen",
        "node.announce",
        "node.bootstrap",
        "node.relay",
        "peers.allow",
        "peers.deny",
        "node.upload",
        "node.ram",
        "node.offload",
    ),
}
"""Settings of this node alone that have a flag, by the title under which `--help` shows it; all
others are set by --set.
"""
COMPUTING_FLAGS = {COMPUTING: NODE_FLAGS[COMPUTING][:2]}
AVERAGING_FLAGS = {
    AVERAGING: ("outer.method", "outer.round", "outer.codec", "outer.robust", "verify.audit_rate")
}
RL_FLAGS = {RL: ("rl.env", "rl.policy")}
SET_FLAG = {AVERAGING: ("assigned",)}
METRICS_FLAGS = {OUTPUT: ("node.metrics", "node.tensorboard", "node.wandb")}
NAMES = {"task.hooks": "task", "task.options": "option", "verify.audit_rate": "verify"}
"""Flags that are not called as their settings are."""
METAVARS = {
    "task.hooks": "text|rl|MODULE:CLASS|FILE.py:CLASS",
    "task.options": "KEY=VALUE",
    "node.shard": "I/N",
    "node.gpus": "all|N",
    "node.listen": "MULTIADDR",
    "node.announce": "MULTIADDR",
    "node.bootstrap": "MULTIADDR",
    "peers.allow": "ID|FILE",
    "peers.deny": "ID|FILE",
    "node.upload": "MBIT",
    "node.ram": "GB",
    "node.metrics": "[HOST:]PORT",
    "node.wandb": "PROJECT",
    "node.lag": "STEPS|auto",
    "node.offload": "device|DIR",
    "verify.audit_rate": "SHARE",
}
TOKENIZER_HELP = (
    "Tokenizer of the task text: bytes, a name on the hub, or a local ./FOLDER.  [default: bytes]"
)
"""Of the one flag that is an option of the built-in task, and no setting."""
MAX_SHOWN_CHOICES = 4
"""Choices up to which a flag shows all of them in place of a word."""


def waiting(what: str) -> None:
    """Say on stderr what takes some seconds now, to a person who waits at a terminal."""
    if sys.stderr.isatty():
        click.echo(f"{what} ...", err=True)


class SettingsCommand(click.Command):
    """Command with flags of ``settings``: lists of dotted keys, by the title under which `--help`
    shows them.

    A parameter of the command has the dotted key as its name. The flags are made when they are
    first looked at: pydantic takes longer to import than all that `shoal --help` needs. A key
    without a dot is an option of the command's own, which is shown under that title.
    """

    def __init__(
        self, *args: Any, settings: Sequence[Mapping[str, Sequence[str]]], **named: Any
    ) -> None:
        self._titles: dict[str, str] = {}
        for group in settings:
            for title, keys in group.items():
                self._titles |= dict.fromkeys(keys, title)
        self._unmade = [key for key in self._titles if "." in key]
        super().__init__(*args, **named)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups in the order of `TITLES`."""
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in TITLES}
        titles = {**self._titles, "as_json": OUTPUT, "verbose": OUTPUT}
        for parameter in self.get_params(ctx):
            if not isinstance(parameter, click.Option):
                continue
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            title = titles.get(str(parameter.name), OPTIONS)
            if parameter is self.get_help_option(ctx):
                title = OUTPUT
            groups[title].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    @property
    def params(self) -> list[click.Parameter]:
        while self._unmade:
            self._params.append(_option(self._unmade.pop(0)))
        return self._params

    @params.setter
    def params(self, given: list[click.Parameter]) -> None:
        self._params = given


def _option(key: str) -> click.Option:
    """Return the option of the setting ``key`` (dotted)."""
    name = key.partition(".")[2]
    flag = "--" + NAMES.get(key, name.rpartition(".")[2]).replace("_", "-")
    if key == "task.options.tokenizer":
        made = click.Option([flag], help=TOKENIZER_HELP)
    else:
        made = click.Option([flag], **_of_field(key))
    made.name = key
    return made


def _of_field(key: str) -> dict[str, Any]:
    """Return the arguments of the option that sets ``key``, by the type of the setting."""
    from shoal.node.config.settings import Settings, assignment

    table, _, name = key.partition(".")
    field = Settings.model_fields[table].annotation.model_fields[name]  # type: ignore[union-attr]
    metavar = METAVARS.get(key)
    text = str(field.description)
    if isinstance(field.default, (str, int, float)) and field.default:
        text += f"  [default: {field.default}]"
    given: dict[str, Any] = {"metavar": metavar, "help": text}
    kinds, choices = _kinds(field.annotation)
    if choices and len(kinds) == 1:

        def complete(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
            """Complete a value in a shell; the settings check it, against what there is."""
            return [choice for choice in choices if choice.startswith(begun)]

        given["shell_complete"] = complete
        given["metavar"] = name.upper()
        if len(choices) <= MAX_SHOWN_CHOICES:
            given["metavar"] = "|".join(choices)
    elif kinds & {list, dict}:
        given["multiple"] = True
    elif kinds == {bool}:
        given["is_flag"] = True
        given["default"] = None
    elif len(kinds) == 1:
        kind = kinds.pop()
        given["type"] = click.Path(path_type=Path) if kind is Path else kind
        words = {int: None, float: None, Path: "PATH"}
        given["metavar"] = metavar or words.get(kind, name.upper())
    else:

        def number_or_word(context: click.Context, option: click.Parameter, value: Any) -> Any:
            if value is None:
                return None
            _, parsed = assignment(f"{name}={value}")
            return parsed

        given["callback"] = number_or_word
    return given


def _kinds(annotation: Any) -> tuple[set[type], list[str]]:
    """Return the types of which one is that of a setting's value, without None, and the words that
    it may be.
    """
    origin = get_origin(annotation)
    if origin is Literal:
        return {str}, list(get_args(annotation))
    if annotation is type(None):
        return set(), []
    if origin in (list, dict):
        return {origin}, []
    if isinstance(annotation, type) and origin is None:
        return {annotation}, []
    parts = get_args(annotation)
    if origin is Annotated:
        parts = parts[:1]
    kinds: set[type] = set()
    words: list[str] = []
    for part in parts:
        more_kinds, more_words = _kinds(part)
        kinds |= more_kinds
        words += more_words
    return kinds, words


def overrides(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dotted settings that ``flags`` give, by --option and --set too; a flag of its own
    wins over these.
    """
    from shoal.node.config.settings import assignment

    given = {}
    for key, value in flags.items():
        if "." in key:
            given[key] = list(value) if isinstance(value, tuple) else value
    found = dict(map(assignment, flags.get("assigned", ())))
    for key, value in map(assignment, given.pop("task.options", ())):
        found[f"task.options.{key}"] = value
    for key, value in given.items():
        if value not in (None, []):
            found[key] = value
    return found
