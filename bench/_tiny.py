"""The world of `bench/sapo.py --policy tiny`: nodes with the small transformer of node/rl/tiny.py and the built-in questions.

Every node begins with another wrong habit. Accuracy is that of greedy answers to held-out questions, which nobody trains on.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import torch

from bench._world import Completion, Group, Settings, World
from shoal.node.rl.environment import HELD_OUT, Strings
from shoal.node.rl.task import RolloutGroup as Learnt
from shoal.node.rl.task import loss_of, make_update
from shoal.node.rl.tiny import HABITS, Tiny
from shoal.optim.rl import TokenLoss

QUESTIONS = 4000  # in the world, none of them held out
ASKED = (500, 100)  # held-out questions: in the end, and in turn at the beginning of each round
TEMPERATURE = 1.0


@functools.lru_cache(maxsize=64)
def _warm(habit: str, seed: int) -> Tiny:
    return Tiny(Strings(), habit, seed=seed)


class Learner:
    """One node."""

    def __init__(self, number: int, prompts: Sequence[str], loss: TokenLoss, seed: int) -> None:
        names = list(HABITS)
        self.policy = copy.deepcopy(_warm(names[number % len(names)], seed))
        self.prompts, self.loss, self.drawn, self.looks = prompts, loss, seed * 1_000_003 + number, 0
        self.optimizer = torch.optim.AdamW(self.policy.module.parameters(), lr=self.policy.lr, betas=(0.9, 0.99), weight_decay=0.0)
        self.held_out = [Strings().question(HELD_OUT, index) for index in range(ASKED[0])]

    def complete(self, questions: Sequence[int], count: int) -> list[tuple[Completion, ...]]:
        self.drawn += 1_000_000_007
        prompts = [self.prompts[question] for question in questions]
        written = self.policy.generate(prompts, count, temperature=TEMPERATURE, max_tokens=self.policy.max_tokens, seed=self.drawn)
        return [tuple(Completion(one.text, one.log_probs) for one in group) for group in written]

    def learn(self, groups: Sequence[Group], rewards: Sequence[Sequence[float]]) -> None:
        update = make_update([self._learnt(group, given) for group, given in zip(groups, rewards, strict=True)])
        if update is None:
            return
        loss, _ = loss_of(self.policy, update, self.loss, TEMPERATURE)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()

    def _learnt(self, group: Group, rewards: Sequence[float]) -> Learnt:
        # A character is a token, so one log-probability more is that of the end.
        tokens = [self.policy.encode(one.text, len(one.log_probs) != len(one.text)) for one in group.completions]
        known = [
            one.log_probs if len(one.log_probs) == len(row) else None for one, row in zip(group.completions, tokens, strict=True)
        ]
        return Learnt(self.prompts[group.question], tuple(map(tuple, tokens)), tuple(rewards), tuple(known))

    def accuracy(self, last: bool = False) -> float:
        asked = self.held_out
        if not last:
            start = self.looks * ASKED[1] % len(asked)
            asked = asked[start : start + ASKED[1]]
            self.looks += 1
        prompts = [question.prompt for question in asked]
        answers = self.policy.generate(prompts, 1, temperature=0.0, max_tokens=self.policy.max_tokens, seed=0)
        return sum(question.answer == one.text for question, (one,) in zip(asked, answers, strict=True)) / len(asked)


def tiny_world(settings: Settings, seed: int) -> World:
    """The same questions for all nodes, each of which begins with a habit of its own."""
    env = Strings()
    held_out = {env.question(HELD_OUT, index).prompt for index in range(ASKED[0])}
    asked = [question for index in range(2 * QUESTIONS) if (question := env.question(seed, index)).prompt not in held_out]
    asked = asked[:QUESTIONS]
    right = [str(question.answer) for question in asked]
    # The next question's answer, unless that happens to be right: then something that never is.
    wrong = [other if other != answer else "?" for answer, other in zip(right, [*right[1:], "?"], strict=True)]
    prompts = [question.prompt for question in asked]
    policies = tuple(Learner(number, prompts, settings.loss, seed) for number in range(settings.nodes))
    return World(tuple(right), tuple(wrong), policies)
