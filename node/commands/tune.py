"""What `shoal tune` does: it finds the learning rate, and the batch size if the task has one, with
which the task alone learns most in a stated time, and writes them into a settings file.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.node.config.device import make_current, resolve_device, use_threads
from shoal.node.config.edit_file import edit
from shoal.node.config.setting_types import spec_label
from shoal.node.config.settings import ConfigError, Settings, load
from shoal.node.config.swarm_settings import TaskSettings
from shoal.node.console import figure
from shoal.node.console import table as as_table
from shoal.node.runtime.join import for_new_swarm
from shoal.node.runtime.task_setup import RL, check_size, make_task
from shoal.node.tune.halving import Candidate, Trial
from shoal.node.tune.knobs import Knobs, TuneError, find_knobs
from shoal.node.tune.search import Search
from shoal.swarm.figures import duration
from shoal.swarm.file_lock import replace_file
from shoal.swarm.settings.training import TrainSettings

FILE = Path("swarm.toml")
EVIDENCE_ROWS = 4
"""Of the last trials, the best first; the present settings' is there too."""
MARK = "tune: "
"""How the evidence in the settings file begins."""


def tune(
    file: Path | None,
    given: Mapping[str, Any],
    *,
    minutes: float,
    keep_batch: bool = False,
    log: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Search, write what was found, and return the report.

    ``file``: the settings to read and write, by default `FILE`; it need not exist. ``given``:
    dotted settings of the command line, of which those of the task and of the swarm's training are
    written too.

    Raises ConfigError, TuneError, and what loading and training the task raises.
    """
    began = clock()
    path = file or FILE
    there = path if path.exists() else None
    settings = load(there, given)
    _check_task(path, load(there).task, settings.task)
    text = "" if there is None else path.read_text(encoding="utf-8-sig")
    settings = for_new_swarm(settings)
    device = resolve_device(settings.node.device)
    check_size(make_task(settings), settings, device.type, log)
    knobs = find_knobs(settings, keep_batch=keep_batch)
    beside = _beside(settings, given, not text)
    _edited(path, text, beside | knobs.values(knobs.present))  # what cannot be written is found now
    make_current(device)
    use_threads(settings.node.threads)
    search = Search(settings, knobs, device, minutes, began=began, log=log, clock=clock)
    search.run()
    best = search.halving.best
    if best is None and search.halving.rungs:
        rates = sorted(one.candidate.rate for one in search.halving.rungs[-1])
        raise TuneError(
            f"The loss was not finite at any rate from {rates[0]:g} to {rates[-1]:g}: check the "
            "task's loss() and evaluate(), or set a much lower rate to begin with."
        )
    if best is None and not search.interrupted:
        raise TuneError(
            f"The {minutes:g} minutes were over before each candidate was tried once: give more "
            "of them, or --keep-batch."
        )
    report = _report(search, knobs, minutes, clock() - began)
    report["task"] = given.get("task.hooks") or spec_label(settings.task.hooks)
    if best is not None:
        values = beside | knobs.values(best.candidate)
        replace_file(path, _edited(path, text, values, _evidence(report)))
        report["file"] = str(path)
        report["written"] = values
        start = ["shoal", "up", str(path)]
        if data := given.get("node.data"):  # a folder of this machine, which no swarm has
            start += ["--data", str(data)]
        report["start"] = shlex.join(start)
    return report


def _check_task(path: Path, own: TaskSettings, task: TaskSettings) -> None:
    """Raise ConfigError or TuneError unless ``task`` is the file's ``own``, and can be tuned."""
    if "hooks" in own.model_fields_set and own.hooks != task.hooks:
        raise ConfigError(
            f"The settings file {str(path)!r} is of the task {spec_label(own.hooks)!r}: name "
            "another file to write, such as mine.toml."
        )
    if task.hooks == RL:
        raise TuneError(
            "The task rl has no held-out loss to compare rates by: set rl.lr yourself, as "
            "docs/rl.md says."
        )


def _edited(path: Path, text: str, values: Mapping[str, Any], notes: Sequence[str] = ()) -> str:
    """Return the settings file's text with ``values``. ConfigError if it cannot be written."""
    if not os.access(path.absolute().parent, os.W_OK):
        raise ConfigError(
            f"The settings file {str(path)!r} cannot be written: name a file in a folder of yours."
        )
    return edit(text, values, notes, MARK)


def _beside(settings: Settings, given: Mapping[str, Any], is_new: bool) -> dict[str, Any]:
    """Return the settings to write beside what was found: those without which it would mean
    something else.
    """
    values = {}
    for dotted, value in given.items():
        of_train = dotted.removeprefix("train.") in TrainSettings.model_fields
        if value is not None and (dotted.startswith("task.") or of_train):
            values[dotted] = value
    if is_new:
        values.setdefault("task.hooks", settings.task.hooks)
    if settings.train.optimizer != "task":
        values.setdefault("train.optimizer", settings.train.optimizer)
    return values


def _report(search: Search, knobs: Knobs, minutes: float, took_s: float) -> dict[str, Any]:
    best = search.halving.best
    pair = search.halving.compared()
    rungs = []
    for seconds, trials in zip(search.seconds, search.halving.rungs, strict=False):
        rungs.append({"seconds": round(seconds, 1), "trials": [_row(one) for one in trials]})
    return {
        "rate": knobs.rate,
        "batch": knobs.batch,
        "present": asdict(knobs.present),
        "minutes": minutes,
        "took_s": round(took_s, 1),
        "device": str(search.device),
        "rungs": rungs,
        "best": None if best is None else _row(best),
        "compared": None if pair is None else {"best": _row(pair[0]), "before": _row(pair[1])},
        "ended": search.ended or None,
        "interrupted": search.interrupted,
        "file": None,
        "written": {},
        "start": None,
    }


def _row(trial: Trial) -> dict[str, Any]:
    return {**asdict(trial.candidate), "steps": trial.steps, "loss": trial.loss}


def _evidence(report: Mapping[str, Any]) -> list[str]:
    """Return comments for the settings file that say what its values were chosen by."""
    last = report["rungs"][-1]["trials"]
    before = (report["compared"] or {}).get("before")
    day = datetime.now(UTC).date()
    count = len(report["rungs"][0]["trials"])
    lines = [
        f"{MARK}{day}, {report['minutes']:g} minutes on {report['device']}: the best of {count} "
        "tried, by held-out loss, alone on all data",
    ]
    shown = [row for row in last if row in last[:EVIDENCE_ROWS] or row == before]
    for row in shown:
        lines.append(f"{MARK}{_named(row)}: {_loss(row)} after {row['steps']} steps")
    return lines


def table(report: Mapping[str, Any]) -> str:
    """Format a report for people: all trials, then what was found and where it is written."""
    columns = [report["rate"].rpartition(".")[2]]
    if report["batch"]:
        columns.append("batch")
    columns += [f"{duration(rung['seconds'])} each" for rung in report["rungs"]]
    rows = [_cells(report, candidate) for candidate in _candidates(report)]
    lines = []
    if rows:
        lines.append(f"{report['task']}: held-out loss of trials that took equally long")
        lines.append(as_table([*columns, "steps", ""], rows, words=("",), width=132))
    return "\n".join([*lines, *summary(report)])


def _candidates(report: Mapping[str, Any]) -> list[tuple[int | None, float]]:
    """Return batch and rate of all that was tried, in this order."""
    if not report["rungs"]:
        return []
    trials = report["rungs"][0]["trials"]
    return sorted((row["batch"], row["rate"]) for row in trials)


def _cells(report: Mapping[str, Any], candidate: tuple[int | None, float]) -> list[str]:
    """Return the line of the table of one candidate."""
    batch, rate = candidate
    cells = [f"{rate:g}"]
    if batch is not None:
        cells.append(str(batch))
    steps = 0
    for rung in report["rungs"]:
        row = next((one for one in rung["trials"] if _is(one, candidate)), None)
        cells.append("" if row is None else _loss(row))
        if row is not None:
            steps = row["steps"]
    remarks = []
    if _is(report["best"], candidate):
        remarks.append("best")
    if _is(report["present"], candidate):
        remarks.append("as it was")
    return [*cells, f"{steps:,}", ", ".join(remarks)]


def _is(row: Mapping[str, Any] | None, candidate: tuple[int | None, float]) -> bool:
    return row is not None and (row["batch"], row["rate"]) == candidate


def summary(report: Mapping[str, Any]) -> list[str]:
    """Return what was found, as sentences."""
    lines = []
    if report["ended"]:
        lines.append(report["ended"])
    best = report["best"]
    if best is None:
        return [*lines, "Not all candidates were tried, so nothing was written."]
    lines.append(f"Best: {_named(best)}, held-out loss {_loss(best)}{_compared(report)}.")
    rates = sorted(row["rate"] for row in report["rungs"][0]["trials"])
    if best["rate"] in (rates[0], rates[-1]):
        end = "lowest" if best["rate"] == rates[0] else "highest"
        lines.append(f"That is the {end} rate that was tried: run it again to go on from there.")
    values = ", ".join(f"{dotted} = {value}" for dotted, value in report["written"].items())
    lines.append(f"Written into {report['file']}: {values}. Start: {report['start']}")
    lines.append(
        f"The longest trials had {best['steps']:,} steps: a run of six times as many may want half "
        "of the rate (docs/running.md, Finding the learning rate)."
    )
    return lines


def _compared(report: Mapping[str, Any]) -> str:
    """Return by how much the best is better than the present settings, or than what comes next."""
    pair = report["compared"]
    if pair is None:
        return ""
    best = pair["best"]
    before = pair["before"]
    if before["loss"] is None:
        return "; with the settings as they were it diverges"
    if before != best:
        was = f"the settings as they were ({_named(before)}: {_loss(before)})"
        if best == report["best"]:
            return f", {_below(best, before)} {was}"
        return f"; after {best['steps']:,} steps it was {_below(best, before)} {was}"
    others = [row for row in report["rungs"][-1]["trials"] if row != best]
    if not others or others[0]["loss"] is None:
        return ", as it was"
    return f", as it was; {_below(best, others[0])} the next ({_named(others[0])})"


def _below(best: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    difference = other["loss"] - best["loss"]
    if best["loss"] <= 0:
        return f"{difference:.4f} below"
    return f"{100 * difference / other['loss']:.1f} % below"


def _named(row: Mapping[str, Any]) -> str:
    return str(Candidate(row["rate"], row["batch"]))


def _loss(row: Mapping[str, Any]) -> str:
    return "diverged" if row["loss"] is None else figure(row["loss"], ".4g")
