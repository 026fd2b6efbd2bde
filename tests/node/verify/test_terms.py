"""The terms of a swarm's claims, and who does not fit them."""

import pytest

from shoal.node.config.settings import ConfigError, Settings
from shoal.node.task import Task
from shoal.node.verify.start import check_terms, make_terms
from tests.node.verify.board import settings_of, task_of


def test_terms_are_the_creators_settings(tmp_path):
    task = task_of()
    terms = make_terms(settings_of(tmp_path), task)
    assert (terms.policy, terms.group, terms.temperature, terms.max_tokens) == ("tiny", 8, 1.0, 8)
    assert terms.base == make_terms(settings_of(tmp_path), task_of(seed=5)).base  # all of tiny's weights are trained
    check_terms(terms, settings_of(tmp_path), task)
    assert make_terms(settings_of(tmp_path, audit_rate=0.0), task) is None


def test_a_habit_is_no_other_policy(tmp_path):
    terms = make_terms(settings_of(tmp_path), task_of())
    check_terms(terms, with_policy(settings_of(tmp_path), "tiny:first"), task_of())


def test_a_task_without_completions_has_nothing_to_claim(tmp_path):
    with pytest.raises(ConfigError) as refused:
        make_terms(settings_of(tmp_path), Task())
    assert str(refused.value) == "This task writes no completions to claim: pass --task rl with it."


def test_another_policy_is_refused_in_a_sentence(tmp_path):
    terms = make_terms(settings_of(tmp_path), task_of())
    with pytest.raises(ConfigError) as refused:
        check_terms(terms, with_policy(settings_of(tmp_path), "hf:/models/small"), task_of())
    assert str(refused.value) == (
        "The swarm verifies the policy 'tiny', this node was given 'hf:small': pass --policy and where that one is."
    )


def test_other_untrained_weights_are_refused_in_a_sentence(tmp_path):
    task, other = task_of(), task_of()
    for made in (task, other):
        made.policy.module.tokens.weight.requires_grad_(False)
    terms = make_terms(settings_of(tmp_path), task)
    check_terms(terms, settings_of(tmp_path), other)
    other.policy.module.tokens.weight[0, 0] += 1e-3
    with pytest.raises(ConfigError) as refused:
        check_terms(terms, settings_of(tmp_path), other)
    assert str(refused.value) == (
        "This node's copy of 'tiny' has other weights than the swarm's: take the same version of the model."
    )


def with_policy(settings: Settings, policy: str) -> Settings:
    return settings.model_copy(update={"rl": settings.rl.model_copy(update={"policy": policy})})
