"""Transformers as policies of bench/sapo.py: copies of one model, which learn as nodes of
`shoal up --task rl` do.

* ``tiny`` is the policy of `shoal demo --task rl` with its warm start. Every node begins with
  another wrong habit.
* ``small`` has a million parameters and a byte-pair vocabulary. All nodes begin alike, with what it
  learnt from solved questions.
* ``hf:DIR`` is any causal language model; where peft is installed only an adapter learns.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench._hacpo import UNCHANGED, Correction
from bench._world import Completion, Group, Settings, World
from shoal.node.rl.environment import HELD_OUT, Env, EnvError, Environment, Question
from shoal.node.rl.gym import Gym
from shoal.node.rl.hf import HF
from shoal.node.rl.loading import load_env, load_policy
from shoal.node.rl.policy import Policy
from shoal.node.rl.strings import RULES, Strings
from shoal.node.rl.tiny import HABITS, Tiny
from shoal.node.rl.update import RolloutGroup as Learnt
from shoal.node.rl.update import loss_of, make_update
from shoal.optim.rl.objective import Objective

TINY_QUESTIONS, QUESTIONS = 4000, 2000  # in the world, none of them held out
ASKED = (
    500,
    100,
)  # held-out questions: in the end, and (tiny) in turn at the beginning of each round
FAMILIES: dict[str, dict[str, int]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "basic_arithmetic": {"max_terms": 2, "max_digits": 2},
    "gcd": {"max_value": 200},
    "lcm": {"max_value": 20},
    "simple_equations": {"max_terms": 2, "max_value": 20},
    "base_conversion": {"max_base": 10, "max_value": 100},
}
"""Of reasoning-gym, such that answers are short and some questions are easy."""
WIDTH, LAYERS, VOCABULARY = 128, 4, 512
SMALLER_WIDTH, SMALLER_LAYERS = 32, 1
"""tiny: of the smaller policy of nodes that differ in size; those of `small` halve."""
BATCH, WARM_LR = 64, 2e-3
SMALL_LR, SMALL_TOKENS = 1e-4, 8  # at 3e-4 it forgets within 20 updates what it was taught
HF_WARM_LR, WRITTEN = 5e-5, 16
ROWS = 128  # at once on a GPU


class Families:
    """The families of FAMILIES in turn."""

    def __init__(self) -> None:
        self._gyms = [Gym(name, **options) for name, options in FAMILIES.items()]
        self.version = self._gyms[0].version

    def question(self, seed: int, index: int) -> Question:
        gym = self._gyms[index % len(self._gyms)]
        found = gym.question(seed, index)
        return Question(found.prompt, found.answer, (gym, found))

    def family(self, question: Question) -> int:
        """Return the place of the question's family in `FAMILIES`."""
        gym, _ = question.data
        return self._gyms.index(gym)

    def reward(self, question: Question, completion: str) -> float:
        gym, found = question.data
        return float(gym.reward(found, completion))


def environment(name: str) -> Env:
    """Make the environment `families`, or one that `shoal up --env` knows."""
    return Env(name, b"{}", Families()) if name == "families" else load_env(name, {})


