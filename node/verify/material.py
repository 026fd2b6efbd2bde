"""Material of a claim about a group of completions, as its author serves it, and the hashes that
the claim holds.

The claim is a `shoal.verification.consensus.records.Claim`; its field ``prompt`` is the hash of the
question's coordinates, ``sampling`` that of the agreed settings, ``output`` that of the tokens, and
``fingerprint`` that of the whole material.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgpack
import torch
from pydantic import Field, model_validator

from shoal.node.rl.environment import Env
from shoal.node.verify.audit import MOST_BYTES, VerifyError
from shoal.swarm.errors import MessageError
from shoal.swarm.file_lock import replace_file
from shoal.swarm.topics.attestation import verify_record
from shoal.swarm.topics.rollout import (
    EnvConfig,
    EnvName,
    Finish,
    Finishes,
    Numbers,
    QuestionSeed,
    pack_tokens,
)
from shoal.swarm.wire.envelope import KIB, Count, Label, Message, pack, unpack
from shoal.verification.consensus.records import LIMIT as MOST_RECORD
from shoal.verification.consensus.records import Claim, Signed, decode

MOST_TOKENS = 1 << 17  # of a claim, which a proof of activations can hold
Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Agreed:
    """The swarm's settings of how claimed completions are drawn."""

    temperature: float
    max_tokens: int
    group: int
    """Completions of each question."""

    def __post_init__(self) -> None:
        if not (
            0 <= self.temperature <= 100
            and 1 <= self.max_tokens <= 16_384
            and 1 <= self.group <= 64
        ):
            raise ValueError(
                "a group has 1 to 64 completions of at most 1 to 16,384 tokens, at a temperature "
                "from 0 to 100"
            )

    @property
    def hash(self) -> bytes:
        return _hash("sampling", struct.pack(">dII", self.temperature, self.max_tokens, self.group))


@dataclass(frozen=True)
class Coordinates:
    """Coordinates by which a rollout names a question."""

    env: str
    version: str
    config: bytes
    seed: int
    index: int

    @staticmethod
    def of(env: Env, seed: int, index: int) -> Coordinates:
        """Return the coordinates of question number ``index`` of ``seed`` in ``env``."""
        return Coordinates(env.label, env.made.version, env.config, seed, index)

    @property
    def hash(self) -> bytes:
        return _hash(
            "question",
            bytes(msgpack.packb([self.env, self.version, self.config, self.seed, self.index])),
        )


class Material(Message):
    """Material of one claim.

    ``policy``: name of the policy of the snapshot, such as "tiny"; ``snapshot``: its size in bytes;
    ``proof``: of the activations of all completions, one after the other; ``dtype`` and ``kernel``:
    of the author's computation.
    """

    KIND = "claim-material"
    LIMIT = 4096 * KIB
    policy: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:+-]{1,128}$")]
    env: EnvName
    env_version: Label
    env_config: EnvConfig
    seed: QuestionSeed
    index: Count
    tokens: Numbers
    finish: Finishes
    proof: Annotated[bytes, Field(max_length=2048 * KIB)]
    dtype: Dtype
    kernel: Label
    snapshot: Annotated[int, Field(ge=1, le=2**40)]

    @model_validator(mode="after")
    def _consistent(self) -> Material:
        if not self.tokens or len(self.finish) != len(self.tokens) or not all(self.tokens):
            raise ValueError(
                "must hold completions of at least one token, each with its finish reason"
            )
        if sum(map(len, self.tokens)) > 4 * MOST_TOKENS:
            raise ValueError(f"must hold at most {MOST_TOKENS} tokens")
        return self

    @property
    def coordinates(self) -> Coordinates:
        return Coordinates(self.env, self.env_version, self.env_config, self.seed, self.index)

    def rows(self) -> list[tuple[int, ...]]:
        """Return the token ids of each completion; unchecked, so they may be negative."""
        return [struct.unpack(f"<{len(part) // 4}i", part) for part in self.tokens or ()]


def decode_material(data: bytes) -> Material:
    """Decode a packed material. Raises MessageError for other bytes."""
    return unpack(data, Material)


def material_of(
    at: Coordinates, rows: Sequence[Sequence[int]], finish: Sequence[Finish], *,
    proof: bytes, policy: str, dtype: str, kernel: str, snapshot: int,
) -> Material:  # fmt: skip
    """Make the material of one's own completions.

    Raises pydantic's ValidationError, a ValueError, for what no claim can hold.
    """
    fields = {
        "env": at.env,
        "env_version": at.version,
        "env_config": at.config,
        "seed": at.seed,
        "index": at.index,
    }
    packed = tuple(pack_tokens(row) for row in rows)
    said = {
        "policy": policy,
        "proof": proof,
        "dtype": dtype,
        "kernel": kernel,
        "snapshot": snapshot,
    }
    return Material.model_validate({**fields, **said, "tokens": packed, "finish": tuple(finish)})


