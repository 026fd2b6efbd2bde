"""Checks of this machine: Python, PyTorch, device, memory, disk and port. No network."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

from shoal.node.doctor.checkup import Check, Note, Tell
from shoal.node.exit_codes import ExitCode
from shoal.node.memory import free_memory
from shoal.swarm.errors import ShoalError
from shoal.swarm.p2p.connections import check_free

GB = 1e9
MIN_DISK, SMALL_DISK = 0.25 * GB, 2 * GB
MIN_MEMORY, SMALL_MEMORY = 0.5 * GB, 1.5 * GB
OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 7)


class UnfitError(ShoalError):
    """Fault of this machine that prevents training."""


def python(tell: Tell) -> str:
    """Check the version of Python; return it and the platform."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] < OLDEST_PYTHON:  # pip does not check a checkout
        raise UnfitError(f"this is Python {found}: install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer.")
    place = platform.system(), platform.machine()
    if place == ("Darwin", "arm64"):
        raise Note(f"{found}: all packages have wheels for it, but it was not run by us; say how it went.")
    if place not in (("Linux", "x86_64"), ("Linux", "aarch64")):
        raise Note(f"{found}: PyTorch or the network daemon has no wheel for it; take Linux or Apple silicon, or WSL or Docker.")
    return found


def torch(tell: Tell) -> str:
    """Check that PyTorch can be imported."""
    try:
        import torch as found
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        first = str(error).split("\n")[0][:200]
        raise UnfitError(f"PyTorch cannot be imported ({first}): reinstall it with `pip install torch`.") from error
    numbers = tuple(int(part) for part in found.__version__.split("+")[0].split(".")[:2])
    if numbers < OLDEST_TORCH:
        raise UnfitError(f"this is PyTorch {found.__version__}: install {'.'.join(map(str, OLDEST_TORCH))} or newer.")
    kinds = {"CUDA": found.version.cuda, "ROCm": found.version.hip, "XPU": getattr(found.version, "xpu", None)}
    made = next((f"for {kind} {version}" for kind, version in kinds.items() if version), "for no GPU but Apple's")
    return f"{found.__version__}, {made}"


def device(tell: Tell) -> str:
    """Check a small product on the device that ``auto`` chooses."""
    import torch as found

    from shoal.node.config.device import NO_DRIVER, resolve_device, trouble

    chosen = resolve_device("auto")
    try:
        ones = found.ones(64, 64, device=chosen)
        right = bool(((ones @ ones).cpu() == 64).all())
    except RuntimeError as error:
        first = str(error).split("\n")[0][:200]
        raise UnfitError(f"{chosen} does not compute ({first}): mend its driver, or train with --device cpu.") from error
    if not right:
        raise UnfitError(f"{chosen} computes wrongly: do not train on it, take --device cpu or another machine.")
    if chosen.type in ("cuda", "xpu"):
        of_kind = found.get_device_module(chosen)
        free, total = of_kind.mem_get_info(chosen)
        return f"{chosen}, {of_kind.get_device_name(chosen)}, {free / GB:.1f} of {total / GB:.1f} GB free"
    if chosen.type == "cpu" and (why := trouble()) and not why.startswith(NO_DRIVER):
        raise Note(f"a GPU cannot be used ({why}), so a node trains on the processor: install its driver, or a build that fits it.")
    return f"{chosen}, {os.cpu_count() or 1} processors"


def memory(tell: Tell) -> str:
    """Check the free main memory."""
    free, total = free_memory()
    found = f"{free / GB:.1f} of {total / GB:.1f} GB free"
    if free < MIN_MEMORY:
        raise UnfitError(f"only {found}, less than a node with the smallest model needs: end other programs.")
    if free < SMALL_MEMORY:
        raise Note(f"{found}: enough for a small model only, of which a node holds about seven copies.")
    return found


def disk(tell: Tell) -> str:
    """Check that the default folder of checkpoints is writable, and has room."""
    folder = next(path for path in (Path("runs"), Path()) if path.is_dir())
    where = f"in {str(folder.resolve())!r}"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
        free = float(shutil.disk_usage(folder).free)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space, or use --folder elsewhere" if full else "start in a folder that you can write, or use --folder"
        raise UnfitError(f"cannot write {where} ({error.strerror}): {remedy}.") from error
    if free < MIN_DISK:
        raise UnfitError(f"the disk is full, {free / GB:.2f} GB are free {where}: free some space, or use --folder elsewhere.")
    if free < SMALL_DISK:
        raise Note(f"{free / GB:.1f} GB are free {where}: enough for a small model, of which three checkpoints are kept.")
    return f"{free / GB:.1f} GB free {where}"


def port(number: int) -> str:
    """Check that port ``number`` can be listened on; 0: any."""
    check_free([f"/ip4/0.0.0.0/tcp/{number}"])
    return f"TCP {number} can be listened on" if number else "any free one will do; --port tries a certain one"


def checks(number: int) -> list[Check]:
    """Return all checks of the machine; ``number``: the port on which the node is to listen."""
    unfit = ExitCode.UNFIT_MACHINE
    return [
        Check("python", unfit, python),
        Check("torch", unfit, torch, seconds=60.0),
        Check("device", unfit, device, needs=("torch",), seconds=60.0),
        Check("memory", unfit, memory),
        Check("disk", unfit, disk),
        Check("port", ExitCode.NO_DAEMON, lambda tell: port(number)),
    ]
