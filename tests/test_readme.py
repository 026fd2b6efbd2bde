"""The README and the guide pages do what they say: every block of code is run, or says why it is
not.

A block in ``sh`` or ``python`` runs in a scratch folder; one in ``toml`` must load as settings;
``text`` is a picture or an output. A comment ``<!-- not run: why -->`` on the line before a block
excuses it from being run, but the commands in it must still exist, with the options that it uses.
"""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from shoal.node.cli.main import cli
from shoal.node.config.settings import load
from shoal.node.task import Shard
from shoal.node.tasks.loader import load_task
from shoal.node.training.trainer import Trainer
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from tests.support.forked import ForkServer

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
TOPS = ("node", "optim", "swarm", "verification")
MARK = re.compile(r"<!-- not run: \S.* -->")
LANGUAGES = {"sh", "python", "toml", "text", "diff"}


class Block(NamedTuple):
    page: str
    line: int
    language: str
    code: str
    excused: bool


def blocks():
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").split("\n")
        opened = None
        for number, line in enumerate(lines):
            if not line.startswith("```"):
                continue
            if opened is None:
                opened = number
                continue
            excused = bool(MARK.fullmatch(lines[opened - 1]))
            yield Block(
                page.name,
                opened + 1,
                lines[opened][3:],
                "\n".join(lines[opened + 1 : number]) + "\n",
                excused,
            )
            opened = None
        assert opened is None, f"{page.name}: the block of line {opened} does not end"


BLOCKS = list(blocks())


def name(block):
    return f"{block.page}:{block.line}"


def chosen(language, *, excused=False):
    return [
        pytest.param(b, id=name(b))
        for b in BLOCKS
        if b.language == language and b.excused == excused
    ]


@pytest.fixture
def scratch(tmp_path):
    """A folder that looks like the repository to the commands of the README, and an environment for
    them.
    """
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return tmp_path, {
        **os.environ,
        "PATH": path,
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }


def run(command, scratch):
    folder, env = scratch
    ended = subprocess.run(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def test_every_block_has_a_known_language():
    assert {b.language for b in BLOCKS} <= LANGUAGES, [
        name(b) for b in BLOCKS if b.language not in LANGUAGES
    ]
    assert any(b.language == "python" and b.page == "README.md" for b in BLOCKS)


@pytest.mark.parametrize("block", chosen("sh"))
def test_shell_block_runs(block, scratch):
    assert run(["bash", "-euo", "pipefail", "-c", block.code], scratch)


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    """Forks programs from a process that has imported what they import, which takes seconds."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    server = ForkServer(tmp_path_factory.mktemp("forks"), env)
    yield server
    server.close()


@pytest.mark.parametrize("block", chosen("python"))
def test_python_block_runs(block, scratch, forks):
    folder, env = scratch
    file, log = folder / "block.py", folder / "log"
    file.write_text(block.code)
    command = ["tests.support.as_script", str(folder), json.dumps(env), str(file)]
    with log.open("w") as errors:
        process = forks.start(command, errors, "block")
    with process.stdout as out:
        printed = out.read()
    assert process.wait(120) == 0, log.read_text()
    assert printed


def test_the_task_of_the_readme_trains(tmp_path):
    """As the demo that stands below it would train it, but in this process and without a swarm."""
    (code,) = [b.code for b in BLOCKS if b.page == "README.md" and "(Task):" in b.code]
    (tmp_path / "sums.py").write_text(code)
    trainer = Trainer(
        load_task(f"{tmp_path}/sums.py:Sums", {}), OuterSettings(every=25), TrainSettings(steps=400)
    )
    trainer.connect(trainer.opt.exchange, "run", Shard(0, 2, 0))
    before = trainer.evaluate()
    trainer.run()
    assert trainer.evaluate() < before / 2


@pytest.mark.parametrize("block", chosen("toml"))
def test_toml_block_loads(block, tmp_path):
    file = tmp_path / "swarm.toml"
    file.write_text(block.code)
    load(file)


def shoal_commands(code):
    for line in code.splitlines():
        words = shlex.split(line, comments=True)
        if words and Path(words[0]).name == "shoal":
            yield words[1:]


def check_command(words):
    """Parse a command as the real one does, without running it. UsageError if it does not exist
    so.
    """
    command = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        # As click does it: `shoal verify CLAIM` is `shoal verify check CLAIM`, for instance.
        _, found, words = command.resolve_command(click.Context(command), list(words))
        assert found is not None
        command = found
    if words != ["--help"]:
        command.make_context(command.name, list(words))


@pytest.mark.parametrize("block", chosen("sh", excused=True))
def test_commands_of_a_block_that_is_not_run_exist(block):
    for words in shoal_commands(block.code):
        check_command(words)
    for line in block.code.splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] == "make" and shutil.which("make"):
            env = {
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("MAKE", "MFLAGS"))
            }
            command = ["make", "--dry-run", *words[1:]]
            dry = subprocess.run(
                command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
            )
            assert dry.returncode == 0, dry.stderr


def test_a_wrong_option_would_be_found():
    with pytest.raises(click.UsageError, match="No such option"):
        check_command(["join", "shoal://LINK", "--nmae", "bert"])


def test_files_that_the_pages_name_exist():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
        for path in re.findall(
            r"`((?:optim|swarm|node|verification|tests|examples|bench|docs)/[\w/]+\.\w+)`", text
        ):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_headings_that_the_pages_link_to_exist():
    def anchors(page):
        headings = re.findall(
            r"^#+ (.*)$",
            re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S),
            re.M,
        )
        return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}

    for page in PAGES:
        for target, anchor in re.findall(
            r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")
        ):
            assert anchor in anchors(page.parent / target if target else page), (
                f"{page.name} links to {target}#{anchor}"
            )


def exists(name):
    """Say whether ``shoal.optim.outer.optimizer.OuterOptimizer`` is a module, or a name in one."""
    module, rest = "shoal", name.split(".")[1:]
    while rest and (ROOT / "shoal" / Path(*module.split(".")[1:])).is_dir():
        try:
            importlib.import_module(f"{module}.{rest[0]}")
        except ModuleNotFoundError:
            break
        module, rest = f"{module}.{rest[0]}", rest[1:]
    return not rest or hasattr(importlib.import_module(module), rest[0])


def test_modules_and_names_that_the_pages_name_exist():
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
        for name in re.findall(r"(?:`|^::: )(shoal(?:\.\w+)+)", text, re.M):
            assert name == "shoal.json" or exists(name), f"{page.name} names {name}"


def test_modules_that_the_pages_name_in_short_exist():
    """ARCHITECTURE.md and docs/internals.md leave out the leading ``shoal.``."""
    for page in (ROOT / "ARCHITECTURE.md", ROOT / "docs" / "internals.md"):
        for name in re.findall(
            rf"`((?:{'|'.join(TOPS)})(?:\.\w+)+)`", page.read_text(encoding="utf-8")
        ):
            assert exists(f"shoal.{name}"), f"{page.name} names {name}"


def test_the_tour_names_ten_files():
    tour = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## A tour of ten")[2]
    named = re.findall(r"^\d+\. `([\w/]+\.py)`", tour, re.M)
    assert len(named) == 10
    assert not [name for name in named if not (ROOT / name).is_file()]
