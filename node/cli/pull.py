"""The commands ``shoal pull``, ``sample`` and ``merge``, which take the result.

Heavy imports happen inside them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shoal.node.cli.options import json_option, logging_option, waiting
from shoal.node.console import dumps
from shoal.swarm.errors import printable


@click.command(short_help="Average checkpoints into one file of weights.")
@click.argument(
    "checkpoints", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="CHECKPOINT..."
)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The safetensors file to write.",
)
@click.option(
    "--weights", metavar="W,W,...", help="Weight of each; only ratios matter.  [default: equal]"
)
@click.option(
    "--slow", is_flag=True, help="Use the slow weights of nodes' checkpoints, not the fast ones."
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@json_option
def merge(
    checkpoints: tuple[Path, ...],
    out: Path,
    weights: str | None,
    slow: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Average checkpoints into one file of weights.

    A CHECKPOINT is a node's folder (its newest checkpoint), a folder step-..., or a safetensors
    file.
    """
    from shoal.node.checkpoint.export import merge as average
    from shoal.node.checkpoint.export import parse_weights

    shares = None if weights is None else parse_weights(weights)
    report = average(checkpoints, out, weights=shares, slow=slow, force=force)
    text = (
        f"{out}: the mean of {len(checkpoints)} checkpoints, {report['values']:,} values in "
        f"{report['tensors']} tensors"
    )
    click.echo(dumps(report) if as_json else text)


@click.command(short_help="Download a swarm's weights without joining it.")
@click.argument("link")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder to write into.",
)
@click.option(
    "--task", "hooks", metavar="MODULE:CLASS|FILE.py:CLASS", help="Your copy of the swarm's task."
)
@click.option(
    "--evaluate",
    is_flag=True,
    help="Compute the held-out loss of the task here, for the model card.",
)
@click.option(
    "--average",
    is_flag=True,
    help="Take the mean of the newest weights of all members that can be reached.",
)
@click.option("--data", help="Data of --evaluate, for the built-in task: as for `shoal up`.")
@click.option(
    "--max-bytes",
    type=click.IntRange(1),
    default=64 << 30,
    show_default=True,
    help="Most bytes of weights to download.",
)
@click.option("--force", is_flag=True, help="Replace the weights that are in DIR.")
@json_option
@logging_option
def pull(link: str, out: Path, as_json: bool, **options: Any) -> None:
    """Download the weights of the swarm of LINK, without joining it.

    Writes DIR/model.safetensors, and README.md, a model card: how they were trained and how to load
    them. After an interruption it continues where it stopped.

    \b
    Examples:
      shoal pull 'shoal://...' --out weights
      shoal pull 'shoal://...' --out weights --task task.py:Mine --evaluate
      shoal pull 'shoal://...' --out weights --average
    """
    from shoal.node.commands.pull import pull as take
    from shoal.node.commands.pull import summary
    from shoal.node.config.links import read_link

    parsed = read_link(link)
    waiting("asking the swarm's peers for their newest weights")
    report = take(
        parsed,
        out,
        say=waiting,
        **options | {"evaluate": options["evaluate"] or options["data"] is not None},
    )
    click.echo(dumps(report) if as_json else summary(report))


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
    type=click.FloatRange(0.0, 100.0),
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
    click.echo(
        dumps(report)
        if as_json
        else "\n---\n".join(printable(text, "\n\t", "\ufffd") for text in report["texts"])
    )
