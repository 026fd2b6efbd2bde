"""Tables of measurements inside a page of docs/."""

from __future__ import annotations

from pathlib import Path


def put_into(page: Path, text: str, begin: str, end: str) -> None:
    """Between two comments of the page, in place of what stands there. SystemExit if it lacks
    them.
    """
    whole = page.read_text(encoding="utf-8")
    if begin not in whole or end not in whole:
        raise SystemExit(
            f"bench: {page} has no place for the table: put {begin.strip()} and {end} there."
        )
    head, tail = whole.split(begin)[0], whole.split(end, 1)[1]
    page.write_text(f"{head}{begin}{text}{end}{tail}", encoding="utf-8")
