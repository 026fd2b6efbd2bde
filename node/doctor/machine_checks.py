"""Checks of this machine, without network."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from shoal.node.doctor.check import FaultError, Note, Tell
from shoal.node.doctor.visit import Visit
from shoal.node.free_memory import free_memory
from shoal.node.lost_output import DISK_FULL
from shoal.node.runtime.run_options import METRICS
from shoal.swarm.errors import printable
from shoal.swarm.p2p.listening import check_free

GB = 1e9
MIN_DISK_BYTES = 0.25 * GB
SMALL_DISK_BYTES = 2 * GB
MIN_MEMORY_BYTES = 0.5 * GB
SMALL_MEMORY_BYTES = 1.5 * GB
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 7)
READ_BYTES = 4 << 20
"""From the end of a run's metrics, that are looked at."""


def python(visit: Visit, tell: Tell) -> str:
    """Check the version of Python; return it and the platform."""
    build = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    # pip does not check a checkout.
    if sys.version_info[:2] < OLDEST_PYTHON:
        raise FaultError(
            f"this is Python {build}: install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer."
        )
    place = platform.system(), platform.machine()
    if place == ("Darwin", "arm64"):
        raise Note(
            f"{build}: all packages have wheels for it, but it was not run by us; say how it went."
        )
    if place not in (("Linux", "x86_64"), ("Linux", "aarch64")):
        raise Note(
            f"{build}: PyTorch or the network daemon has no wheel for it; take Linux or Apple "
            "silicon, or WSL or Docker."
        )
    return build


def torch(visit: Visit, tell: Tell) -> str:
    """Check that PyTorch can be imported."""
    try:
        import torch as installed
    # OSError: a shared library is missing.
    except (ImportError, OSError) as error:
        first = str(error).split("\n")[0][:200]
        raise FaultError(
            f"PyTorch cannot be imported ({first}): reinstall it with `pip install torch`."
        ) from error
    numbers = tuple(int(part) for part in installed.__version__.split("+")[0].split(".")[:2])
    if numbers < OLDEST_TORCH:
        raise FaultError(
            f"this is PyTorch {installed.__version__}: install {'.'.join(map(str, OLDEST_TORCH))} "
            "or newer."
        )
    kinds = {
        "CUDA": installed.version.cuda,
        "ROCm": installed.version.hip,
        "XPU": getattr(installed.version, "xpu", None),
    }
    made = "a build for the processor only"
    if sys.platform == "darwin":
        made = "for Apple's GPU"
    for kind, version in kinds.items():
        if version:
            made = f"for {kind} {version}"
            break
    return f"{installed.__version__}, {made}"


def device(visit: Visit, tell: Tell) -> str:
    """Check a small product on the device that ``auto`` chooses."""
    import torch as installed

    from shoal.node.config.device import NO_DRIVER, resolve_device, trouble

    chosen = resolve_device("auto")
    try:
        ones = installed.ones(64, 64, device=chosen)
        right = bool(((ones @ ones).cpu() == 64).all())
    except RuntimeError as error:
        first = str(error).split("\n")[0][:200]
        raise FaultError(
            f"{chosen} does not compute ({first}): mend its driver, or train with --device cpu."
        ) from error
    if not right:
        raise FaultError(
            f"{chosen} computes wrongly: do not train on it, take --device cpu or another machine."
        )
    if chosen.type in ("cuda", "xpu"):
        of_kind = installed.get_device_module(chosen)
        free, total = of_kind.mem_get_info(chosen)
        return (
            f"{chosen}, {of_kind.get_device_name(chosen)}, {free / GB:.1f} of {total / GB:.1f} "
            "GB free"
        )
    why = trouble() if chosen.type == "cpu" else ""
    if why and not why.startswith(NO_DRIVER):
        raise Note(
            f"a GPU cannot be used ({why}), so a node trains on the processor: install its driver, "
            "or a build that fits it."
        )
    return f"{chosen}, {os.cpu_count() or 1} processors"


def memory(visit: Visit, tell: Tell) -> str:
    """Check the free main memory."""
    free, total = free_memory()
    available = f"{free / GB:.1f} of {total / GB:.1f} GB free"
    if free < MIN_MEMORY_BYTES:
        raise FaultError(
            f"only {available}, less than a node with the smallest model needs: end other programs."
        )
    if free < SMALL_MEMORY_BYTES:
        raise Note(
            f"{available}: enough for a small model only, of which a node holds about seven copies."
        )
    return available


def disk(visit: Visit, tell: Tell) -> str:
    """Check that runs/ here, else the current folder, is writable and its disk has room."""
    folder = next(path for path in (Path("runs"), Path()) if path.is_dir())
    where = f"in {str(folder.resolve())!r}"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
        free = float(shutil.disk_usage(folder).free)
    except OSError as error:
        remedy = "start in a folder that you can write, or use --folder"
        if error.errno in DISK_FULL:
            remedy = "free some space, or use --folder elsewhere"
        raise FaultError(f"cannot write {where} ({error.strerror}): {remedy}.") from error
    if free < MIN_DISK_BYTES:
        raise FaultError(
            f"the disk is full, {free / GB:.2f} GB are free {where}: free some space, or use "
            "--folder elsewhere."
        )
    if free < SMALL_DISK_BYTES:
        raise Note(
            f"{free / GB:.1f} GB are free {where}: enough for a small model, of which three "
            "checkpoints are kept."
        )
    return f"{free / GB:.1f} GB free {where}"


def last_run(visit: Visit, tell: Tell) -> str:
    """Check that the newest run here, which may be under way, met no error of its own code and
    exchanged something.
    """
    runs = [(path.stat().st_mtime, path) for path in Path("runs").glob(f"*/{METRICS}")]
    if not runs:
        return "none is in the folder 'runs' here"
    _, path = max(runs)
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - READ_BYTES, 0))
            lines = file.read().splitlines()
    except OSError as error:
        raise Note(
            f"{str(path)!r} cannot be read ({error.strerror}): check its permissions."
        ) from error
    own = ""
    alone = ""
    for line in lines:
        event = _event(line)
        if event.get("event") == "start":
            # Of the newest of several runs in this folder.
            own = ""
            alone = ""
        elif event.get("event") == "diagnosis" and event.get("about") == "internal":
            own = str(event.get("said"))
        elif event.get("event") == "end":
            alone = str(event.get("trained_alone") or "")
    said = printable(alone or own)
    if said:
        raise Note(f"{str(path.parent)!r}: {said}.")
    return f"{str(path.parent)!r} met no error of its own"


def _event(line: bytes) -> dict[str, Any]:
    """Return the event in a line of metrics; an empty one if it is none, as where the node is
    writing it just now.
    """
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def port(visit: Visit, tell: Tell) -> str:
    """Check that the port can be listened on."""
    check_free([f"/ip4/0.0.0.0/tcp/{visit.port}"])
    if not visit.port:
        return "any free one will do; --port tries a certain one"
    return f"TCP {visit.port} can be listened on"
