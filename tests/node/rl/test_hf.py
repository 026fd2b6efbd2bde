"""Models of transformers, where it is installed: a random one of a few thousand parameters, and
(SHOAL_SLOW=1) a real one.
"""

from importlib.util import find_spec

import pytest
import torch

from shoal.node.config.rl_settings import RLSettings
from shoal.node.rl.environment import Env, canonical
from shoal.node.rl.gym import Gym
from shoal.node.rl.hf import HF, load_hf
from shoal.node.rl.policy import PolicyError
from shoal.node.rl.sampling import draw
from shoal.node.rl.strings import Strings
from shoal.node.rl.task import RLRound, RLTask
from shoal.node.rl.update import RolloutGroup, make_update
from shoal.node.task import Shard
from shoal.node.training.trainer import Trainer
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from tests.support.transformers_models import real_model, wants_real_model

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)
PROMPTS = ["a", "reverse: abc", "the longest of all the prompts"]


@pytest.fixture(scope="module")
def policy(folder):
    return load_hf(str(folder))


def test_log_probs_of_generation_are_those_of_a_whole_pass(policy, monkeypatch):
    monkeypatch.setattr(policy, "_rows", 8)  # of 21, so that some begin while others are written
    monkeypatch.setattr(policy, "_ends", {0, 5, 15, 25, 35, 45})
    for temperature in (1.0, 0.5):
        groups = policy.generate(PROMPTS, 7, temperature=temperature, max_tokens=9, seed=5)
        flat = [
            (prompt, one) for prompt, group in zip(PROMPTS, groups, strict=True) for one in group
        ]
        logs, mask = policy.log_probs(
            [prompt for prompt, _ in flat], [one.tokens for _, one in flat], temperature
        )
        for row, kept, (_, one) in zip(logs, mask, flat, strict=True):
            torch.testing.assert_close(row[kept], torch.tensor(one.log_probs), atol=2e-5, rtol=0)


def test_greedy_is_what_transformers_generates(policy, folder):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, (mine,) in zip(
        PROMPTS, policy.generate(PROMPTS, 1, temperature=0.0, max_tokens=9, seed=0), strict=True
    ):
        ids = torch.tensor([policy._prompt(prompt)])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=9,
            pad_token_id=0,
        )
        assert list(mine.tokens) == theirs[0, ids.shape[1] :].tolist()


def sliding(folder):
    import transformers

    torch.manual_seed(1)
    config = transformers.MistralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=6,
        eos_token_id=0,
        bos_token_id=None,
    )
    return HF(
        transformers.MistralForCausalLM(config),
        transformers.AutoTokenizer.from_pretrained(folder),
        lr=1e-3,
    )


@pytest.mark.parametrize("plain", [True, False])
def test_ended_row_makes_room(policy, folder, monkeypatch, plain):
    """A row that ends makes room and each completion is that of its prompt alone."""
    made = policy if plain else sliding(folder)
    monkeypatch.setattr(made, "_rows", 4)
    monkeypatch.setattr(
        made, "_ends", set(range(0, 96, 9))
    )  # so that some end early, some late and some never
    prompts = [f"{'long ' * (number % 4)}{number}" for number in range(11)]
    sizes, widths = [], []

    def look(module, args, given):
        sizes.append(len(given["input_ids"]))
        widths.append(given["attention_mask"].shape[1])

    hook = made.module.register_forward_pre_hook(look, with_kwargs=True)
    alone = [
        made.generate([prompt], 1, temperature=0.0, max_tokens=12, seed=0)[0][0]
        for prompt in prompts
    ]
    passes_alone = len(sizes)
    sizes.clear()
    together = [one for (one,) in made.generate(prompts, 1, temperature=0.0, max_tokens=12, seed=0)]
    hook.remove()
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    for mine, own in zip(together, alone, strict=True):
        torch.testing.assert_close(
            torch.tensor(mine.log_probs), torch.tensor(own.log_probs), atol=2e-5, rtol=0
        )
    lengths = [len(one.tokens) for one in alone]
    assert (min(lengths) < 4, max(lengths), passes_alone) == (True, 12, sum(lengths))
    assert max(sizes) == 4
    assert max(widths) <= max(map(len, map(made._prompt, prompts))) + 12  # whoever was there before
    # A token of a row costs one row of a pass, and none is computed for a row that has ended; else
    # rows wait for the longest.
    assert (sum(sizes) == sum(lengths)) is plain


def test_rare_looks_change_no_completion(policy, monkeypatch):
    """As on a GPU, which the host would wait for: rows go on past their end, and past the most
    tokens, until it looks.
    """
    monkeypatch.setattr(policy, "_ends", set(range(0, 96, 9)))
    monkeypatch.setattr(policy, "_rows", 4)
    found = []
    for every in (1, 8):
        monkeypatch.setattr(
            "shoal.node.rl.hf.is_look_due", lambda token, device, every=every: token % every == 0
        )
        found.append(policy.generate(PROMPTS, 5, temperature=0.0, max_tokens=11, seed=0))
    assert [[one.tokens for one in group] for group in found[0]] == [
        [one.tokens for one in group] for group in found[1]
    ]
    assert {len(one.tokens) for group in found[0] for one in group} > {11}


