"""The command ``shoal sample``. Heavy imports happen inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shoal.node.cli.finite_range import FiniteRange
from shoal.node.cli.options import json_option
from shoal.node.console import dumps
from shoal.swarm.errors import printable


@click.command(short_help="Continue a text with weights that were pulled.")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option(
    "--prompt",
    default="",
    metavar="TEXT",
    help="The text to continue.  [default: the beginning of a document]",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, 1_000_000),
    default=200,
    show_default=True,
    help="Tokens to add.",
)
@click.option(
    "--samples",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Continuations to draw.",
)
@click.option(
    "--temperature",
    type=FiniteRange(0.0, 100.0),
    default=0.8,
    show_default=True,
    help="0: the likeliest token.",
)
@click.option(
    "--top-k",
    type=click.IntRange(1),
    metavar="K",
    help="Draw among the K likeliest tokens.  [default: all]",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    help="Seed of the draws.  [default: another each time]",
)
@click.option(
    "--tokenizer",
    metavar="NAME|PATH",
    help="Your copy of the swarm's tokenizer.  [default: by its name]",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    help="auto, cpu, cuda, cuda:1 and so on, xpu, or mps.",
)
@json_option
def sample(folder: Path, as_json: bool, **options: Any) -> None:
    """Continue a text with the weights in DIR, which `shoal pull` wrote, of a swarm of the built-in
    task `text`.

    \b
    Examples:
      shoal pull 'shoal://...' --out weights
      shoal sample weights --prompt "def main" --tokens 100
    """
    from shoal.node.commands.sample import sample as draw

    report = draw(folder, **options)
    if as_json:
        click.echo(dumps(report))
        return
    # What a model writes may be anything; controls of a terminal are not shown.
    texts = [printable(text, "\n\t", "\ufffd") for text in report["texts"]]
    click.echo("\n---\n".join(texts))
