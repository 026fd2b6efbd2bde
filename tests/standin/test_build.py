"""Where the stand-in GPU cannot be built, one sentence says why."""

import pytest

from tests.standin import build


@pytest.mark.parametrize(
    ("torch", "compiler", "said"),
    [
        ("2.12.1+cpu", "/usr/bin/g++", "is written for PyTorch 2.13.0, and this is 2.12.1+cpu"),
        ("2.13.0+cpu", None, "g++ is missing"),
        ("2.13.0+cpu", "/usr/bin/g++", None),
        ("2.13.0", "/usr/bin/g++", None),
    ],
)
def test_what_is_missing_is_named(monkeypatch, tmp_path, torch, compiler, said):
    monkeypatch.setattr(build, "version", lambda package: torch)
    monkeypatch.setattr(build, "_torch", lambda: tmp_path)
    monkeypatch.setattr(build.shutil, "which", lambda program: compiler)
    assert build.refusal() is None if said is None else said in build.refusal()


def test_a_build_for_real_gpus_is_left_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "version", lambda package: "2.13.0")
    monkeypatch.setattr(build, "_torch", lambda: tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    assert "is built for real GPUs" in build.refusal()
