"""Live terminal screen of ``shoal watch``. q ends it, tab and the arrow keys move the focus, p
pauses it.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.coordinate import Coordinate
from textual.widgets import DataTable, Footer, RichLog, Static

from shoal.node.console import figure, plural
from shoal.node.watch.curves import Points, chart
from shoal.node.watch.events import Event
from shoal.node.watch.source import EventSource
from shoal.node.watch.swarm_view import SwarmView, change_sentence, faults_label
from shoal.swarm.figures import amount
from shoal.swarm.topics.status import lag_label, reach_label, tokens_label
from shoal.swarm.wire.record import TAIL

# A swarm's view as text: headline, table, curves and exchanges. Names come from strangers, so no
# markup is parsed.

COLOURS = (
    "cyan",
    "magenta",
    "yellow",
    "green",
    "red",
    "blue",
    "bright_yellow",
    "bright_cyan",
    "bright_magenta",
    "bright_green",
)
MEAN = "bold bright_white"
BRAILLE = 0x2800  # the character without dots
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column, then row from the top
LABEL = 8  # columns of the scale on the left
BINS = 64  # points of the curve of the mean


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def plot(
    curves: Sequence[Points], width: int, height: int, mean: Points = (), *, axis: str = ""
) -> Text:
    """Draw ``curves`` in ``height`` lines of ``width`` characters, with the scale on the left and
    the ends of x below.

    ``mean`` is drawn over them in `MEAN`; ``axis`` names x. Where curves meet, a character has the
    colour of the later one.
    """
    points = [point for curve in (*curves, mean) for point in curve]
    if not points:
        return Text("nothing yet", style="dim")
    xs = [x for x, _ in points]
    ys = [y for _, y in points]
    x_low = min(xs)
    x_high = max(xs)
    y_low = min(ys)
    y_high = max(ys)
    canvas = _Canvas(columns=max(width - LABEL - 1, 4), rows=max(height - 1, 2))
    x_scale = (canvas.columns * 2 - 1) / ((x_high - x_low) or 1.0)
    y_scale = (canvas.rows * 4 - 1) / ((y_high - y_low) or 1.0)
    for number, curve in enumerate(curves):
        canvas.draw(_dots(curve, x_low, y_high, x_scale, y_scale), colour(number))
    canvas.draw(_dots(mean, x_low, y_high, x_scale, y_scale), MEAN)

    text = Text(no_wrap=True, overflow="crop")
    labels = {canvas.rows - 1: f"{y_low:.4g}", 0: f"{y_high:.4g}"}
    for row in range(canvas.rows):
        text.append(f"{labels.get(row, ''):>{LABEL}} ", style="dim")
        for code, style in canvas.row(row):
            text.append(code, style=style)
        text.append("\n")
    left = f"{axis} {x_low:.6g}".strip()
    right = f"{x_high:.6g}".rjust(max(canvas.columns - len(left), 1))
    text.append(" " * (LABEL + 1) + left + right, style="dim")
    return text


class _Canvas:
    """Characters of braille, each of 2 x 4 dots; a character has the colour of its newest dot."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns = columns
        self.rows = rows
        self._dots = [[0] * columns for _ in range(rows)]
        self._styles = [[colour(0)] * columns for _ in range(rows)]

    def draw(self, dots: Iterable[tuple[int, int]], style: str) -> None:
        for x, y in dots:
            self._dots[y // 4][x // 2] |= DOTS[x % 2][y % 4]
            self._styles[y // 4][x // 2] = style

    def row(self, number: int) -> Iterator[tuple[str, str]]:
        """Yield each character of a row with its colour."""
        for dots, style in zip(self._dots[number], self._styles[number], strict=True):
            yield chr(BRAILLE + dots), style


def _dots(
    curve: Points, x_low: float, y_high: float, x_scale: float, y_scale: float
) -> Iterator[tuple[int, int]]:
    """Yield the dots of lines from point to point."""
    before: tuple[int, int] | None = None
    for x, y in curve:
        here = (round((x - x_low) * x_scale), round((y_high - y) * y_scale))
        yield from _line(before or here, here)
        before = here


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots from ``start`` to ``end``, both included."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (
            start[0] + round((end[0] - start[0]) * step / steps),
            start[1] + round((end[1] - start[1]) * step / steps),
        )
        for step in range(steps + 1)
    ]


RECENT = 32  # rounds of which the picture of exchanges is
SHADES = " ░▒▓█"
COLUMNS = (
    "peer",
    "state",
    "round",
    "step",
    "loss",
    "with",
    "steps/s",
    "tokens/s",
    "lag",
    "reach",
    "up",
    "down",
    "reward",
    "faults",
    "heard",
)


