"""What checks of claims are made of: errors and findings, snapshots of a policy, the swarm's
network, a budget of time.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from shoal.node.rl.policy import Policy
from shoal.swarm.errors import ShoalError
from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.membership.membership import Membership
from shoal.swarm.topics.attestation import Attestations, Handler, sign_record, verify_record
from shoal.swarm.topics.evidence import EvidenceStore
from shoal.swarm.topics.verification_log import LogServer, fetch_log
from shoal.verification.calibration import Honest, Pair
from shoal.verification.consensus.participant import Slot
from shoal.verification.consensus.records import Claim
from shoal.verification.fingerprints.fingerprint import Evidence

# Errors of this node while it proves or checks; a prover's faults are findings, never errors.


class VerifyError(ShoalError):
    """Failure to make or read a claim, a snapshot or a calibration on this node."""


class NotCheckable(VerifyError):
    """Inability of this node to judge a claim: no calibration, no such policy, or no snapshot."""


class NotCalibrated(NotCheckable):
    """Missing calibration of the policy for the dtypes of prover and verifier."""


MOST_EVIDENCE = 512  # bytes, as a reveal has room for
_REASON = 200  # characters of the reason that travel


@dataclass(frozen=True)
class Measured:
    """Evidence of a claim, with the honest claims of ``pair`` that it is compared with.

    ``kernel``: as the author says.
    """

    pair: Pair
    honest: Honest
    evidence: Evidence
    kernel: str


@dataclass(frozen=True)
class Finding:
    """Result of a check.

    ``reason``: one sentence, also if accepted. ``statistics``: finite, by name. ``seconds`` it
    took. ``measured``: for the odds over all claims of the author; empty where these are not
    computed.
    """

    accepted: bool
    reason: str
    statistics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    measured: tuple[Measured, ...] = ()

    @property
    def evidence(self) -> bytes:
        """At most 512 bytes of JSON: the reason, cut, and as many figures as fit."""
        reason = ascii(self.reason[:_REASON])[1:-1][:_REASON]
        figures = dict(self.statistics)
        while True:
            said = {
                "accepted": self.accepted,
                "reason": reason,
                **{name: float(f"{value:.4g}") for name, value in figures.items()},
            }
            data = json.dumps(said, separators=(",", ":")).encode()
            if len(data) <= MOST_EVIDENCE:
                return data
            if not figures:
                reason = reason[: len(reason) // 2]
            else:
                figures.popitem()


# A policy's trained weights as bytes, so that others can compute what it computed.
#
# Of tiny these are all parameters, of a model with an adapter the adapter's. They travel as float32
# safetensors, whatever the module computes in (float32 holds bfloat16 and float16 exactly), and a
# policy is known by the SHA-256 of these bytes.

MOST_BYTES = 64 * 2**20
_HEAD, _ENTRY = (
    1024,
    256,
)  # bytes that safetensors' header has at most, besides the names: in all, and for each tensor


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a snapshot holds, in the order of names."""
    return {name: value for name, value in sorted(module.named_parameters()) if value.requires_grad}


def snapshot(policy: Policy) -> bytes:
    """Encode the trained parameters in at most 64 MiB; equal weights give equal bytes.

    Raises VerifyError if they are more, none, or not finite.
    """
    found = trained(policy.module)
    nbytes = sum(4 * value.numel() for value in found.values())
    if not found or nbytes > MOST_BYTES - _HEAD:
        raise VerifyError(
            f"The policy has {nbytes:,} bytes of trained weights, and claims need 1 to "
            f"{MOST_BYTES:,}: train a small adapter (with peft installed) of a smaller model, or "
            "turn verification off."
        )
    tensors = {
        name: value.detach().to("cpu", torch.float32, copy=True).contiguous()
        for name, value in found.items()
    }
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise VerifyError(
            "The policy's weights are not all finite: its training failed, so nothing can be "
            "claimed of it."
        )
    return save(tensors)


def base(module: nn.Module) -> str:
    """Return the hex SHA-256 of the untrained state, which no snapshot holds: equal for peers that
    can check each other.
    """
    found = hashlib.sha256(b"shoal policy base 1\0")
    own = trained(module)
    state = module.state_dict()
    for name in sorted(state.keys() - own.keys()):
        if not isinstance(
            state[name], Tensor
        ):  # what a module keeps beside tensors (get_extra_state) may be of any type
            continue
        tensor = state[name].detach().to("cpu").contiguous()
        found.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return found.hexdigest()


def digest(data: bytes) -> bytes:
    """Return the SHA-256 of a snapshot or of a claim's material, by which others fetch it."""
    return hashlib.sha256(data).digest()


def most_bytes(module: nn.Module) -> int:
    return _HEAD + sum(
        4 * value.numel() + _ENTRY + 6 * len(name) for name, value in trained(module).items()
    )


