"""Claims of groups of completions: how training writes them, how a node checks them, and the work
of ``shoal verify``.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, cast

from shoal.node.config.device import use_threads
from shoal.node.config.settings import Settings
from shoal.node.rl.environment import Env, Option
from shoal.node.rl.loading import load_env, load_policy
from shoal.node.rl.policy import Policy
from shoal.node.rl.task import Claimed, RLTask
from shoal.node.verify.audit import (
    Finding,
    Made,
    NotCalibrated,
    NotCheckable,
    SwarmNetwork,
    VerifyError,
    digest,
    snapshot,
)
from shoal.node.verify.checker import (
    ACTIVATIONS,
    SAMPLING,
    Checker,
    ProvenGroup,
    examine,
    make_claim,
    policy_label,
    prove,
    write,
)
from shoal.node.verify.material import (
    CLAIM,
    DTYPES,
    Agreed,
    Coordinates,
    Dtype,
    Material,
    Stored,
    decode_material,
    load_claim,
    save_claim,
    seed_of,
)
from shoal.swarm.errors import MessageError
from shoal.swarm.settings.verification import Terms
from shoal.verification.calibration import FEWEST, Calibration, CalibrationError, Pair
from shoal.verification.calibration_file import load_calibration, save_calibration
from shoal.verification.consensus.participant import Slot
from shoal.verification.consensus.records import Signed
from shoal.verification.fingerprints.fingerprint import Evidence

# The training thread's part in verification: writing the groups of completions that are to be
# claimed.

MOST_WRITTEN = 64  # groups that wait to be claimed
ASIDE = (
    2**40
)  # distance to the questions of which one is answered instead where a claim has to be wrong
ASIDES = 64  # questions to try there: where there are few, the same one comes up again


class Claimer:
    """Writer of groups for the slots that it was offered.

    ``offer`` and ``take`` are for one other thread.

    ``round`` returns the current round of verification; a slot of an earlier one is too late.
    ``allowed``: dtypes of claims.
    """

    def __init__(
        self,
        env: Env,
        agreed: Agreed,
        run: str,
        peer: str,
        *,
        policy_name: str,
        round: Callable[[], int],
        allowed: Collection[str] = tuple(DTYPES),
    ) -> None:
        self._env = env
        self._agreed = agreed
        self._run = run
        self._peer = peer
        self._policy_name = policy_name
        self._round = round
        self._allowed = allowed
        self._lock = threading.Lock()  # guards the next three
        self._slots: deque[Slot] = deque()
        self._filled: set[tuple[int, int]] = set()
        self._written: deque[tuple[Slot, ProvenGroup, bytes]] = deque(maxlen=MOST_WRITTEN)
        self.seconds = 0.0
        """Time of the training thread spent on writing such groups, generating included."""

    def offer(self, slots: Sequence[Slot]) -> None:
        """Replace the slots for which groups are to be written."""
        with self._lock:
            self._filled &= {(slot.round, slot.slot) for slot in slots}
            self._slots = deque(
                slot for slot in slots if (slot.round, slot.slot) not in self._filled
            )

    def take(self) -> list[Made]:
        """Return the claims of the groups written since the last call."""
        with self._lock:
            written = list(self._written)
            self._written.clear()
        return [
            Made(
                slot,
                make_claim(
                    proven,
                    run=self._run,
                    round=slot.round,
                    peer=self._peer,
                    slot=slot.slot,
                    model=digest(held),
                ),
                proven.material,
                held,
            )
            for slot, proven, held in written
        ]

    def write(self, policy: Policy, seed: int, index: int) -> Claimed | None:
        with self._lock:
            slot = self._slots.popleft() if self._slots else None
            if slot is None or slot.round != self._round():
                return None
            self._filled.add((slot.round, slot.slot))
        began = time.perf_counter()
        at = Coordinates.of(self._env, seed, index)
        aside = self._aside(seed, index) if slot.planted else None
        if slot.planted and aside is None:
            return None
        held = snapshot(policy)
        proven = prove(
            policy,
            self._env,
            at,
            self._agreed,
            seed_of(self._run, slot.round, self._peer, slot.slot, at.hash),
            policy_name=self._policy_name,
            snapshot_bytes=len(held),
            planted_prompt=aside,
            allowed=self._allowed,
        )
        with self._lock:
            self._written.append((slot, proven, held))
        self.seconds += time.perf_counter() - began
        return Claimed(proven.completions, slot.planted)

    def _aside(self, seed: int, index: int) -> str | None:
        """Return the prompt of another question, or None if none was found: an answer to the same
        one would be a right claim.
        """
        asked = self._env.made.question(seed, index).prompt
        others = (
            self._env.made.question(seed, index + ASIDE + number).prompt for number in range(ASIDES)
        )
        return next((prompt for prompt in others if prompt != asked), None)


# Calibration of a policy: honest claims, measured on this machine for each pair of dtypes of prover
# and verifier.

QUESTIONS = 2**61  # the seed of the questions
Progress = Callable[[int, int], None]
"""(claims done, of how many)"""


def self_calibrate(
    policy: Policy,
    env: Env,
    agreed: Agreed,
    *,
    policy_name: str,
    claims: int,
    dtypes: Sequence[Dtype] = ("float32",),
    progress: Progress = lambda done, of: None,
    across: bool = True,
) -> Calibration:
    """Calibrate with ``claims`` honest claims of ``policy`` for each pair of ``dtypes``, or each of
    them with itself if not ``across``; the policy does not change.

    Raises VerifyError for fewer than 20 claims, or if the policy computes nonsense in one of the
    dtypes.
    """
    if claims < FEWEST:
        raise VerifyError(
            f"A calibration needs at least {FEWEST} claims, not {claims}: ask for more."
        )
    sides = {dtype: copy.deepcopy(policy) for dtype in dtypes}
    for dtype, own in sides.items():
        own.module.to(DTYPES[dtype]).eval()
    evidence: dict[Pair, list[Evidence]] = {}
    for number, prover in enumerate(sides):
        for claim in range(claims):
            progress(number * claims + claim, len(sides) * claims)
            at = Coordinates.of(env, QUESTIONS, claim)
            prompt = env.made.question(at.seed, at.index).prompt
            seed = seed_of("calibration", claim, prover, 0, at.hash)
            try:
                group = write(sides[prover], prompt, agreed, seed)
                proof = ACTIVATIONS.make(group.states)
                rows = [one.tokens for one in group.completions]
                for verifier in sides if across else (prover,):
                    for name, found in examine(
                        sides[verifier], prompt, rows, proof, agreed, seed
                    ).items():
                        evidence.setdefault(Pair(name, policy_name, prover, verifier), []).append(
                            found
                        )
            except ValueError as error:
                raise VerifyError(
                    f"The policy cannot be calibrated in {prover} ({error}): leave that dtype out."
                ) from error
    progress(len(sides) * claims, len(sides) * claims)
    made = Calibration()
    for pair, found_of in evidence.items():
        made.add(pair, found_of)
    return made


def read_calibration(path: Path, policy_name: str, provers: Collection[str]) -> Calibration:
    """Read a file of ``shoal verify calibrate``, to check claims of that policy by, each in its own
    dtype or in float32.

    Raises VerifyError if it cannot be read, or misses one of ``provers``' dtypes: abstaining costs
    reputation.
    """
    found = _loaded(path)
    own = own_dtypes(found, policy_name, provers)
    wanted = {
        Pair(
            fingerprint.name, policy_name, prover, prover if prover in own else "float32"
        ): fingerprint.features
        for prover in provers
        for fingerprint in (ACTIVATIONS, SAMPLING)
    }
    if any(
        pair in found.pairs and found.pairs[pair].features != features
        for pair, features in wanted.items()
    ):
        raise VerifyError(
            f"The calibration '{path}' was made by a version of shoal that measured other things: "
            "make another with `shoal verify calibrate`, or remove it."
        )
    if any(pair not in found.pairs for pair in wanted):
        raise VerifyError(
            f"The calibration '{path}' says nothing about {policy_name!r} in "
            f"{' and '.join(provers)}: make another with `shoal verify calibrate`, or remove it."
        )
    return found


def own_dtypes(known: Calibration, policy_name: str, provers: Collection[str]) -> tuple[str, ...]:
    """Return those of ``provers``' dtypes that ``known`` can judge in the same dtype."""
    names = ACTIVATIONS.name, SAMPLING.name
    return tuple(
        one
        for one in provers
        if all(Pair(name, policy_name, one, one) in known.pairs for name in names)
    )


