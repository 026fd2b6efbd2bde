"""Environments: the same questions everywhere, judged alike, and one sentence for each mistake."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.rl.environment import HELD_OUT, GuardedEnvironment, Question, canonical
from shoal.node.rl.loading import load_env, load_policy
from shoal.node.rl.policy import PolicyError
from shoal.node.rl.strings import RULES, Strings
from shoal.node.user_code import UserCodeError

ADD = f"{Path(__file__).parents[3] / 'examples' / 'add_env.py'}:Add"


def test_questions_are_the_same_in_another_process():
    code = (
        "from shoal.node.rl.strings import Strings\nfor i in range(20): "
        "print(Strings().question(7, i).prompt)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert told.splitlines() == [Strings().question(7, index).prompt for index in range(20)]


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**53))
def test_the_known_answer_is_right_and_others_are_not(seed, index):
    env = Strings()
    question = env.question(seed, index)
    family, word = question.prompt.split(": ")
    assert question.answer == RULES[family](word)
    assert 3 <= len(word) <= 4
    assert set(word) <= set("abcdef")
    assert env.reward(question, question.answer) == 1
    assert env.reward(question, question.answer + " ") == 0
    assert env.reward(question, "") == 0


def test_all_families_come_up():
    asked = [Strings().question(1, index).prompt.split(":")[0] for index in range(200)]
    assert all(asked.count(family) > 20 for family in RULES)


def test_the_identity_of_an_environment():
    env = load_env("strings", {"letters": 4, "families": "last"})
    assert (env.label, env.config) == ("strings", b'{"families":"last","letters":4}')
    assert env.config == canonical({"families": "last", "letters": 4})
    assert env.knows("strings", "1", env.config)
    assert not env.knows("strings", "2", env.config)
    assert not env.knows("strings", "1", b"{}")
    assert not env.knows("other", "1", env.config)


def test_an_environment_of_ones_own():
    env = load_env(ADD, {"largest": 9})
    assert env.label == "add_env.py:Add"
    question = env.made.question(3, 4)
    left, right = question.prompt.split(" + ")
    assert env.rewards(question, [str(int(left) + int(right)), "x"]) == (1.0, 0.0)


class Odd:
    version = "1"
    value = 0.0

    def question(self, seed, index):
        return Question("q")

    def reward(self, question, completion):
        return self.value


class Generous(Odd):
    value = 1.5


class Nonsense(Odd):
    value = float("nan")


class Broken(Odd):
    def question(self, seed, index):
        raise RuntimeError("no luck")


class Wordless(Odd):
    def question(self, seed, index):
        return "q"


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        (
            "strings",
            {"families": "last,first"},
            "no family 'first' of strings: choose of reverse, last",
        ),
        ("strings", {"letters": 0}, "1 to 26 letters"),
        ("strings", {"leters": 4}, "its options, which are families, letters"),
        ("no/such/file.py:Env", {}, "no file 'no/such/file.py' to load the environment"),
        ("What Ever", {}, "The environment 'What Ever' is not of the form"),
        (f"{__file__}:Generous", {}, "gave the reward 1.5: it must be a number from 0 to 1"),
        (f"{__file__}:Nonsense", {}, "gave the reward nan"),
        (f"{__file__}:Broken", {}, r"failed in question\(\): RuntimeError: no luck"),
        (f"{__file__}:Wordless", {}, "must return a Question"),
        (f"{__file__}:Path", {}, "needs version, question"),
    ],
)
def test_each_mistake_is_one_sentence(spec, options, words):
    with pytest.raises(UserCodeError, match=words) as raised:
        load_env(spec, options)
    assert "\n" not in str(raised.value)


def test_one_thread_at_a_time_calls_ones_own_environment():
    """The fault: training and verification called it together, which few environments bear."""
    rewarded = threading.Event()

    class Slow(Odd):
        overlapped = False

        def question(self, seed, index):
            other.start()
            self.overlapped = rewarded.wait(0.3)  # where threads exclude each other it comes later
            return Question("q")

        def reward(self, question, completion):
            rewarded.set()
            return 0.0

    slow = Slow()
    guarded = GuardedEnvironment(slow, "Slow")
    other = threading.Thread(target=guarded.reward, args=(Question("q"), "a"))
    guarded.question(1, 2)
    other.join(10)
    assert rewarded.is_set()
    assert not slow.overlapped


@pytest.mark.parametrize(
    ("spec", "words"),
    [("big", "no policy 'big'"), ("hf:", "no policy 'hf:'"), ("tiny:lazy", "no habit 'lazy'")],
)
def test_an_unknown_policy_is_one_sentence(spec, words):
    with pytest.raises(PolicyError, match=words):
        load_policy(spec, load_env("strings", {}), 0)


def test_held_out_questions_have_a_seed_that_records_can_carry():
    assert 0 <= HELD_OUT < 2**63
