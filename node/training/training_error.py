"""The errors of what cannot be trained."""

from __future__ import annotations

from shoal.swarm.errors import ShoalError


class TrainingError(ShoalError):
    """The task's model, batches or loss cannot be trained, or not as the settings ask for."""


class DivergedError(TrainingError):
    """The training loss, or the gradients, are not finite any more."""


class BatchesEndedError(TrainingError):
    """The task has no batch for the next step."""
