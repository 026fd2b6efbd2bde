"""The command ``shoal init``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from shoal.node.cli.options import json_option
from shoal.node.commands.scaffold import TEMPLATES, scaffold
from shoal.node.console import dumps


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