def load_snapshot(module: nn.Module, data: bytes) -> None:
    """Give ``module`` the weights in ``data``, cast to its dtype: whole or not at all.

    Raises VerifyError unless ``data`` holds exactly its trained parameters, by name and shape, as
    float32, and all are finite in the module's dtype. Nothing larger than the module is allocated.
    """
    own = trained(module)
    if len(data) > most_bytes(module):
        raise VerifyError(
            f"The snapshot has {len(data):,} bytes where at most {most_bytes(module):,} fit this "
            "policy: refuse it."
        )
    try:
        found = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise VerifyError(
            f"The snapshot is no safetensors file ({type(error).__name__}): refuse it."
        ) from None
    if found.keys() != own.keys():
        other = min(found.keys() ^ own.keys())
        raise VerifyError(
            f"The snapshot is of another policy, which differs in {other[:80]!a}: refuse it."
        )
    cast: dict[str, Tensor] = {}
    for name, value in own.items():
        tensor = found[name]
        if tensor.dtype != torch.float32 or tensor.shape != value.shape:
            shown = f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
            raise VerifyError(
                f"The snapshot has {name} as {shown}, not as float32 of shape "
                f"{tuple(value.shape)}: refuse it."
            )
        cast[name] = tensor.to(value.dtype)
        if not bool(cast[name].isfinite().all()):
            raise VerifyError(f"The snapshot has numbers in {name} that are not finite: refuse it.")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(cast[name])


PULL_S = 5.0  # seconds for a log of records
LEAVE_S = 2.0  # seconds for the last records to be sent


class SwarmNetwork:
    """What `shoal.node.verify.service.Verification` needs of a member's swarm, for any thread.

    ``gossip`` carries the records.
    """

    def __init__(self, membership: Membership, gossip: Gossip) -> None:
        self.me = membership.identity.peer_id
        self.swarm = membership.swarm
        self.internal_errors = membership.host.internal_errors
        self._membership = membership
        self._gossip = gossip
        self._bodies = EvidenceStore(
            membership.host, membership.swarm, membership.directory.addresses
        )
        self._records: Attestations | None = None
        self._logs: LogServer | None = None

    def sign(self, record: bytes) -> bytes:
        return sign_record(self._membership.identity, record)

    def verify(self, peer: str, record: bytes, signature: bytes) -> bool:
        return verify_record(peer, record, signature)

    def open(
        self, take: Handler, log: Callable[[int], bytes], is_banned: Callable[[str], bool]
    ) -> None:
        """Start, once, to give ``take`` the records of others as (author, record, signature), to
        serve ``log(since)``, and to leave out banned peers. All three are called from other
        threads; ``take`` refuses by MessageError, and must not wait.
        """
        self._records = Attestations(self._gossip, take)
        self._logs = LogServer(self._membership.host, self.swarm, log)
        self._membership.directory.barred = is_banned

    def publish(self, record: bytes, signature: bytes) -> None:
        """Send a record of this node to everybody soon, without waiting; after `open`."""
        assert self._records is not None
        self._records.publish(record, signature)

    def put(self, body: bytes) -> bytes:
        """Serve ``body`` to other peers; return its SHA-256."""
        return self._bodies.put(body)

    def get(self, peer: str, sha256: bytes, most: int, timeout: float) -> bytes:
        """Fetch the body with that hash, and serve it too. Raises NetworkError or MessageError."""
        return self._bodies.get(peer, sha256, most, timeout)

    def fetch_log(self, peer: str, since: int) -> bytes:
        """Fetch the log of ``peer`` from round ``since`` on: at most 8 MiB, in 5 s.

        Raises NetworkError or MessageError.
        """
        return fetch_log(
            self._membership.host,
            peer,
            self._membership.directory.addresses(peer),
            self.swarm,
            since,
            PULL_S,
        )

    def others(self) -> list[str]:
        """Return the members but this node and banned peers, in secret random order."""
        peers = [peer for peer in self._membership.directory.members() if peer != self.me]
        secrets.SystemRandom().shuffle(peers)
        return peers

    def name(self, peer: str) -> str:
        """Return the display name of ``peer``; its id if it is gone."""
        member = self._membership.directory.everyone().get(peer)
        return member.name if member is not None else peer

    @property
    def counts(self) -> dict[str, Any]:
        return {} if self._records is None else self._records.topic.counts

    def close(self) -> None:
        """Leave, after what was published is on its way, or `LEAVE_S`."""
        if self._records is not None and self._logs is not None:
            self._records.topic.flush(LEAVE_S)
            self._records.topic.close()
            self._logs.close()


# Budget of checking: some seconds of a node's time in each minute, saved up for one minute at most.

MINUTE = 60.0


class Budget:
    """Time budget of ``seconds`` in each minute; ``clock``: seconds.

    A check that was begun is finished, so it may be overdrawn.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._rate = seconds / MINUTE
        self._most = seconds
        self._clock = clock
        self._left = seconds
        self._since = clock()
        self.spent = 0.0

    @property
    def is_open(self) -> bool:
        """True if a check may begin now."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._since) * self._rate)
        self._since = now
        return self._left > 0

    def spend(self, seconds: float) -> None:
        self.spent += seconds
        self._left -= seconds


@dataclass(frozen=True)
class Made:
    """Claim for ``slot``, with the bytes that its author serves to verifiers."""

    slot: Slot
    claim: Claim
    material: bytes
    snapshot: bytes
