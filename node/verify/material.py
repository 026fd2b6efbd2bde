"""Material of a claim about a group of completions, as its author serves it, and the hashes that
the claim holds.

The claim is a `shoal.verification.consensus.records.Claim`; its field ``prompt`` is the hash of the
question's coordinates, ``sampling`` that of the agreed settings, ``output`` that of the tokens, and
``fingerprint`` that of the whole material.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgpack
import torch
from pydantic import Field, model_validator

from shoal.node.rl.environment import Env
from shoal.swarm.topics.rollout import (
    EnvConfig,
    EnvName,
    Finish,
    Finishes,
    Numbers,
    QuestionSeed,
    pack_tokens,
)
from shoal.swarm.wire.envelope import KIB, Count, Label, Message, unpack

MAX_TOKENS = 1 << 17
"""Of a claim, which a proof of activations can hold."""
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
        is_group = 1 <= self.group <= 64 and 1 <= self.max_tokens <= 16_384
        if not is_group or not 0 <= self.temperature <= 100:
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
        fields = [self.env, self.version, self.config, self.seed, self.index]
        return _hash("question", bytes(msgpack.packb(fields)))


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
        if sum(map(len, self.tokens)) > 4 * MAX_TOKENS:
            raise ValueError(f"must hold at most {MAX_TOKENS} tokens")
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
    at: Coordinates,
    rows: Sequence[Sequence[int]],
    finish: Sequence[Finish],
    *,
    proof: bytes,
    policy: str,
    dtype: str,
    kernel: str,
    snapshot: int,
) -> Material:
    """Make the material of one's own completions.

    Raises pydantic's ValidationError, a ValueError, for what no claim can hold.
    """
    return Material.model_validate(
        {
            "policy": policy,
            "env": at.env,
            "env_version": at.version,
            "env_config": at.config,
            "seed": at.seed,
            "index": at.index,
            "tokens": tuple(pack_tokens(row) for row in rows),
            "finish": tuple(finish),
            "proof": proof,
            "dtype": dtype,
            "kernel": kernel,
            "snapshot": snapshot,
        }
    )


def output_hash(rows: Sequence[Sequence[int]]) -> bytes:
    """Return the hash of the tokens, each completion with its length before it."""
    parts = [struct.pack(">I", len(row)) + pack_tokens(row) for row in rows]
    return _hash("output", b"".join(parts))


def seed_of(run: str, round: int, peer: str, slot: int, prompt: bytes) -> int:
    """Return `Claim.seed`, below 2^63: it follows from the place of the claim, so its author cannot
    try several.
    """
    place = bytes(msgpack.packb([run, round, peer, slot, prompt]))
    return int.from_bytes(_hash("seed", place)[:8], "big") >> 1


def _hash(what: str, data: bytes) -> bytes:
    return hashlib.sha256(f"shoal/verification/1/{what}\0".encode() + data).digest()
