"""Prover of training: keeps a stretch of inner steps as it happens, and makes a claim of it (verification.md, section 6).

    audit = TrainingAudit(trainer, terms)
    trainer.run(after_step=audit.after_step)        # costs nothing until asked
    audit.request()                                 # any thread: keep the next stretch without an exchange in it
    kept = audit.take()                             # any thread: it, or None
    proven = prove(kept, terms, run=..., round=..., peer=..., slot=...)     # not in the training thread

A valid claim shows: from this state, ``steps`` inner steps of the task on this shard lead to these weights, up to the differences
between honest machines; and the prover had fixed them before it knew how they would be compared. It does not show:

* What happened between claimed stretches: a prover that knows which it will claim can rest in between. The share of steps that is
  claimed is the share that must be done. Where stretches are adjacent, ``output`` of one claim is ``before`` of the next.
* The last step before an exchange, whose weights the outer rule has replaced by the time they could be kept; and that the exchanged
  weights are those of the claims.
* That the optimizer's numbers in the snapshot (momentum) come from honest steps: they are taken as they are.

The steps must be repeatable: batches that depend on the shard and the step alone, on data that the auditor has too (so not
reinforcement learning, and not data of one's own), and random numbers, if any, of the CPU.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.node.training.trainer import Trainer
from shoal.node.verify.audit.errors import VerifyError
from shoal.node.verify.training.material import MOST_FIRST, Stretch, TrainingMaterial, TrainingTerms, projection_seed
from shoal.node.verify.training.replica import MODEL, State, before, copied, snapshot_of, trainable, weights_hash, weights_in
from shoal.optim.schedule.round_length import Steps
from shoal.swarm.wire.envelope import pack
from shoal.verification.consensus.records import Claim
from shoal.verification.fingerprints.weights import WeightProjection


@dataclass(frozen=True)
class Kept:
    """Stretch with the state before it and the trainable weights ``names`` after it, all on the CPU."""

    stretch: Stretch
    state: State
    names: tuple[str, ...]
    after: tuple[Tensor, ...]


@dataclass(frozen=True)
class ProvenSteps:
    """Claim and the bytes that its verifiers ask for."""

    claim: Claim
    material: bytes
    snapshot: bytes


class TrainingAudit:
    """Recorder of stretches of ``trainer``'s steps, one at a time, on request. It copies weights and changes nothing.

    ``since``: stretches from this step on, so that a resumed run does not claim again what it claimed before.

    Raises VerifyError if an exchange falls into every stretch.
    """

    def __init__(self, trainer: Trainer, terms: TrainingTerms, *, since: int = 0) -> None:
        self._trainer, self._steps, self._since = trainer, terms.steps, since
        self._wanted = False
        self._open: tuple[int, tuple[int, tuple[int, ...]], State] | None = None
        self._done: deque[Kept] = deque(maxlen=1)
        self.broken = 0
        """Stretches that an exchange fell into; another was begun at once."""
        schedule, every = trainer.opt.schedule, trainer.opt.schedule.every
        firsts = range(every * terms.steps, 2 * every * terms.steps, terms.steps)  # after the first rounds, which may differ
        if isinstance(trainer.opt.length, Steps) and not any(
            all(not schedule.at(step) for step in range(first + 1, first + terms.steps + 1)) for first in firsts
        ):
            fewer = ", have fewer fragments (outer.fragments)" if trainer.opt.fragments > 1 else ""
            raise VerifyError(
                f"Rounds of {every} steps leave no room to audit {terms.steps} of them between exchanges: "
                f"make rounds longer (outer.every){fewer}, or do not audit training."
            )

    def request(self) -> None:
        """Keep the next stretch that is whole; one that was kept and not taken is dropped then."""
        self._wanted = True

    def take(self) -> Kept | None:
        """Return the kept stretch, once."""
        return self._done.popleft() if self._done else None

    def after_step(self) -> None:
        """Record between steps, after all other work there. Raises VerifyError if the optimizer's state is not all numbers."""
        if not self._wanted:
            return
        opt = self._trainer.opt
        exchanges = (opt.round, tuple(opt.applied))
        if self._open is not None and exchanges != self._open[1]:
            self._open, self.broken = None, self.broken + 1
        if self._open is not None and opt.steps == self._open[0] + self._steps:
            first, _, state = self._open
            after = copied(trainable(self._trainer.model))
            stretch = Stretch(self._trainer.shard, first, self._steps)
            self._done.append(Kept(stretch, state, tuple(after), tuple(after.values())))
            self._open, self._wanted = None, False
        elif self._open is None and self._since <= opt.steps <= MOST_FIRST and opt.steps % self._steps == 0:
            self._open = (opt.steps, exchanges, before(self._trainer.model, opt.inner))


def change(names: tuple[str, ...], state: State, after: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the pseudo-gradient, weights before - weights after, float32."""
    return [old.float() - new.float() for old, new in zip(weights_in(state, names, MODEL), after, strict=True)]


def prove(
    kept: Kept, terms: TrainingTerms, *, run: str, round: int, peer: str, slot: int, dtype: str = "float32", planted: bool = False
) -> ProvenSteps:
    """Make the claim about ``kept``. ``dtype``: of the computation. ``planted``: make it wrong (half of the change).

    Raises VerifyError if the steps changed nothing, or what they led to is not finite.
    """
    if planted:
        pairs = zip(weights_in(kept.state, kept.names, MODEL), kept.after, strict=True)
        kept = replace(kept, after=tuple(torch.lerp(old.float(), new.float(), 0.5).to(new.dtype) for old, new in pairs))

    def project(seed: int) -> bytes:
        try:
            return WeightProjection(seed, terms.dims).make(change(kept.names, kept.state, kept.after))
        except ValueError as error:
            raise VerifyError(f"Nothing can be claimed of these training steps ({error}): look at the training loss.") from error

    return assemble(kept, terms, project, run=run, round=round, peer=peer, slot=slot, dtype=dtype)


def assemble(
    kept: Kept, terms: TrainingTerms, project: Callable[[int], bytes], *, run: str, round: int, peer: str, slot: int, dtype: str
) -> ProvenSteps:
    """Make the claim about ``kept`` with the projection that ``project`` makes from the resulting seed."""
    after = kept.after
    snapshot = snapshot_of(kept.state, kept.names, after)
    model, output = hashlib.sha256(snapshot).digest(), weights_hash(kept.names, after)
    seed = projection_seed((run, round, peer, slot), model, kept.stretch.hash, terms.hash, output)
    shard = kept.stretch.shard
    material = pack(
        TrainingMaterial(
            index=shard.index, of=shard.of, seed=shard.seed, first=kept.stretch.first, steps=kept.stretch.steps, dtype=dtype,
            before=weights_hash(kept.names, weights_in(kept.state, kept.names, MODEL)), snapshot=len(snapshot),
            projection=project(seed),
        )
    )  # fmt: skip
    claim = Claim(
        peer=peer, run=run, round=round, slot=slot, model=model, prompt=kept.stretch.hash, sampling=terms.hash, seed=seed,
        tokens=kept.stretch.steps, output=output, fingerprint=hashlib.sha256(material).digest(),
    )  # fmt: skip
    return ProvenSteps(claim, material, snapshot)
