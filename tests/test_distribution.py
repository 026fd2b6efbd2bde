"""What is built from the checkout: wheel, source distribution and editable install, through the
links in ``shoal/``.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from shoal.node.commands.scaffold import FILES, TEMPLATES
from tests.support.checkout import ROOT, TOPS, copied

BUILD = """
import sys
from setuptools import build_meta
for what, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    getattr(build_meta, f"build_{what}")(folder)
"""
USERS_PROGRAM = """
import torch, shoal, optim, swarm, node, verification
from shoal import NoLoCo, Simulation
assert {module.MINE for module in (optim, swarm, node, verification)} == {True}

def train(exchange):
    torch.manual_seed(int(exchange.peer))
    model = torch.nn.Linear(2, 1)
    opt = NoLoCo(torch.optim.SGD(model.parameters(), lr=0.1), exchange, every=2, lag=0)
    for _ in range(6):
        model(torch.ones(1, 2)).square().sum().backward()
        opt.step()
        opt.zero_grad()
    return opt.round

print(Simulation(["0", "1"]).run(train), shoal.__file__, shoal.optim.__file__)
"""


def setuptools_is_new_enough():
    try:
        return int(version("setuptools").split(".")[0]) >= 77
    except PackageNotFoundError:
        return False


needs_setuptools = pytest.mark.skipif(
    not setuptools_is_new_enough(), reason="building needs setuptools 77 or newer"
)


def run(*command, folder, **env):
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**kept, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def unpacked(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with all that is built from a copy of the checkout: ``*.whl``, ``*.tar.gz``,
    ``again/*.whl``, ``editable/*.whl``.
    """
    folder = tmp_path_factory.mktemp("built")
    copy = copied(folder / "copy")
    (folder / "editable").mkdir()
    (folder / "again").mkdir()
    run("-c", BUILD, "sdist", folder, "wheel", folder, "editable", folder / "editable", folder=copy)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(
            folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    run("-c", BUILD, "wheel", folder / "again", folder=next(folder.glob("shoal-*/")))
    return folder


@pytest.fixture(scope="module")
def site(built):
    """The wheel as pip would unpack it."""
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(built / "site")
    return built / "site"


def test_the_links_are_relative_and_git_keeps_them():
    for name in TOPS:
        assert (ROOT / "shoal" / name).readlink() == Path("..") / name
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no checkout of git's")
    listed = subprocess.run(
        ["git", "ls-files", "-s", "shoal"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert set(re.findall(r"^120000 .*\tshoal/(\w+)$", listed, re.M)) == set(TOPS)


@needs_setuptools
def test_the_wheel_holds_every_module_template_and_page_below_shoal(site):
    files = (
        file
        for top in TOPS
        for file in (ROOT / top).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    )
    expected = {"shoal" / file.relative_to(ROOT) for file in files}
    expected |= {Path("shoal") / name for name in ("__init__.py", "__main__.py", "py.typed")}
    found = {file.relative_to(site) for file in site.rglob("*") if file.is_file()}
    assert {file for file in found if not file.parts[0].endswith(".dist-info")} == expected
    assert {
        Path("shoal/node/templates") / template / file for template in TEMPLATES for file in FILES
    } <= found
    assert not any(file.is_symlink() for file in site.rglob("*"))


@needs_setuptools
def test_the_source_distribution_builds_the_same_wheel(built):
    assert unpacked(next(built.glob("*.whl"))) == unpacked(next((built / "again").glob("*.whl")))
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    assert {
        Path("LICENSE"),
        Path("README.md"),
        Path("constraints.txt"),
        Path("shoal/optim/__init__.py"),
    } <= names
    assert not {Path("tests"), Path("optim"), Path("bench")} & {
        Path(*name.parts[:1]) for name in names
    }


@needs_setuptools
def test_an_editable_install_finds_the_checkout(built):
    with zipfile.ZipFile(next((built / "editable").glob("*.whl"))) as wheel:
        wheel.extractall(built / "linked")
    program = (
        "import site; site.addsitedir('linked'); import shoal.swarm.errors; "
        "print(shoal.swarm.errors.__file__)"
    )
    # Without the interpreter's own site-packages (-S), where shoal may be installed already.
    assert run("-S", "-c", program, folder=built).strip() == str(
        built / "copy" / "shoal" / "swarm" / "errors.py"
    )


@pytest.mark.ci
@needs_setuptools
def test_same_named_user_modules_do_no_harm(site, tmp_path):
    """A user's own modules of the same names do no harm."""
    for name in TOPS:
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
    (tmp_path / "train.py").write_text(USERS_PROGRAM)
    said = run("train.py", folder=tmp_path, PYTHONPATH=str(site), OMP_NUM_THREADS="1")
    assert said.split() == [
        "{'0':",
        "3,",
        "'1':",
        "3}",
        str(site / "shoal/__init__.py"),
        str(site / "shoal/optim/__init__.py"),
    ]


@needs_setuptools
def test_types_are_seen_from_an_installed_wheel(site, tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    venv.create(tmp_path / "v", symlinks=True)
    (packages,) = (tmp_path / "v").glob("lib/python*/site-packages")
    shutil.copytree(site, packages, dirs_exist_ok=True)
    program = (
        "import shoal\nfrom shoal import "
        "Alone\nreveal_type(Alone())\nreveal_type(shoal.optim.Alone)\n"
    )
    (tmp_path / "use.py").write_text(program)
    options = [
        "--python-executable",
        tmp_path / "v" / "bin" / "python",
        "--cache-dir",
        tmp_path / "cache",
        "--no-error-summary",
    ]
    said = run("-m", "mypy", *options, "use.py", folder=tmp_path)
    home = "shoal.optim.exchange.base.Alone"
    assert re.findall(r'Revealed type is "(.+)"', said) == [home, f"def () -> {home}"]
