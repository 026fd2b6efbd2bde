"""Why a checkpoint could not be saved, in a sentence with a remedy."""

from __future__ import annotations

from shoal.node.checkpoint.folder import CheckpointError
from shoal.node.checkpoint.packing import ABLE, UnpackableError, shown
from shoal.node.user_code import device_failed, out_of_memory

HOLDERS = {
    "model": "the model",
    "optimizer": "the optimizer",
    "inner": "the optimizer",
    "scheduler": "the learning-rate scheduler",
    "data": "the place in the data",
    "extra": "run.extra",
}
"""Whoever keeps what is found under a key of the state, for sentences."""


def save_failure(error: Exception) -> CheckpointError:
    """Return the error as CheckpointError.

    What is not known here is caused by the task: a type that no file holds.
    """
    if isinstance(error, CheckpointError):
        return error
    if out_of_memory(error):
        return CheckpointError(
            "There is no memory for the copy that a checkpoint is written from: train a smaller "
            "model, or save at the end only (node.checkpoint_every_rounds = 0)."
        )
    if device_failed(error):
        said = next(iter(str(error).splitlines()), "")[:200]
        return CheckpointError(
            f"Cannot save a checkpoint, for the device has failed ({said}): go on from the last "
            "one with --resume."
        )
    if isinstance(error, UnpackableError):
        known = [HOLDERS[key] for key in error.place if key in HOLDERS]
        holder = known[0] if known else "the state"
        where = "".join(f"[{key!r:.40}]" for key in error.place)
        kept = f"{type(error.value).__name__}{error.why} ({shown(error.value)})"
        return CheckpointError(
            f"Cannot save a checkpoint: {holder} keeps a {kept} at {where}, and a checkpoint holds "
            f"{ABLE}: keep one of them in its place."
        )
    return CheckpointError(
        f"Cannot save a checkpoint ({type(error).__name__}: {error}): change what the task's "
        "optimizer keeps."
    )
