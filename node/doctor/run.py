"""Run of all checks, from this machine to the swarm."""

from __future__ import annotations

from pathlib import Path

from shoal.node.config.settings import default_identity_path
from shoal.node.doctor import machine_checks as machine
from shoal.node.doctor import network_checks as network
from shoal.node.doctor import swarm_checks as agreement
from shoal.node.doctor.checkup import CheckOutcome, Tell, examine
from shoal.node.doctor.network_checks import Visit
from shoal.node.exit_codes import ExitCode
from shoal.swarm.access.invitation import invited
from shoal.swarm.access.link import Link
from shoal.swarm.identity import Identity


def diagnose(
    link: str | None,
    *,
    port: int = 0,
    hooks: str | None = None,
    parameters: bool = False,
    identity: Path | None = None,
    tell: Tell = lambda finding: None,
) -> tuple[list[CheckOutcome], ExitCode]:
    """Run all checks; return the findings and the exit code of the first failure. ``tell`` gets each finding at once. LinkError.

    ``port``: on which the node is to listen, 0 for any. ``hooks``: this machine's copy of the swarm's task.
    ``parameters``: name those that Muon and AdamW train, where the swarm has Muon.
    ``identity``: the key file that the node is to use, by default the user's; it is needed where the invitation is for that peer.
    """
    visit = Visit(None if link is None else Link.parse(link), port, hooks, parameters)
    path = identity or default_identity_path()
    if visit.link is not None and invited(visit.link.invite) is not None and path.exists():
        visit.identity = Identity.load(path)
    reach, agreed = network.checks(visit), agreement.checks(visit)
    # The manifest comes right after the first contact: it says whether the other checks need an invitation.
    checks = [*machine.checks(port), *reach[:2], *agreed[:1], *reach[2:], *agreed[1:]]
    try:
        return examine(checks, tell)
    finally:
        visit.close()
