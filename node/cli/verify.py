"""The commands ``shoal verify``: check a claim, explain odds, calibrate, compute odds of a vote.

Heavy imports happen inside them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click

from shoal.node.cli.finite_range import FiniteRange
from shoal.node.cli.options import json_option
from shoal.node.console import dumps
from shoal.node.exit_code import ExitCode

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
CALIBRATING_CLAIMS = 32
"""Honest claims to calibrate with where no calibration is given."""


class _CheckByDefault(click.Group):
    """Group whose first word, if no command, is a claim.

    ``shoal verify FILE`` is ``shoal verify check FILE``.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            args = ["check", *args]
        return super().resolve_command(ctx, args)


@click.group(
    cls=_CheckByDefault,
    subcommand_metavar="FILE|CLAIM|COMMAND [ARGS]...",
    short_help="Check a stored claim.",
)
def verify() -> None:
    """Check a stored claim about the policy that wrote completions.

    FILE or CLAIM alone is the command check.
    """


@verify.command(short_help="Check one stored claim.")
@click.argument("claim", metavar="FILE|CLAIM")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Node's folder in which to look for CLAIM.  [default: all of runs/]",
)
@click.option(
    "--model", metavar="POLICY", help="Claimed policy: tiny, or hf:PATH_OR_NAME.  [default: tiny]"
)
@click.option(
    "--env",
    metavar="ENV",
    help="The environment, if it is not a built-in one.  [default: the claim's]",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File of `shoal verify calibrate`.  [default: calibrate now, with "
    f"{CALIBRATING_CLAIMS} claims]",
)
@json_option
def check(
    claim: str,
    folder: Path | None,
    model: str | None,
    env: str | None,
    calibration: Path | None,
    as_json: bool,
) -> int:
    """Check one stored claim: a file, or the id (or its beginning) of a claim stored by a node on
    this machine.

    The exit code is 0 if the claim passes all checks, and 4 if it is refused.
    """
    from shoal.node.verify import claim_file, inspect_claim

    folders = [folder / "claims"] if folder is not None else sorted(Path("runs").glob("*/claims"))
    stored = claim_file.load_claim(claim_file.find_claim(claim, folders))
    finding = inspect_claim.inspect(stored, model or "tiny", env, calibration, CALIBRATING_CLAIMS)
    report = inspect_claim.report(stored, finding)
    click.echo(dumps(report) if as_json else inspect_claim.summary(report))
    return int(ExitCode.OK if finding.accepted else ExitCode.REFUSED)


@verify.command(short_help="Show what a node found out about a peer.")
@click.argument("peer", metavar="PEER")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Folder of the node that checked.  [default: all of runs/]",
)
@json_option
def explain(peer: str, folder: Path | None, as_json: bool) -> None:
    """Show the odds against PEER that follow from all of its claims that a node on this machine
    checked, claim by claim.

    PEER is its id, or the beginning or end of it, as `shoal peers` shows it. The exit code is 0,
    whatever was found.
    """
    from shoal.node.verify.explain import explain as explain_peer
    from shoal.node.verify.explain import summary

    folders = [folder] if folder is not None else sorted(Path("runs").glob("*"))
    report = explain_peer(peer, folders)
    click.echo(dumps(report) if as_json else summary(report))


