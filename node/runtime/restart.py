"""The start of a node that was running a moment ago: its launcher starts it again after one of its ranks died."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.node.checkpoint.folder import steps
from shoal.node.config.links import LINK, read_link
from shoal.node.config.settings import Settings
from shoal.swarm.access.link import Link
from shoal.swarm.errors import LinkError
from shoal.swarm.identity import Identity


def again(settings: Settings, link: Link | None) -> tuple[Settings, Link | None]:
    """Return settings and link by which the node goes on in its swarm: from its checkpoint if it has saved one.

    A node that created the swarm and has not saved yet joins it by its own link, since a second swarm would leave the others alone.
    """
    folder, own = settings.node.run_folder, Identity.load_or_create(settings.node.identity_path).peer_id
    if steps(folder):
        node = settings.node.model_copy(update={"resume": True, "resume_from": None})
        return settings.model_copy(update={"node": node}), link
    return settings, link or _own_link(folder, own)


def _own_link(folder: Path, own: str) -> Link | None:
    """Return the link in ``folder`` without the address of peer ``own``; None if it names nobody else."""
    try:
        link = read_link(str(json.loads((folder / LINK).read_text(encoding="utf-8"))["link"]), folder)
        return Link(link.swarm, tuple(address for address in link.bootstrap if not address.endswith(f"/{own}")), link.invite)
    except (OSError, ValueError, KeyError, TypeError, LinkError):
        return None
