"""SIGNATURE ONLY for now (the implementation follows on this branch)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verification.claims import Claim, Sign, Signed, Verify
from verification.consensus import Consensus, Limits
from verification.log import Log
from verification.member import Check
from verification.reputation import Prices, Table
from verification.rulings import Rules


@dataclass(frozen=True)
class Slot:
    """A claim to be made. ``planted``: by the lottery it has to be wrong."""

    round: int
    slot: int
    planted: bool


@dataclass(frozen=True)
class Wanted:
    """Pull a log from one of ``peers`` (best first), with what happened from round ``since`` on, soon."""

    peers: tuple[str, ...]
    since: int


class Participant:
    round: int
    table: Table
    consensus: Consensus  # .counts: Counter of "accepted" and of the reasons of refusals

    def __init__(
        self, peer: str, run: str, *, operator: str, sign: Sign, verify: Verify, publish: Callable[[Signed], None], check: Check,
        clock: Callable[[], float], salt: Callable[[], bytes], rules: Rules, prices: Prices, round_s: float, limits: Limits | None = None,
    ) -> None: ...  # fmt: skip

    def tick(self, most: int = 1) -> int:
        """Whatever is due at clock(); returns how many claims were checked. Call it a few times a second."""
        raise NotImplementedError

    def take(self, signed: Signed, at: float | None = None) -> None:
        """A record came, ``at`` this Unix time (now if None: give it if records wait in a queue while a check runs). Raises Refused."""
        raise NotImplementedError

    def slots(self) -> list[Slot]: ...
    def claim(self, claim: Claim) -> None:
        """Publish ``claim`` for a slot. Raises Refused (its round is over, ...)."""

    @property
    def wanted(self) -> Wanted | None: ...
    def learn(self, log: Log) -> int: ...
    def log(self, since: int) -> Log: ...
# verification/log.py: encode(log: Log) -> bytes (<= MOST_BYTES = 8 MiB), decode(data: bytes) -> Log (ValueError)
# Rules gets: claims: int = 1, life: int = 8, least: int (score to be drawn), strangers: int
# Times.of(round_s) -> Times