log = logging.getLogger(__name__)

CLAIMS = "claims"  # their folder, within the node's
SELF_CLAIMS = 128  # honest claims of its own that a node without a calibration measures
CALIBRATION = (
    "calibration"  # file of `shoal verify calibrate` in a node's folder, where there is one
)
KEPT = 256  # claims in the node's folder
PENDING = 20  # rounds in which a claim can still be checked, disputes included


class CompletionClaims:
    """Claims about the completions of ``task``: how they are made, and how they are checked.

    ``clock``: Unix seconds.

    All methods are for the thread of verification; each own claim is made once.

    Raises VerifyError if the node's folder holds a calibration that cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        terms: Terms,
        task: RLTask,
        network: SwarmNetwork,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._network = network
        self._folder = settings.node.run_folder / CLAIMS
        self._agreed = Agreed(terms.temperature, terms.max_tokens, terms.group)
        self._policy_name = terms.policy
        self._env = task.env
        self._policy: Policy = copy.deepcopy(task.policy)  # training goes on changing its own
        self._dtypes = cast("tuple[Dtype, ...]", tuple(dict.fromkeys(("float32", terms.dtype))))
        path = settings.node.run_folder / CALIBRATION
        self._calibration = (
            read_calibration(path, self._policy_name, self._dtypes) if path.exists() else None
        )
        self._round: Callable[[], int] = lambda: int(clock() // settings.verify.round_s)
        self.claimer = Claimer(
            self._env,
            self._agreed,
            network.swarm,
            network.me,
            policy_name=self._policy_name,
            round=self._round,
            allowed=self._dtypes,
        )
        task.claim(self.claimer.write)

    def prepare(self, notify: Callable[[str], None]) -> Checker:
        """Calibrate on honest claims, once before all that follows; ``notify`` is given sentences
        for people.
        """
        self._hand_out_again()
        known = self._calibration
        if known is None:
            known = self_calibrate(
                self._policy,
                self._env,
                self._agreed,
                policy_name=self._policy_name,
                claims=SELF_CLAIMS,
                dtypes=self._dtypes,
                across=False,
            )
            notify(f"measured {SELF_CLAIMS} honest claims of its own, to check others by")
        return Checker(
            lambda: self._policy,
            self._env,
            self._agreed,
            known,
            self._policy_name,
            allowed=self._dtypes,
            own=own_dtypes(known, self._policy_name, self._dtypes),
        )

    def _hand_out_again(self) -> None:
        """Serve the claims of before a restart again, or they would count as withheld; the newest
        last, which is kept longest.
        """
        oldest = self._round() - PENDING
        for path in sorted(
            self._folder.glob(f"*{CLAIM}"), key=lambda path: path.stat().st_mtime_ns
        )[-KEPT:]:
            with contextlib.suppress(VerifyError):
                stored = load_claim(path)
                claim = stored.claim
                if (
                    claim.peer == self._network.me
                    and claim.run == self._network.swarm
                    and claim.round >= oldest
                ):
                    for body in filter(
                        None, (stored.material, stored.snapshot)
                    ):  # a crash may leave an empty file
                        self._network.put(body)

    def keep(self, signed: Signed, material: bytes, snapshot: bytes | None) -> None:
        """Store a claim of this node, or one that it checked, for `shoal verify`."""
        try:
            save_claim(self._folder, signed, material, self._agreed, snapshot, KEPT)
        except VerifyError as error:
            log.warning("%s", error)


def inspect(
    stored: Stored, model: str, env: str | None, calibration: Path | None, claims: int
) -> Finding:
    """Check ``stored`` with the policy that the user names; if a ``calibration`` is needed and not
    given, one is made from ``claims`` honest claims of the same snapshot.

    Raises NotCheckable and other ShoalErrors if this node cannot tell. Only built-in code, or code
    that the user names, is loaded.
    """
    use_threads()
    if not stored.signed:
        return Finding(False, "The claim is not signed by the peer that it names.")
    if digest(stored.material) != stored.claim.fingerprint:
        return Finding(False, "The material is not the one that the claim names.")
    try:
        material = decode_material(stored.material)
    except MessageError as error:
        return Finding(False, str(error))
    made = _environment(material, env)
    name = policy_label(model)
    if stored.snapshot is None:
        raise NotCheckable(
            f"The claimed policy's weights {stored.claim.model.hex()}.safetensors are not beside "
            "the claim's file: put them there."
        )
    if material.policy != name:
        raise NotCheckable(
            f"The claim is of the policy {material.policy!r}, not of {name!r}: name it with "
            "--model."
        )

    def make() -> Policy:
        return load_policy(
            "tiny:copy:0" if name == "tiny" else model, made, 0
        )  # the snapshot has all of tiny

    known = _loaded(calibration) if calibration else Calibration()
    own = own_dtypes(known, name, [material.dtype]) if calibration else (material.dtype,)
    checker = Checker(make, made, stored.agreed, known, name, own=own)
    try:
        return checker.check(stored.claim, stored.material, stored.snapshot)
    except NotCalibrated:
        if calibration is not None:
            raise
    # All tests that need no calibration have passed, so the policy holds the claimed weights.
    policy = checker.policy_for(material.dtype)
    honest = self_calibrate(
        policy, made, stored.agreed, policy_name=name, claims=claims, dtypes=[material.dtype]
    )
    checker.calibration.pairs.update(honest.pairs)
    return checker.check(stored.claim, stored.material, stored.snapshot)


def _environment(material: Material, spec: str | None) -> Env:
    try:
        options = cast("dict[str, Option]", json.loads(material.env_config))
    except (ValueError, RecursionError):
        options = {}
    if spec is None and not re.fullmatch(
        r"[a-z0-9_]{1,64}", material.env
    ):  # only a user decides what is imported
        raise NotCheckable(
            f"The claim is about {material.env!r}, which is not built in: name its file with --env."
        )
    return load_env(spec or material.env, options if isinstance(options, dict) else {})


def _loaded(path: Path) -> Calibration:
    try:
        return load_calibration(path)
    except CalibrationError as error:
        raise VerifyError(f"The calibration {error}.") from error


def report(stored: Stored, finding: Finding) -> dict[str, Any]:
    """Return the object that the command prints with ``--json``."""
    claim = stored.claim
    about = {
        "claim": claim.id.hex(),
        "peer": claim.peer,
        "run": claim.run,
        "round": claim.round,
        "slot": claim.slot,
    }
    with contextlib.suppress(MessageError):
        material = decode_material(stored.material)
        about |= {"dtype": material.dtype, "kernel": material.kernel}
    found = {
        "accepted": finding.accepted,
        "reason": finding.reason,
        "statistics": finding.statistics,
        "seconds": finding.seconds,
    }
    return {**found, **about, "model": claim.model.hex()}


def summary(report: dict[str, Any]) -> str:
    head = "accepted" if report["accepted"] else "refused"
    lines = [
        f"{head}: {report['reason']}",
        f"claim {report['claim'][:16]} of {report['peer']}, round {report['round']}",
    ]
    if "dtype" in report:
        lines.append(f"  computed in {report['dtype']} by {report['kernel']}, as its author says")
    lines += [f"  {name}: {value:.4g}" for name, value in report["statistics"].items()]
    return "\n".join(lines)


def calibrate_spec(
    model: str,
    env: str,
    dtypes: Sequence[str],
    claims: int,
    rate: float,
    out: Path,
    *,
    group: int,
    max_tokens: int,
    temperature: float,
    progress: Progress,
) -> dict[str, Any]:
    """Calibrate the policy named ``model`` into ``out``; return the object of ``shoal verify
    calibrate --json``.

    Its ``warning`` is empty unless there are too few claims for ``rate``. Raises VerifyError as
    `self_calibrate`, or if the file cannot be written.
    """
    use_threads()
    made = load_env(env, {})
    policy = load_policy(model, made, 0)
    agreed = Agreed(temperature, max_tokens or policy.max_tokens, group)
    sides = [cast(Dtype, dtype) for dtype in dtypes]
    name = policy_label(model)
    found = self_calibrate(
        policy, made, agreed, policy_name=name, claims=claims, dtypes=sides, progress=progress
    )
    warning = next(iter(found.pairs.values())).warning(rate)
    try:
        save_calibration(found, out)
    except OSError as error:
        raise VerifyError(
            f"Cannot write {str(out)!r} ({error.strerror}): choose another file or its permissions."
        ) from error
    pairs = [f"{prover} -> {verifier}" for prover in sides for verifier in sides]
    warning = warning[:1].upper() + warning[1:]
    return {
        "policy": name,
        "claims": claims,
        "rate": rate,
        "pairs": pairs,
        "warning": warning,
        "out": str(out),
    }