def headline(view: SwarmView) -> str:
    totals = view.totals()
    title = view.title
    parts = [
        f"{title.name} · {title.task} · {title.method}"
        if title
        else (view.swarm[:12] + "…" if view.swarm else "shoal watch")
    ]
    if not totals["known"]:
        parts.append(plural(totals["connected"], "connection") + ", no status yet")
    else:
        low = totals["round_min"]
        high = totals["round_max"]
        about = f"about {totals['size']:,} peers (estimated from {totals['peers']})"
        parts.append(
            about if totals["sampled"] else f"{totals['peers']} of {totals['known']} peers"
        )
        if low is not None:
            parts.append(f"round {low}" if low == high else f"rounds {low} to {high}")
        parts.append(f"loss {figure(totals['loss'])}")
        if totals["reward"] is not None:
            parts.append(f"reward {figure(totals['reward'])}")
        parts.append(f"{totals['steps_per_s']:.1f} steps/s")
        if totals["tokens_per_s"]:
            parts.append(f"{totals['tokens_per_s']:,.0f} tokens/s")
        by = " by those" if totals["sampled"] else ""
        sent_per_s = amount(totals["bytes_sent_per_s"])
        parts.append(f"{sent_per_s}/s sent, {amount(totals['bytes_sent'])} in all{by}")
        if totals["groups_own"] is not None:
            parts.append(
                f"groups learnt: {totals['groups_own']} own, {totals['groups_foreign']} of others"
            )
        # What peers state need not fit together.
        if totals["groups_unused"] and totals["groups_seen"]:
            reason = next(iter(totals["groups_unused"]))
            unused = min(sum(totals["groups_unused"].values()) / totals["groups_seen"], 1.0)
            parts.append(f"{100 * unused:.0f} % of groups unused, most {reason}")
        if totals["claims"] is not None:
            parts.append(
                f"{totals['claims']} claims, {totals['checked']} checks, {totals['invalid']} "
                "invalid"
            )
        parts.append(plural(totals["connected"], "connection"))
    if totals["refused"]:
        parts.append(plural(totals["refused"], "message") + " refused")
    if view.changes:
        parts.append("changed: " + ", ".join(map(change_sentence, view.changes)))
    return "   ".join(parts)


def peer_rows(view: SwarmView) -> list[tuple[str, list[Text]]]:
    """Return for each peer its id and a cell for each of `COLUMNS`."""
    found = []
    for index, (key, peer) in enumerate(view.rows()):
        status = peer.status
        progress = status.progress
        exchanges = status.exchanges
        reward = None if status.rollouts is None else status.rollouts.reward
        style = "" if peer.here else "dim"
        cells = [
            Text(status.name, style=colour(index) if peer.here else "dim"),
            *(
                Text(text, style=style)
                for text in (
                    peer.doing,
                    str(peer.round),
                    str(progress.step),
                    figure(status.loss.training),
                    ", ".join(view.name(tail) for tail in peer.partners[:3])
                    + (" …" if len(peer.partners) > 3 else "")
                    or "-",
                    figure(progress.steps_per_s, ".1f"),
                    tokens_label(progress.tokens_per_s, progress.mfu),
                    lag_label(exchanges.lag_steps, exchanges.lag_auto, exchanges.late),
                    reach_label(status.link.reach, status.link.bytes_per_s),
                    amount(peer.sent_rate) + "/s",
                    amount(peer.received_rate) + "/s",
                    figure(reward),
                    faults_label(peer.faults) or "-",
                    f"{max(view.now - peer.heard, 0):.0f} s ago",
                )
            ),
        ]
        found.append((key, cells))
    return found


def losses(view: SwarmView, width: int, height: int) -> Text:
    curves = [peer.loss.smooth() for _, peer in view.rows()]
    shown = chart(curves, BINS, 0)
    mean = [(x, y) for x, y in zip(shown["x"], shown["mean"], strict=True) if y is not None]
    return plot(curves, width, height, mean if len(curves) > 1 else (), axis="round")


