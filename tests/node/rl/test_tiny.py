"""The small policy: what it says of its own completions is what it computes for them afterwards."""

import copy
import math

import pytest
import torch

from shoal.node.rl.policy import PolicyError
from shoal.node.rl.sampling import chances, draw
from shoal.node.rl.strings import Strings
from shoal.node.rl.tiny import ALPHABET, END, HABITS, LONGEST_PROMPT, Tiny, Warm

PROMPTS = ["last: abc", "reverse: fedc", "x", ""]


def test_log_probs_of_generation_are_those_of_a_whole_pass(tiny):
    for temperature in (1.0, 0.5):
        groups = tiny.generate(PROMPTS, 3, temperature=temperature, max_tokens=9, seed=5)
        flat = [
            (prompt, one) for prompt, group in zip(PROMPTS, groups, strict=True) for one in group
        ]
        logs, mask = tiny.log_probs(
            [prompt for prompt, _ in flat], [one.tokens for _, one in flat], temperature
        )
        assert mask.sum(1).tolist() == [len(one.tokens) for _, one in flat]
        for row, kept, (_, one) in zip(logs, mask, flat, strict=True):
            torch.testing.assert_close(row[kept], torch.tensor(one.log_probs), atol=2e-5, rtol=0)


def test_a_prompt_is_answered_alike_whatever_stands_beside_it(tiny):
    together = tiny.generate(PROMPTS, 1, temperature=0.0, max_tokens=9, seed=0)
    alone = [
        tiny.generate([prompt], 1, temperature=0.0, max_tokens=9, seed=3)[0] for prompt in PROMPTS
    ]
    assert [group[0].tokens for group in together] == [group[0].tokens for group in alone]


def test_the_same_seed_gives_the_same_completions(tiny):
    first, again, other = (
        tiny.generate(PROMPTS, 8, temperature=1.0, max_tokens=9, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_a_completion_is_its_text_and_its_end(tiny):
    found = [
        one
        for group in tiny.generate(PROMPTS, 16, temperature=1.0, max_tokens=5, seed=2)
        for one in group
    ]
    assert {one.finish for one in found} == {"stop", "length"}
    for one in found:
        ended = one.finish == "stop"
        assert len(one.tokens) == len(one.log_probs) <= 5
        assert (one.tokens[-1] == END) == ended
        if "?" not in one.text:
            assert tiny.encode(one.text, ended) == list(one.tokens)


def test_the_end_is_trained(tiny):
    tokens = tiny.encode("ab", True)
    (logs, mask), module = tiny.log_probs(["q"], [tokens], 1.0), tiny.module
    assert mask.tolist() == [[True] * 3]
    grads = torch.autograd.grad(logs[0, 2], [module.head.weight])
    assert float(grads[0][END].abs().sum()) > 0


def test_long_and_foreign_text_is_bounded(tiny):
    logs, mask = tiny.log_probs(
        ["é" * 1000, "a"], [tiny.encode("ü" * 1000, True), tiny.encode("b", True)], 1.0
    )
    assert mask.sum(1).tolist() == [256 - LONGEST_PROMPT - 1, 2]
    assert bool(logs.isfinite().all())
    assert (
        len(tiny.generate(["a" * 1000], 1, temperature=1.0, max_tokens=1000, seed=0)[0][0].tokens)
        <= 256 - LONGEST_PROMPT
    )
    assert len(ALPHABET) == 95


def test_the_warm_start_learns_the_habit_and_sometimes_the_rule():
    env = Strings("last", letters=3)
    policy = Tiny(env, "copy", seed=0, width=32, warm=Warm(steps=250, batch=32, right=0.4))
    questions = [env.question(9, index) for index in range(40)]
    words = [question.prompt.split()[-1] for question in questions]
    prompts = [question.prompt for question in questions]
    greedy = [
        group[0].text
        for group in policy.generate(prompts, 1, temperature=0.0, max_tokens=9, seed=0)
    ]
    drawn = policy.generate(prompts, 16, temperature=1.0, max_tokens=9, seed=0)
    right = (
        sum(
            one.text == q.answer for q, group in zip(questions, drawn, strict=True) for one in group
        )
        / 640
    )
    habit = (
        sum(
            one.text == HABITS["copy"](word)
            for word, group in zip(words, drawn, strict=True)
            for one in group
        )
        / 640
    )
    assert (
        sum(text == question.answer for text, question in zip(greedy, questions, strict=True)) <= 20
    )
    assert 0.15 < right < 0.55
    assert habit > 0.2


def test_making_one_leaves_the_global_random_numbers_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = Tiny(Strings(), seed=4, width=16, warm=Warm(steps=2, batch=4))
    assert torch.equal(before, torch.get_rng_state())
    second = Tiny(Strings(), seed=4, width=16, warm=Warm(steps=2, batch=4))
    for left, right in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(left, right)
    assert all(parameter.grad is None for parameter in copy.deepcopy(first).module.parameters())


def test_tokens_are_drawn_by_their_probabilities():
    """Tokens are drawn with their probabilities and none that cannot come."""
    logits = torch.tensor(
        [-torch.inf, 0.0, math.log(3.0), -torch.inf, math.log(4.0), -torch.inf]
    )  # 1/8, 3/8, 4/8
    for chance, token in [
        (0.0, 1),
        (0.1249, 1),
        (0.1251, 2),
        (0.4999, 2),
        (0.5001, 4),
        (1 - 2**-24, 4),
    ]:
        drawn, log = draw(logits[None], 1.0, torch.tensor([chance]))
        assert drawn.tolist() == [token]
        assert log.exp().tolist() == pytest.approx([{1: 1 / 8, 2: 3 / 8, 4: 4 / 8}[token]])
    drawn, _ = draw(
        logits.expand(4096, -1),
        0.5,
        chances(torch.Generator().manual_seed(0), 1, 4096, torch.device("cpu"))[0],
    )
    of_26 = torch.bincount(drawn, minlength=6) / 4096 * 26  # 1, 9 and 16 at half the temperature
    torch.testing.assert_close(
        of_26, torch.tensor([0.0, 1, 9, 0, 16, 0]), rtol=0.0, atol=26 * 3 * 0.5 / 64
    )


def test_a_policy_whose_weights_are_no_numbers_says_so(tiny):
    with torch.no_grad():
        tiny.module.head.weight.fill_(torch.nan)
    with pytest.raises(PolicyError, match="not finite any more"):
        tiny.generate(["x"], 1, temperature=1.0, max_tokens=3, seed=0)
