"""Errors of this node while it proves or checks; a prover's faults are findings, never errors."""

from __future__ import annotations

from shoal.swarm.errors import ShoalError


class VerifyError(ShoalError):
    """Failure to make or read a claim, a snapshot or a calibration on this node."""


class NotCheckable(VerifyError):
    """Inability of this node to judge a claim: no calibration, no such policy, or no snapshot."""


class NotCalibrated(NotCheckable):
    """Missing calibration of the policy for the dtypes of prover and verifier."""
