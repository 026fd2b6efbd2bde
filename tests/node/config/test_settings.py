"""Settings from defaults, file and flags; each mistake is one sentence that names the key."""

import math
import re
import socket
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.node.config.device import resolve_device
from shoal.node.config.setting_types import MAX_NAME_CHARS
from shoal.node.config.settings import ConfigError, Settings, assignment, known_keys, load
from shoal.node.doctor import machine_checks
from shoal.node.doctor.check import Note
from shoal.node.home import HomeError, expanded

EXAMPLE = Path(__file__).parents[3] / "examples" / "swarm.toml"


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "swarm.toml"
    path.write_text(
        '[outer]\nevery = 7\nlr = 1\n[task.options]\nlayers = 3\n[node]\nname = "ada"\n'
    )
    loaded = load(path, {"outer.every": 9, "task.options.width": 32, "node.device": None})
    assert loaded.outer.every == 9
    assert loaded.outer.lr == 1.0
    assert loaded.outer.wait_s == 10.0
    assert loaded.task.options == {"layers": 3, "width": 32}
    assert loaded.node.device == "auto"
    assert loaded.node.run_folder == Path("runs/ada").absolute()


def test_defaults_need_no_file():
    assert load() == Settings()


def test_example_file_has_the_defaults():
    example, default = load(EXAMPLE).model_dump(), load().model_dump()
    assert example == default


@pytest.mark.parametrize("key", known_keys())
def test_example_file_documents_every_key(key):
    table, name = key.split(".")
    model = Settings.model_fields[table].annotation
    field = model.model_fields[name]
    if key == "task.options":
        section, before = (
            "task.options",
            EXAMPLE.read_text().split("[task.options]")[1].split("\n[")[0],
        )
    else:
        section = EXAMPLE.read_text().split(f"[{table}]\n")[1].split("\n[")[0]
        found = re.search(rf"((?:^#.*\n)+)^(?:# )?{name} = .+$", section, re.MULTILINE)
        assert found, f"examples/swarm.toml lacks {key}"
        before = found[1]
    words = " ".join(line.removeprefix("#").strip() for line in before.splitlines())
    assert " ".join(field.description.split()) in words
    assert "Default: " in words


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"outer.evry": 3}, r"no setting 'outer\.evry': did you mean 'outer\.every'\?"),
        (
            {"lr": 0.5},
            "no setting 'lr': did you mean 'outer.lr' or 'train.lr' or 'rl.lr' or "
            "'task.options.lr'",
        ),
        ({"outter.every": 3}, "no setting 'outter': did you mean 'outer'"),
        ({"qqqq": 3}, "the tables are swarm, task, outer, train, verify, rl, node"),
        ({"outer.every": 0}, r"outer\.every=0 .* greater than or equal to 1"),
        (
            {"outer.every": "x"},
            r"outer\.every='x' "
            r".* valid integer",
        ),
        ({"outer.every": True}, r"outer\.every=True"),
        ({"outer.lr": math.nan}, r"outer\.lr=nan .* finite"),
        (
            {"outer.method": "diloco2"},
            r"outer\.method='diloco2' .* 'noloco', 'local', .* or ",
        ),
        (
            {"outer.codec": "int9"},
            r"outer\.codec='int9' .* unknown codec 'int9': choose one of "
            r"float32, .*\+ef",
        ),
        ({"outer.codec": "sign+ef:7"}, r"outer\.codec='sign\+ef:7' .* must lie in \[0, 1\], got 7"),
        (
            {"outer.method": "local", "outer.lr": 0.5},
            r"settings of 'outer' do not go together: the method 'local' has no lr: leave it out, "
            r"or choose one that has it "
            r"\(noloco, diloco, diloco-hb, ",
        ),
        (
            {"outer.codec": "topk2+ef"},
            r"noloco sends whole weights, of which the codec topk2\+ef "
            r"loses too much",
        ),
        ({"swarm.bucket": 3}, r"swarm\.bucket=3 .* holds 4 to 64 members, or 0"),
        ({"swarm.bucket": 65}, r"swarm\.bucket=65 .* holds 4 to 64 members"),
        (
            {"swarm.bucket": 64, "swarm.epoch_s": 20.0},
            r"swarm\.epoch_s=20\.0 .* an epoch takes 30 "
            r"to 86400 seconds",
        ),
        (
            {"swarm.epoch_s": 90.0},
            r"epoch_s is a setting of buckets: leave it out, or set bucket "
            r"too",
        ),
        ({"node": 3}, r"'node' must be a table"),
        (
            {"node": 3, "node.name": "x"},
            r"'node' must be "
            r"a table",
        ),
        ({"node.listen": "a"}, r"node\.listen='a' .* list"),
        ({"node.name": "../../etc"}, r"node\.name='../../etc' .* letters"),
        ({"node.shard": "8/8"}, r"node\.shard='8/8' .* 0/8"),
        ({"node.folder": 3}, r"node\.folder=3 .* path"),
        ({"task.options.layers": [1]}, r"'task\.options\.layers' must be a number"),
    ],
)
def test_mistakes_name_the_key(overrides, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load(None, overrides)
    assert "\n" not in str(caught.value)


@settings(deadline=None)
@given(st.sampled_from(known_keys()), st.integers(0, 40), st.characters(categories=["Ll"]))
def test_an_unknown_key_is_named_with_its_neighbour(key, place, letter):
    table, name = key.split(".")
    at = place % (len(name) + 1)
    wrong = f"{table}.{name[:at]}{letter}{name[at:]}"
    assume(wrong not in known_keys())
    with pytest.raises(ConfigError) as caught:
        load(None, {wrong: 1})
    assert f"no setting {wrong!r}: did you mean '{table}." in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[outer]\nevery = = 3\n", r"not TOML .*line 2"),
        (b"\xff\xfe", "is not UTF-8 text: save it as UTF-8, as TOML asks for"),
        (b"#" * (2**20 + 1), "over 1 MiB"),
    ],
)
def test_files_that_are_no_settings(tmp_path, content, words):
    path = tmp_path / "swarm.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load(path)


