"""Errors of the nodes' own code in a demo, and a line about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def internal_errors(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the errors of the nodes' own code by place: their ``count``, and the ``first`` line of
    one.
    """
    found: dict[str, dict[str, Any]] = {}
    for result in results:
        for place, known in result["internal_errors"].items():
            of_place = found.setdefault(place, {"count": 0, "first": known["first"]})
            of_place["count"] += known["count"]
    return found


def internal_errors_line(report: Mapping[str, Any]) -> str:
    """Return a line about the errors of the nodes' own code; nothing if there were none."""
    found = report["internal_errors"]
    if not found:
        return ""
    count = sum(known["count"] for known in found.values())
    first = next(iter(found.values()))["first"]
    return (
        f"\n{count} error{'s' * (count > 1)} in the nodes' own code, and not in the network, ended "
        f"{report['failed']} exchanges ({first}): run again with --keep FOLDER, whose node.log "
        "files have the tracebacks"
    )
