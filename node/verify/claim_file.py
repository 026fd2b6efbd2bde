"""Claims on disk, for later checks: ``claims/ID.claim``, and beside it the policy,
``claims/HASH.safetensors``.

A claim's file holds the signed record, its material and the agreed settings; the policy's weights
are found by their hash, because several claims may be of one policy. Files are written whole or not
at all. A file may come from a stranger: its size is bounded before it is read, and nothing in it is
used as a path.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from shoal.node.verify.errors import VerifyError
from shoal.node.verify.material import Agreed
from shoal.node.verify.snapshot import MAX_SNAPSHOT_BYTES
from shoal.swarm.errors import MessageError, write_remedy
from shoal.swarm.file_lock import replace_file
from shoal.swarm.topics.attestation import verify_record
from shoal.swarm.wire.envelope import KIB, Message, pack, unpack
from shoal.verification.consensus.records import LIMIT as MAX_RECORD_BYTES
from shoal.verification.consensus.records import Claim, Signed, decode

CLAIM = ".claim"
WEIGHTS = ".safetensors"
KEPT_CLAIMS = 64
"""The newest in a folder."""
KEPT_BYTES = 2 << 30
"""Of a folder, weights included: 32 policies of the largest size."""


class _ClaimFile(Message):
    KIND = "stored-claim"
    LIMIT = 4200 * KIB
    record: Annotated[bytes, Field(max_length=MAX_RECORD_BYTES)]
    signature: Annotated[bytes, Field(max_length=64)]
    material: Annotated[bytes, Field(max_length=4096 * KIB)]
    temperature: Annotated[float, Field(ge=0, le=100)]
    max_tokens: Annotated[int, Field(ge=1, le=16_384)]
    group: Annotated[int, Field(ge=1, le=64)]


@dataclass(frozen=True)
class Stored:
    """Claim as found on disk; ``snapshot`` is None if the policy is not beside it."""

    claim: Claim
    signature: bytes
    material: bytes
    agreed: Agreed
    snapshot: bytes | None

    @property
    def signed(self) -> bool:
        return verify_record(self.claim.peer, self.claim.encoded, self.signature)


def save_claim(
    folder: Path,
    signed: Signed,
    material: bytes,
    agreed: Agreed,
    snapshot: bytes | None,
    keep: int = KEPT_CLAIMS,
    most_bytes: int = KEPT_BYTES,
) -> Path:
    """Write a claim into ``folder`` and return its file; only the newest ``keep`` claims, and their
    policies, stay there, of at most ``most_bytes`` beside the newest.

    Raises VerifyError if it cannot be written, and ValueError for a record that is no claim.
    """
    claim = signed.record
    if not isinstance(claim, Claim):
        raise ValueError(f"only claims are stored, not a {claim.KIND}")
    packed = pack(
        _ClaimFile(
            record=claim.encoded,
            signature=signed.signature,
            material=material,
            temperature=float(agreed.temperature),
            max_tokens=agreed.max_tokens,
            group=agreed.group,
        )
    )
    path = folder / f"{claim.id.hex()}{CLAIM}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        weights = _weights(folder, claim)
        if snapshot is not None and not weights.exists():
            replace_file(weights, snapshot)
        replace_file(path, packed)
        _prune(folder, keep, most_bytes, path)
    except OSError as error:
        raise VerifyError(
            f"Cannot write {str(path)!r} ({error.strerror}): {write_remedy(error)}."
        ) from error
    return path


def load_claim(path: Path) -> Stored:
    """Read what ``save_claim`` wrote.

    Raises VerifyError; a wrong signature, or weights of another policy, are left to a check.
    """
    found = _read_file(path)
    try:
        claim = decode(found.record)
    except ValueError as error:
        raise VerifyError(
            f"{str(path)!r} holds no claim that can be read: take another copy of it."
        ) from error
    if not isinstance(claim, Claim):
        raise VerifyError(
            f"{str(path)!r} holds a {claim.KIND} and no claim: name the file of a claim."
        )
    agreed = Agreed(found.temperature, found.max_tokens, found.group)
    weights = _weights(path.parent, claim)
    snapshot = _read(weights, MAX_SNAPSHOT_BYTES) if weights.is_file() else None
    return Stored(claim, found.signature, found.material, agreed, snapshot)


def find_claim(name: str, folders: Sequence[Path]) -> Path:
    """Find the file of a claim: ``name`` is its path, or the first 4 or more hex digits of its id,
    looked for in ``folders``.

    Raises VerifyError if there is none, or several.
    """
    if Path(name).is_file():
        return Path(name)
    if not re.fullmatch(r"[0-9a-f]{4,64}", name):
        raise VerifyError(
            f"There is no file {name!r}, and it is no claim's id: give a file, or 4 or more hex "
            "digits of an id."
        )
    found: dict[str, Path] = {}
    for folder in folders:
        if folder.is_dir():
            found |= {path.name: path for path in folder.glob(f"{name}*{CLAIM}")}
    if len(found) == 1:
        return next(iter(found.values()))
    where = ", ".join(map(str, folders)) or "runs/*/claims"
    if not found:
        raise VerifyError(
            f"There is no claim {name!r} in {where}: name its file, or a node's folder with "
            "--folder."
        )
    raise VerifyError(f"{len(found)} claims begin with {name!r}: give more digits.")


def _read_file(path: Path) -> _ClaimFile:
    data = _read(path, _ClaimFile.LIMIT)
    try:
        return unpack(data, _ClaimFile)
    except MessageError:
        raise VerifyError(
            f"{str(path)!r} is no stored claim of this version, or damaged: take another copy of "
            "it."
        ) from None


def _weights(folder: Path, claim: Claim) -> Path:
    return folder / f"{claim.model.hex()}{WEIGHTS}"


def _read(path: Path, most: int) -> bytes:
    try:
        if path.stat().st_size > most:
            raise VerifyError(
                f"{str(path)!r} is larger than {most} bytes: it is not what it should be."
            )
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise VerifyError(
            f"Cannot read {str(path)!r} ({error.strerror}): check the path and its permissions."
        ) from error


def _prune(folder: Path, keep: int, most_bytes: int, newest: Path) -> None:
    claims = sorted(
        folder.glob(f"*{CLAIM}"),
        key=lambda path: (path == newest, path.stat().st_mtime_ns),
        reverse=True,
    )
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    if len(claims) <= keep and sum(sizes.values()) <= most_bytes:
        return
    left = most_bytes
    needed: set[str] = set()
    for number, path in enumerate(claims):
        weights = f"{_model_of(path)}{WEIGHTS}"
        left -= sizes[path.name]
        if weights not in needed:
            left -= sizes.get(weights, 0)
        if number > 0 and (number >= keep or left < 0):
            path.unlink(missing_ok=True)
        else:
            needed.add(weights)
    for stored in folder.glob(f"*{WEIGHTS}"):
        if stored.name not in needed:
            stored.unlink(missing_ok=True)


def _model_of(path: Path) -> str:
    """Return the hex digest of a stored claim's policy; empty if it cannot be read."""
    try:
        claim = decode(_read_file(path).record)
    except (VerifyError, ValueError):
        return ""
    return claim.model.hex() if isinstance(claim, Claim) else ""
