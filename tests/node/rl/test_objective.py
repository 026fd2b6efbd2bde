"""What the settings make a policy minimise, and losses from a user's file."""

from functools import partial

import pytest
import torch

from shoal.node.config.rl_settings import RLSettings
from shoal.node.config.settings import ConfigError
from shoal.node.rl.loading import load_env
from shoal.node.rl.objective import UserLoss, load_loss, make_objective
from shoal.node.rl.task import RLTask
from shoal.node.rl.tiny import Tiny, Warm
from shoal.node.rl.update import RolloutGroup, completions_of, loss_of, make_update
from shoal.node.tasks.user_class import HookError
from shoal.node.user_code import UserCodeError
from shoal.optim.rl.completions import Completions
from shoal.optim.rl.losses import LOSSES
from shoal.optim.rl.objective import Objective

ENV = load_env("strings", {"families": "last", "letters": 3})


@pytest.fixture
def tiny():
    return Tiny(ENV.made, seed=1, layers=1, width=16, warm=Warm(steps=5, batch=8))


def update(tiny):
    rows = tuple(tuple(tiny.encode(text, True)) for text in ("a", "bc", "abc"))
    return make_update([RolloutGroup("last: abc", rows, (1.0, 0.0, 0.5), (None,) * 3)])


def batch():
    new = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    return Completions(new, new.detach(), torch.ones(1, 2, dtype=torch.bool), torch.ones(1))


def file(folder, body):
    path = folder / "mine.py"
    path.write_text(f"import torch\n\n\ndef loss(batch):\n    {body}\n")
    return f"{path}:loss"


def test_a_loss_of_ones_own_is_trained_with(tiny, tmp_path):
    spec = file(tmp_path, "return 0 * batch.new + 3")
    task = RLTask(ENV, lambda: tiny, RLSettings(held_out=3, loss=spec), seed=1)
    assert isinstance(task.objective.loss, UserLoss)
    assert task.objective.per == "token"
    loss, _ = loss_of(tiny, update(tiny), task.objective, 1.0)
    assert loss.item() == 3


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return batch.knew", "AttributeError: .* \\(mine.py, line 5\\)"),
        ("return batch.advantages", r"\(mine.py, line 4\) returned the shape \(2,\)"),
        ("return batch.new.mean()", r"returned the shape \(\): .* of its shape \(2, 3\)"),
        ("return 1.0", r"\(mine.py, line 4\) returned a float"),
        ("return batch.old * 1", "returned numbers without a gradient"),
        ("return batch.new / 0", "returned a number that is not finite"),
        ("return (", r"SyntaxError: .* \(mine.py, line 5\)"),
    ],
)
def test_a_faulty_loss_names_its_line_before_training(tmp_path, body, said):
    with pytest.raises((UserCodeError, HookError), match=said):
        load_loss(file(tmp_path, body))


def test_a_loss_that_fails_later_names_its_line(tmp_path):
    spec = file(tmp_path, "assert len(batch.new) > 1, 'one is too few'; return batch.new")
    loss = load_loss(spec)
    with pytest.raises(UserCodeError, match=r"one is too few \(mine.py, line 5\): mend it"):
        loss(batch())


def test_a_file_without_the_function_says_what_it_has(tmp_path):
    file(tmp_path, "return batch.new")
    with pytest.raises(HookError, match=r"There is no function 'lose' .* did you mean 'loss'"):
        load_loss(f"{tmp_path / 'mine.py'}:lose")


def test_a_name_that_is_no_loss_is_refused():
    with pytest.raises(ValueError, match=r"there is no loss 'grop': choose sapo, .* or write your"):
        RLSettings(loss="grop")


@pytest.mark.parametrize(
    ("settings", "objective"),
    [
        ({"loss": "gspo"}, Objective(LOSSES["gspo"], "completion", 8)),
        ({"loss": "dr_grpo"}, Objective(LOSSES["dr_grpo"], "max_tokens", 8)),
        ({"loss": "luspo", "per": "token"}, Objective(LOSSES["luspo"], "token", 8)),
        (
            {"loss": "dapo", "kl_coef": 0.1, "entropy_coef": 0.2, "off_policy_mask": 0.3},
            Objective(
                LOSSES["dapo"],
                "token",
                8,
                kl_coef=0.1,
                entropy_coef=0.2,
                off_policy_mask=0.3,
            ),
        ),
    ],
)
def test_settings_compose_the_objective(settings, objective):
    rl = RLSettings(**settings)
    assert make_objective(rl, rl.loss, LOSSES[rl.loss], 8) == objective


def test_delta_is_for_losses_that_clip():
    objective = make_objective(RLSettings(delta=2.0), "sapo", LOSSES["sapo"], 8)
    assert isinstance(objective.loss, partial)
    assert objective.loss.keywords == {"delta": 2.0}
    with pytest.raises(ConfigError) as caught:
        make_objective(RLSettings(delta=2.0), "cispo", LOSSES["cispo"], 8)
    assert str(caught.value) == (
        "The loss 'cispo' has no two-sided clipping: leave rl.delta out, or choose rl.loss=sapo, "
        "grpo, dr_grpo, dapo, gspo or luspo."
    )


def test_the_reference_is_the_policy_as_it_was_made(tiny):
    task = RLTask(ENV, lambda: tiny, RLSettings(kl_coef=1.0, held_out=3, loss="sapo"), seed=1)
    made = [weight.detach().clone() for weight in task.model().parameters()]
    with torch.no_grad():
        for weight in tiny.module.parameters():
            weight += 0.1
    given = update(tiny)
    plain, _ = loss_of(tiny, given, Objective(), 1.0)
    bound, _ = loss_of(tiny, given, task.objective, 1.0, task._reference)
    assert bound > plain
    with torch.no_grad():
        for weight, value in zip(tiny.module.parameters(), made, strict=True):
            weight.copy_(value)
    plain, _ = loss_of(tiny, given, Objective(), 1.0)
    bound, _ = loss_of(tiny, given, task.objective, 1.0, task._reference)
    assert bound == plain


def test_log_probabilities_with_entropy_are_the_same(tiny):
    """In parts of several lengths, with a gradient, and the entropy that of the distribution."""
    rows = tuple(tuple(tiny.encode("a" * (1 + number % 4), True)) for number in range(20))
    rewards = tuple(float(number % 2) for number in range(20))
    given = make_update([RolloutGroup("last: abc", rows, rewards, (None,) * 20)])
    plain = completions_of(tiny, given, 0.7)
    found = completions_of(tiny, given, 0.7, with_entropy=True)
    assert torch.equal(found.mask, plain.mask)
    torch.testing.assert_close(found.new[plain.mask], plain.new[plain.mask])
    logits, _ = tiny.logits(given.prompts[:1], given.tokens[:1])
    expected = torch.distributions.Categorical(logits=logits[0] / 0.7).entropy()
    torch.testing.assert_close(found.entropy[0, : len(expected)], expected)
    (found.entropy * found.mask).sum().backward()
    assert tiny.module.head.weight.grad.any()
