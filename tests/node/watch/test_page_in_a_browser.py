"""The page as a browser shows it: only that runs its script. Headless Chromium, where there is one."""

import json
import shutil
import subprocess
import sys
from urllib.request import urlopen

import pytest

from shoal.node.watch.recording import Recorder
from tests.node.watch.conftest import NOW

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.slow(reason="starts Chromium")
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_names_numbers_and_curves_are_on_the_page(authors, tmp_path, until):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    anna, bert, _ = authors
    recorder = Recorder(tmp_path / "swarm.jsonl")
    for number in range(3):
        recorder.take(anna.heard(anna.round(number, [bert]), at=NOW + number, name="<i>anna</i>", faults=(("no-partner", 2),)))
        recorder.take(bert.heard(bert.round(number, [anna]), at=NOW + number))
    recorder.close()
    command = [sys.executable, "-m", "shoal", "watch", "--replay", str(tmp_path / "swarm.jsonl"), "--speed", "0", "--web", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = server.stdout.readline().strip()
            browser = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
            until(lambda: '"ended": true' in urlopen(address, timeout=10).read().decode(), 60, "the end of the recording")
            shown = subprocess.run(
                [*browser, "--dump-dom", address], capture_output=True, text=True, timeout=120, check=True
            ).stdout
        finally:
            server.terminate()
    assert "&lt;i&gt;anna&lt;/i&gt;" in shown
    assert "<i>anna" not in shown
    assert "no-partner 2" in shown
    assert shown.count('class="curve"') == 2
    assert shown.count('class="mean"') == 1
    assert ">round</text>" in shown
    assert shown.count("<circle") == 2
    assert "2 of 2" in shown
    assert "end of the recording" in shown
    assert json.dumps(bert.peer) in shown
