"""Calibration of training audits: the same stretches done twice, under a prover's conditions and under this node's.

Same machine, same number of threads and same dtype give the same bits, so a calibration needs conditions that differ as machines
do. It trains, so do it in a process of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle

import torch

from shoal.node.task import Shard, Task
from shoal.node.training.trainer import Trainer
from shoal.node.verify.training.audit import Kept, TrainingAudit, change
from shoal.node.verify.training.material import TrainingTerms
from shoal.node.verify.training.replica import Condition, Replica
from shoal.optim import Alone
from shoal.swarm.manifest.outer import OuterSettings
from shoal.verification.fingerprints.fingerprint import Evidence
from shoal.verification.fingerprints.weights import WeightProjection


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with another number of threads, which sums in another order."""
    known = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(known)


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Compute with torch's own kernels in place of oneDNN's, as another processor may."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is no GPU of Intel's
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def half() -> AbstractContextManager[None]:
    """Compute in bfloat16 (autocast) on weights of float32."""
    return torch.autocast("cpu", dtype=torch.bfloat16)


OTHERS: tuple[Condition, ...] = (*[plain_kernels] * 9, lambda: threads(2))
"""Conditions of computing the same in float32 with other rounding. Threads seldom: on a busy machine they wait for each other."""


def stretches(task: Task, terms: TrainingTerms, shard: Shard, outer: OuterSettings | None = None) -> Iterator[Kept]:
    """Yield all stretches that can be claimed of a training run without partners, to the end of its steps, or without end."""
    trainer = Trainer(task, outer or OuterSettings(method="none", every=16 * terms.steps), terms.train)
    trainer.connect(Alone(), "run", shard)
    audit = TrainingAudit(trainer, terms)
    audit.request()
    audit.after_step()
    while not terms.train.steps or trainer.opt.steps < terms.train.steps:
        trainer.step()
        audit.after_step()
        kept = audit.take()
        if kept is not None:
            yield kept
            audit.request()
            audit.after_step()


def honest_evidence(
    kept: Iterable[Kept], replica: Replica, terms: TrainingTerms, provers: Sequence[Condition], verifier: Condition
) -> list[Evidence]:
    """Return the evidence of each stretch for `Calibration.add`, done under ``provers`` in turn and under ``verifier``."""
    found = []
    for number, (one, prover) in enumerate(zip(kept, cycle(provers), strict=False)):
        stretch = one.stretch
        theirs, own = (
            change(one.names, one.state, tuple(replica.replay(one.state, stretch.shard, stretch.first, stretch.steps, condition)))
            for condition in (prover, verifier)
        )
        projection = WeightProjection(number, terms.dims)
        found.append(projection.compare(projection.make(theirs), own))
    return found
