"""The command line: ``shoal``.

Flat verbs; results on stdout, everything else on stderr; exit codes in `shoal.node.exit_code`.

Heavy imports (torch, hivemind) happen inside the commands, so that ``shoal --help`` and ``shoal
id`` answer at once.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from shoal.node.cli.creator import change, end, invite
from shoal.node.cli.demo import demo
from shoal.node.cli.doctor import doctor
from shoal.node.cli.identity import identity
from shoal.node.cli.init import init
from shoal.node.cli.merge import merge
from shoal.node.cli.plan import plan
from shoal.node.cli.pull import pull
from shoal.node.cli.run import join, up
from shoal.node.cli.sample import sample
from shoal.node.cli.seed import seed
from shoal.node.cli.status import link, peers, status
from shoal.node.cli.swarms import swarms
from shoal.node.cli.tune import tune
from shoal.node.cli.verify import verify
from shoal.node.cli.watch import watch
from shoal.node.exit_code import BUG, ExitCode, epilogue
from shoal.node.lost_output import drop_lost_output
from shoal.node.user_code import explained
from shoal.swarm.errors import ShoalError


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
                rows = [(f"{each.name:{widest}}", each.short_help or "") for each in commands]
                formatter.write_dl(rows)


@click.group(
    cls=Chapters,
    epilog="\b\n" + epilogue(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="shoal")
def cli() -> None:
    """Train one model together, on machines that share nothing but an ordinary internet link.

    \b
    Examples:
      shoal demo                   see it work on this machine
      shoal init my-task           a folder with a task of your own
      shoal up                     create a swarm and print its link
      shoal join 'shoal://...'     train with it on another machine
      shoal watch 'shoal://...'    see the swarm live
      shoal pull 'shoal://...' --out weights
    """


cli.add_chapter("Begin", demo, init, tune, doctor, plan)
cli.add_chapter("Train together", up, link, invite, change, end, swarms, join, identity)
cli.add_chapter("Look", status, watch, peers)
cli.add_chapter("Take the result", pull, sample, merge)
cli.add_chapter("Run a bootstrap node", seed)
cli.add_chapter("Measure and check", verify)


def main(command: click.Command = cli) -> None:
    """Run a command and exit with the documented code for how it ended."""
    drop_lost_output()
    try:
        code = command.main(standalone_mode=False)
    except ShoalError as error:
        code = _show(error)
    except click.ClickException as error:
        error.show()
        code = ExitCode.BAD_INPUT
    except (KeyboardInterrupt, click.Abort):
        code = ExitCode.INTERRUPTED
    except Exception as error:
        own = explained(error)
        if own is not None:
            code = _show(own)
        else:
            traceback.print_exc()
            print(BUG, file=sys.stderr)
            code = ExitCode.INTERNAL
    sys.exit(int(code or 0))


def _show(error: ShoalError) -> int:
    """Print an error, below the traceback of the user's own code; return the exit code."""
    trace = getattr(error, "trace", "")
    print(f"{trace}Error: {error}", file=sys.stderr)
    return int(getattr(error, "exit_code", ExitCode.BAD_INPUT))


if __name__ == "__main__":
    main()
