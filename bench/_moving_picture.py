"""A recording of `shoal watch` as an animated SVG: loss of each node, who averages with whom, and
when a node was gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

from shoal.node.watch.curves import laid
from shoal.node.watch.events import Heard
from shoal.node.watch.source import recorded
from shoal.node.watch.swarm_view import SwarmView

WIDTH, HEIGHT = 860, 350
LEFT, RIGHT, TOP, BOTTOM = 400, 836, 60, 262  # of the chart
MAP_X, MAP_Y, MAP_R = 170, 160, 88
LOOP_S, HOLD = (
    18.0,
    0.9,
)  # length of the loop, and the part of it in which the run is shown; then the end stands still
FLASH_S = 0.3  # for which a pair lights up
GONE_S = 8.0  # without a status, a node is gone
POINTS = 220
COLOURS = (
    ("#1f6fb5", "#5aa9ee"),
    ("#7a3fb0", "#b98aec"),
    ("#b3382f", "#ff8a7a"),
    ("#1d7f3c", "#5fd083"),
)  # light, dark

STYLE = """
svg { font: 14px system-ui, sans-serif; --back: #fff;
  --text: #1a1f29; --faint: #5b6573; --line: #d7dce3; LIGHT }
@media (prefers-color-scheme: dark) {
  svg { --back: #10141b; --text: #e6eaf0; --faint: #9aa5b4; --line: #2d3643; DARK } }
text { fill: var(--faint); }
.said { font-size: 17px; } .strong { fill: var(--text); font-weight: 600; }
.back, .cover { fill: var(--back); }
.grid { stroke: var(--line); }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.pair { stroke: var(--text); stroke-width: 4; stroke-linecap: round; opacity: 0.1; }
.away { fill: var(--faint); opacity: 0.16; }
.cross { stroke: var(--faint); stroke-width: 3; opacity: 0; }
.said { opacity: 0; } .last { opacity: 1; }
.cover { transform: translateX(TRAVELpx); }
"""


@dataclass
class Run:
    """What is drawn of a run; times in seconds since its first status."""

    names: list[str] = field(default_factory=list)
    curves: list[list[tuple[float, float]]] = field(default_factory=list)
    meetings: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    gone: list[list[tuple[float, float]]] = field(default_factory=list)
    seconds: float = 0.0


def read(path: Path) -> Run:
    """Return the run in the recording at ``path``."""
    view, heard, seen, met = (
        SwarmView(),
        dict[str, list[float]](),
        set[tuple[int, str, str]](),
        list[tuple[float, str, str]](),
    )
    for event in recorded(path):
        view.take(event)
        if not isinstance(event, Heard) or view.begun is None:
            continue
        now, me = event.time - view.begun, event.peer
        heard.setdefault(me, []).append(now)
        for done in event.status.rounds:
            for tail in done.partners:
                low, high = sorted((me[-8:], tail))
                if (done.round, low, high) not in seen:
                    seen.add((done.round, low, high))
                    met.append((now, low, high))
    keys = sorted(view.peers, key=lambda key: view.peers[key].status.name)
    tails = [key[-8:] for key in keys]
    run = Run(
        [view.peers[key].status.name for key in keys],
        [view.peers[key].loss_over_time.smooth() for key in keys],
    )
    run.seconds = max(times[-1] for times in heard.values())
    for now, low, high in met:
        if low in tails and high in tails:
            a, b = sorted((tails.index(low), tails.index(high)))
            run.meetings.setdefault((a, b), []).append(now)
    for key in keys:
        times = [*heard[key], run.seconds]
        run.gone.append([(one, other) for one, other in pairwise(times) if other - one > GONE_S])
    return run


def share(run: Run, at: float) -> float:
    """Return the percentage of the loop at which ``at`` is shown."""
    return 100 * HOLD * min(max(at / run.seconds, 0.0), 1.0)


def windows(name: str, shown: Sequence[tuple[float, float]], on: str, off: str) -> str:
    """Return keyframes that are ``on`` in the windows (percentages of the loop) and ``off`` outside
    them.
    """
    merged: list[list[float]] = []
    for begin, end in sorted(shown):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    steps = [f"0% {{ {off} }}"]
    steps += [f"{begin:.2f}% {{ {on} }} {min(end, 100):.2f}% {{ {off} }}" for begin, end in merged]
    return f"@keyframes {name} {{ {' '.join(steps)} }}"


def draw(run: Run) -> str:
    """Return the picture."""
    known = [y for points in run.curves for _, y in points]
    low, high = math.floor(min(known) * 2) / 2, math.ceil(max(known) * 2) / 2
    frames: list[str] = []
    moving: list[str] = []
    parts: list[str] = []

    def x(at: float) -> float:
        return LEFT + (RIGHT - LEFT) * at / run.seconds

    def y(loss: float) -> float:
        return TOP + (BOTTOM - TOP) * (high - loss) / (high - low)

    def animate(selector: str, name: str, timing: str = "step-end") -> None:
        moving.append(f"{selector} {{ animation: {name} {LOOP_S:g}s {timing} infinite; }}")

    # The chart, under a cover that moves to the right.
    for index, away in enumerate(run.gone):
        for begin, end in away:
            parts.append(
                f'<rect class="away" x="{x(begin):.0f}" y="{TOP}" width="{x(end) - x(begin):.0f}" '
                f'height="{BOTTOM - TOP}"/>'
            )
            middle, name = x((begin + end) / 2), escape(run.names[index])
            parts.append(
                f'<text x="{middle:.0f}" y="{TOP + 18}" text-anchor="middle">{name} is gone</text>'
            )
    xs = [run.seconds * number / (POINTS - 1) for number in range(POINTS)]
    for index, points in enumerate(run.curves):
        route, lifted = [], True
        for at, loss in zip(xs, laid(points, xs), strict=True):
            if loss is not None:
                route.append(f"{'M' if lifted else 'L'}{x(at):.1f} {y(loss):.1f}")
            lifted = loss is None
        parts.append(f'<path class="curve" stroke="var(--c{index})" d="{"".join(route)}"/>')
    parts.append(
        f'<rect class="cover" x="{LEFT}" y="{TOP - 4}" width="{RIGHT - LEFT + 8}" '
        f'height="{BOTTOM - TOP + 8}"/>'
    )
    gone = f"{100 * HOLD:g}%, 100% {{ transform: translateX({WIDTH - LEFT}px); }}"
    frames.append(f"@keyframes wipe {{ 0% {{ transform: translateX(0); }} {gone} }}")
    animate(".cover", "wipe", "linear")
    axes = [f'<path class="grid" fill="none" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>']
    step = max(round((high - low) / 4 * 2) / 2, 0.5)
    marks = [low + step * number for number in range(int((high - low) / step) + 1)]
    axes += [
        f'<text x="{LEFT - 8}" y="{y(mark) + 5:.0f}" text-anchor="end">{mark:g}</text>'
        for mark in marks
    ]
    axes += [
        f'<text x="{x(at):.0f}" y="{BOTTOM + 20}" text-anchor="middle">{at}</text>'
        for at in range(0, int(run.seconds) + 1, 30)
    ]
    axes.append(
        f'<text x="{(LEFT + RIGHT) / 2:.0f}" y="{BOTTOM + 42}" text-anchor="middle">seconds</text>'
    )
    axes.append(f'<text class="strong" x="{LEFT}" y="{TOP - 18}">training loss, nats</text>')

    # The map.
    places = [
        (
            MAP_X + MAP_R * math.sin(2 * math.pi * index / len(run.names)),
            MAP_Y - MAP_R * math.cos(2 * math.pi * index / len(run.names)),
        )
        for index in range(len(run.names))
    ]
    for (a, b), times in sorted(run.meetings.items()):
        (x1, y1), (x2, y2) = places[a], places[b]
        parts.append(
            f'<line class="pair p{a}{b}" x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}"/>'
        )
        shown = [(share(run, at), share(run, at) + 100 * FLASH_S / LOOP_S) for at in times]
        frames.append(windows(f"m{a}{b}", shown, "opacity: 0.9;", "opacity: 0.1;"))
        animate(f".p{a}{b}", f"m{a}{b}")
    said = [(0.0, f"{len(run.names)} nodes train one model, each on its own data")]
    for index, (cx, cy) in enumerate(places):
        name, anchor = escape(run.names[index]), {1: "start", 3: "end"}.get(index, "middle")
        tx, ty = (cx + {1: 22, 3: -22}.get(index, 0), cy + {0: -22, 2: 36}.get(index, 5))
        parts.append(
            f'<circle class="n{index}" cx="{cx:.0f}" cy="{cy:.0f}" r="13" fill="var(--c{index})"/>'
        )
        parts.append(
            f'<text class="strong" x="{tx:.0f}" y="{ty:.0f}" text-anchor="{anchor}">{name}</text>'
        )
        if away := run.gone[index]:
            parts.append(
                f'<path class="cross x{index}" d="M{cx - 9:.0f} {cy - 9:.0f}l18 18m0 -18l-18 18"/>'
            )
            shown = [(share(run, begin), share(run, end)) for begin, end in away]
            frames += [
                windows(f"g{index}", shown, "fill: var(--back);", f"fill: var(--c{index});"),
                windows(f"x{index}", shown, "opacity: 1;", "opacity: 0;"),
            ]
            animate(f".n{index}", f"g{index}")
            animate(f".x{index}", f"x{index}")
            left = [escape(other) for other in run.names if other != run.names[index]]
            others = f"{', '.join(left)} train{'s' if len(left) == 1 else ''} on"
            for begin, end in away:
                said += [
                    (begin, f"{name} is killed: {others}"),
                    (end, f"{name} is back, and catches up"),
                ]
    said.sort()
    for number, (at, text) in enumerate(said):
        until = said[number + 1][0] if number + 1 < len(said) else math.inf
        kind = "said last" if until == math.inf else "said"
        parts.append(
            f'<text class="strong {kind} s{number}" x="{WIDTH / 2:.0f}" y="{HEIGHT - 16}" '
            f'text-anchor="middle">{text}</text>'
        )
        end = 100.0 if until == math.inf else share(run, until)
        frames.append(windows(f"s{number}", [(share(run, at), end)], "opacity: 1;", "opacity: 0;"))
        animate(f".s{number}", f"s{number}")
    parts.append(
        '<text class="strong" x="24" y="28">Bold line: two nodes average their weights</text>'
    )

    light, dark = (
        " ".join(f"--c{index}: {COLOURS[index % 4][shade]};" for index in range(len(run.names)))
        for shade in (0, 1)
    )
    style = STYLE.replace("LIGHT", light).replace("DARK", dark).replace("TRAVEL", str(WIDTH - LEFT))
    motion = "@media (prefers-reduced-motion: no-preference) {\n" + "\n".join(moving) + "\n}"
    ends = [f"{points[-1][1]:.2f}" for points in run.curves]
    label = (
        f"Training loss of {', '.join(map(escape, run.names))} over {run.seconds:.0f} s, to "
        f"{', '.join(ends)} nats; " + "; ".join(text for _, text in said[1:])
    )
    body = "\n".join([*parts, *axes])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{label}">\n'
        f"<style>{style}{chr(10).join(frames)}\n{motion}</style>\n"
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}" rx="8"/>\n{body}\n</svg>\n'
    )
