"""The command ``shoal merge``. Heavy imports happen inside it."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.node.cli.options import json_option
from shoal.node.console import dumps


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
    from shoal.node.checkpoint.merge import merge as average
    from shoal.node.checkpoint.merge import parse_weights

    shares = None if weights is None else parse_weights(weights)
    report = average(checkpoints, out, weights=shares, slow=slow, force=force)
    text = (
        f"{out}: the mean of {len(checkpoints)} checkpoints, {report['values']:,} values in "
        f"{report['tensors']} tensors"
    )
    click.echo(dumps(report) if as_json else text)