def test_rows_that_begin_together_share_an_equal_prompt(policy, monkeypatch):
    sizes = []
    hook = policy.module.register_forward_pre_hook(
        lambda module, args, given: sizes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    first, again, other = (
        policy.generate(["abc", "abcde"], 3, temperature=1.0, max_tokens=5, seed=seed)
        for seed in (1, 1, 2)
    )
    hook.remove()
    assert sizes[0] == (2, 5)
    assert first == again != other
    # Each token by a chance of its own: drawn by hand from one pass over the whole text.
    chance = torch.rand(5, 6, generator=torch.Generator().manual_seed(1))
    flat = [one.tokens for group in first for one in group]
    logits, mask = policy.logits([prompt for prompt in ("abc", "abcde") for _ in range(3)], flat)
    for row, tokens in enumerate(flat):
        by_hand, _ = draw(logits[row, mask[row]], 1.0, chance[: len(tokens), row])
        assert tuple(by_hand.tolist()) == tokens


def test_gradients_do_not_depend_on_how_many_go_at_once(policy, monkeypatch):
    rows = [policy.encode(text, True) for text in ("abc", "", "d e")]
    found = []
    for at_once in (1, 16):
        monkeypatch.setattr(policy, "_rows", at_once)
        policy.module.zero_grad()
        passes = []
        hook = policy.module.register_forward_pre_hook(
            lambda *given, passes=passes: passes.append(given)
        )
        logs, mask = policy.log_probs(PROMPTS, rows, 1.0)
        (logs * mask).sum().backward()
        hook.remove()
        assert len(passes) == (
            2 * len(PROMPTS) if at_once == 1 else 1
        )  # again in the backward pass, where that saves memory
        found.append([p.grad.clone() for p in policy.module.parameters() if p.grad is not None])
    assert found[0]
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)


def test_foreign_special_token_is_text(policy):
    """The end is kept and a strangers special token is text."""
    assert policy.encode("ab", True) == [*policy.encode("ab", False), 0]
    assert 0 not in policy.encode("<end>", False)
    assert policy._completion([1, 2, 0, 5], [-1.0] * 4).tokens == (1, 2, 0)
    assert policy._completion([1, 2], [-1.0] * 2).finish == "length"


def test_a_round_trains_it(policy):
    env = Strings()
    task = RLTask(
        Env("strings", canonical({}), env),
        lambda: policy,
        RLSettings(local=1, external=0, held_out=3, max_tokens=4),
        seed=0,
    )
    trainer = Trainer(task, OuterSettings(method="none"), TrainSettings(steps=1))
    trainer.connect(trainer.opt.exchange, "run", Shard(0, 1, 0))
    trainer.step()
    assert 0 <= trainer.evaluate() <= 1
    update = make_update(
        [
            RolloutGroup(
                "q",
                tuple(tuple(policy.encode(t, True)) for t in ("a", "b")),
                (1.0, 0.0),
                (None, None),
            )
        ]
    )
    task._pending = RLRound(round=0, reward=None, own=1, used=())
    before = [parameter.detach().clone() for parameter in trainer.params]
    task.loss(trainer.model, update).backward()
    trainer.opt.step()
    assert any(not torch.equal(old, new) for old, new in zip(before, trainer.params, strict=True))


def test_a_missing_model_is_one_sentence(tmp_path):
    with pytest.raises(PolicyError, match="cannot be loaded") as raised:
        load_hf(str(tmp_path))
    assert "\n" not in str(raised.value)


@wants_real_model
def test_a_whole_round_of_a_real_model(monkeypatch):
    pytest.importorskip("gguf")
    pytest.importorskip("reasoning_gym")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made: HF = load_hf(str(real_model()))
    asked = ["What is 7 + 8?", "Name the capital of France."]
    written = [
        group[0] for group in made.generate(asked, 1, temperature=0.0, max_tokens=24, seed=0)
    ]
    assert "Paris" in written[1].text
    for prompt, one in zip(asked, written, strict=True):
        ids = torch.tensor([made._prompt(prompt)])
        theirs = made.module.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24
        )
        assert list(one.tokens) == theirs[0, ids.shape[1] :].tolist()
    env = Env(
        "basic_arithmetic",
        b"{}",
        Gym("basic_arithmetic", min_terms=2, max_terms=2, min_digits=1, max_digits=1),
    )
    task = RLTask(
        env,
        lambda: made,
        RLSettings(local=2, external=0, group=4, held_out=4, max_tokens=16),
        seed=0,
    )
    trainer = Trainer(task, OuterSettings(method="none"), TrainSettings(steps=1))
    trainer.connect(trainer.opt.exchange, "run", Shard(0, 1, 0))
    trainer.run()
    assert task.totals.rounds == 1
    assert 0 <= trainer.evaluate() <= 1
