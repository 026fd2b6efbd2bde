"""Links as the user gives them, with what this machine's nodes know of the swarm, and the file of a
node's own link.
"""

from __future__ import annotations

from pathlib import Path

from shoal.swarm.access.link import Link
from shoal.swarm.p2p.peerstore import Peerstore

KNOWN_PEERS = "peers.json"
"""File in a node's folder that keeps the addresses of peers from run to run."""
LINK = "link.json"
"""File in a node's folder with the newest link to its swarm (`shoal link`)."""
MAX_FOLDERS = 64
"""Below runs/ that are looked into."""


def read_link(text: str, folder: Path | None = None, runs: Path = Path("runs")) -> Link:
    """Parse a link, and append addresses of its swarm known to the node of ``folder`` and to those
    below ``runs``.

    So an old link serves when the nodes that it names are gone. Raises LinkError.
    """
    link = Link.parse(text)
    folders = sorted(runs.glob("*"))[:MAX_FOLDERS]
    if folder is not None:
        folders.insert(0, folder)
    for place in folders:
        link = link.also(Peerstore("", place / KNOWN_PEERS, link.swarm).addresses())
    return link