def test_a_settings_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "swarm.toml"
    path.write_bytes(b"\xef\xbb\xbf[outer]\nevery = 7\n")
    assert load(path).outer.every == 7


def test_joiner_cannot_set_what_the_swarm_fixes():
    """A node that joins hears that the swarm fixes a setting."""
    with pytest.raises(ConfigError) as error:
        load(None, {"train.lr": 1e-3}, joins=True)
    assert str(error.value) == (
        "The swarm fixes the settings of 'train' for all its members, and this node was given "
        "train.lr: leave that out; the creator can change train.lr and train.steps for all (`shoal "
        "change`)."
    )
    with pytest.raises(ConfigError, match="do not go together"):
        load(None, {"train.lr": 1e-3})


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ConfigError, match="There is no settings file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Cannot read the settings file"):
        load(tmp_path)


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """A user without HOME and without an entry, as in a container with --user 54321."""

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_missing_home_makes_no_tilde_folder(homeless, monkeypatch):
    """Fault: the private key was written to ./~/.config/shoal."""
    with pytest.raises(HomeError) as caught:
        _ = load().node.identity_path
    assert str(caught.value) == (
        "This node's key is kept in the home folder, which is not known (HOME is not set, and this "
        "user has no entry in the system): pass --identity FILE, or set HOME."
    )
    assert load(None, {"node.identity": "/keys/one"}).node.identity_path == Path("/keys/one")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/cfg")
    assert load().node.identity_path == Path("/cfg/shoal/identity.key")


@pytest.mark.parametrize("key", ["node.folder", "node.identity", "node.resume_from"])
def test_a_path_in_an_unknown_home_is_refused(homeless, key):
    with pytest.raises(HomeError) as caught:
        load(None, {key: "~/runs"})
    assert str(caught.value) == (
        "The home folder that '~/runs' begins with is not known (HOME is not set, and this user "
        "has no entry in the system): set HOME, or write the whole path."
    )


def test_tilde_file_name_is_that_file(homeless):
    """A file whose name begins with a tilde is that file."""
    (homeless / "~notes.txt").touch()
    assert expanded("~notes.txt") == "~notes.txt"


