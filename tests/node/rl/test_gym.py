"""reasoning-gym's families, where the package is installed: never evaluated, never a credit for
nothing.
"""

import sys
import threading
from importlib.util import find_spec

import pytest

from shoal.node.rl.environment import EnvError
from shoal.node.rl.gym import NINE, Gym
from shoal.node.rl.loading import load_env

# Not by importing it: that takes half a second, also of who only collects.
pytestmark = pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="reasoning_gym is not installed"
)


def test_the_nine_of_the_paper(capsys):
    env = load_env("sapo9", {})
    families = set()
    for index in range(60):
        question = env.made.question(5, index)
        again = load_env("sapo9", {}).made.question(5, index)
        assert (question.prompt, question.answer) == (again.prompt, again.answer)
        assert env.rewards(question, [question.answer, "", "hm"]) == (1.0, 0.0, 0.0), question.data[
            0
        ]
        families.add(question.data[0])
    assert families == set(NINE)
    assert capsys.readouterr().out == ""


def test_two_threads_that_ask_leave_the_streams_as_they_were(monkeypatch):
    env, before = Gym("chain_sum"), sys.stdout
    plain, second, first_has_left = env._dataset, threading.Event(), threading.Event()

    def slow(family, seed):
        if threading.current_thread() is other:
            second.set()
            first_has_left.wait(5)
        else:
            other.start()
            second.wait(0.5)  # where threads exclude each other it comes later
        return plain(family, seed)

    other = threading.Thread(target=lambda: env.question(1, 2))
    monkeypatch.setattr(env, "_dataset", slow)
    env.question(1, 1)
    first_has_left.set()
    other.join(10)
    left, sys.stdout = sys.stdout, before
    assert left is before


@pytest.mark.parametrize(
    "family", ["binary_matrix", "countdown", "polynomial_multiplication", "puzzle24"]
)
def test_an_answer_is_never_evaluated(family, tmp_path):
    env = Gym(family)
    question = env.question(1, 1)
    spoor = tmp_path / "evaluated"
    assert env.reward(question, f"[open({str(spoor)!r}, 'w').write('x')]") == 0
    assert env.reward(question, f"__import__('pathlib').Path({str(spoor)!r}).touch()") == 0
    assert not spoor.exists()
    assert env.reward(question, f" {question.answer}\n") == (question.answer is not None)


def test_what_an_answer_breaks_is_worth_nothing():
    env = Gym("propositional_logic")
    assert env.reward(env.question(1, 1), "(" * 20_000) == 0


def judged(monkeypatch, family, text):
    """Return whether ``family`` itself is given ``text``, and the reward."""
    env = Gym(family)
    question = env.question(1, 1)
    _, dataset, _ = question.data
    given = []
    monkeypatch.setattr(dataset, "score_answer", lambda text, item: given.append(text) or 1.0)
    reward = env.reward(question, text)
    return given == [text], reward


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("propositional_logic", "∨".join("abcdefghijklmnopqrstuvwxyz")),
        ("propositional_logic", "P∨PP∨PPP∨PPPP"),
        ("propositional_logic", "P∨P P∨P  P"),
        ("propositional_logic", "∨".join("PPPPPPPPP")),
        ("propositional_logic", "¬" * 800),
        ("propositional_logic", "(" * 9 + "P"),
        ("propositional_logic", "(P ∧ Q)" * 3000),
        ("coin_flip", "1e99999999"),
        ("coin_flip", "1E+99999999"),
        ("coin_flip", "1_0e-9_999_999"),
        ("rush_hour", "F+99999999"),
        ("rush_hour", "A+1" * 201),
    ],
)
def test_an_answer_without_bound_is_not_judged(monkeypatch, family, text):
    """The fault: 25 letters made propositional_logic list 2^25 assignments of truth values."""
    assert judged(monkeypatch, family, text) == (False, 0.0)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("propositional_logic", " (¬P ∨ (Q ↔ R)) → ¬¬S\n"),
        ("propositional_logic", "∨".join("PPPPPPPP")),
        ("coin_flip", "6.103515625e-05"),
        ("coin_flip", "1/4"),
        ("rush_hour", "F+1 K+1 M-1\n"),
    ],
)
def test_an_answer_of_the_right_form_is_judged(monkeypatch, family, text):
    assert judged(monkeypatch, family, text) == (True, 1.0)


@pytest.mark.parametrize("family", ["coin_flip", "propositional_logic"])
def test_known_answers_have_the_form_that_is_judged(family):
    env = Gym(family)
    questions = [env.question(5, index) for index in range(40)]
    assert all(env.reward(question, question.answer) > 0 for question in questions)


def test_options_reach_the_family_and_mistakes_are_named():
    small = load_env("basic_arithmetic", {"max_digits": 1, "min_digits": 1, "max_terms": 2})
    assert all(len(small.made.question(1, index).answer) <= 3 for index in range(20))
    for spec, options, words in [
        ("basic_arithmetics", {}, "no environment 'basic_arithmetics'"),
        ("sapo9", {"max_digits": 1}, "takes no options"),
        ("basic_arithmetic", {"digits": 1}, "cannot be made"),
    ]:
        with pytest.raises(EnvError, match=words):
            load_env(spec, options)
