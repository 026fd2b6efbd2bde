"""``shoal link``: the link of a node on this machine, with the addresses of members that are there now."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from shoal.node.config.links import LINK
from shoal.swarm.access.link import Link
from shoal.swarm.errors import LinkError

STALE_S = 120.0  # seconds without a new link after which its node may have ended
MAX_BYTES = 64 * 1024
RUNS = Path("runs")


def folder_of(name: str | None, folder: Path | None) -> Path | None:
    """Return the folder of the node that the user names, as `shoal.node.config.settings` places it. Raises LinkError."""
    if name is None:
        return folder
    if folder is not None:
        raise LinkError("Pass either --name or --folder.")
    if name in ("", ".", "..") or Path(name).name != name:
        raise LinkError(f"{name[:80]!r} is no name of a node: pass --folder to name a folder.")
    return RUNS / name


def current_link(folder: Path | None, now: float | None = None) -> dict[str, Any]:
    """Return the link that the node of ``folder`` wrote last, and notes about it; by default of the newest below ``runs``.

    Raises LinkError: there is none, or it is unreadable.
    """
    path = folder / LINK if folder is not None else _newest(RUNS)
    if path is None:
        raise LinkError("No folder runs/NAME here has a link: name the folder of a node with --folder, or start one (shoal join).")
    try:
        with path.open(encoding="utf-8") as file:
            found = json.loads(file.read(MAX_BYTES))
        link, age = str(Link.parse(str(found["link"]))), (time.time() if now is None else now) - float(found["written"])
        name, invite_only = str(found["name"]), bool(found["invite_only"])
    except FileNotFoundError:
        raise LinkError(f"There is no link in {str(path.parent)!r}: name the folder of a node, such as runs/NAME.") from None
    except OSError as error:
        raise LinkError(f"Cannot read {str(path)!r} ({error.strerror}): check its permissions.") from error
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise LinkError(f"The file {str(path)!r} is damaged: start its node again, which writes it anew.") from error
    notes = []
    if age > STALE_S:
        notes.append(
            f"The node of {str(path.parent)!r} wrote this link {_ago(age)} ago and may have ended; the link works while a peer in "
            "it is there."
        )
    if invite_only:
        notes.append("This swarm is by invitation only: the link shows it, and its creator admits others (shoal invite LINK).")
    return {"link": link, "name": name, "folder": str(path.parent), "invite_only": invite_only, "notes": notes}


def _newest(runs: Path) -> Path | None:
    found = [(path.stat().st_mtime, path) for path in runs.glob(f"*/{LINK}")]
    return max(found)[1] if found else None


def _ago(seconds: float) -> str:
    unit, size = next((unit for unit in (("days", 86_400), ("hours", 3600)) if seconds >= 2 * unit[1]), ("minutes", 60))
    return f"{seconds / size:.0f} {unit}"
