"""Live terminal screen of ``shoal watch``. q ends it, tab and the arrow keys move the focus, p pauses it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.coordinate import Coordinate
from textual.widgets import DataTable, Footer, RichLog, Static

from shoal.node.watch import charts as pictures
from shoal.node.watch.events import Event
from shoal.node.watch.source import EventSource
from shoal.node.watch.swarm_view import SwarmView

FRAME_S = 0.25
MOST_AT_ONCE = 2000  # events taken between two frames
STYLES = {"peer": "", "fault": "yellow", "verdict": "red"}


class Picture(Static):  # type: ignore[misc]
    """A chart of the view, drawn to the size that it has when it is painted, so it fits at first sight and after each change."""

    can_focus = True

    def __init__(self, draw: Callable[[int, int], Text], **options: str) -> None:
        super().__init__(markup=False, **options)
        self._draw = draw

    def render(self) -> Text:
        """Return the chart for the current size."""
        return self._draw(*self.content_size)


class WatchApp(App[None]):  # type: ignore[misc]
    """Screen of the events in ``inbox``. If not ``live``, as in a replay, the events give the time."""

    TITLE = "shoal watch"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "hold", "Hold"),
        Binding("d", "toggle_dark", "Dark or light"),
    ]
    VERTICAL_BREAKPOINTS = [(0, "-low"), (32, "-high")]  # noqa: RUF012 - an instance variable in the base class
    CSS = """
    #head { padding: 0 1; background: $primary; color: $text; height: auto; }
    #body { layout: grid; grid-size: 2 3; grid-columns: 5fr 2fr; grid-rows: 1fr 1fr 1fr; }
    .-low #body { grid-rows: 7 1fr 5; }
    #peers, #news { column-span: 2; scrollbar-size-horizontal: 0; }
    .panel { border: round $primary; padding: 0 1; height: 100%; width: 100%; }
    Picture { text-wrap: nowrap; text-overflow: clip; }
    .panel:focus { border: round $accent; }
    """

    def __init__(self, inbox: queue.Queue[Event], source: EventSource, *, live: bool = True, seconds: float | None = None) -> None:
        super().__init__()
        self._seconds = seconds
        self._inbox, self._source, self._live = inbox, source, live
        self.view = SwarmView()
        self._held = False
        self._is_dark = True
        self._logged = 0

    def compose(self) -> ComposeResult:
        """Compose one line on top, four panels and the keys below."""
        yield Static(id="head", markup=False)
        table: DataTable[Text] = DataTable(id="peers", classes="panel", cursor_type="row", zebra_stripes=True)
        table.border_title = "peers"
        log = RichLog(id="news", classes="panel", max_lines=256, wrap=True, min_width=1)
        log.border_title = "news, faults, verdicts"
        with Container(id="body"):
            yield table
            yield self._picture("losses", "loss over rounds, smoothed; white: mean")
            yield self._picture("exchanges", f"exchanges, {pictures.RECENT} rounds")
            yield log
        yield Footer()

    def _picture(self, name: str, title: str) -> Picture:
        picture = Picture(partial(getattr(pictures, name), self.view), id=name, classes="panel")
        picture.border_title = title
        return picture

    def on_mount(self) -> None:
        """Set up the screen and its timer."""
        self.query_one("#peers", DataTable).add_columns(*pictures.COLUMNS)
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
        """Switch to the other of the two themes."""
        self._is_dark = not self._is_dark
        self.theme = "textual-dark" if self._is_dark else "textual-light"

    def frame(self) -> None:
        """Take in events, and draw."""
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
        if not self._held:
            self._draw()

    def _draw(self) -> None:
        head = pictures.headline(self.view)
        if not self._live and self._source.ended.is_set() and self._inbox.empty():
            head += "   end of the recording"
        self.query_one("#head", Static).update(Text(head))
        self._draw_table()
        for picture in self.query(Picture):
            picture.refresh()
        fresh = self.view.logged - self._logged
        self._logged = self.view.logged
        log = self.query_one("#news", RichLog)
        for item in list(self.view.log)[-fresh:] if fresh else []:
            stamp = time.strftime("%H:%M:%S ", time.localtime(item.time))
            log.write(Text(stamp + item.text, style=STYLES.get(item.kind, "")))

    def _draw_table(self) -> None:
        """Draw the table, in place where the peers are the same, so that the cursor stays."""
        table = self.query_one("#peers", DataTable)
        rows = pictures.rows(self.view)
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


def show(inbox: queue.Queue[Event], source: EventSource, *, live: bool, seconds: float | None) -> None:
    """Run the screen until the user ends it, the source fails, or time is up."""
    WatchApp(inbox, source, live=live, seconds=seconds).run()