class Learner:
    """One node.

    ``greedy``: accuracy is that of greedy answers to held-out questions, else the mean reward of
    what it wrote.
    """

    def __init__(
        self,
        policy: Policy,
        env: Env,
        asked: Sequence[Question],
        settings: Settings,
        *,
        seed: int,
        greedy: bool = False,
    ) -> None:
        self.policy, self.env, self.asked, self.settings, self.greedy = (
            policy,
            env,
            asked,
            settings,
            greedy,
        )
        self.drawn, self.looks, self.reward = seed, 0, 0.0
        self.seconds, self.tokens = {"write": 0.0, "judge": 0.0, "learn": 0.0}, 0
        learning = [
            parameter for parameter in policy.module.parameters() if parameter.requires_grad
        ]
        self.optimizer = torch.optim.AdamW(
            learning, lr=settings.rate or policy.lr, betas=(0.9, 0.99), weight_decay=0.0
        )
        self.held_out = [env.made.question(HELD_OUT, index) for index in range(ASKED[0])]

    def complete(self, questions: Sequence[int], count: int) -> list[tuple[Completion, ...]]:
        began = time.process_time()
        self.drawn += 1_000_000_007
        prompts = [self.asked[question].prompt for question in questions]
        written = self.policy.generate(
            prompts,
            count,
            temperature=self.settings.temperature,
            max_tokens=self.policy.max_tokens,
            seed=self.drawn,
        )
        found = [
            tuple(Completion(one.text, one.log_probs, one.tokens, one.finish) for one in group)
            for group in written
        ]
        self.tokens += sum(len(one.tokens) for group in found for one in group)
        self.seconds["write"] += time.process_time() - began
        given = [
            reward
            for question, group in zip(questions, found, strict=True)
            for reward in self.judge(question, group)
        ]
        self.reward = sum(given) / len(given)
        return found

    def judge(self, question: int, completions: Sequence[Completion]) -> tuple[float, ...]:
        """Return the environment's rewards."""
        began = time.process_time()
        rewards = self.env.rewards(self.asked[question], [one.text for one in completions])
        self.seconds["judge"] += time.process_time() - began
        return rewards

    def learn(
        self,
        groups: Sequence[Group],
        rewards: Sequence[Sequence[float]],
        correction: Correction = UNCHANGED,
    ) -> None:
        began = time.process_time()
        update = make_update(
            [self._learnt(group, given) for group, given in zip(groups, rewards, strict=True)]
        )
        if update is not None:
            advantages = correction.advantages(update.advantages, rewards)
            update = replace(update, advantages=advantages)
            loss = correction.loss(self.settings.loss, rewards)
            objective = Objective(loss, per=self.settings.per, max_tokens=self.policy.max_tokens)
            value, _ = loss_of(self.policy, update, objective, self.settings.temperature)
            self.optimizer.zero_grad()
            torch.autograd.backward(value)
            self.optimizer.step()
        self.seconds["learn"] += time.process_time() - began

    def _learnt(self, group: Group, rewards: Sequence[float]) -> Learnt:
        # Others' text is encoded anew, as a node does that only gets the text.
        tokens = [
            tuple(self.policy.encode(one.text, one.finish == "stop")) for one in group.completions
        ]
        known = [
            one.log_probs if one.tokens == row else None
            for one, row in zip(group.completions, tokens, strict=True)
        ]
        return Learnt(
            self.asked[group.question].prompt, tuple(tokens), tuple(rewards), tuple(known)
        )

    def accuracy(self, last: bool = False) -> float:
        if not (last or self.greedy):
            return self.reward
        asked = self.held_out
        if not last:
            start = self.looks * ASKED[1] % len(asked)
            asked = asked[start : start + ASKED[1]]
            self.looks += 1
        return greedy_reward(self.policy, self.env, asked)


def greedy_reward(policy: Policy, env: Env, asked: Sequence[Question]) -> float:
    answers = policy.generate(
        [one.prompt for one in asked], 1, temperature=0.0, max_tokens=policy.max_tokens, seed=0
    )
    return sum(
        env.rewards(question, [one.text])[0]
        for question, (one,) in zip(asked, answers, strict=True)
    ) / len(asked)


def questions(env: Env, seed: int, count: int) -> list[Question]:
    """Make questions of which none is held out. EnvError if there are too few."""
    held_out = {env.made.question(HELD_OUT, index).prompt for index in range(ASKED[0])}
    asked = [
        question
        for index in range(2 * count)
        if (question := env.made.question(seed, index)).prompt not in held_out
    ]
    if len(asked) < count // 2:
        raise EnvError(
            f"The environment {env.label!r} has too few questions that are not held out: choose "
            "another."
        )
    return asked[:count]


@functools.lru_cache(maxsize=64)
def _warm(habit: str, seed: int, is_smaller: bool = False) -> Tiny:
    if is_smaller:
        return Tiny(Strings(), habit, seed=seed, layers=SMALLER_LAYERS, width=SMALLER_WIDTH)
    return Tiny(Strings(), habit, seed=seed)


def tiny_world(settings: Settings, seed: int) -> World:
    """The same questions for all nodes, each of which begins with a habit of its own."""
    env = load_env("strings", {})
    asked = questions(env, seed, TINY_QUESTIONS)
    right = [str(question.answer) for question in asked]
    # The next question's answer, unless that happens to be right: then something that never is.
    wrong = [
        other if other != answer else "?"
        for answer, other in zip(right, [*right[1:], "?"], strict=True)
    ]
    habits = list(HABITS)
    policies = tuple(
        Learner(
            copy.deepcopy(_warm(habits[number % len(habits)], seed, is_smaller(settings, number))),
            env,
            asked,
            settings,
            seed=seed * 1_000_003 + number,
            greedy=True,
        )
        for number in range(settings.nodes)
    )
    rules = [list(RULES).index(question.prompt.partition(":")[0]) for question in asked]
    return World(tuple(right), tuple(wrong), policies, families=tuple(rules))


