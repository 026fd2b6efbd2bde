"""Protocols of a kind of claim: how claims are made, and how they are checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.node.verify.audit.finding import Finding
from shoal.verification.consensus.participant import Slot
from shoal.verification.consensus.records import Claim, Signed


@dataclass(frozen=True)
class Made:
    """Claim for ``slot``, with the bytes that its author serves to verifiers."""

    slot: Slot
    claim: Claim
    material: bytes
    snapshot: bytes


class Checking(Protocol):
    """Checker of claims, one at a time, whose material and snapshot have been fetched already."""

    @property
    def most_material_bytes(self) -> int:
        """Size of the largest material that it can use."""
        ...

    @property
    def most_snapshot_bytes(self) -> int:
        """Size of the largest snapshot that it can use."""
        ...

    def knows(self, model: bytes) -> bool:
        """Return whether it still has the snapshot of that digest, so that it need not be fetched."""
        ...

    def check(self, claim: Claim, material: bytes, snapshot: bytes | None) -> Finding:
        """Check ``claim``; ``snapshot`` is None only if it ``knows(claim.model)``. Raises NotCheckable if this node cannot tell."""
        ...


class ClaimKind(Protocol):
    """Kind of claim. All methods but `after_step` are for the thread of verification; each own claim is made once."""

    @property
    def seconds(self) -> float:
        """Time of the training thread spent on making claims."""
        ...

    def after_step(self) -> None:
        """Do the training thread's part between two inner steps."""
        ...

    def prepare(self, notify: Callable[[str], None]) -> Checking:
        """Do the slow preparation, once before all that follows; ``notify`` is given sentences for people."""
        ...

    def offer(self, slots: Sequence[Slot]) -> None:
        """Replace the slots for which claims are to be made."""
        ...

    def take(self) -> list[Made]:
        """Return the claims made since the last call. Raises VerifyError if the outcome of training cannot be claimed."""
        ...

    def heard(self, claim: Claim) -> None:
        """Note a signed claim of any peer, also of this node; perhaps not for the first time."""
        ...

    def keep(self, signed: Signed, material: bytes, snapshot: bytes | None) -> None:
        """Store a claim of this node, or one that it checked, so that people can inspect it later."""
        ...