def exchanges(view: SwarmView, width: int, height: int) -> Text:
    """Draw the exchanges of the newest rounds: a shade for each pair, the darker the more."""
    shown = view.rows()[: max(min(height - 1, (width - 10) // 2), 0)]
    if not shown:
        return Text("nobody yet", style="dim")
    counts = view.meetings.pairs(RECENT)
    most = max(counts.values(), default=0)
    tails = [key[-TAIL:] for key, _ in shown]
    text = Text(no_wrap=True, overflow="crop")
    text.append(" " * 10)
    for index in range(len(shown)):
        text.append(f"{index % 100:<2}", style=colour(index))
    for index, (_, peer) in enumerate(shown):
        text.append("\n")
        text.append(f"{peer.status.name[:6]:<6} {index % 100:>2} ", style=colour(index))
        for other in tails:
            low, high = sorted((tails[index], other))
            count = counts.get((low, high), 0)
            shade = (
                SHADES[math.ceil(count * (len(SHADES) - 1) / most)]
                if count
                else ("·" if other != tails[index] else "╲")
            )
            text.append(shade * 2 if count else f"{shade} ", style="" if count else "dim")
    return text


FRAME_S = 0.25
MOST_AT_ONCE = 2000  # events taken between two frames
STYLES = {"peer": "", "change": "cyan", "fault": "yellow", "verdict": "red"}


class Picture(Static):  # type: ignore[misc]
    """A chart of the view, drawn to the size that it has when it is painted, so it fits at first
    sight and after each change.
    """

    can_focus = True

    def __init__(self, draw: Callable[[int, int], Text], **options: str) -> None:
        super().__init__(markup=False, **options)
        self._draw = draw

    def render(self) -> Text:
        return self._draw(*self.content_size)


class WatchApp(App[None]):  # type: ignore[misc]
    """Screen of the events in ``inbox``, until the user ends it, a live source ends, or ``seconds``
    are over.

    If not ``live``, as in a replay, the events give the time.
    """

    TITLE = "shoal watch"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "hold", "Hold"),
        Binding("d", "toggle_dark", "Dark or light"),
    ]
    # An instance variable in the base class.
    VERTICAL_BREAKPOINTS = [(0, "-low"), (32, "-high")]  # noqa: RUF012
    CSS = """
    #head { padding: 0 1; background: $primary; color: $text; height: auto; }
    #body { layout: grid; grid-size: 2 3; grid-columns: 5fr 2fr; grid-rows: 1fr 1fr 1fr; }
    .-low #body { grid-rows: 7 1fr 5; }
    #peers, #news { column-span: 2; scrollbar-size-horizontal: 0; }
    .panel { border: round $primary; padding: 0 1; height: 100%; width: 100%; }
    Picture { text-wrap: nowrap; text-overflow: clip; }
    .panel:focus { border: round $accent; }
    """

    def __init__(
        self,
        inbox: queue.Queue[Event],
        source: EventSource,
        *,
        live: bool = True,
        seconds: float | None = None,
    ) -> None:
        super().__init__()
        self._seconds = seconds
        self._inbox = inbox
        self._source = source
        self._live = live
        self.view = SwarmView()
        self._held = False
        self._is_dark = True
        self._logged = 0

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        table: DataTable[Text] = DataTable(
            id="peers", classes="panel", cursor_type="row", zebra_stripes=True
        )
        table.border_title = "peers"
        log = RichLog(id="news", classes="panel", max_lines=256, wrap=True, min_width=1)
        log.border_title = "news, changes, faults, verdicts"
        with Container(id="body"):
            yield table
            yield self._picture(losses, "loss over rounds, smoothed; white: mean")
            yield self._picture(exchanges, f"exchanges, {RECENT} rounds")
            yield log
        yield Footer()

    def _picture(self, draw: Callable[[SwarmView, int, int], Text], title: str) -> Picture:
        picture = Picture(partial(draw, self.view), id=draw.__name__, classes="panel")
        picture.border_title = title
        return picture

    def on_mount(self) -> None:
        self.query_one("#peers", DataTable).add_columns(*COLUMNS)
        self.query_one("#peers", DataTable).focus()
        self.set_interval(FRAME_S, self.frame)
        if self._seconds is not None:
            self.set_timer(self._seconds, self.exit)
        self.frame()

    def action_hold(self) -> None:
        """Pause or resume the screen; events are taken in any case."""
        self._held = not self._held
        self.frame()

    def action_toggle_dark(self) -> None:
        self._is_dark = not self._is_dark
        self.theme = "textual-dark" if self._is_dark else "textual-light"

    def frame(self) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                self.view.take(self._inbox.get_nowait())
            except queue.Empty:
                break
        if self._live:
            self.view.tick(time.time())
        if self._live and self._source.ended.is_set():
            self.exit()
            return
        if not self._held and self.query(
            "#head"
        ):  # textual takes the widgets down before it stops the timers
            self._draw()

    def _draw(self) -> None:
        head = headline(self.view)
        if not self._live and self._source.ended.is_set() and self._inbox.empty():
            head += "   end of the recording"
        self.query_one("#head", Static).update(Text(head))
        self._draw_table()
        for picture in self.query(Picture):
            picture.refresh()
        fresh = self.view.log.count - self._logged
        self._logged = self.view.log.count
        log = self.query_one("#news", RichLog)
        for item in list(self.view.log.lines)[-fresh:] if fresh else []:
            stamp = time.strftime("%H:%M:%S ", time.localtime(item.time))
            log.write(Text(stamp + item.text, style=STYLES.get(item.kind, "")))

    def _draw_table(self) -> None:
        """Draw the table, in place where the peers are the same, so that the cursor stays."""
        table = self.query_one("#peers", DataTable)
        rows = peer_rows(self.view)
        if [key.value for key in table.rows] != [key for key, _ in rows]:
            at = table.cursor_row
            table.clear()
            for key, cells in rows:
                table.add_row(*cells, key=key)
            table.move_cursor(row=at)
            return
        for row, (_, cells) in enumerate(rows):
            for column, cell in enumerate(cells):
                table.update_cell_at(Coordinate(row, column), cell)
