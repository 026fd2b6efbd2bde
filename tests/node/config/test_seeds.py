"""Which seeds `shoal swarms` asks: those named, else the variable's, else the file's."""

import pytest

from shoal.node.commands.swarms import MAX_SEEDS, VARIABLE, known_seeds, seeds_file
from shoal.node.config.settings import ConfigError

PEER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"


def seed(number):
    return f"/ip4/203.0.113.{number}/tcp/4001/p2p/{PEER}"


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)


def write(text):
    seeds_file().parent.mkdir(exist_ok=True)
    seeds_file().write_text(text)


def test_the_nearest_source_wins(monkeypatch):
    write(f"# of a friend\n\n{seed(3)}  # Oslo\n{seed(4)}\n")
    assert known_seeds() == [seed(3), seed(4)]
    monkeypatch.setenv(VARIABLE, f"{seed(2)} {seed(2)}")
    assert known_seeds() == [seed(2)]
    assert known_seeds([seed(1)]) == [seed(1)]
    assert len(known_seeds([seed(number) for number in range(1, 100)])) == MAX_SEEDS


def test_without_any_it_says_where_one_can_be_named():
    with pytest.raises(ConfigError) as error:
        known_seeds()
    with pytest.raises(ConfigError, match="name one with --bootstrap MULTIADDR"):
        known_seeds((), "--bootstrap")  # the option of `shoal join`
    for part in ("--seed", VARIABLE, str(seeds_file()), "`shoal seed`"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("where", "text"), [("variable", "/ip4/203.0.113.1/tcp/4001"), ("file", "example.org:4001")]
)
def test_a_wrong_address_is_quoted_with_its_source(where, text, monkeypatch):
    if where == "variable":
        monkeypatch.setenv(VARIABLE, text)
    else:
        write(text + "\n")
    with pytest.raises(ConfigError) as error:
        known_seeds()
    assert text in str(error.value)
    assert (VARIABLE if where == "variable" else str(seeds_file())) in str(error.value)
