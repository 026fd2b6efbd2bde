"""The commands ``shoal init``, ``plan`` and ``doctor``, before a run.

Heavy imports happen inside them.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.node.cli.options import json_option, verbose_option, waiting
from shoal.node.console import dumps, log_to_stderr, require
from shoal.swarm.errors import ShoalError

if TYPE_CHECKING:
    from shoal.node.doctor.network_checks import CheckOutcome, Verdict

# ``shoal init``: copy a template of `shoal.node` into a new folder.

FILES = ("README.md", "swarm.toml", "task.py")
TEMPLATES = {
    "pretrain": "shoal demo --task task.py:Pretrain --peers 2 --rounds 8 --every 10",
    "finetune": "shoal demo --task task.py:Finetune --peers 2 --rounds 4 --every 5",
    "rl": "shoal demo --task rl --env task.py:Reverse --peers 2 --rounds 20",
}
"""For each template the command that tries it; its README has the same one."""


class ScaffoldError(ShoalError):
    """The folder cannot be created from the template."""


def scaffold(folder: Path, template: str) -> list[str]:
    """Create ``folder`` with the files of ``template`` and return their names.

    Raises:
        ScaffoldError: the folder is not empty, and then unchanged, or cannot be written; or the
            template needs a missing package.
    """
    if template == "finetune":
        require(ScaffoldError, "The template finetune", "transformers", extra="hf")
    source = resources.files("shoal.node") / "templates" / template
    contents = {name: (source / name).read_bytes() for name in FILES}
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ScaffoldError(
                f"The folder {str(folder)!r} is not empty: name a new one, or empty it."
            )
        for name, content in contents.items():
            with (folder / name).open("xb") as file:
                written.append(folder / name)
                file.write(content)
    except OSError as error:
        for path in written:  # a part of a template is of no use
            with contextlib.suppress(OSError):
                path.unlink()
        raise ScaffoldError(
            f"Cannot write the folder {str(folder)!r} ({error.strerror}): choose another place."
        ) from error
    return list(contents)


@click.command(short_help="Make a folder with a task of your own.")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option(
    "--template",
    type=click.Choice(tuple(TEMPLATES)),
    default="pretrain",
    show_default=True,
    help="Template to copy.",
)
@json_option
def init(folder: Path, template: str, as_json: bool) -> None:
    """Make the new folder DIR with a task of your own, its settings and a README.

    pretrain: a small language model on your text. finetune: a model of transformers. rl: an
    environment of your own.
    """
    files = scaffold(folder, template)
    if as_json:
        click.echo(dumps({"folder": str(folder), "template": template, "files": files}))
    else:
        click.echo(
            f"{folder}: {', '.join(files)}\ntry it: cd {shlex.quote(str(folder))}, then "
            f"{TEMPLATES[template]}"
        )


@click.command(short_help="Show which method and settings suit a link.")
@click.option(
    "--params", type=float, required=True, help="Parameters that are averaged, such as 135e6."
)
@click.option("--step", type=float, required=True, help="Seconds of an inner step.")
@click.option(
    "--mbit", type=float, help="Megabits a second that the link carries, in its slower direction."
)
@click.option("--rtt", type=float, help="Seconds of a round trip to the other peers.")
@click.option(
    "--measure",
    metavar="LINK",
    help="Measure the link to a member of this swarm, without joining it.",
)
@click.option("--peers", type=int, default=8, show_default=True, help="Peers of the swarm.")
@click.option("--every", type=int, help="Inner steps in a round.  [default: the method's]")
@click.option("--steps", type=int, help="Say what so many inner steps take and send.")
@json_option
def plan(as_json: bool, **numbers: Any) -> None:
    """Show, for each method and codec, how much a node would compute over a link, its bytes and
    memory, and settings to copy.

    \b
    Examples:
      shoal plan --params 135e6 --step 0.5 --mbit 100 --rtt 0.1 --steps 2000
      shoal plan --params 135e6 --step 0.5 --measure 'shoal://...'
    """
    if numbers["measure"] is not None:
        waiting("measuring the link")
    from shoal.node.commands.plan import plan as make
    from shoal.node.commands.plan import table

    report = make(**numbers)
    click.echo(dumps(report) if as_json else table(report))


_COLOURS: dict[Verdict, str] = {"ok": "green", "note": "yellow", "failed": "red", "skipped": "blue"}


@click.command(short_help="Check this machine and its way into a swarm.")
@click.argument("link", required=False, metavar="[LINK]")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=0,
    help="Port on which the node is to listen.  [default: any]",
)
@click.option(
    "--task",
    "hooks",
    metavar="TASK",
    help="Your copy of the swarm's task, if it is not a built-in one.",
)
@click.option(
    "--identity",
    type=click.Path(path_type=Path),
    help="Key file of the node.  [default: ~/.config/shoal/identity.key]",
)
@click.option(
    "--parameters",
    is_flag=True,
    help="Name the parameters that Muon and AdamW train, where the swarm has Muon.",
)
@json_option
@verbose_option
def doctor(
    link: str | None,
    port: int,
    hooks: str | None,
    identity: Path | None,
    parameters: bool,
    as_json: bool,
    verbose: bool,
) -> int:
    """Check what keeps this machine from training and, with LINK, from joining that swarm.

    Prints a line for each check: ok, note (worth knowing), failed (with a remedy), or skipped (with
    the reason). It trains nothing and leaves nothing behind.
    """
    log_to_stderr(verbose)
    if not verbose:  # the findings repeat the network's warnings
        logging.getLogger("shoal").setLevel(logging.ERROR)
    from shoal.node.doctor.checks import diagnose

    def tell(finding: CheckOutcome) -> None:
        click.echo(finding.trace or "", nl=False, err=True)
        outcome = click.style(f"{finding.outcome:8}", fg=_COLOURS[finding.outcome])
        click.echo(f"{outcome} {finding.check}: {finding.said}", err=as_json)

    findings, code = diagnose(
        link, port=port, hooks=hooks, parameters=parameters, identity=identity, tell=tell
    )
    failed, skipped = (
        sum(finding.outcome == kind for finding in findings) for kind in ("failed", "skipped")
    )
    checks = [
        {name: value for name, value in asdict(finding).items() if name != "trace"}
        for finding in findings
    ]
    if as_json:
        click.echo(dumps({"ok": not failed, "exit_code": int(code), "checks": checks}))
    else:
        fine = (
            f"nothing that was checked is in the way; skipped: {skipped} of {len(findings)}"
            if skipped
            else "nothing is in the way"
        )
        click.echo(f"{failed} of {len(findings)} checks failed" if failed else fine)
    return int(code)
