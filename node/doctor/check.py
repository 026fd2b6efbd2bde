"""Checks: what one is, what comes of it, and running them in order.

Each has a deadline; a check that needs a failed one is skipped.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.node.exit_code import ExitCode
from shoal.node.user_code import explained
from shoal.swarm.errors import ShoalError

MAX_REASON_CHARS = 300

Verdict = Literal["ok", "note", "failed", "skipped"]


class FaultError(ShoalError):
    """Raised by a check for what prevents training here, or joining the swarm."""


class Note(ShoalError):
    """Raised by a check for something worth knowing that does not prevent training."""


class Skip(ShoalError):
    """Raised by a check that cannot run here."""


@dataclass(frozen=True)
class CheckOutcome:
    """Outcome of a check.

    ``said``: one sentence; after a failure what happened and what to do. ``seconds`` it took.

    ``trace``: the traceback of the user's own code, if that failed; "" if it returned something
    wrong.
    """

    check: str
    outcome: Verdict
    said: str
    seconds: float = 0.0
    trace: str | None = None


Tell = Callable[[CheckOutcome], None]


@dataclass(frozen=True)
class Check:
    """One thing that is checked.

    ``run`` returns in a few words what is well, or raises ShoalError. It may report findings of its
    own before.

    ``needs``: names of earlier checks. ``code``: exit code of `shoal doctor` if this is the first
    that fails. ``seconds``: time limit, after which its thread is abandoned.
    """

    name: str
    code: ExitCode
    run: Callable[[Tell], str]
    needs: tuple[str, ...] = ()
    seconds: float = 20.0


def examine(
    checks: Sequence[Check], tell: Tell = lambda finding: None
) -> tuple[list[CheckOutcome], ExitCode]:
    """Run all ``checks``; return all findings and the code of the first failure.

    ``tell`` gets each finding at once.
    """
    findings: list[CheckOutcome] = []
    # By check that failed or was skipped the failed check that caused it.
    cause: dict[str, str] = {}
    code = ExitCode.OK

    def note(finding: CheckOutcome) -> None:
        findings.append(finding)
        tell(finding)

    for check in checks:
        blocked = next((cause[name] for name in check.needs if name in cause), None)
        if blocked is not None:
            cause[check.name] = blocked
            note(CheckOutcome(check.name, "skipped", f"needs {blocked!r}, see there"))
            continue
        finding = _run(check, note)
        if finding.outcome in ("failed", "skipped"):
            cause[check.name] = check.name
        if finding.outcome == "failed" and code == ExitCode.OK:
            code = check.code if finding.trace is None else ExitCode.BAD_INPUT
        note(finding)
    return findings, code


def _run(check: Check, note: Tell) -> CheckOutcome:
    """Run one check in a thread of its own, which is abandoned when its time is up."""
    began = time.monotonic()
    ended: list[CheckOutcome] = []
    late = threading.Event()

    def tell(finding: CheckOutcome) -> None:
        if not late.is_set():
            note(finding)

    def work() -> None:
        outcome, said, trace = _outcome(check, tell)
        seconds = round(time.monotonic() - began, 3)
        ended.append(CheckOutcome(check.name, outcome, said, seconds, trace))

    thread = threading.Thread(target=work, name=f"doctor-{check.name}", daemon=True)
    thread.start()
    thread.join(check.seconds)
    if ended:
        return ended[0]
    late.set()
    said = (
        f"this took longer than {check.seconds:g} s and was given up: the machine may be "
        "overloaded, try again."
    )
    return CheckOutcome(check.name, "failed", said, round(time.monotonic() - began, 3))


def _outcome(check: Check, tell: Tell) -> tuple[Verdict, str, str | None]:
    """Run ``check``; return what came of it, a sentence, and a traceback of the user's own code.

    No error of one check stops the others.
    """
    try:
        return "ok", check.run(tell), None
    except Note as note:
        return "note", str(note), getattr(note, "trace", None)
    except Skip as skip:
        return "skipped", str(skip), getattr(skip, "trace", None)
    except ShoalError as error:
        return "failed", str(error), getattr(error, "trace", None)
    except Exception as error:
        own = explained(error)
        if own is not None:
            return "failed", str(own), getattr(own, "trace", "")
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
        what = f"{type(error).__name__}: {error}".split("\n")[0][:MAX_REASON_CHARS]
        said = f"this check itself failed ({what}, in {where}): please report it."
        return "failed", said, None
