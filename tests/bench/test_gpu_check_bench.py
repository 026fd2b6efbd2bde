"""bench/gpu_check.py: a step that fails is reported with what it said, and the others go on."""

import sys

import pytest
import torch

from bench import gpu_check


def test_the_report_has_a_row_for_each_step_and_the_end_of_what_it_said():
    long = "print('\\n'.join(map(str, range(100)))); raise SystemExit(3)"
    steps = [
        gpu_check.run("fails", [[sys.executable, "-c", long], [sys.executable, "-c", "print('never')"]], limit_s=60),
        gpu_check.measured("breaks", lambda: f"{1 // 0}"),
        gpu_check.measured("works", lambda: "1.5 of it"),
    ]
    assert [one.passed for one in steps] == [False, False, True]
    report = gpu_check.report("a machine", steps)
    assert "| fails | **failed** |" in report
    assert "| works | passed |" in report
    assert "99\n```" in report
    assert "\n74\n" not in report
    assert "never" not in report
    assert "ZeroDivisionError" in report


def test_a_step_that_takes_too_long_is_ended():
    step = gpu_check.run("long", [[sys.executable, "-c", "import time; time.sleep(600)"]], limit_s=0.5)
    assert not step.passed
    assert step.said == "ended after 0.5 s"
    assert step.seconds < 60


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    monkeypatch.setattr(gpu_check, "resolve_device", lambda name: torch.device("cpu"))
    with pytest.raises(SystemExit, match="PyTorch finds no GPU on this machine"):
        gpu_check.main()