def test_identity_path_follows_xdg(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert load().node.identity_path == Path("/home/ada/.config/shoal/identity.key")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/cfg")
    assert load().node.identity_path == Path("/cfg/shoal/identity.key")
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert load().node.identity_path == Path("/home/ada/.config/shoal/identity.key")
    assert load(None, {"node.identity": "~/key"}).node.identity_path == Path("/home/ada/key")


def test_shard_pair():
    assert load(None, {"node.shard": "3/8"}).node.shard_pair == (3, 8)
    assert load().node.shard_pair is None


@pytest.fixture
def machine(monkeypatch):
    """Lets PyTorch have so many accelerators of a kind."""

    def has(kind, count):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda: torch.device(kind) if kind else None
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return has


@pytest.mark.parametrize(
    ("kind", "count", "text", "chosen"),
    [
        (None, 0, "auto", "cpu"),
        ("cuda", 2, "auto", "cuda:0"),
        ("cuda", 2, "cuda", "cuda:0"),
        ("cuda", 2, "cuda:1", "cuda:1"),
        ("cuda", 2, "cpu", "cpu"),
        ("xpu", 1, "auto", "xpu:0"),
        ("xpu", 1, "xpu", "xpu:0"),
        ("mps", 1, "auto", "mps"),
        ("mps", 1, "mps", "mps"),
    ],
)
def test_devices_of_every_kind(machine, kind, count, text, chosen):
    machine(kind, count)
    assert resolve_device(text) == torch.device(chosen)


@pytest.mark.parametrize(
    ("kind", "count", "text", "words"),
    [
        (
            None,
            0,
            "cuda",
            r"'cuda' is not available here \(this build of PyTorch has no accelerator\): install "
            r"its driver",
        ),
        (None, 0, "xpu", r"'xpu' is not available here"),
        (None, 0, "mps", r"'mps' is not available here"),
        ("cuda", 1, "xpu", r"'xpu' is not available here \(there is cuda\)"),
        ("cuda", 2, "cuda:7", r"no device 'cuda:7': this machine has cuda:0 to cuda:1\."),
        ("xpu", 1, "xpu:1", r"no device 'xpu:1': this machine has xpu:0 only\."),
        (
            "cuda",
            1,
            "rocm",
            r"no device 'rocm': choose auto, cpu, cuda, cuda:N \(of NVIDIA or AMD\), xpu",
        ),
        ("mps", 1, "mps:0", r"no device 'mps:0': choose"),
    ],
)
def test_a_device_that_there_is_not_is_one_sentence(machine, kind, count, text, words):
    machine(kind, count)
    with pytest.raises(ConfigError, match=words) as caught:
        resolve_device(text)
    assert "\n" not in str(caught.value)


def test_too_old_driver_is_named(machine, monkeypatch):
    """A driver that is too old for the build is named."""

    def init():
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040). Please "
            "update\nyour driver"
        )

    machine(None, 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(
        ConfigError,
        match=r"not available here \(The NVIDIA driver on your system is too old \(found version "
        r"11040",
    ):
        resolve_device("cuda")
    assert resolve_device("auto").type == "cpu"
    with pytest.raises(
        Note, match=r"a GPU cannot be used .*too old.*: install its driver, or a build that fits it"
    ):
        machine_checks.device(None, lambda said: None)


def test_nodes_of_one_machine_have_different_default_names(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "box.example.org")

    def name(**given):
        return load(None, {f"node.{key}": value for key, value in given.items()}).node.name

    assert name() == "box"
    assert name(folder="runs/box") == "box"
    assert name(folder="runs/second one") == "box-second-one"
    assert name(identity="keys/other.key") == "box-other"
    assert name(folder="runs/second", identity="keys/other.key") == "box-second"
    assert name(folder="runs/second", name="anna") == "anna"
    assert len(name(folder="x" * 100)) == MAX_NAME_CHARS


def test_a_second_key_gives_a_second_run_folder(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    first, second = load().node, load(None, {"node.identity": "other.key"}).node
    assert (first.run_folder.name, second.run_folder.name) == ("box", "box-other")


def test_host_name_is_a_file_name(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "-é/box.example.org")
    assert load().node.name == "box"
    monkeypatch.setattr(socket, "gethostname", lambda: "...")
    assert load().node.name == "node"


@pytest.mark.parametrize("key", ["listen", "announce"])
def test_an_address_that_is_none_is_named(key):
    with pytest.raises(
        ConfigError, match=r"'4001' should be written such as /ip4/0\.0\.0\.0/tcp/4001"
    ):
        load(None, {f"node.{key}": ["/ip4/127.0.0.1/tcp/1", "4001"]})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("outer.lr=0.5", 0.5),
        ("width=256", 256),
        ("a=true", True),
        ("outer.method=diloco-hb", "diloco-hb"),
        ('a="1"', "1"),
        ("a=", ""),
        ("a=/some/path", "/some/path"),
        ("a=1\nb = 2", "1\nb = 2"),
        ("a=1 # no comment", "1 # no comment"),
    ],
)
def test_assignment_is_toml_or_plain_text(text, value):
    """An assignment is read as toml would or as plain text."""
    key, got = assignment(text)
    assert (key, got, type(got)) == (text.partition("=")[0], value, type(value))


def test_a_number_of_thousands_of_digits_is_refused(tmp_path):
    """Fault: Python reads none of over 4,300 digits, and the command ended with a traceback."""
    digits = "1" * 5000
    assert assignment(f"train.steps={digits}") == ("train.steps", digits)
    with pytest.raises(ConfigError, match=r"^The setting train\.steps='1+\.\.\.1+' cannot be used"):
        load(None, dict([assignment(f"train.steps={digits}")]))
    file = tmp_path / "swarm.toml"
    file.write_text(f"[train]\nsteps = {digits}\n")
    with pytest.raises(ConfigError, match=r"^The settings file .* is not TOML \(Exceeds the limit"):
        load(file)


@pytest.mark.parametrize("text", ["width", "=3", "a b=3", "outer.=3", ".lr=3"])
def test_what_is_no_assignment(text):
    with pytest.raises(
        ConfigError, match=r"is not of the form KEY=VALUE: write it so, such as width=256\."
    ):
        assignment(text)
