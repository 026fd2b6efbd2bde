"""How the commands show their help: options in groups, commands in the order in which one needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
TITLES = (
    "Options", "The run", "Task and data", "This node", "Averaging, alike on all nodes", "Computing, each node its own way",
    "Network and limits",
    "Reinforcement learning, with --task rl", "Output",
)  # fmt: skip
"""Groups of options, in the order in which they are shown."""
OPTIONS, RUN, TASK, NODE, AVERAGING, COMPUTING, NETWORK, RL, OUTPUT = TITLES
_titles: dict[click.Parameter, str] = {}


def titled(title: str, *options: Decorator) -> Decorator:
    """Return a decorator that adds ``options`` to a `HelpfulCommand`, in this order, under a title of their own."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
            added: click.Parameter = getattr(function, "__click_params__")[-1]  # noqa: B009 (mypy knows no such attribute)
            _titles.setdefault(added, title)
        return function

    return add


def entitle(title: str, option: click.Option) -> click.Option:
    """Return ``option``, to be shown under ``title``."""
    _titles[option] = title
    return option


class HelpfulCommand(click.Command):
    """Command that shows its options below the titles of `titled`; those without one are first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups in the order of `TITLES`."""
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in TITLES}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                last = parameter.name in ("as_json", "verbose") or parameter is self.get_help_option(ctx)
                groups[OUTPUT if last else _titles.get(parameter, OPTIONS)].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class Chapters(click.Group):
    """Group that lists its commands in chapters, in the order in which they were added."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.chapters: dict[str, Sequence[click.Command]] = {}

    def add_chapter(self, title: str, *commands: click.Command) -> None:
        self.chapters[title] = commands
        for command in commands:
            self.add_command(command)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the chapters, each command with its whole first sentence."""
        widest = max(map(len, self.commands))
        for title, commands in self.chapters.items():
            with formatter.section(title):
                formatter.write_dl([(f"{command.name:{widest}}", command.short_help or "") for command in commands])


def one_of(*names: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return what completes the value of an option in a shell. The command itself checks it later, against what there is."""
    return lambda ctx, parameter, begun: [name for name in names if name.startswith(begun)]
