"""The part of a node's network that its directory needs."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class DHTClient(Protocol):
    """Part of a `shoal.swarm.p2p.host.Host` that a directory needs."""

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of this node."""

    def remember(self, addresses: Iterable[str]) -> None:
        """Keep addresses of peers for a restart."""

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop."""

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run a coroutine on the loop and wait for it."""

    async def store(self, key: str, subkey: str, value: bytes, ttl: float) -> bool:
        """Put a record into the DHT."""

    async def get(self, key: str) -> dict[str, bytes]:
        """Return the records under a key."""
