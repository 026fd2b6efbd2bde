"""Nodes of a demo are started so that no file in the present folder hides a module of Python's own."""

import os
import subprocess
import sys

import pytest

from shoal.node.demo.nodes import interpreter


@pytest.mark.parametrize("wanted", [False, True])
def test_a_file_in_the_present_folder_hides_nothing_unless_it_does_so_here_too(tmp_path, monkeypatch, wanted):
    (tmp_path / "queue.py").write_text("raise SystemError('hidden')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [os.getcwd() if wanted else "/", *sys.path])
    ended = subprocess.run(
        [*interpreter(), "-m", "concurrent.futures.thread"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ("hidden" in ended.stderr) == wanted
