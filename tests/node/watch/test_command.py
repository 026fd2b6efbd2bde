"""``shoal watch`` as it is typed, with recordings and with links that lead nowhere; and what it
never imports.
"""

import json
import signal
import subprocess
import sys
from urllib.request import urlopen

import pytest
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.watch.source import Recorder
from shoal.swarm.errors import ShoalError
from tests.support.watched_peers import NOW

NOBODY = f"shoal://{'a' * 52}?peer=/ip4/127.0.0.1/tcp/1/p2p/12D3KooWBfyETpgiRKw6XJTa45zDN3ZkPUhEPb7ur57Rg3FqQQf7"  # noqa: E501

# A process of its own, to see what it imports.
ALONE = """
import json, sys
from shoal.node.cli.main import main
sys.argv = ["shoal", "watch", *sys.argv[1:]]
try:
    main()
finally:
    print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "hivemind", "libp2p"})))
"""  # noqa: E501


def run(*arguments):
    ended = subprocess.run(
        [sys.executable, "-c", ALONE, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout.splitlines(), ended.stderr.splitlines()


@pytest.fixture
def recording(authors, tmp_path):
    recorder = Recorder(tmp_path / "swarm.jsonl")
    for number in range(3):
        recorder.take(authors[0].heard(authors[0].round(number), at=NOW + number))
    recorder.close()
    return tmp_path / "swarm.jsonl"


def said(*arguments):
    """The sentence with which the command ends."""
    ended = CliRunner().invoke(cli, ["watch", *map(str, arguments)])
    assert isinstance(ended.exception, ShoalError), ended.output
    return str(ended.exception)


def test_recording_is_printed_as_it_is(recording):
    """A recording is printed as it is and without a network."""
    code, lines, errors = run("--replay", str(recording), "--speed", "0")
    assert (code, errors) == (0, [])
    assert lines[:-1] == recording.read_text().splitlines()
    assert json.loads(lines[-1]) == []


def test_what_cannot_be_watched_is_one_sentence(recording, tmp_path):
    assert (
        said()
        == said(NOBODY, "--replay", recording)
        == "Pass either the LINK of a swarm or --replay FILE."
    )
    assert "pass the link that `shoal up` printed" in said("nonsense")
    assert "exists already" in said("--replay", recording, "--record", recording)
    recording.write_text("nonsense\n")
    assert "line 1 of" in said("--replay", recording)


@pytest.mark.ci
@pytest.mark.parametrize("flags", [(), ("--no-link",)], ids=["link", "no-link"])
def test_live_page_needs_no_torch_or_hivemind(flags):
    """The page of a live swarm has its link without torch or hivemind."""
    for package in ("aiohttp", "segno"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    command = [sys.executable, "-c", ALONE, f"{NOBODY}&invite=secret", "--web", "0", *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        address = process.stdout.readline().strip()
        with urlopen(f"{address}events", timeout=30) as stream:
            line = stream.readline().decode()
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    found = json.loads(line.removeprefix("data: "))["link"]
    assert found is None if flags else found["text"] == NOBODY
    assert "secret" not in line
    assert json.loads(rest.splitlines()[-1]) == []


def test_empty_swarm_is_told_as_an_event():
    """A swarm that nobody is in is told as an event and needs neither torch nor hivemind."""
    command = [sys.executable, "-c", ALONE, NOBODY, "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.strip()) == (130, "")
    assert first["event"] == "watching"
    assert (second["event"], second["reason"]) == (
        "unreachable",
        "refused the connection: no node listens there, start it or get a new link",
    )
    assert json.loads(rest.splitlines()[-1]) == []


def test_a_page_for_others_must_be_wanted(recording):
    assert "pass --share if it may" in said("--replay", recording, "--web", "0.0.0.0:8080")
    assert (
        said("--replay", recording, "--share")
        == "--share is about the page: pass --web [HOST:]PORT too."
    )
    assert "it should be a port or HOST:PORT" in said("--replay", recording, "--web", "here:there")
