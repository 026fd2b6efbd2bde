"""What the events of a run mean as curves, which TensorBoard and W&B draw: points at inner steps."""

from __future__ import annotations

from shoal.node.metrics.catalogue import Fields, number

SUMMARIES = ("start", "end")
"""Events about the whole run; of them a curve holds the held-out loss alone."""

PROGRESS_S = 10.0
"""Seconds between two points of progress, of which there are two a second: a month of them would fill a disk."""

STEPS = {"rl": "round", "start": "steps", "end": "steps"}
"""Event -> its field that says where it lies, if that is not ``step``; one round of rl is one inner step."""


class Curves:
    """Makes points of events as they come."""

    def __init__(self) -> None:
        self._step, self._progress = 0, float("-inf")

    def points(self, event: str, time: float, fields: Fields) -> tuple[int, dict[str, float]]:
        """The inner step at which the points lie, and their values by name: ``event/field`` for every number and list.

        A list counts by its length. An event that says no step lies where the one before lay.
        """
        step = number(fields.get(STEPS.get(event, "step")))
        self._step = self._step if step is None else int(step)
        if event == "progress":
            if time - self._progress < PROGRESS_S:
                return self._step, {}
            self._progress = time
        if event in SUMMARIES:
            loss = number(fields.get("loss_first" if event == "start" else "loss_last"))
            return self._step, {} if loss is None else {"evaluation/loss": loss}
        found = {name: number(value) for name, value in fields.items() if name not in ("step", "round")}
        return self._step, {f"{event}/{name}": value for name, value in found.items() if value is not None}
