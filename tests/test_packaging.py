"""Makefile, Dockerfile, pyproject and licence: what a newcomer meets before any of our code
runs.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from shoal.swarm.membership.membership import SHOAL_VERSION, installed_version

ROOT = Path(__file__).resolve().parent.parent
TOPS = ("node", "optim", "swarm", "verification")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCKER = (ROOT / "Dockerfile").read_text(encoding="utf-8")

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments):
    """Run make as from a fresh shell: these tests may themselves be run by make."""
    ours = ("MAKE", "MFLAGS", "PYTHON", "VENV", "PIP_ARGS", "PEERS", "ROUNDS", "ARGS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = ["make", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def python_that(folder, refuses):
    """An interpreter that fails when its arguments hold the text ``refuses``, and else is this
    one.
    """
    script = folder / "python"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *{refuses}*) exit 1;; esac\nexec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    return script


@needs_make
class TestMake:
    def said(self, ended, folder):
        """The one sentence; nothing may have been installed."""
        assert ended.returncode == 2
        assert not (folder / "venv").exists()
        lines = [line for line in ended.stderr.splitlines() if not line.startswith("make: ***")]
        assert len(lines) == 1, ended.stderr
        assert lines[0].startswith("Error: ")
        return lines[0]

    def test_python_is_missing(self, tmp_path):
        ended = make("demo", "PYTHON=/no/such/python", f"VENV={tmp_path}/venv")
        assert "/no/such/python was not found: install Python 3.11 or newer" in self.said(
            ended, tmp_path
        )

    def test_python_is_too_old(self, tmp_path):
        old = python_that(tmp_path, "version_info")
        assert "needs Python 3.11 or newer" in self.said(
            make("test", f"PYTHON={old}", f"VENV={tmp_path}/venv"), tmp_path
        )

    def test_venv_is_missing(self, tmp_path):
        bare = python_that(tmp_path, "venv")
        ended = make("demo", f"PYTHON={bare}", f"VENV={tmp_path}/venv")
        assert "sudo apt install python3-venv" in self.said(ended, tmp_path)

    def test_the_second_run_installs_nothing(self, tmp_path):
        venv = tmp_path / "venv"
        (venv / "bin").mkdir(parents=True)
        for stamp in ("bin/python", ".installed", ".installed-test"):
            (venv / stamp).touch()
        dry = make("--dry-run", "demo", "test", "lint", f"VENV={venv}", "ROUNDS=8", "PEERS=3")
        assert "pip" not in dry.stdout
        assert "shoal demo --peers 3 --rounds 8" in dry.stdout
        changed = make("--dry-run", "demo", f"VENV={venv}", "--what-if=constraints.txt")
        assert "pip install" in changed.stdout
        assert "-c constraints.txt" in changed.stdout

    def test_plain_make_only_explains(self):
        ended = make()
        assert ended.returncode == 0
        assert "make demo" in ended.stdout


def test_dockerfile_runs_shoal_without_root():
    lines = re.sub(r"\\\n", " ", DOCKER).splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users
    assert users[-1] not in ("root", "0")
    assert re.search(rf"useradd .*\b{users[-1]}\b", DOCKER)
    entry = [
        json.loads(line.split(maxsplit=1)[1]) for line in lines if line.startswith("ENTRYPOINT ")
    ]
    assert entry == [["shoal"]]
    assert any(line.split()[:1] == ["EXPOSE"] and "4001" in line for line in lines)


def test_dockerfile_copies_all_that_is_installed():
    copied = {
        word.rstrip("/")
        for line in DOCKER.splitlines()
        if line.startswith("COPY ")
        for word in line.split()[1:-1]
    }
    copied -= {"--from=build", "/opt/venv"}  # of the stage before
    assert {"shoal", *TOPS} <= copied
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"} <= copied
    assert all((ROOT / path).exists() for path in copied)
    sent = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert copied <= sent


def test_torch_of_the_dockerfile_is_the_one_of_the_constraints():
    pinned = re.search(r"^(torch==\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert f'ARG TORCH_SPEC="{pinned[1]}"' in DOCKER


def test_no_package_index_is_written_down():
    for name in ("Makefile", "Dockerfile", "pyproject.toml", "constraints.txt", ".ci/run"):
        assert "://" not in (ROOT / name).read_text(encoding="utf-8"), name


def test_ci_script_can_be_run():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111 == 0o111
    assert "set -euo pipefail" in script.read_text()
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


def test_the_workflow_runs_ci_on_every_python():
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["run"]
    assert job["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(11, 15)]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]


def test_commit_hooks_equal_make_lint():
    """Hooks before a commit are those of make lint and fetch nothing."""
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"
    assert {hook["language"] for hook in repo["hooks"]} == {"system"}
    assert [hook["entry"] for hook in repo["hooks"]] == ["ruff check --fix", "ruff format", "mypy"]


def test_reports_of_bugs_ask_for_what_the_doctor_says():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    asked = [
        part
        for part in form["body"]
        if "shoal doctor --json" in part["attributes"].get("label", "")
    ]
    assert [part["validations"] for part in asked] == [{"required": True}]
    assert "shoal doctor --json" in (ROOT / ".github/pull_request_template.md").read_text()


def test_coverage_has_a_floor_over_all_processes():
    """Coverage has a floor and measures the whole product with its processes."""
    recipe = re.search(r"^coverage: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)[1]
    assert all(word in recipe for word in ("--cov=shoal", "--cov-fail-under="))
    settings = PROJECT["tool"]["coverage"]["run"]
    assert {"shoal", *(link.name for link in (ROOT / "shoal").iterdir() if link.is_symlink())} == {
        *settings["source_dirs"]
    }
    assert "subprocess" in settings["patch"]
    assert any(
        line.startswith("pytest-cov")
        for line in PROJECT["project"]["optional-dependencies"]["test"]
    )


def test_commits_to_ignore_in_blame_are_whole_hashes():
    lines = (ROOT / ".git-blame-ignore-revs").read_text().splitlines()
    assert [
        line
        for line in lines
        if not line.startswith("#") and not re.fullmatch(r"[0-9a-f]{40}", line)
    ] == []
    assert len(lines) - sum(line.startswith("#") for line in lines) >= 2


def test_ruff_and_mypy_are_strict():
    tools = PROJECT["tool"]
    assert tools["mypy"]["strict"] is True
    assert {"shoal", "examples", "bench"} <= set(tools["mypy"]["files"])
    assert {"E", "F", "ANN", "D1"} <= set(tools["ruff"]["lint"]["select"])


def test_core_installs_little():
    names = {re.match(r"[\w-]+", line)[0] for line in PROJECT["project"]["dependencies"]}
    wanted = {
        "torch",
        "hivemind",
        "msgpack",
        "cryptography",
        "click",
        "pydantic",
        "rich",
        "safetensors",
    }
    assert wanted <= names
    # uvloop and numpy come with hivemind in any case; prometheus-client needs nothing else;
    # torchdata only what torch brings
    assert len(names) <= len(wanted) + 6
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    assert PROJECT["project"]["scripts"] == {"shoal": "shoal.node.cli.main:main"}


def test_named_python_versions_are_those_of_ci():
    """praxis #52: a version that was promised and never run."""
    matrix = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    versions = matrix["jobs"]["run"]["strategy"]["matrix"]["python"]
    named = "Programming Language :: Python :: "
    assert PROJECT["project"]["classifiers"] == [named + version for version in versions]
    assert PROJECT["project"]["requires-python"] == f">={versions[0]}"
    assert PROJECT["tool"]["mypy"]["python_version"] == versions[0]
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{versions[0].replace('.', '')}"


def test_watching_needs_nothing_that_must_be_compiled():
    extras = PROJECT["project"]["optional-dependencies"]
    assert {re.match(r"[\w-]+", line)[0] for line in extras["watch"]} == {
        "textual",
        "aiohttp",
        "segno",
    }
    assert extras["libp2p"] == ["libp2p==0.8.1"]
    assert "--no-deps libp2p==0.8.1\n" in (ROOT / "Makefile").read_text()
    assert "libp2p" not in str([extras[name] for name in extras if name != "libp2p"])


def test_licence():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_one_version(monkeypatch):
    assert PROJECT["project"]["version"] == SHOAL_VERSION == installed_version()
    monkeypatch.setattr(
        "importlib.metadata.distribution", Mock(side_effect=PackageNotFoundError("shoal"))
    )
    assert installed_version() == "0+unknown"  # a checkout that is not installed