def output_hash(rows: Sequence[Sequence[int]]) -> bytes:
    return _hash("output", b"".join(struct.pack(">I", len(row)) + pack_tokens(row) for row in rows))


def seed_of(run: str, round: int, peer: str, slot: int, prompt: bytes) -> int:
    """Return `Claim.seed`, below 2^63: it follows from the place of the claim, so its author cannot
    try several.
    """
    return (
        int.from_bytes(
            _hash("seed", bytes(msgpack.packb([run, round, peer, slot, prompt])))[:8], "big"
        )
        >> 1
    )


def _hash(what: str, data: bytes) -> bytes:
    return hashlib.sha256(f"shoal/verification/1/{what}\0".encode() + data).digest()


# Store of claims on disk, for later checks: ``claims/ID.claim``, and beside it the policy,
# ``claims/HASH.safetensors``.
#
# A claim's file holds the signed record, its material and the agreed settings; the policy's weights
# are found by their hash, because several claims may be of one policy. Files are written whole or
# not at all. A file may come from a stranger: its size is bounded before it is read, and nothing in
# it is used as a path.

CLAIM = ".claim"
WEIGHTS = ".safetensors"
KEEP = 64  # newest claims in a folder


class _File(Message):
    KIND = "stored-claim"
    LIMIT = 4200 * KIB
    record: Annotated[bytes, Field(max_length=MOST_RECORD)]
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
    keep: int = KEEP,
) -> Path:
    """Write a claim into ``folder`` and return its file; only the newest ``keep`` claims, and their
    policies, stay there.

    Raises VerifyError if it cannot be written, and ValueError for a record that is no claim.
    """
    claim = signed.record
    if not isinstance(claim, Claim):
        raise ValueError(f"only claims are stored, not a {claim.KIND}")
    settings = {
        "temperature": float(agreed.temperature),
        "max_tokens": agreed.max_tokens,
        "group": agreed.group,
    }
    packed = pack(
        _File.model_validate(
            {
                "record": claim.encoded,
                "signature": signed.signature,
                "material": material,
                **settings,
            }
        )
    )
    path = folder / f"{claim.id.hex()}{CLAIM}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        weights = _weights(folder, claim)
        if snapshot is not None and not weights.exists():
            replace_file(weights, snapshot)
        replace_file(path, packed)
        _prune(folder, keep, path)
    except OSError as error:
        raise VerifyError(
            f"Cannot write {str(path)!r} ({error.strerror}): free some space or check its "
            "permissions."
        ) from error
    return path


def load_claim(path: Path) -> Stored:
    """Read what ``save_claim`` wrote.

    Raises VerifyError; a wrong signature, or weights of another policy, are left to a check.
    """
    found = _opened(path)
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
    snapshot = _read(weights, MOST_BYTES) if weights.is_file() else None
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
    found = {
        path.name: path
        for folder in folders
        if folder.is_dir()
        for path in folder.glob(f"{name}*{CLAIM}")
    }
    if len(found) == 1:
        return next(iter(found.values()))
    where = ", ".join(map(str, folders)) or "runs/*/claims"
    if not found:
        raise VerifyError(
            f"There is no claim {name!r} in {where}: name its file, or a node's folder with "
            "--folder."
        )
    raise VerifyError(f"{len(found)} claims begin with {name!r}: give more digits.")


def _opened(path: Path) -> _File:
    data = _read(path, _File.LIMIT)
    try:
        return unpack(data, _File)
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


def _prune(folder: Path, keep: int, newest: Path) -> None:
    claims = sorted(
        folder.glob(f"*{CLAIM}"),
        key=lambda path: (path == newest, path.stat().st_mtime_ns),
        reverse=True,
    )
    for path in claims[max(keep, 1) :]:
        path.unlink(missing_ok=True)
    if len(claims) > keep:
        needed = {_model_of(path) for path in claims[: max(keep, 1)]}
        for weights in folder.glob(f"*{WEIGHTS}"):
            if weights.stem not in needed:
                weights.unlink(missing_ok=True)


def _model_of(path: Path) -> str:
    """Return the hex digest of a stored claim's policy; empty if it cannot be read."""
    try:
        claim = decode(_opened(path).record)
    except (VerifyError, ValueError):
        return ""
    return claim.model.hex() if isinstance(claim, Claim) else ""
