"""The table of chaos runs in bench/results/tables.md, from lines that
`python -m bench.chaos --json` printed.

python -m bench.chaos --peers 8 --minutes 5 --kills-per-minute 2 --json >> bench/results/chaos.jsonl
python bench/chaos_table.py --into bench/results/tables.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench._page import put_into

RESULTS = Path(__file__).parent / "results" / "chaos.jsonl"
BEGIN, END = "<!-- chaos: begin -->\n", "<!-- chaos: end -->"
Report = Mapping[str, Any]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _two(report: Report, first: str, second: str, form: str) -> str:
    return f"{_shown(report[first], form)}, {_shown(report[second], form)}"


def _what(report: Report) -> str:
    parts = [
        f"{report['peers']} × {report['minutes']:g} min",
        report["method"],
        f"every {report['every']}",
    ]
    if report["byzantine"]:
        parts.append(f"{report['byzantine']} hostile ({report['lie']})")
    if report["robust"] != "none":
        parts.append(report["robust"])
    if report.get("suspect"):  # older lines do not have it
        parts.append(f"suspect {report['suspect']:g}")
    return ", ".join([*parts, f"seed {report['seed']}"])


def _unharmed(report: Report, key: str, form: str) -> str:
    return "not run" if report["unharmed"] is None else _shown(report["unharmed"][key], form)


COLUMNS: Sequence[tuple[str, Callable[[Report], str]]] = (
    ("run", _what),
    ("load before", lambda r: f"{r['load']:.1f} on {r['cores']} cores"),
    ("kills, stops, rejoins", lambda r: f"{r['kills']}, {r['stops']}, {r['rejoins']}"),
    (
        "stall: longest, median node",
        lambda r: _two(r, "max_stall_s", "median_stall_s", ".2f") + " s",
    ),
    (
        "unharmed: longest",
        lambda r: _unharmed(r, "max_stall_s", ".2f") + (" s" if r["unharmed"] else ""),
    ),
    (
        "kill to last survivor's step: median, most",
        lambda r: _two(r, "resume_s", "resume_max_s", ".2f") + " s",
    ),
    ("restart to accepted: median, most", lambda r: _two(r, "join_s", "join_max_s", ".1f") + " s"),
    (
        "steps lost: living, killed",
        lambda r: f"{r['steps_lost']}, {r['steps_lost_by_killed']} of {r['steps']}",
    ),
    (
        "throughput kept, with starts",
        lambda r: _two(r, "throughput_kept", "throughput_kept_with_starts", ".3f"),
    ),
    (
        "loss: first, last, unharmed",
        lambda r: (
            f"{_two(r, 'loss_first', 'loss_last', '.3f')}, {_unharmed(r, 'loss_last', '.3f')}"
        ),
    ),
    ("left behind", lambda r: str(r["orphans"])),
    ("MB/min: node, daemon", lambda r: _two(r, "rss_slope", "daemon_rss_slope", "+.2f")),
    ("files/min", lambda r: _shown(r["fd_slope"], "+.2f")),
    ("failed starts, troubles", lambda r: f"{len(r['failed_starts'])}, {len(r['troubles'])}"),
)


def table(reports: Sequence[Report]) -> str:
    """Markdown: a line for each figure, a column for each run, for there are more figures than
    runs.
    """
    rows = [[head, *(cell(report) for report in reports)] for head, cell in COLUMNS]
    rows.insert(1, ["---"] * (len(reports) + 1))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="a report in each line")
    parser.add_argument(
        "--into", type=Path, metavar="PAGE", help="write the table between two comments of a page"
    )
    options = parser.parse_args(arguments)
    text = table(
        [json.loads(line) for line in options.results.read_text(encoding="utf-8").splitlines()]
    )
    if options.into is not None:
        put_into(options.into, text, BEGIN, END)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
