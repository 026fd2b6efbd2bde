"""``shoal pull --push``: against a hub of our own on loopback, through the library that people
use.
"""

import base64
import importlib
import importlib.util
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.commands import pull as pulling
from shoal.node.commands.pull import HubRepository, PushError

hub = pytest.importorskip(
    "huggingface_hub", reason="huggingface_hub is not installed: pip install 'shoal[data]'"
)
constants = importlib.import_module("huggingface_hub.constants")
LINK = "shoal://ulb4iv5aq7xt3uyp3nhpjvl2vcgjltt34tnhw2yp3uh3y6kgxbya?peer=/ip4/127.0.0.1/tcp/1/p2p/12D3KooWLVT8MxxJMw7LJ7dKhVjXUcpAwg3Ttk1dT5FzJFypkYVj"
TOKEN = "hf_test"
HEX = "0" * 40


class FakeHub(ThreadingHTTPServer):
    """As much of the hub as an upload of small files needs: ``created`` and ``files`` are what it
    was given.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.created, self.files, self.summaries, self.writable = [], {}, [], True

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    def log_message(self, *_): ...

    def give(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        mine = self.headers["Authorization"] == f"Bearer {TOKEN}"
        if self.path == "/api/whoami-v2":
            self.give(
                200 if mine else 401,
                {"name": "anna", "type": "user"} if mine else {"error": "Invalid token"},
            )
        else:
            self.give(404, {"error": self.path})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path == "/api/repos/create":
            if not self.server.writable:
                return self.give(403, {"error": "This token may only read"})
            self.server.created.append(json.loads(body))
            return self.give(
                200, {"url": f"{self.server.address}/anna/group", "name": "anna/group", "id": HEX}
            )
        if self.path == "/api/validate-yaml":
            return self.give(200, {"errors": [], "warnings": []})
        if self.path == "/api/models/anna/group/preupload/main":
            named = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.give(200, {"files": named})
        if self.path == "/api/models/anna/group/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(
                        line["value"]["content"]
                    )
                else:
                    self.server.summaries.append(line["value"]["summary"])
            return self.give(
                200,
                {
                    "commitUrl": f"{self.server.address}/anna/group/commit/{HEX}",
                    "commitOid": HEX,
                    "hookOutput": "",
                },
            )
        return self.give(404, {"error": self.path})


@pytest.fixture
def server(monkeypatch):
    with FakeHub() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", made.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield made
        made.shutdown()
        thread.join(30)


@pytest.fixture
def weights(tmp_path):
    (tmp_path / "README.md").write_text("---\ntags:\n- shoal\n---\n\n# Weights\n")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)))
    (tmp_path / "notes.txt").write_text("of the user's own")
    return tmp_path


def test_the_files_come_in_one_commit_and_no_others(server, weights):
    address = HubRepository("anna/group", private=True).push(
        weights, ["README.md", "model.safetensors"], "Weights of round 4"
    )
    assert address == f"{server.address}/anna/group"
    assert [(made["name"], made["organization"]) for made in server.created] == [("group", "anna")]
    assert (
        server.created[0].get("private") is True or server.created[0].get("visibility") == "private"
    )
    assert server.files == {
        name: (weights / name).read_bytes() for name in ("README.md", "model.safetensors")
    }
    assert server.summaries == ["Weights of round 4"]


def test_the_command_pushes_what_it_has_pulled(server, weights, monkeypatch):
    report = {
        "out": str(weights),
        "files": ["README.md"],
        "round": 4,
        "values": 64,
        "tensors": 1,
        "named": True,
    }
    report |= {"held_out_loss": None, "notes": []}
    monkeypatch.setattr(pulling, "pull", lambda link, out, **_: dict(report))
    pull = ["pull", LINK, "--out", str(weights), "--push", "anna/group"]
    assert (
        json.loads(CliRunner().invoke(cli, [*pull, "--json"]).stdout)["pushed"]
        == f"{server.address}/anna/group"
    )
    assert [*server.files] == ["README.md"]
    assert (
        CliRunner().invoke(cli, pull).stdout.splitlines()[-1]
        == f"pushed to {server.address}/anna/group"
    )


def test_faults_are_said_in_one_sentence_before_anything_is_pulled(server, monkeypatch):
    def said(name="anna/group"):
        with pytest.raises(PushError) as caught:
            HubRepository(name)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    for name in ("", "a/b/c", "../x", "a//b", "https://hub/x", "a/-b", "a/x..y"):
        assert said(name) == f"{name!r} names no repository of the hub: write OWNER/NAME."
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the hub refuses the token (status 401): run `hf auth login`, or set HF_TOKEN" in said()
    monkeypatch.setattr(hub, "get_token", lambda: None)
    assert said().startswith("There is no token for the hub on this machine: run `hf auth login`")
    monkeypatch.undo()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert said().startswith("Cannot ask the hub whose token this is (")
    assert said().endswith("): check the name and the network, and try again.")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (
        said()
        == "--push needs the package huggingface_hub, which is not installed: run pip install "
        "'shoal[data]'."
    )


def test_a_token_that_may_not_write_is_said(server, weights):
    server.writable = False
    with pytest.raises(
        PushError,
        match=r"Cannot push to 'anna/group', because the hub refuses the token \(status 403\): run "
        r"`hf",
    ):
        HubRepository("anna/group").push(weights, ["README.md"], "x")
    assert server.files == {}


def test_private_needs_a_repository():
    ended = CliRunner().invoke(cli, ["pull", LINK, "--out", "x", "--private"])
    assert isinstance(ended.exception, PushError)
    assert "--private says how a repository of --push is made" in str(ended.exception)
