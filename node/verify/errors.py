"""What can go wrong on this node while it proves or checks; what a prover did wrong is a finding, never an error."""

from __future__ import annotations

from swarm.errors import ShoalError


class VerifyError(ShoalError):
    """A claim, a snapshot or a calibration cannot be made or read here."""


class NotCheckable(VerifyError):
    """This node cannot say whether a claim is true: another policy, no calibration, or the snapshot cannot be had."""
