"""Curves of the events of a run for TensorBoard and W&B: points at inner steps."""

from __future__ import annotations

from shoal.node.metrics.catalogue import Fields, number

SUMMARIES = ("start", "end")
"""Events about the whole run, of which only the held-out loss makes a curve."""

PROGRESS_S = 10.0
"""Least seconds between two points of progress: at two a second, a month would fill a disk."""

STEPS = {"rl": "round", "start": "steps", "end": "steps"}
"""Event -> its field with the inner step, if that is not ``step``; one round of rl is one inner step."""


class Curves:
    """Converter of events to points."""

    def __init__(self) -> None:
        self._step, self._progress = 0, float("-inf")

    def points(self, event: str, time: float, fields: Fields) -> tuple[int, dict[str, float]]:
        """Return the inner step of the points, and their values by name: ``event/field`` for every number and list.

        A list counts by its length. An event without a step takes that of the one before.
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
