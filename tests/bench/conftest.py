"""The benchmarks are no installed package: their tests take them from the repository, however
pytest was called.
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
MARK = "SHOAL_BENCH_TEST"
sys.path.insert(0, str(ROOT))


def marked():
    """Every process that inherited the environment of a program of this test."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == str(os.getpid()):
                yield process


@pytest.fixture
def program():
    """Runs a benchmark by its path; how it ended, with ``code``. Nothing of it is left in the end.

    ``nodes``: it starts nodes, which are to be of this checkout.
    """

    def program(script, *options, timeout=280, code=0, nodes=False, **env):
        env |= {MARK: str(os.getpid()), **({"PYTHONPATH": str(ROOT)} if nodes else {})}
        done = subprocess.run(
            [sys.executable, ROOT / "bench" / script, *map(str, options)],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=ROOT,
            env={**os.environ, **env},
        )
        assert done.returncode == code, done.stderr
        return done

    yield program
    assert psutil.wait_procs(list(marked()), timeout=5)[1] == []


@pytest.fixture
def called(monkeypatch, capsys):
    """Runs a benchmark's ``main`` in this process, which has imported torch already: its exit code
    and what it said.
    """

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
    """Runs a benchmark's ``main`` in this process with options that it refuses; what it said of
    them.
    """

    def refused(main, *options):
        done = called(main, *options)
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr

    return refused
