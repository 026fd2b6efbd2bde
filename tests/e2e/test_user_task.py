"""What users meet first: a task of their own under the defaults of a private and a public swarm,
with an even and an odd number of nodes, one of which is killed and comes back, or comes late.
"""

import signal
from pathlib import Path

import pytest

TASK = f"{Path(__file__).with_name('user_task.py')}:Words"
EVERY = 10
ROUNDS = 16
COURSES = ("straight", "killed", "late")


@pytest.mark.ci
@pytest.mark.slow(reason="two or three real nodes, started twice")
@pytest.mark.parametrize("course", COURSES)
@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("swarm", ["private", "public"])
def test_a_users_task_is_trained_together(shoal, eventually, swarm, nodes, course):
    run(shoal, eventually, swarm, nodes, course)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("swarm", "nodes", "course"), [("public", 2, "straight"), ("private", 2, "killed")]
)
def test_a_users_task_in_short(shoal, eventually, swarm, nodes, course):
    """Two of the combinations above, in every run."""
    run(shoal, eventually, swarm, nodes, course)


def run(shoal, eventually, swarm, nodes, course):
    straight = course == "straight"
    # What is killed or late takes its time to start, on a busy machine: the others train on.
    steps = ["--steps", ROUNDS * EVERY if straight else 0]
    saving = ["--set", "node.checkpoint_every_rounds=1"]
    together = nodes - (course == "late")
    settings = ["--every", EVERY, "--set", f"swarm.start_when={together}", *steps, *saving]
    if swarm == "public":
        settings.append("--public")
    names = ["anna", "bert", "cleo"][:nodes]
    accepted = ["--yes"] if swarm == "public" else []

    def start(verb, what, name, *more):
        return shoal.start(verb, *what, *shoal.own(name), "--task", TASK, *saving, *more)

    def exchanged(name, skip=0):
        return sum(event["partner"] is not None for event in shoal.rounds(name)[skip:])

    running = {"anna": start("up", [], "anna", *settings)}
    link = running["anna"].line()
    for name in names[1:together]:
        running[name] = start("join", [link], name, *accepted)
    last = names[-1]
    before = 0
    if course == "late":
        eventually(lambda: len(shoal.rounds("anna")) >= 8, 60, "rounds without the late one")
        running[last] = start("join", [link], last, *accepted)
    if course == "killed":
        eventually(lambda: exchanged(last) >= 4, 60, "exchanges before it is killed")
        running[last].signal(signal.SIGKILL)
        running[last].wait()
        before = len(shoal.rounds(last))
        running[last] = start("join", [link], last, "--resume", *accepted)

    if straight:
        for name in names:
            assert running[name].wait(120) == 0, running[name].said()
    else:
        eventually(lambda: exchanged(last, before) >= 4, 90, f"exchanges of {last}")
        shoal.interrupt(*running.values())
    for name in names:
        result = shoal.result(name)
        assert result["exchanges"]["with_partner"] > 0
        assert result["internal_errors"] == {}, running[name].said()
        if straight:
            assert result["loss"]["held_out"] < 0.7 * result["loss"]["held_out_first"]
            assert result["last_average"]["members"] == names
    if straight and nodes == 2:
        # One in ten may pass while the other is starting.
        exchanges = shoal.result("anna")["exchanges"]
        alone = exchanges["without_partner"]
        assert alone <= 0.1 * exchanges["with_partner"]
