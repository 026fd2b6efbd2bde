"""Errors of a node's own code, planted in the trials of two real nodes, as those who look see them
while training goes on.
"""

import json
from pathlib import Path

import pytest

from shoal.node.exit_code import ExitCode

FAILING = f"{Path(__file__).with_name('failing_trial_task.py')}:Failing"
PLANTED = "RuntimeError: planted in the trial"
NAMES = ["anna", "bert"]


@pytest.mark.ci
@pytest.mark.slow(reason="two real nodes, and commands that look at them")
def test_errors_of_its_own_are_seen_by_status_and_doctor(shoal, eventually):
    """Mutants: a node's record has none of them; status leaves them out, in JSON or in words;
    doctor looks at another event of the metrics.
    """

    def start(verb, what, name, *more):
        folder = ("--folder", shoal.home / "runs" / name)
        return shoal.start(verb, *what, *shoal.own(name), *folder, "--task", FAILING, *more)

    settings = {"outer.check_loss": "true", "swarm.start_when": len(NAMES)}
    given = [f"--set={name}={value}" for name, value in settings.items()]
    nodes = [start("up", [], "anna", "--every", 5, "--steps", 0, *given)]
    link = nodes[0].line()
    nodes.append(start("join", [link], "bert"))
    for name in NAMES:
        eventually(lambda name=name: caught(shoal, name), 60, f"an error of {name}'s own")

    def seen():
        members = shoal.start("status", link, "--json").json()["members"]
        counts = {member["name"]: member["faults"]["internal_errors"] for member in members}
        return counts.keys() == {*NAMES} and all(counts.values())

    eventually(seen, 90, "records with the errors")
    status = shoal.start("status", link)
    assert status.wait() == ExitCode.OK, status.said()
    for name in NAMES:
        (said,) = [line for line in status.lines if f"{name} met " in line]
        assert "of its own, in the code of shoal or of its task and not in the network" in said

    doctor = shoal.start("doctor", "--json")
    doctor.wait()
    (report,) = map(json.loads, doctor.lines)
    (run,) = [check for check in report["checks"] if PLANTED in check["said"]]
    assert (run["check"], run["outcome"]) == ("run", "note")

    shoal.interrupt(*nodes)
    for name in NAMES:
        result = shoal.result(f"runs/{name}")
        assert PLANTED in result["internal_errors"]["trial"]["first"]


def caught(shoal, name):
    events = shoal.metrics(f"runs/{name}")
    return [event for event in events if event["event"] == "internal_errors" and event["trial"]]
