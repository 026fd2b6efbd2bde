"""``shoal://`` links: the swarm id, a few addresses of peers, and perhaps an invitation.

shoal://<swarm id>?peer=/ip4/203.0.113.5/tcp/4001/p2p/12D3KooW…&peer=…&invite=…
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote, unquote

from shoal.swarm.access.address import address_problem
from shoal.swarm.errors import LinkError

SCHEME = "shoal://"
MAX_CHARS = 4096
MAX_ADDRESSES = 16
MAX_QUOTED_CHARS = 160
"""Of a part of a link in an error message."""
AGAIN = "copy the whole link again"

# The last character carries one bit of the hash, so it is a or q.
_SWARM = re.compile(r"[a-z2-7]{51}[aq]")
_INVITE = re.compile(r"[A-Za-z0-9_-]{1,1536}")


@dataclass(frozen=True)
class Link:
    """A swarm and its bootstrap peers: ``swarm`` is its id, ``bootstrap`` 1 to 16 addresses,
    ``invite`` an invitation or nothing.

    Raises LinkError.
    """

    swarm: str
    bootstrap: tuple[str, ...]
    invite: str = ""

    def __post_init__(self) -> None:
        if not _SWARM.fullmatch(self.swarm):
            raise LinkError(
                f"The swarm id in the link is not 52 characters of a-z and 2-7: {AGAIN}."
            )
        if not self.bootstrap:
            raise LinkError(f"The link names no peer to join through (?peer=…): {AGAIN}.")
        if len(self.bootstrap) > MAX_ADDRESSES:
            raise LinkError(
                f"The link holds {len(self.bootstrap)} addresses, at most {MAX_ADDRESSES} are "
                "allowed: remove some."
            )
        for address in self.bootstrap:
            problem = address_problem(address)
            if problem:
                raise LinkError(
                    f"The address {_quoted(address)} in the link is malformed, {problem}: {AGAIN}."
                )
        if self.invite and not _INVITE.fullmatch(self.invite):
            raise LinkError(f"The invitation in the link is malformed: {AGAIN}.")
        if len(str(self)) > MAX_CHARS:
            raise LinkError(
                f"The link is longer than {MAX_CHARS} characters: remove some of its addresses."
            )

    def __str__(self) -> str:
        parts = [f"peer={quote(address, safe='/:')}" for address in self.bootstrap]
        if self.invite:
            parts.append(f"invite={self.invite}")
        return f"{SCHEME}{self.swarm}?{'&'.join(parts)}"

    def also(self, addresses: Iterable[str]) -> Link:
        """Return a link with these addresses behind its own, as far as they are valid and the
        bounds of a link allow.
        """
        link = self
        for address in addresses:
            if len(link.bootstrap) == MAX_ADDRESSES:
                break
            if address not in link.bootstrap and address_problem(address) is None:
                # One with which the link would be too long is left out.
                with contextlib.suppress(LinkError):
                    link = Link(self.swarm, (*link.bootstrap, address), self.invite)
        return link

    @classmethod
    def parse(cls, text: str) -> Link:
        """Parse the link in ``text``; white space around it is ignored. Raises LinkError."""
        if not isinstance(text, str):
            given = "None" if text is None else f"of type {type(text).__name__}"
            raise LinkError(
                f"The link is {given}, and must be a text: pass the link that `shoal up` or the "
                "other session's `link` shows."
            )
        text = text.strip()
        if len(text) > MAX_CHARS:
            raise LinkError(f"The link is longer than {MAX_CHARS} characters: {AGAIN}.")
        if not text.startswith(SCHEME):
            raise LinkError(
                f"{_quoted(text)} does not start with {SCHEME}: pass the link that `shoal up` "
                "printed."
            )
        swarm, _, query = text[len(SCHEME) :].partition("?")
        addresses = []
        invite = ""
        for part in query.split("&") if query else []:
            name, _, value = part.partition("=")
            if name == "peer":
                # Bytes that are no UTF-8 become a character that no address may have.
                addresses.append(unquote(value))
            elif name == "invite" and value and not invite:
                invite = value
            else:
                raise LinkError(
                    f"The link holds an unknown part {_quoted(part)}: quote it in the shell, and "
                    f"{AGAIN}."
                )
        return cls(swarm, tuple(addresses), invite)


def _quoted(text: str) -> str:
    """Quote ``text`` for an error message: short, and without control characters."""
    quoted = ascii(text)
    if len(quoted) > MAX_QUOTED_CHARS:
        return quoted[: MAX_QUOTED_CHARS - 4] + "...'"
    return quoted