def is_smaller(settings: Settings, node: int) -> bool:
    return settings.unlike == "size" and node % 2 == 1


@functools.lru_cache(maxsize=2)
def prepare(settings: Settings, smaller: bool = False) -> tuple[Policy, Env]:
    """Return what all nodes begin with, or all those with the smaller policy."""
    env, folder = environment(settings.env), settings.base
    if smaller:
        folder = folder.with_name(f"{folder.name}-half")
    if settings.solved:
        _teach(settings, env.made, folder, WIDTH // 2 if smaller else WIDTH)
    if settings.policy == "small":
        policy: Policy = _policy(*_loaded(folder))
    else:
        policy = load_policy(f"hf:{folder}" if settings.solved else settings.policy, env, 0)
        policy.max_tokens = WRITTEN
    if settings.device != "cpu":
        policy.module.to(settings.device)
        policy._rows = ROWS  # type: ignore[attr-defined]
    return policy, env


def language_world(settings: Settings, seed: int) -> World:
    """The same questions for all nodes, and the same model unless they differ in size."""
    _, env = prepare(settings)
    asked = questions(env, seed, QUESTIONS)
    right = tuple(str(question.answer) for question in asked)
    policies = []
    for number in range(settings.nodes):
        policy, _ = prepare(settings, is_smaller(settings, number))
        own_seed = seed * 1_000_003 + number
        policies.append(Learner(copy.deepcopy(policy), env, asked, settings, seed=own_seed))
    families = None
    if isinstance(env.made, Families):
        families = tuple(map(env.made.family, asked))
    return World(right, ("",) * len(right), tuple(policies), policies[0].judge, families)


# What learns from solved questions first


def _teach(settings: Settings, env: Environment, folder: Path, width: int) -> None:
    """Make the model in ``folder`` from batches of solved questions, if it is not there yet.

    ``width``: of a small one.
    """
    if (folder / "config.json").exists():
        return
    is_small = settings.policy == "small"
    policy = (
        _untrained(env, width)
        if is_small
        else HF(*_loaded(Path(settings.policy.removeprefix("hf:"))), lr=SMALL_LR)
    )
    policy.module.to(settings.device)
    _learn_solved(policy, env, settings.solved, WARM_LR if is_small else HF_WARM_LR)
    policy.module.save_pretrained(folder)  # type: ignore[operator]
    policy._tokenizer.save_pretrained(folder)


def _loaded(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _policy(model: Any, tokenizer: Any) -> HF:
    policy = HF(model, tokenizer, lr=SMALL_LR)
    policy.max_tokens = SMALL_TOKENS
    return policy


def _untrained(env: Environment, width: int) -> HF:
    """Make the small model with random weights; its vocabulary from questions, digits apart.

    Its layers and heads are in proportion to its ``width``.
    """
    import tokenizers
    import transformers

    texts = [
        f"{one.prompt}\n{one.answer}"
        for index in range(1000)
        for one in [env.question(HELD_OUT - 1, index)]
    ]
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    raw.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=["<end>"], initial_alphabet=alphabet
        ),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=LAYERS * width // WIDTH,
        num_attention_heads=4 * width // WIDTH,
        num_key_value_heads=4 * width // WIDTH,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    return _policy(transformers.LlamaForCausalLM(config), tokenizer)


def _learn_solved(policy: HF, env: Environment, batches: int, lr: float) -> None:
    """Show right answers, each question once, none of a world or held out but by chance."""
    optimizer = torch.optim.AdamW(
        policy.module.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0
    )
    for step in range(batches):
        shown = [env.question(HELD_OUT - 1, step * BATCH + number) for number in range(BATCH)]
        logs, mask = policy.log_probs(
            [one.prompt for one in shown],
            [policy.encode(str(one.answer), True) for one in shown],
            1.0,
        )
        for group in optimizer.param_groups:
            group["lr"] = (
                lr
                * min(1.0, (step + 1) / 50)
                * (0.1 + 0.45 * (1 + math.cos(math.pi * step / batches)))
            )
        optimizer.zero_grad()
        torch.autograd.backward(-(logs * mask).sum() / mask.sum())
        optimizer.step()
