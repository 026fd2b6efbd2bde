"""The command ``shoal doctor``. Heavy imports happen inside the checks."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path

import click

from shoal.node.doctor.checkup import CheckOutcome, Outcome
from shoal.node.json_output import dumps
from shoal.node.logs import log_to_stderr

_COLOURS: dict[Outcome, str] = {"ok": "green", "note": "yellow", "failed": "red", "skipped": "blue"}


@click.command(short_help="Check this machine and its way into a swarm.")
@click.argument("link", required=False, metavar="[LINK]")
@click.option("--port", type=click.IntRange(0, 65_535), default=0, help="Port on which the node is to listen.  [default: any]")
@click.option("--task", "hooks", metavar="TASK", help="Your copy of the swarm's task, if it is not a built-in one.")
@click.option("--identity", type=click.Path(path_type=Path), help="Key file of the node.  [default: ~/.config/shoal/identity.key]")
@click.option("--parameters", is_flag=True, help="Name the parameters that Muon and AdamW train, where the swarm has Muon.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line of stdout.")
@click.option("--verbose", is_flag=True, help="Log what the network does, on stderr.")
def doctor(
    link: str | None, port: int, hooks: str | None, identity: Path | None, parameters: bool, as_json: bool, verbose: bool
) -> int:
    """Check what keeps this machine from training and, with LINK, from joining that swarm.

    Prints a line for each check: ok, note (worth knowing), failed (with a remedy), or skipped (with the reason). It trains nothing
    and leaves nothing behind.
    """
    log_to_stderr(verbose)
    if not verbose:  # the findings repeat the network's warnings
        logging.getLogger("shoal").setLevel(logging.ERROR)
    from shoal.node.doctor.run import diagnose

    def tell(finding: CheckOutcome) -> None:
        click.echo(finding.trace or "", nl=False, err=True)
        click.echo(line(finding), err=as_json)

    findings, code = diagnose(link, port=port, hooks=hooks, parameters=parameters, identity=identity, tell=tell)
    failed, skipped = (sum(finding.outcome == kind for finding in findings) for kind in ("failed", "skipped"))
    checks = [{name: value for name, value in asdict(finding).items() if name != "trace"} for finding in findings]
    if as_json:
        click.echo(dumps({"ok": not failed, "exit_code": int(code), "checks": checks}))
    else:
        fine = (
            f"nothing that was checked is in the way; skipped: {skipped} of {len(findings)}" if skipped else "nothing is in the way"
        )
        click.echo(f"{failed} of {len(findings)} checks failed" if failed else fine)
    return int(code)


def line(finding: CheckOutcome) -> str:
    """Format a finding for people."""
    return f"{click.style(f'{finding.outcome:8}', fg=_COLOURS[finding.outcome])} {finding.check}: {finding.said}"
