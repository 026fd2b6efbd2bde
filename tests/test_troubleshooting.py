"""docs/troubleshooting.md has every exit code and every check of the doctor; and a refused start
says what to do about it.
"""

import re
import signal
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.doctor import diagnose as here
from shoal.node.doctor.visit import Visit
from shoal.node.exit_code import ExitCode
from shoal.swarm.access.link import Link
from shoal.swarm.errors import ShoalError

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "troubleshooting.md").read_text(
    encoding="utf-8"
)
ID = "12D3KooWBfyETpgiRKw6XJTa45zDN3ZkPUhEPb7ur57Rg3FqQQf7"
SWARM = "a" * 52
NOBODY = f"/ip4/127.0.0.1/tcp/1/p2p/{ID}"
REMEDY = re.compile(
    r"[:;,] (?:did you mean|the tables are|its options are|it should "
    r"be|check|choose|copy|correct|install|leave|mend|name|pass|put|"
    r"quote|remove|restore|run|say|set|start|use|write)\b"
)
"""How a sentence goes on after what happened."""


def test_exit_codes_are_those_of_the_program():
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", PAGE, re.M)
    assert rows == [(str(int(code)), code.meaning) for code in ExitCode]


def test_every_exit_code_has_a_section_in_order():
    assert [int(code) for code in re.findall(r"^## Exit code (\d+): ", PAGE, re.M)] == [
        int(code) for code in ExitCode
    ]


def test_every_doctor_check_is_documented():
    """Every check of the doctor is in the table with its code."""
    checks = here.checks(Visit(Link(SWARM, (NOBODY,))))
    rows = re.findall(r"^\| (`[^|]+) \| [^|]+ \| (?:(\d+) )?\|$", PAGE, re.M)
    table = {name: code for names, code in rows for name in re.findall(r"`([^`]+)`", names)}
    assert set(table) == {check.name for check in checks}
    notes = {"dialled back", "nat", "bandwidth", "bucket", "run"}
    assert table == {
        check.name: "" if check.name in notes else str(int(check.code)) for check in checks
    }


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with what is wrong in it; handlers of signals, which a node sets, are as before
    afterwards.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "typo.toml").write_text("[outer]\nevry = 3\n")
    (tmp_path / "broken.toml").write_text("[outer\n")
    (tmp_path / "flat.toml").write_text("outer = 3\n")
    (tmp_path / "method.toml").write_text("[outer]\nmethod = 'diloco'\nfragments = 3\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "empty.py").write_text("class Mine:\n    pass\n")
    (tmp_path / "file").write_text("no key\n")
    (tmp_path / "file").chmod(0o600)
    (tmp_path / "open.key").write_text("no key\n")
    (tmp_path / "open.key").chmod(0o644)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)


REFUSED = [
    ["join", "http://example.org"],
    ["join", f"shoal://tooshort?peer={NOBODY}"],
    ["join", f"shoal://{SWARM}?peer=/ip4/1.2.3.4/tcp/99999/p2p/{ID}"],
    ["status", f"shoal://{SWARM}"],
    ["doctor", f"shoal://{SWARM}"],
    ["status", f"shoal://{SWARM}?peer={NOBODY}&pear=x"],
    ["up", "absent.toml"],
    ["up", "typo.toml"],
    ["up", "broken.toml"],
    ["up", "flat.toml"],
    ["up", "method.toml"],
    ["up", "--shard", "4/4"],
    ["up", "--set", "outer.lr"],
    ["up", "--name", "../x"],
    ["up", "--device", "abacus"],
    ["up", "--device", "xpu"],
    ["demo", "--set", "node.ram=4"],
    ["up", "--method", "none", "--set", "outer.lr=3"],
    ["up", "--task", "nowhere/task.py:Mine"],
    ["up", "--task", "broken.py:Mine"],
    ["up", "--task", "empty.py:Mine"],
    ["up", "--task", "empty.py:Mime"],
    ["up", "--task", "no_such_module:Mine"],
    ["up", "--task", "mine"],
    ["up", "--task", "rl", "--policy", "parrot"],
    ["up", "--folder", "file/below"],
    ["up", "--identity", "file"],
    ["up", "--identity", "open.key"],
    ["up", "--resume"],
    ["up", "--resume-from", "nowhere"],
    ["up", "--listen", "/ip4/127.0.0.1/tcp/1/garbage"],
    ["up", "--listen", "/ip4/127.0.0.1/tcp/TAKEN"],
    ["up", "--metrics", "TAKEN"],
    ["up", "--metrics", "all:9464x"],
    ["up", "--wandb", "one/two/three"],
    ["up", "--tensorboard", "file/below"],
    ["demo", "--metrics", "TAKEN", "--peers", "1"],
    ["demo", "--metrics", "65535", "--peers", "2"],
    ["init", "."],
    ["merge", "nowhere", "--out", "x.safetensors"],
]


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_a_refused_start_says_in_one_sentence_what_to_do(home, arguments):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        arguments = [word.replace("TAKEN", str(other.getsockname()[1])) for word in arguments]
        if arguments[0] == "up":
            if "--identity" not in arguments:
                arguments += ["--identity", "n.key"]
            arguments += ["--threads", "1"]
            if "--listen" not in arguments:
                arguments += ["--listen", "/ip4/127.0.0.1/tcp/0"]
        ended = CliRunner().invoke(cli, arguments, standalone_mode=False)
    said = str(ended.exception)
    assert isinstance(ended.exception, ShoalError), ended.exception
    assert getattr(ended.exception, "exit_code", ExitCode.BAD_INPUT) == ExitCode.BAD_INPUT
    assert "\n" not in said
    assert said.endswith((".", "?"))
    assert REMEDY.search(said), said