@verify.command(short_help="Measure honest claims of a policy.")
@click.option(
    "--model",
    metavar="POLICY",
    required=True,
    help="The policy: tiny[:HABIT[:STEPS]], or hf:PATH_OR_NAME.",
)
@click.option(
    "--env",
    metavar="ENV",
    default="strings",
    show_default=True,
    help="Environment: strings, a family ...",
)
@click.option(
    "--dtypes",
    metavar="D,D,...",
    default="fp32",
    show_default=True,
    help="Dtypes of provers and verifiers: fp32, bf16, fp16.",
)
@click.option(
    "--claims",
    type=click.IntRange(20, 50_000),
    default=200,
    show_default=True,
    help="Honest claims for each pair.",
)
@click.option(
    "--rate",
    type=FiniteRange(1e-9, 0.5),
    default=1e-4,
    show_default=True,
    help="Rate of false alarms, for the warning.",
)
@click.option(
    "--group",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Completions of a claim.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(0, 16_384),
    default=0,
    help="Most tokens of a completion.  [default: the policy's]",
)
@click.option(
    "--temperature",
    type=FiniteRange(0, 100),
    default=1.0,
    show_default=True,
    help="Sampling temperature.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file to write.  [default: MODEL.calibration]",
)
@json_option
def calibrate(
    model: str,
    env: str,
    dtypes: str,
    claims: int,
    rate: float,
    out: Path | None,
    as_json: bool,
    **drawn: Any,
) -> None:
    """Measure honest claims of a policy on this machine, to distinguish false ones from them."""
    from shoal.node.verify.calibrate import calibrate_spec

    named = [part.strip() for part in dtypes.split(",")]
    unknown = [name for name in named if name not in DTYPES]
    if unknown:
        raise click.BadParameter(
            f"there is no dtype {unknown[0]!r}: choose of {', '.join(DTYPES)}",
            param_hint="--dtypes",
        )
    sides = [DTYPES[name] for name in named]
    shown = sys.stderr.isatty()

    def progress(done: int, of: int) -> None:
        if shown:
            click.echo(f"\r{done} of {of} claims", nl=done == of, err=True)

    if out is None:
        last = model.rstrip("/").rpartition("/")[2]
        out = Path(re.sub(r"[^A-Za-z0-9_.-]", "-", last) + ".calibration")
    report = calibrate_spec(model, env, sides, claims, rate, out, progress=progress, **drawn)
    if report["warning"]:
        click.echo(f"Warning: {report['warning']}", err=True)
    text = (
        f"{out}: {claims} honest claims of {report['policy']!r} for each of {len(report['pairs'])} "
        "pairs of dtypes"
    )
    click.echo(dumps(report) if as_json else text)


@verify.command(short_help="Compute the odds of a vote on a claim.")
@click.option(
    "--n",
    "verifiers",
    type=click.IntRange(1, 31),
    default=3,
    show_default=True,
    help="Verifiers of a claim, an odd number.",
)
@click.option(
    "--collude",
    type=FiniteRange(0, 1),
    default=0.0,
    show_default=True,
    help="Share that votes against the truth.",
)
@click.option(
    "--lazy",
    type=FiniteRange(0, 1),
    default=0.0,
    show_default=True,
    help="Share that approves without a check.",
)
@click.option(
    "--miss",
    type=FiniteRange(0, 1),
    default=0.01,
    show_default=True,
    help="P(a check passes a wrong claim).",
)
@click.option(
    "--alarm",
    type=FiniteRange(0, 1),
    default=0.01,
    show_default=True,
    help="P(a check refuses an honest claim).",
)
@click.option(
    "--population",
    type=click.IntRange(1, 1_000_000),
    help="Peers to draw from.  [default: very many]",
)
@click.option(
    "--audit",
    type=FiniteRange(0, 1),
    help="Share of claims that are checked: does cheating pay?",
)
@click.option(
    "--gain",
    type=FiniteRange(0),
    default=1.0,
    show_default=True,
    help="Gain from a cheat that is not found.",
)
@click.option(
    "--penalty",
    type=FiniteRange(0, min_open=True),
    default=20.0,
    show_default=True,
    help="Penalty for a cheat that is found.",
)
@json_option
def odds(verifiers: int, as_json: bool, **shares: Any) -> None:
    """Compute how often drawn verifiers accept a wrong claim or reject an honest one, in closed
    form, without network.
    """
    from shoal.node.verify.vote_odds import odds_report, odds_table

    try:
        report = odds_report(verifiers, **shares)
    except ValueError as error:
        said = str(error)
        raise click.UsageError(f"{said[:1].upper()}{said[1:]}.") from error
    click.echo(dumps(report) if as_json else odds_table(report))
