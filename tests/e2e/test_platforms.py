"""The platforms that docs/install.md names: wheels of all dependencies for each, and an emulated
node for arm64 in a swarm.

What was asked and fetched stays in the user's cache; where no registry is reached the tests are
skipped.
"""

import hashlib
import json
import os
import platform as this
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal-tests"
PYTHON = "{}.{}".format(*sys.version_info)
GLIBC = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
ARM64 = [f"{kind}_aarch64" for kind in GLIBC]
# Whose wheels are taken; and of the markers sys_platform, platform_system, platform_machine.
PLATFORMS = {
    "linux-x86_64": ([f"{kind}_x86_64" for kind in GLIBC], "linux", "Linux", "x86_64"),
    "linux-arm64": (ARM64, "linux", "Linux", "aarch64"),
    "macos-arm64": (["macosx_14_0_arm64"], "darwin", "Darwin", "arm64"),
}
# The wheel for arm64 of the release in constraints.txt is for CUDA, without whose libraries it is
# not imported. This one is not.
TORCH_OF_ARM64 = "torch==2.9.1"
SIZE = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch": 2}
INSIDE = r"""
set -e
mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
printf '%s' ":arm64:M::$magic:$mask:$1/usr/bin/qemu-aarch64-static:F" > /proc/sys/fs/binfmt_misc/register
mkdir -p "$1/root/checkout"
for folder in /proc /dev /sys "$3"; do mkdir -p "$1/root$folder"; mount --rbind "$folder" "$1/root$folder"; done
mount --rbind "$2" "$1/root/checkout"
root=$1; shift 4
exec env PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHONPATH=/checkout:/site chroot "$root/root" /usr/bin/python3 "$@"
"""  # noqa: E501
"""Runs Python in a root for arm64.

Since Linux 6.7 the namespace of a user has its own table of formats: no other is changed.
"""


def needed(platform, python=PYTHON):
    """What `shoal[watch]` needs there, as ``name==version`` of this environment, and which of it
    have compiled parts.
    """
    _, system, named, machine = PLATFORMS[platform]
    there = {
        "sys_platform": system,
        "platform_system": named,
        "platform_machine": machine,
        "python_version": python,
    }
    exact, compiled, done, todo = {}, set(), set(), [Requirement("shoal[watch]")]
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        if (name, *wanted.extras) in done:
            continue
        done.add((name, *wanted.extras))
        try:
            found = distribution(name)
        except PackageNotFoundError:  # not needed on this machine
            exact[name] = f"{name}{wanted.specifier}"
            compiled.add(name)
            continue
        exact[name] = f"{name}=={found.version.partition('+')[0]}"
        if any(
            not tag.endswith("-none-any")
            for tag in re.findall(r"^Tag: (\S+)", found.read_text("WHEEL") or "", re.M)
        ):
            compiled.add(name)
        for each in map(Requirement, found.requires or ()):
            if each.marker is None or any(
                each.marker.evaluate({**there, "extra": extra}) for extra in ("", *wanted.extras)
            ):
                todo.append(each)
    del exact["shoal"]
    return sorted(exact.values()), sorted(exact[name] for name in compiled if name in exact)


def pip(*arguments, tags, python=PYTHON, seconds=280):
    """Run pip for another platform."""
    where = [f"--platform={tag}" for tag in tags]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--ignore-installed",
        f"--python-version={python}",
    ]
    return subprocess.run(
        [*command, *where, *arguments], capture_output=True, text=True, timeout=seconds, check=False
    )


def wheels_of(platform, names):
    """The wheels that pip takes there, or why it takes none."""
    with tempfile.TemporaryDirectory() as folder:
        dry = ("--dry-run", "--only-binary=:all:", f"--target={folder}", "--report=-")
        ended = pip(*dry, *names, tags=PLATFORMS[platform][0])
    if ended.returncode:
        return ended.stderr
    return [
        part["download_info"]["url"].rpartition("/")[2]
        for part in json.loads(ended.stdout)["install"]
    ]


@pytest.mark.slow(reason="asks a registry for two dozen packages")
@pytest.mark.parametrize("platform", PLATFORMS)
def test_all_dependencies_with_compiled_parts_have_wheels(platform):
    """What has none (pure Python alone) is the same for all platforms."""
    _, names = needed(platform)
    assert {name.partition("==")[0] for name in names} >= {
        "hivemind",
        "torch",
        "uvloop",
        "blake3",
        "cryptography",
    }
    said = (
        CACHE
        / f"wheels-{platform}-{PYTHON}-{hashlib.sha256(' '.join(names).encode()).hexdigest()[:16]}.json"  # noqa: E501
    )
    if not said.exists():
        if isinstance(wheels_of("linux-x86_64", ["hivemind==1.1.12"]), str):
            pytest.skip("no registry is reached")
        found = wheels_of(platform, names)
        assert isinstance(found, list), found
        said.parent.mkdir(parents=True, exist_ok=True)
        said.write_text(json.dumps(found))
    wheels = json.loads(said.read_text())
    assert len(wheels) == len(names)
    kinds = (f"_{PLATFORMS[platform][3]}.whl", "_universal2.whl")
    assert [wheel for wheel in wheels if not wheel.endswith(kinds)] == []


