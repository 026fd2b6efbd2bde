"""The benchmarks are no installed package: their tests take them from the repository, however pytest was called."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs a benchmark's ``main`` in this process with options that it refuses; what it said of them."""

    def refused(main, *options):
        monkeypatch.setattr(sys, "argv", ["bench", *options])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert (ended.value.code, said.out) == (2, "")
        return said.err

    return refused
