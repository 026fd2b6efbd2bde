"""Work of ``python -m bench.chaos``: an unharmed run, one with the plan's faults, and their
comparison.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.chaos import figures
from bench.chaos.plan import draw_plan
from bench.chaos.processes_under_test import ChaosError
from bench.chaos.run import ProcessSample, RunObservations, run_swarm
from shoal.node.config.device import resolve_device, use_threads
from shoal.node.config.settings import assignment, load
from shoal.node.demo.run_nodes import stage
from shoal.node.tasks.loader import load_task

WARM_S = 60.0  # of a long run: allocations in a process's first minute are no leak


def run_chaos(
    *,
    peers: int = 8,
    minutes: float = 5.0,
    kills_per_minute: float = 2.0,
    stops_per_minute: float = 0.5,
    byzantine: float = 0.0,
    lie: str = "sign-flip",
    seed: int = 0,
    unharmed: bool = True,
    step_seconds: float = 0.1,
    every: int = 25,
    checkpoint_every: int = 2,
    outer: Mapping[str, Any] | None = None,
    hooks: str = "text",
    task_options: Sequence[str] = (),
    device: str = "auto",
    keep: Path | None = None,
    verbose: bool = False,
) -> dict[str, Any]:
    """Run ``python -m bench.chaos`` and return the object of ``--json`` (see `report`).

    ``outer``: more settings, with dotted keys.

    ``load`` is the machine's load average before the run.

    Raises:
        ConfigError: a setting cannot be used.
        ChaosError: a swarm did not begin, or all nodes would be hostile.
    """
    settings = load(
        None,
        {
            "swarm.name": "chaos",
            "swarm.start_when": peers,
            "swarm.shards": peers,
            "task.hooks": hooks,
            **{f"task.options.{key}": value for key, value in map(assignment, task_options)},
            "train.steps": 0,
            "train.seed": seed,
            "outer.every": every,
            **(outer or {}),
        },
    )
    load_task(hooks, settings.task.options)
    resolve_device(device)
    use_threads(1)  # for evaluations, after the nodes have ended
    hostile = round(byzantine * peers)
    if hostile >= peers:
        raise ChaosError("Nobody would be honest: choose a smaller --byzantine.")
    lies = dict.fromkeys(range(peers - hostile, peers), lie)
    seconds, began, busy = 60 * minutes, time.monotonic(), os.getloadavg()[0]
    plan = draw_plan(
        peers=peers,
        seconds=seconds,
        kills_per_minute=kills_per_minute,
        stops_per_minute=stops_per_minute,
        seed=seed,
    )
    usual: dict[str, Any] = {
        "seconds": seconds,
        "step_s": step_seconds,
        "device": device,
        "checkpoint_every": checkpoint_every,
        "verbose": verbose,
    }
    with stage(keep, "chaos") as (folder, display):
        for name in ("unharmed", "chaos"):
            if (folder / name).exists():
                raise ChaosError(
                    f"The folder {str(folder)!r} holds an earlier run: choose another one with "
                    "--keep."
                )
        clean = None
        if unharmed:
            display.message(
                f"first {minutes:g} min with {peers} nodes that nobody harms, to compare with"
            )
            clean = run_swarm(settings, folder / "unharmed", display, plan=(), lies={}, **usual)
        said = f", {hostile} of them hostile ({lie})" if hostile else ""
        display.message(
            f"now {minutes:g} min with {peers} nodes{said}, "
            f"{sum(hit.kind == 'kill' for hit in plan)} kills"
        )
        harmed = run_swarm(settings, folder / "chaos", display, plan=plan, lies=lies, **usual)
        display.close()
    return {
        "peers": peers,
        "byzantine": hostile,
        "lie": lie if hostile else None,
        "method": settings.outer.method,
        "robust": settings.outer.robust,
        "task": hooks,
        "every": settings.outer.resolved().every,
        "step_seconds": step_seconds,
        "minutes": minutes,
        "seed": seed,
        **report(harmed, clean, hostile=set(lies), deadline=settings.outer.wait_s, seconds=seconds),
        "cores": os.cpu_count(),
        "load": busy,
        "wall_s": time.monotonic() - began,
    }


def report(
    harmed: RunObservations,
    clean: RunObservations | None,
    *,
    hostile: set[int],
    deadline: float,
    seconds: float,
) -> dict[str, Any]:
    """Return the figures of a run, of honest nodes only but for kills, memory and what is left
    behind.

    ``stalls``: longest time of each node between two inner steps, while it lived and was not
    stopped. ``steps_lost``: inner steps that a living node did and then lost;
    ``steps_lost_by_killed``: those since its checkpoint. ``throughput_kept``: inner steps for each
    second that a node was alive and not stopped, against the unharmed run; ``_with_starts``: the
    seconds from the start of its process to its first step count too. ``join_s``: from a restart to
    the first contribution that a peer accepted; ``resume_s``: from a kill until the last survivor
    has done its next step; both medians. Slopes are in MB (10**6 bytes) or descriptors a minute, of
    one node, after a warm-up. None: not known, or there was nothing to measure.
    """
    honest = _honest(harmed, hostile)
    stalls = stalls_of(honest, harmed.until)
    waits = [
        wait
        for peer, at in harmed.kills
        if (wait := figures.next_step_s(honest, peer, at)) is not None
    ]
    again = figures.restarts(honest)
    joins = [life.joined - life.spawned for life in again if life.joined is not None]
    starts = [life.steps[0][0] - life.spawned for life in again if life.steps]
    kept, kept_with_starts = (
        _ratio(honest, harmed, clean, with_starts=with_starts) for with_starts in (False, True)
    )
    warm = min(WARM_S, seconds / 4)
    worst = max(stalls.values(), default=None)
    troubles = [
        *harmed.troubles,
        *((f"unharmed: {trouble}" for trouble in clean.troubles) if clean else ()),
    ]
    if not harmed.losses:
        troubles.append("no honest node saved weights in the end")
    return {
        "kills": len(harmed.kills),
        "stops": harmed.stops,
        "rejoins": len(joins),
        "failed_starts": harmed.failed_starts,
        "max_stall_s": worst,
        "median_stall_s": median(stalls.values()) if stalls else None,
        "deadline_s": deadline,
        "beyond_deadline_s": None if worst is None else max(worst - deadline, 0.0),
        "stalls": {f"peer-{peer}": stall for peer, stall in sorted(stalls.items())},
        "steps": sum(len(life.steps) for life in honest),
        "steps_lost": figures.steps_lost(honest),
        "steps_lost_by_killed": figures.steps_lost_by_kills(honest),
        "loss_first": loss_first(harmed, hostile),
        "loss_last": _mean(harmed.losses.values()),
        "loss_last_of": {f"peer-{peer}": loss for peer, loss in sorted(harmed.losses.items())},
        "loss_curve": loss_curve(harmed, hostile),
        "throughput_kept": kept,
        "throughput_kept_with_starts": kept_with_starts,
        "steps_per_s": figures.speed(honest, harmed.until),
        "orphans": len(harmed.orphans) + (len(clean.orphans) if clean else 0),
        "rss_slope": slope_of(harmed, warm, lambda sample: sample.node_mb),
        "daemon_rss_slope": slope_of(harmed, warm, lambda sample: sample.daemon_mb),
        "fd_slope": slope_of(harmed, warm, lambda sample: sample.descriptors),
        "start_s": median(starts) if starts else None,
        "join_s": median(joins) if joins else None,
        "join_max_s": max(joins, default=None),
        "resume_s": median(waits) if waits else None,
        "resume_max_s": max(waits, default=None),
        "unharmed": None if clean is None else _unharmed(clean, warm),
        "troubles": troubles,
    }


def _unharmed(clean: RunObservations, warm: float) -> dict[str, Any]:
    stalls = stalls_of(clean.lives, clean.until)
    return {
        "max_stall_s": max(stalls.values(), default=None),
        "median_stall_s": median(stalls.values()) if stalls else None,
        "steps": sum(len(life.steps) for life in clean.lives),
        "steps_per_s": figures.speed(clean.lives, clean.until),
        "loss_first": loss_first(clean, set()),
        "loss_last": _mean(clean.losses.values()),
        "loss_curve": loss_curve(clean, set()),
        "rss_slope": slope_of(clean, warm, lambda sample: sample.node_mb),
        "daemon_rss_slope": slope_of(clean, warm, lambda sample: sample.daemon_mb),
        "fd_slope": slope_of(clean, warm, lambda sample: sample.descriptors),
    }


def _honest(seen: RunObservations, hostile: set[int]) -> list[figures.Life]:
    return [life for life in seen.lives if life.peer not in hostile]


def _mean(values: Any) -> float | None:
    values = list(values)
    return fmean(values) if values else None


def stalls_of(lives: Sequence[figures.Life], until: float) -> dict[int, float]:
    """Return by node the longest time without a finished inner step in any of its lives."""
    found: dict[int, float] = {}
    for life in lives:
        if (gap := figures.longest_gap(life, until)) is not None:
            found[life.peer] = max(found.get(life.peer, 0.0), gap)
    return found


def _ratio(
    honest: Sequence[figures.Life],
    harmed: RunObservations,
    clean: RunObservations | None,
    *,
    with_starts: bool,
) -> float | None:
    # The unharmed run's nodes waited for each other at the start: that does not count.
    usual = None if clean is None else figures.speed(clean.lives, clean.until)
    if with_starts:
        again = figures.restarts(honest)
        honest = [*again, *(_trained_from_start(life) for life in honest if life not in again)]
    now = figures.speed(honest, harmed.until, with_starts=with_starts)
    return now / usual if now is not None and usual else None


def _trained_from_start(life: figures.Life) -> figures.Life:
    """Return the first life of a node as if its process had begun with its first step: before, it
    waited for the others.
    """
    begin = life.steps[0][0] if life.steps else life.spawned
    return figures.Life(life.peer, begin, life.ended, life.steps, life.stopped)


def loss_first(seen: RunObservations, hostile: set[int]) -> float | None:
    """Return the mean held-out loss of the honest nodes before their first step."""
    firsts = [next((e["loss"]["held_out_first"] for e in events if e["event"] == "start"), None)
              for peer, events in seen.events.items() if peer not in hostile]  # fmt: skip
    return _mean(loss for loss in firsts if loss is not None)


def loss_curve(seen: RunObservations, hostile: set[int]) -> list[float | None]:
    """Return the mean training loss of the honest nodes in each tenth of the run."""
    points = [
        (event["time"], event["loss"])
        for peer, events in seen.events.items()
        for event in events
        if peer not in hostile and event["event"] == "round" and event["loss"] is not None
    ]
    return figures.binned(points, seen.begin, seen.until)


def slope_of(
    seen: RunObservations, warm: float, what: Callable[[ProcessSample], float | None]
) -> float | None:
    """Return the growth of ``what`` a minute, common to all processes, each from ``warm`` seconds
    after its first step.
    """
    series = []
    for place, samples in seen.samples.items():
        life = seen.lives[place]
        if life.steps:
            after = life.steps[0][0] + warm
            series.append(
                [(s.at, value) for s in samples if s.at >= after and (value := what(s)) is not None]
            )
    return figures.slope(series)


ROWS = (
    ("kills, rejoins", ("kills", "rejoins"), "{}"),
    ("stops", ("stops",), "{}"),
    (
        "longest stall of any node, of the median node",
        ("max_stall_s", "median_stall_s"),
        "{:.2f} s",
    ),
    (
        "a kill to the last survivor's next step: median, at most",
        ("resume_s", "resume_max_s"),
        "{:.2f} s",
    ),
    (
        "restart to first accepted contribution: median, at most",
        ("join_s", "join_max_s"),
        "{:.1f} s",
    ),
    (
        "inner steps lost by who lived, by who was killed",
        ("steps_lost", "steps_lost_by_killed"),
        "{}",
    ),
    (
        "throughput kept, with starts counted",
        ("throughput_kept", "throughput_kept_with_starts"),
        "{:.1%}",
    ),
    ("held-out loss at first, in the end", ("loss_first", "loss_last"), "{:.3f}"),
    ("left behind", ("orphans",), "{}"),
    ("memory of a node, of its daemon", ("rss_slope", "daemon_rss_slope"), "{:+.2f} MB/min"),
    ("open files of a node", ("fd_slope",), "{:+.2f} a minute"),
)


def summary(report: Mapping[str, Any]) -> str:
    """Format the report for people."""
    hostile = f", {report['byzantine']} hostile ({report['lie']})" if report["byzantine"] else ""
    grid = Table(
        title=f"{report['peers']} nodes{hostile}, {report['minutes']:g} min of {report['method']}, "
        f"seed {report['seed']}"
    )
    grid.add_column("")
    grid.add_column("", justify="right")
    for label, keys, form in ROWS:
        grid.add_row(
            label,
            ", ".join("-" if report[key] is None else form.format(report[key]) for key in keys),
        )
    if report["unharmed"] is not None:
        grid.add_row("unharmed: longest stall", f"{report['unharmed']['max_stall_s']:.2f} s")
        loss = report["unharmed"]["loss_last"]
        grid.add_row("unharmed: held-out loss in the end", "-" if loss is None else f"{loss:.3f}")
    console = Console(width=110)
    with console.capture() as capture:
        console.print(grid)
    return "\n".join(
        [capture.get().rstrip(), *(f"trouble: {trouble}" for trouble in report["troubles"])]
    )
