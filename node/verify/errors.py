"""Errors of making and checking claims.

That a claim is false is no error: the checker returns a `Finding` that refuses it.
"""

from __future__ import annotations

from shoal.swarm.errors import ShoalError


class VerifyError(ShoalError):
    """What claims need cannot be made, read or written: a claim, snapshot, calibration or evidence
    file; or a task or policy cannot make claims.
    """


class NotCheckable(VerifyError):
    """This node cannot tell whether a claim is true: it has not the snapshot, policy, environment
    or calibration that the check needs, or its dtype overflows.
    """


class NotCalibrated(NotCheckable):
    """There is no calibration of this version for the dtypes of the prover and of this node."""