def fetch_arm64(into):
    """A root with Debian's Python for arm64, our dependencies, and the emulator: nothing of it is
    installed. Raises what failed.
    """
    for folder in ("state/lists/partial", "cache/archives/partial", "root"):
        (into / folder).mkdir(parents=True, exist_ok=True)
    (into / "status").touch()
    here = subprocess.run(
        ["dpkg", "--print-architecture"], capture_output=True, text=True, check=True
    ).stdout.strip()
    (into / "apt.conf").write_text(
        f'APT::Architecture "arm64"; APT::Architectures {{ "arm64"; "{here}"; }};\n'
        f'Dir::State "{into}/state"; Dir::State::status "{into}/status"; Dir::Cache '
        f'"{into}/cache";\n'
    )

    def apt(*arguments):
        env = {**os.environ, "APT_CONFIG": str(into / "apt.conf")}
        subprocess.run(
            ["apt-get", "-qq", *arguments],
            env=env,
            cwd=into,
            capture_output=True,
            timeout=300,
            check=True,
        )

    apt("update")
    apt(
        "install",
        "-y",
        "--no-install-recommends",
        "--download-only",
        "python3-minimal",
        "python3",
        "libgomp1",
        "libstdc++6",
    )
    apt("download", f"qemu-user-static:{here}")
    for package in (into / "cache" / "archives").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, into / "root"], check=True)
    for package in into.glob("qemu-user-static*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, into], check=True)
    python = (into / "root/usr/bin/python3").readlink().name.removeprefix("python")
    names = [
        name if not name.startswith("torch==") else TORCH_OF_ARM64
        for name in needed("linux-arm64", python)[0]
    ]
    ended = pip(f"--target={into}/root/site", *names, tags=ARM64, python=python, seconds=900)
    if ended.returncode:
        raise OSError(ended.stderr[-500:])


@pytest.fixture
def arm64(shoal):
    """What stands before the arguments of Python to run it for arm64."""
    root = (
        CACHE
        / f"arm64-{hashlib.sha256(' '.join(needed('linux-arm64')[0]).encode()).hexdigest()[:16]}"
    )
    if not root.exists():
        if this.system() != "Linux" or not all(
            map(shutil.which, ("apt-get", "dpkg-deb", "unshare", "chroot"))
        ):
            pytest.skip("apt-get, dpkg-deb, unshare and chroot are needed")
        root.parent.mkdir(parents=True, exist_ok=True)
        for other in CACHE.glob("arm64-*"):  # of other versions: a gigabyte each
            shutil.rmtree(other)
        part = Path(tempfile.mkdtemp(dir=root.parent))
        try:
            fetch_arm64(part)
            part.rename(root)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"nothing for arm64 can be fetched: {error!r}"[:500])
        finally:
            shutil.rmtree(part, ignore_errors=True)
    before = (
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "bash",
        "-c",
        INSIDE,
        "arm64",
        root,
        ROOT,
        shoal.home,
    )
    ran = shoal.start(program=("-c", "import platform; print(platform.machine())"), before=before)
    if ran.wait():
        pytest.skip(f"no namespace with its own table of formats: {ran.said()}")
    assert ran.lines == ["aarch64"]
    return before


@pytest.mark.slow(reason="runs Python under an emulator")
@pytest.mark.timeout(1500)
def test_a_node_for_arm64_exchanges_with_one_of_this_machine(shoal, eventually, arm64):
    doctor = shoal.start("doctor", program=("-m", "shoal"), before=arm64)
    assert doctor.wait(300) == 0, doctor.said()
    assert "Linux aarch64" in "\n".join(doctor.lines)
    assert "nothing is in the way" in "\n".join(doctor.lines)
    file = shoal.toml(
        swarm={"start_when": 2}, outer={"round": "seconds:5", "wait_s": 10.0}, options=SIZE
    )
    here = shoal.node("up", file, "here")
    there = shoal.node("join", here.line(), "arm64", program=("-m", "shoal"), before=arm64)

    eventually(
        lambda: min(len(shoal.rounds("here", 2)), len(shoal.rounds("arm64", 2))) >= 2,
        600,
        "two exchanges",
    )
    for node in (there, here):
        node.signal(signal.SIGINT)
    assert [node.wait() for node in (there, here)] == [130, 130]
    assert "with arm64" in here.said()
