"""``shoal invite``: issue an invitation to an invitation-only swarm."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from shoal.node.config.settings import default_identity_path
from shoal.swarm.access.invitation import issue
from shoal.swarm.access.link import Link
from shoal.swarm.errors import AdmissionError
from shoal.swarm.identity import Identity
from shoal.swarm.manifest.manifest import Manifest
from shoal.swarm.membership.visitor import connected

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
MAX_LIFE_S = 10 * 366 * 86_400


def seconds(text: str) -> float:
    """Return the seconds in ``text``, such as 30m, 12h, 7d or 2w. Raises AdmissionError."""
    found = re.fullmatch(r"([0-9]{1,9})([smhdw])", text)
    life = int(found[1]) * UNITS[found[2]] if found else 0
    if not 0 < life <= MAX_LIFE_S:
        raise AdmissionError(f"--expires {text[:40]!a} is no time up to ten years: write it such as 30m, 12h, 7d or 2w.")
    return float(life)


def invite(link: Link, path: Path | None, *, uses: int, peer: str | None, lives: float) -> dict[str, Any]:
    """Return a link with an invitation by the key in ``path`` to the swarm of ``link``, and its terms.

    Raises:
        IdentityError, StartupError, NetworkError, MessageError.
        AdmissionError: the swarm is open, or the key is not its creator's.
    """
    identity = Identity.load(path or default_identity_path())
    with connected(link) as (_, _, manifest):
        pass
    check(manifest, identity)
    now = time.time()
    invitation = issue(identity, link.swarm, lives=lives, uses=uses, peer=peer, now=now)
    invited = Link(link.swarm, link.bootstrap[:1], invitation).also(link.bootstrap[1:])  # as many as fit beside it
    return {"link": str(invited), "swarm": link.swarm, "uses": uses, "peer": peer, "expires": now + lives}


def check(manifest: Manifest, identity: Identity) -> None:
    """Raise AdmissionError unless ``identity`` may invite to the swarm of ``manifest``."""
    if not manifest.invite_only:
        raise AdmissionError(
            f"The swarm {manifest.name!r} is open, so its link needs no invitation: share the link, or make a swarm with "
            "`shoal up --invite-only`."
        )
    if manifest.creator != identity.peer_id:
        raise AdmissionError(
            f"Only the swarm's creator, {manifest.creator}, can invite, and the key in {identity.path} is {identity.peer_id}: "
            "name the creator's key file with --identity; if it is lost, begin a new swarm (shoal up --resume-from)."
        )
