"""Addresses that commands listen on."""

from __future__ import annotations

import re
from typing import NamedTuple

HERE = "127.0.0.1"
"""Loopback, which other machines cannot reach."""
MAX_PORT = 65_535


class Address(NamedTuple):
    """A host to listen on, and a port; 0 is any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def next(self, number: int) -> Address:
        """Return the address ``number`` ports further; any free port stays any free port."""
        return self._replace(port=self.port + number if self.port else 0)


def parse_address(text: str) -> Address:
    """Return ``text`` as an address; without a host it is loopback, which other machines cannot
    reach. Raises ValueError.
    """
    found = re.fullmatch(r"(?:(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9.-]{1,253}):)?([0-9]{1,5})", text)
    if found is None or int(found[2]) > MAX_PORT:
        raise ValueError(
            "it should be a port or HOST:PORT, such as 9464 or 0.0.0.0:9464, with a port of at "
            "most 65535"
        )
    return Address((found[1] or HERE).strip("[]"), int(found[2]))
