"""A missing package is named in one sentence with the extra that brings it, wherever it is missing."""

import importlib.util

import pytest
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.cli.prepare import ScaffoldError, scaffold
from shoal.node.console import require
from shoal.node.data.reader import load_tokenizer
from shoal.node.data.source import DataError
from shoal.node.rl.environment import EnvError, Gym, PolicyError
from shoal.node.rl.hf import load_hf
from shoal.node.watch.source import WatchError
from shoal.swarm.errors import ShoalError
from shoal.swarm.identity import Identity

LINK = f"shoal://{'a' * 52}?peer=/ip4/127.0.0.1/tcp/1/p2p/{Identity.ephemeral().peer_id}"


def watch(*arguments):
    ended = CliRunner().invoke(cli, ["watch", *arguments])
    raise ended.exception


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: scaffold("x", "finetune"), ScaffoldError, "finetune needs the package transformers, .*'shoal[hf]'."),
        (
            lambda: load_tokenizer("gpt2"),
            DataError,
            "'gpt2' needs the package tokenizers, .*'shoal[data]', or set tokenizer=bytes.",
        ),
        (lambda: load_hf("x"), PolicyError, "'hf:x' needs the package transformers, .*'shoal[rl]', or choose tiny."),
        (lambda: Gym("sapo9"), EnvError, "'sapo9' needs the package reasoning_gym, .*'shoal[rl]', or choose strings."),
        (
            lambda: watch(LINK, "--web", "0"),
            WatchError,
            "watch --web needs the packages aiohttp, segno, .*'shoal[watch]', or use --json",
        ),
        (lambda: watch(LINK, "--tui"), WatchError, "watch --tui needs the package textual, .*'shoal[watch]', or use --json"),
        (lambda: watch("--replay", "x", "--tui"), WatchError, "needs the package textual, .*, or use --json, which needs none."),
    ],
)
def test_what_is_missing_is_named_with_its_extra(call, error, words, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(error, match=words.replace("[", r"\[")) as caught:
        call()
    assert str(caught.value).count("pip install") == 1


def test_what_is_there_is_not_missing():
    require(ShoalError, "x", "json", extra="x")
    with pytest.raises(ShoalError, match=r"x needs the package no_such_package_at_all\.below, which is not installed"):
        require(ShoalError, "x", "json", "no_such_package_at_all.below", extra="x")
