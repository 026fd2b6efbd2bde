"""Material of a claim about inner steps, and the hashes that the claim holds.

Of the fields of `shoal.verification.consensus.records.Claim`, ``model`` is the SHA-256 of the snapshot (`Replica`), ``prompt``
that of the stretch (which steps on which shard), ``sampling`` that of the terms, ``output`` that of the weights after,
``fingerprint`` that of the material; ``tokens`` is the number of inner steps. ``seed`` is that of the projection: it follows from
all these but the last, so the prover has fixed the weights after before it knows in which projection they are compared.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from shoal.node.task import Shard
from shoal.swarm.manifest.outer import TrainSettings
from shoal.swarm.wire.envelope import KIB, Message
from shoal.swarm.wire.fields import Sha256
from shoal.verification.fingerprints.weights import DIMS, MOST_DIMS

MOST_STEPS = 1 << 10  # of a stretch
MOST_FIRST = 1 << 24


@dataclass(frozen=True)
class TrainingTerms:
    """Terms on which all peers agree. ``task`` names it with its options and all else on which the steps depend, such as the
    manifest's digest; ``steps`` is the length of a stretch, which begins at a multiple of it, so that no two overlap; ``dims`` is
    that of the projection; ``dtypes`` are allowed for computing: each needs a calibration, and a coarse one hides small cheats.

    Raises ValueError for numbers out of range.
    """

    task: str
    train: TrainSettings
    steps: int = 5
    dims: int = DIMS
    dtypes: tuple[str, ...] = ("float32",)

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MOST_STEPS or not 16 <= self.dims <= MOST_DIMS or self.dims & (self.dims - 1) or not self.dtypes:
            raise ValueError(f"a stretch has 1 to {MOST_STEPS} steps, a projection a power of two from 16 to {MOST_DIMS} numbers")

    @property
    def hash(self) -> bytes:
        """Hash for `Claim.sampling`."""
        said = [self.task, self.train.steps, self.train.seed, self.steps, self.dims, list(self.dtypes)]
        return _hash("terms", json.dumps(said).encode())


@dataclass(frozen=True)
class Stretch:
    """Inner steps ``first`` + 1 to ``first`` + ``steps`` of a run, on the batches of ``shard`` that belong to them."""

    shard: Shard
    first: int
    steps: int

    @property
    def hash(self) -> bytes:
        """Hash for `Claim.prompt`."""
        said = [self.shard.index, self.shard.of, self.shard.seed, self.first, self.steps]
        return _hash("stretch", json.dumps(said).encode())


class TrainingMaterial(Message):
    """Material of one claim. ``before``: hash of the trainable weights before; ``snapshot``: its size in bytes."""

    KIND, LIMIT = "training-material", (MOST_DIMS * 4) + KIB
    index: Annotated[int, Field(ge=0, lt=2**31)]
    of: Annotated[int, Field(ge=1, lt=2**31)]
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    first: Annotated[int, Field(ge=0, le=MOST_FIRST)]
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)]
    dtype: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,32}$")]
    before: Sha256
    snapshot: Annotated[int, Field(ge=1, le=2**40)]
    projection: Annotated[bytes, Field(max_length=4 * (1 + MOST_DIMS))]

    @property
    def stretch(self) -> Stretch:
        """Claimed steps."""
        return Stretch(Shard(self.index, self.of, self.seed), self.first, self.steps)


def projection_seed(place: tuple[str, int, str, int], model: bytes, stretch: bytes, terms: bytes, output: bytes) -> int:
    """Return the seed, below 2**63, from ``place`` (run, round, peer, slot) and the claim's hashes."""
    digest = _hash("projection", json.dumps(place).encode() + b"\0" + model + stretch + terms + output)
    return int.from_bytes(digest[:8], "big") >> 1


def _hash(what: str, data: bytes) -> bytes:
    return hashlib.sha256(b"shoal/training/1/" + what.encode() + b"\0" + data).digest()
