"""All checks of the doctor in their order, and the visit in which they are made."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from shoal.node.config.node_settings import default_identity_path
from shoal.node.doctor import machine_checks, network_checks, swarm_checks
from shoal.node.doctor.check import Check, CheckOutcome, Tell, examine
from shoal.node.doctor.visit import Visit
from shoal.node.exit_code import ExitCode
from shoal.swarm.access.invitation import invited
from shoal.swarm.access.link import Link
from shoal.swarm.identity import Identity


def checks(visit: Visit) -> list[Check]:
    """Return all checks in order; without a link those of this machine and its daemon.

    The manifest comes right after the first contact: it says whether the other checks need an
    invitation.
    """
    unfit = ExitCode.UNFIT_MACHINE
    reach = ExitCode.UNREACHED
    differs = ExitCode.DIFFERS
    of_machine: list[tuple[Any, ...]] = [
        ("python", unfit, machine_checks.python),
        ("torch", unfit, machine_checks.torch, (), 60.0),
        ("device", unfit, machine_checks.device, ("torch",), 60.0),
        ("memory", unfit, machine_checks.memory),
        ("disk", unfit, machine_checks.disk),
        ("run", unfit, machine_checks.last_run),
        ("port", ExitCode.NO_DAEMON, machine_checks.port),
        ("daemon", ExitCode.NO_DAEMON, network_checks.daemon, ("torch",), 45.0),
    ]
    of_link: list[tuple[Any, ...]] = [
        ("bootstrap", reach, network_checks.bootstrap, ("daemon",), 60.0),
        ("swarm", differs, swarm_checks.swarm, ("bootstrap",), 60.0),
        ("clock", unfit, network_checks.clock, ("bootstrap",), 50.0),
        ("dialled back", reach, network_checks.dialled, ("port", "bootstrap"), 100.0),
        ("nat", reach, network_checks.nat, ("bootstrap",), 10.0),
        ("bandwidth", reach, network_checks.bandwidth, ("bootstrap",), 95.0),
        ("version", differs, swarm_checks.version, ("swarm",), 10.0),
        ("bucket", differs, swarm_checks.bucket, ("swarm",), 60.0),
        ("model", differs, swarm_checks.model, ("swarm",), 300.0),
    ]
    rows = of_machine if visit.link is None else [*of_machine, *of_link]
    return [Check(name, code, partial(run, visit), *more) for name, code, run, *more in rows]


def diagnose(
    link: str | None,
    *,
    port: int = 0,
    hooks: str | None = None,
    parameters: bool = False,
    identity: Path | None = None,
    tell: Tell = lambda finding: None,
) -> tuple[list[CheckOutcome], ExitCode]:
    """Run all checks; return the findings and the exit code of the first failure.

    ``tell`` gets each finding at once. Raises LinkError.

    ``port``: on which the node is to listen, 0 for any. ``hooks``: this machine's copy of the
    swarm's task. ``parameters``: name those that Muon and AdamW train, where the swarm has Muon.
    ``identity``: the key file that the node is to use, by default the user's; it is needed where
    the invitation is for that peer.
    """
    visit = Visit(None if link is None else Link.parse(link), port, hooks, parameters)
    path = identity or default_identity_path()
    if visit.link is not None and invited(visit.link.invite) is not None and path.exists():
        visit.identity = Identity.load(path)
    try:
        return examine(checks(visit), tell)
    finally:
        visit.close()
