"""The help of the commands, in groups and with examples that exist; and flags that have their
setting's type and reach it.
"""

import re
import shlex
import subprocess
import sys

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.cli.options import TITLES, overrides
from shoal.node.config.settings import Settings, known_keys, load
from shoal.optim import METHODS


def help_of(*path):
    shown = CliRunner().invoke(cli, [*path, "--help"], terminal_width=110)
    assert shown.exit_code == 0
    return shown.output


def test_help_loads_nothing_heavy():
    program = [sys.executable, "-X", "importtime", "-m", "shoal", "--help"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    loaded = set(re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.M))
    assert {"click", "shoal.node.cli.run"} <= loaded
    heavy = {
        "torch",
        "hivemind",
        "numpy",
        "pydantic",
        "rich",
        "asyncio",
        "cryptography",
        "msgpack",
        "importlib.metadata",
    }
    assert not loaded & heavy


@pytest.mark.parametrize("name", ["up", "join", "demo"])
def test_options_are_in_groups_of_which_none_is_long(name):
    shown = help_of(name)
    titles = [
        line[:-1] for line in shown.splitlines() if line[:-1] in TITLES and line.endswith(":")
    ]
    assert titles == [title for title in TITLES if title in titles]
    assert len(titles) >= 5
    groups = re.split(rf"^(?:{'|'.join(map(re.escape, TITLES))}):$", shown, flags=re.M)[1:]
    assert max(len(re.findall(r"^  -", group, re.M)) for group in groups) <= 10
    listed = re.findall(r"^  (?:-h, )?(--[\w-]+)", shown, re.M)
    declared = [
        p.opts[0] for p in cli.commands[name].params if isinstance(p, click.Option) and not p.hidden
    ]
    assert sorted(listed) == sorted([*declared, "--help"]), "each option is shown once"


def test_commands_are_in_the_order_of_use():
    """Commands are in the order of use with their whole sentence."""
    shown = help_of()
    names = re.findall(r"^  (\w+)  +[A-Z]", shown, re.M)
    used = [
        "demo",
        "init",
        "doctor",
        "up",
        "link",
        "invite",
        "join",
        "status",
        "watch",
        "pull",
        "sample",
        "seed",
    ]
    assert [name for name in names if name in used] == used
    chapters = re.findall(r"^([A-Z][a-z ]+):\n((?:  \w+  +\S.*\n)+)", shown, re.M)
    assert [title for title, _ in chapters] == [
        "Begin",
        "Train together",
        "Look",
        "Take the result",
        "Run a bootstrap node",
        "Measure and check",
    ]
    assert sum(len(lines.splitlines()) for _, lines in chapters) == len(cli.commands)
    assert sorted(names) == sorted(cli.commands)
    for name, command in cli.commands.items():
        assert re.search(rf"^  {name} +{re.escape(command.short_help)}$", shown, re.M), name


def test_the_examples_can_be_typed():
    found = 0
    for path in ([], *([name] for name in cli.commands)):
        for line in re.findall(r"^    (shoal .*)$", help_of(*path), re.M):
            words = shlex.split(re.split(r"\s{2,}", line)[0])[1:]
            cli.commands[words[0]].make_context(words[0], words[1:])
            found += 1
    assert found >= 20


def test_options_are_in_the_order_of_need():
    """The options of a new swarm are in the order in which one needs them."""
    shown = help_of("up")
    order = [
        "--steps",
        "--task",
        "--data",
        "--option",
        "--name",
        "--device",
        "--method",
        "--precision",
        "--listen",
        "--env",
        "--json",
    ]
    places = [re.search(rf"^  {option} ", shown, re.M).start() for option in order]
    assert places == sorted(places)


def test_names_of_methods_are_completed():

    def completed(*words):
        return [
            item.value
            for item in BashComplete(cli, {}, "shoal", "_SHOAL_COMPLETE").get_completions(
                list(words[:-1]), words[-1]
            )
        ]

    assert completed("up", "--method", "di") == ["diloco", "diloco-hb"]
    assert set(completed("demo", "--method", "")) == set(METHODS)
    assert completed("up", "--robust", "c") == ["clipped-gossip", "centered-clip"]
    assert "doctor" in completed("d")


ARGUMENT = {"up": [], "join": ["shoal://x"], "demo": []}
VALUES = {
    "train.steps": ("7", 7),
    "outer.every": ("7", 7),
    "swarm.invite_only": (None, True),
    "swarm.public": (None, True),
    "node.lag": ("auto", "auto"),
    "node.threads": ("3", 3),
    "node.upload": ("5.5", 5.5),
    "node.ram": ("2", 2.0),
    "node.resume": (None, True),
    "train.compile": (None, True),
    "train.precision": ("float16", "float16"),
    "outer.method": ("diloco", "diloco"),
    "outer.round": ("tokens:9", "tokens:9"),
    "outer.codec": ("int8", "int8"),
    "outer.robust": ("clipped-gossip", "clipped-gossip"),
    "verify.audit_rate": ("0.1", 0.1),
    "node.bootstrap": (
        "/ip4/1.2.3.4/tcp/1/p2p/12D3KooWBhSKrWrmS6Q2VFtPYJWqDkZhFJFPqGnCuyZbDFvNMv2L",
    )
    * 2,
    "peers.allow": ("friends", "friends"),
    "peers.deny": ("foes", "foes"),
    "node.gpus": ("2", "2"),
    "node.parallel": ("fsdp", "fsdp"),
    "node.shard": ("1/2", "1/2"),
    "node.relay": ("off", "off"),
    "node.metrics": ("9464", "127.0.0.1:9464"),
    "task.options": ("width=8", {"width": 8}),
}


def flags_of(command):
    return {
        p.name: p
        for p in cli.commands[command].params
        if isinstance(p, click.Option) and "." in p.name
    }


@pytest.mark.parametrize("command", ARGUMENT)
def test_a_flag_reaches_its_setting(command):
    for key, flag in flags_of(command).items():
        text, value = VALUES.get(
            key, ("/ip4/1.2.3.4/tcp/1",) * 2 if flag.multiple else ("x-1",) * 2
        )
        given = [flag.opts[0]] if flag.is_flag else [flag.opts[0], text]
        context = cli.commands[command].make_context(command, [*ARGUMENT[command], *given])
        table, _, name = key.partition(".")
        if key == "task.options.tokenizer":
            assert load(None, overrides(context.params)).task.options == {"tokenizer": "x-1"}
            continue
        found = getattr(getattr(load(None, overrides(context.params)), table), name)
        expected = [value] if flag.multiple and key != "task.options" else value
        assert (
            str(found).endswith(f"/{value}") if hasattr(found, "is_absolute") else found == expected
        ), key


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
            assert flag.help.startswith(
                Settings.model_fields[table].annotation.model_fields[name].description
            )


def test_a_flag_wins_over_set_and_option():
    params = ["--set", "outer.lr=0.5", "--set", "outer.method=local", "--method", "gasloc"]
    params += ["--option", "tokenizer=a", "--tokenizer", "b"]
    given = overrides(cli.commands["up"].make_context("up", params).params)
    assert given == {"outer.lr": 0.5, "outer.method": "gasloc", "task.options.tokenizer": "b"}


def test_methods_are_those_of_the_library():
    choices = [item.value for item in flags_of("up")["outer.method"].shell_complete(None, "")]
    assert sorted(choices) == sorted(METHODS)
