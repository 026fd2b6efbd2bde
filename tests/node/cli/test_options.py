"""Every flag of a setting has the setting's type, help and default, and reaches it."""

import click
import pytest

from shoal.node.cli.main import cli
from shoal.node.cli.options import overrides
from shoal.node.config.settings import Settings, known_keys, load
from shoal.optim import METHODS

ARGUMENT = {"up": [], "join": ["shoal://x"], "demo": []}
VALUES = {
    "train.steps": ("7", 7), "outer.every": ("7", 7), "swarm.invite_only": (None, True), "swarm.public": (None, True),
    "node.lag": ("auto", "auto"), "node.threads": ("3", 3), "node.upload": ("5.5", 5.5), "node.ram": ("2", 2.0),
    "node.resume": (None, True), "train.compile": (None, True), "train.precision": ("float16", "float16"),
    "outer.method": ("diloco", "diloco"), "outer.round": ("tokens:9", "tokens:9"), "outer.codec": ("int8", "int8"),
    "outer.robust": ("clipped-gossip", "clipped-gossip"), "verify.audit_rate": ("0.1", 0.1),
    "node.bootstrap": ("/ip4/1.2.3.4/tcp/1/p2p/12D3KooWBhSKrWrmS6Q2VFtPYJWqDkZhFJFPqGnCuyZbDFvNMv2L",) * 2,
    "peers.allow": ("friends", "friends"), "node.gpus": ("2", "2"), "node.parallel": ("fsdp", "fsdp"), "node.shard": ("1/2", "1/2"),
    "node.relay": ("off", "off"), "node.metrics": ("9464", "127.0.0.1:9464"), "task.options": ("width=8", {"width": 8}),
}  # fmt: skip


def flags_of(command):
    return {p.name: p for p in cli.commands[command].params if isinstance(p, click.Option) and "." in p.name}


@pytest.mark.parametrize("command", ARGUMENT)
def test_a_flag_reaches_its_setting(command):
    for key, flag in flags_of(command).items():
        text, value = VALUES.get(key, ("/ip4/1.2.3.4/tcp/1",) * 2 if flag.multiple else ("x-1",) * 2)
        given = [flag.opts[0]] if flag.is_flag else [flag.opts[0], text]
        context = cli.commands[command].make_context(command, [*ARGUMENT[command], *given])
        table, _, name = key.partition(".")
        if key == "task.options.tokenizer":
            assert load(None, overrides(context.params)).task.options == {"tokenizer": "x-1"}
            continue
        found = getattr(getattr(load(None, overrides(context.params)), table), name)
        expected = [value] if flag.multiple and key != "task.options" else value
        assert str(found).endswith(f"/{value}") if hasattr(found, "is_absolute") else found == expected, key


@pytest.mark.parametrize("command", ARGUMENT)
def test_no_flag_changes_nothing(command):
    context = cli.commands[command].make_context(command, ARGUMENT[command])
    assert load(None, overrides(context.params)) == load(None)


def test_a_flag_is_described_by_its_setting():
    flags = flags_of("up")
    assert set(flags) - {"task.options.tokenizer"} <= set(known_keys())
    assert flags["outer.round"].help.endswith("  [default: steps]")
    for key, flag in flags.items():
        if key != "task.options.tokenizer":
            table, name = key.split(".")
            assert flag.help.startswith(Settings.model_fields[table].annotation.model_fields[name].description)


def test_a_flag_wins_over_set_and_option():
    params = ["--set", "outer.lr=0.5", "--set", "outer.method=local", "--method", "gasloc"]
    params += ["--option", "tokenizer=a", "--tokenizer", "b"]
    given = overrides(cli.commands["up"].make_context("up", params).params)
    assert given == {"outer.lr": 0.5, "outer.method": "gasloc", "task.options.tokenizer": "b"}


def test_methods_are_those_of_the_library():
    choices = [item.value for item in flags_of("up")["outer.method"].shell_complete(None, "")]
    assert sorted(choices) == sorted(METHODS)
