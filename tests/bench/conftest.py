"""The benchmarks are no installed package: their tests take them from the repository, however pytest was called."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@pytest.fixture
def called(monkeypatch, capsys):
    """Runs a benchmark's ``main`` in this process, which has imported torch already: its exit code and what it said."""

    def called(main, *options):
        monkeypatch.setattr(sys, "argv", ["bench", *map(str, options)])
        try:
            code = main() or 0
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=said.out, stderr=said.err)

    return called


@pytest.fixture
def refused(called):
    """Runs a benchmark's ``main`` in this process with options that it refuses; what it said of them."""

    def refused(main, *options):
        done = called(main, *options)
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr

    return refused
