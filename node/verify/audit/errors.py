"""What can go wrong on this node while it proves or checks; what a prover did wrong is a finding, never an error."""

from __future__ import annotations

from shoal.swarm.errors import ShoalError


class VerifyError(ShoalError):
    """A claim, a snapshot or a calibration cannot be made or read here."""


class NotCheckable(VerifyError):
    """This node cannot say whether a claim is true: no calibration, no such policy here, or the snapshot cannot be had."""


class NotCalibrated(NotCheckable):
    """There is no calibration of the policy for the dtypes of prover and verifier."""
