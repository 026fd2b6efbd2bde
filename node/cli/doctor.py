"""The command ``shoal doctor``. Heavy imports happen inside it."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shoal.node.cli.options import json_option, verbose_option
from shoal.node.console import dumps
from shoal.node.logs import log_to_stderr

if TYPE_CHECKING:
    from shoal.node.doctor.check import CheckOutcome, Verdict

COLOURS: dict[Verdict, str] = {"ok": "green", "note": "yellow", "failed": "red", "skipped": "blue"}


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
    if not verbose:
        # The findings repeat the network's warnings.
        logging.getLogger("shoal").setLevel(logging.ERROR)
    from shoal.node.doctor.diagnose import diagnose

    def tell(finding: CheckOutcome) -> None:
        click.echo(finding.trace or "", nl=False, err=True)
        outcome = click.style(f"{finding.outcome:8}", fg=COLOURS[finding.outcome])
        click.echo(f"{outcome} {finding.check}: {finding.said}", err=as_json)

    findings, code = diagnose(
        link, port=port, hooks=hooks, parameters=parameters, identity=identity, tell=tell
    )
    if as_json:
        click.echo(dumps(_report(findings, int(code))))
    else:
        click.echo(_summary(findings))
    return int(code)


def _report(findings: list[CheckOutcome], code: int) -> dict[str, object]:
    checks = []
    for finding in findings:
        fields = asdict(finding)
        del fields["trace"]
        checks.append(fields)
    failed = any(finding.outcome == "failed" for finding in findings)
    return {"ok": not failed, "exit_code": code, "checks": checks}


def _summary(findings: list[CheckOutcome]) -> str:
    outcomes = [finding.outcome for finding in findings]
    failed = outcomes.count("failed")
    skipped = outcomes.count("skipped")
    if failed:
        return f"{failed} of {len(findings)} checks failed"
    if skipped:
        return f"nothing that was checked is in the way; skipped: {skipped} of {len(findings)}"
    return "nothing is in the way"
