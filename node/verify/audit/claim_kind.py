"""What is claimed in a swarm, as far as taking part in the vote about it needs to know: how claims are made, and how checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.node.verify.audit.finding import Finding
from shoal.verification.consensus.participant import Slot
from shoal.verification.consensus.records import Claim, Signed


@dataclass(frozen=True)
class Made:
    """A claim for ``slot``, and what its author hands out to those who check it."""

    slot: Slot
    claim: Claim
    material: bytes
    snapshot: bytes


class Checking(Protocol):
    """Judges claims, one at a time; what their authors hand out was fetched by somebody else."""

    @property
    def most_material_bytes(self) -> int:
        """No material that it can use is larger."""
        ...

    @property
    def most_snapshot_bytes(self) -> int:
        """No snapshot that it can use is larger."""
        ...

    def knows(self, model: bytes) -> bool:
        """Whether it still has the snapshot of that digest, so that it need not be fetched."""
        ...

    def check(self, claim: Claim, material: bytes, snapshot: bytes | None) -> Finding:
        """What is found; ``snapshot`` is None only if it ``knows(claim.model)``. NotCheckable if this node cannot tell."""
        ...


class ClaimKind(Protocol):
    """One thing that can be claimed. All but `after_step` is for the thread of verification; each claim of its own is made once."""

    @property
    def seconds(self) -> float:
        """What making claims took of the training thread's time."""
        ...

    def after_step(self) -> None:
        """In the training thread, between two inner steps."""
        ...

    def prepare(self, say: Callable[[str], None]) -> Checking:
        """What takes long, once before all that follows; ``say`` is told sentences for people."""
        ...

    def offer(self, slots: Sequence[Slot]) -> None:
        """What is to be claimed now, in place of what was."""
        ...

    def take(self) -> list[Made]:
        """What was made for slots since the last call. VerifyError if what training came to cannot be claimed."""
        ...

    def heard(self, claim: Claim) -> None:
        """A signed claim of anybody, this node's too; perhaps not for the first time."""
        ...

    def keep(self, signed: Signed, material: bytes, snapshot: bytes | None) -> None:
        """A claim of this node, or one that it checked, so that people can look at it later."""
        ...
