"""All checks of the doctor, and those of this machine (without network) and of what it and the
swarm agree on.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from shoal.node.config.settings import default_identity_path
from shoal.node.console import FULL, ExitCode, free_memory, plural
from shoal.node.doctor import network_checks
from shoal.node.doctor.network_checks import (
    Check,
    CheckOutcome,
    FaultError,
    Note,
    Skip,
    Tell,
    Visit,
    examine,
)
from shoal.node.runtime.run_options import METRICS
from shoal.swarm.access.invitation import invited
from shoal.swarm.access.link import MAX_ADDRESSES, Link
from shoal.swarm.errors import NetworkError, printable
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.listening import check_free
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.messages import StateRequest

if TYPE_CHECKING:
    from torch import nn

    from shoal.node.task import Task
    from shoal.optim.inner import Split
    from shoal.swarm.wire.messages import Member

GB = 1e9
MIN_DISK = 0.25 * GB
SMALL_DISK = 2 * GB
MIN_MEMORY = 0.5 * GB
SMALL_MEMORY = 1.5 * GB
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 7)


def python(visit: Visit, tell: Tell) -> str:
    """Check the version of Python; return it and the platform."""
    build = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] < OLDEST_PYTHON:  # pip does not check a checkout
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
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
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
    made = next(
        (f"for {kind} {version}" for kind, version in kinds.items() if version),
        "for Apple's GPU" if sys.platform == "darwin" else "a build for the processor only",
    )
    return f"{installed.__version__}, {made}"


def device(visit: Visit, tell: Tell) -> str:
    """Check a small product on the device that ``auto`` chooses."""
    import torch as found

    from shoal.node.config.device import NO_DRIVER, resolve_device, trouble

    chosen = resolve_device("auto")
    try:
        ones = found.ones(64, 64, device=chosen)
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
        of_kind = found.get_device_module(chosen)
        free, total = of_kind.mem_get_info(chosen)
        return (
            f"{chosen}, {of_kind.get_device_name(chosen)}, {free / GB:.1f} of {total / GB:.1f} "
            "GB free"
        )
    if chosen.type == "cpu" and (why := trouble()) and not why.startswith(NO_DRIVER):
        raise Note(
            f"a GPU cannot be used ({why}), so a node trains on the processor: install its driver, "
            "or a build that fits it."
        )
    return f"{chosen}, {os.cpu_count() or 1} processors"


def memory(visit: Visit, tell: Tell) -> str:
    """Check the free main memory."""
    free, total = free_memory()
    available = f"{free / GB:.1f} of {total / GB:.1f} GB free"
    if free < MIN_MEMORY:
        raise FaultError(
            f"only {available}, less than a node with the smallest model needs: end other programs."
        )
    if free < SMALL_MEMORY:
        raise Note(
            f"{available}: enough for a small model only, of which a node holds about seven copies."
        )
    return available


def disk(visit: Visit, tell: Tell) -> str:
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
        full = error.errno in FULL
        remedy = (
            "free some space, or use --folder elsewhere"
            if full
            else "start in a folder that you can write, or use --folder"
        )
        raise FaultError(f"cannot write {where} ({error.strerror}): {remedy}.") from error
    if free < MIN_DISK:
        raise FaultError(
            f"the disk is full, {free / GB:.2f} GB are free {where}: free some space, or use "
            "--folder elsewhere."
        )
    if free < SMALL_DISK:
        raise Note(
            f"{free / GB:.1f} GB are free {where}: enough for a small model, of which three "
            "checkpoints are kept."
        )
    return f"{free / GB:.1f} GB free {where}"


READ = 4 << 20  # bytes from the end of a run's metrics that are looked at


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
            file.seek(max(path.stat().st_size - READ, 0))
            lines = file.read().splitlines()
    except OSError as error:
        raise Note(
            f"{str(path)!r} cannot be read ({error.strerror}): check its permissions."
        ) from error
    own = ""
    alone = ""
    for line in lines:
        event = _event(line)
        if event.get("event") == "start":  # of the newest of several runs in this folder
            own = alone = ""
        elif event.get("event") == "diagnosis" and event.get("about") == "internal":
            own = str(event.get("said"))
        elif event.get("event") == "end":
            alone = str(event.get("trained_alone") or "")
    if said := printable(alone or own):
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
    return (
        f"TCP {visit.port} can be listened on"
        if visit.port
        else "any free one will do; --port tries a certain one"
    )


ASKED = 3  # members whose buckets are read
BUCKET_S = 15.0  # seconds to read where one of them can be
COPIES = 28  # bytes for each parameter of the model: seven copies in 4-byte numbers


def swarm(visit: Visit, tell: Tell) -> str:
    """Check that a member serves the manifest, with the hash in the link."""
    from shoal.swarm.membership.admission import fetch_manifest, open_directory

    assert visit.link is not None
    host = visit.running()
    known = Link(visit.link.swarm, tuple(visit.reached[:MAX_ADDRESSES]))
    _, visit.manifest = fetch_manifest(host, known)
    if (
        visit.manifest.invite_only and not visit.link.invite
    ):  # its peers answer nothing else without an invitation
        raise FaultError(
            "this swarm is by invitation only, and the link has none: ask its creator for one "
            "(`shoal invite`)."
        )
    host.call(host.meet(visit.reached), 15.0)
    visit.directory = open_directory(visit.identity, host, visit.link, visit.manifest)
    manifest = visit.manifest
    named = manifest.outer.resolved()
    about = in_view(visit.members(), visit.directory.size())
    return f"{manifest.name!r} trains {manifest.task} by {named.method}, {named.codec}{about}"


def in_view(members: Mapping[str, Member], size: int) -> str:
    """Return how many ``members`` are in view, to go on with; of a swarm of buckets what all do,
    estimated by them.
    """
    from shoal.swarm.membership.overview import totals, totals_said
    from shoal.swarm.topics.status import reach_label

    if size <= len(members):
        kinds = Counter(
            member.reach for member in members.values() if member.reach != "unknown"
        ).most_common()
        moved = {
            kind: [m.throughput for m in members.values() if m.reach == kind and m.throughput]
            for kind, _ in kinds
        }
        ways = "; ".join(
            f"{count} {reach_label(kind, median(moved[kind] or [0.0]))}" for kind, count in kinds
        )
        return f", {plural(len(members), 'peer')} in view{f' ({ways})' if ways else ''}"
    said = totals_said(totals(members, size))
    return f": {said[0].lower()}{said[1:].removesuffix('.')}"


def version(visit: Visit, tell: Tell) -> str:
    """Compare the members' versions of shoal with this one."""
    from shoal.swarm.membership.membership import SHOAL_VERSION

    versions = Counter(member.version for member in visit.members().values())
    if not versions:
        raise Skip("no member is in view.")
    if set(versions) == {SHOAL_VERSION}:
        return f"{SHOAL_VERSION} here and on {plural(versions[SHOAL_VERSION], 'member')}"
    shown = ", ".join(f"{name} on {number}" for name, number in versions.most_common(4))
    usual = versions.most_common(1)[0][0]
    sentence = f"this is shoal {SHOAL_VERSION}, the members run another ({shown})"
    if SHOAL_VERSION in versions or usual.split(".")[:2] == SHOAL_VERSION.split(".")[:2]:
        raise Note(f"{sentence}: that may do, but one version everywhere is safer.")
    raise FaultError(f"{sentence}: install the swarm's version here, or ask its members to update.")


def bucket(visit: Visit, tell: Tell) -> str:
    """Check, in a swarm of buckets, that each member that answered has its record where those of
    its bucket look for it.
    """
    from shoal.swarm.membership.bucket_index import is_in_its_bucket

    manifest = visit.agreed()
    link = visit.link
    host = visit.running()
    if not manifest.bucket:
        return "no buckets: every member reads all others"
    assert link is not None
    peers = list(dict.fromkeys(address.rpartition("/p2p/")[2] for address in visit.reached))[:ASKED]
    if not peers:
        raise Skip("no member answered whose bucket could be read.")
    epoch = int(visit.now() // manifest.epoch_s)
    missing = []
    for peer in peers:
        if not host.call(is_in_its_bucket(host.get, link.swarm, peer, epoch), BUCKET_S):
            missing.append(short(peer))
    if missing:
        raise Note(
            f"{' and '.join(missing)} never showed up in the bucket of this epoch, so nobody is "
            "paired with it: if it has run for more than a minute, set its clock by NTP "
            "(`timedatectl set-ntp true`) and restart it."
        )
    return f"{plural(len(peers), 'member')} looked for, and found in the bucket of this epoch"


def model(visit: Visit, tell: Tell) -> str:
    """Check that the task loads with the swarm's options, and that its model has the swarm's
    parameters.
    """
    import torch

    from shoal.node.config.settings import load
    from shoal.node.data.source import DataError
    from shoal.node.runtime.door import RL, make_task, swarm_settings
    from shoal.node.tasks.text import TextTask
    from shoal.optim.codecs.base import FLOAT32
    from shoal.optim.parameters import AveragedParameters
    from shoal.swarm.exchange.contribution import model_digest
    from shoal.swarm.membership.membership import OWN_LOOP
    from shoal.swarm.state.offers import ask
    from shoal.swarm.state.query import StateQuery

    manifest = visit.agreed()
    if manifest.task == OWN_LOOP:
        raise Skip("its members train in loops of their own: swarm.join compares the model.")
    settings = swarm_settings(load(None, {"task.hooks": visit.hooks}), manifest)
    if settings.task.hooks == RL:
        if manifest.outer.alone:
            raise Skip(
                "in this swarm only rollouts are shared, so every node may have a model of its own."
            )
        raise Skip("with the task rl the model depends on --policy: `shoal join` compares it.")
    task = make_task(settings)
    torch.manual_seed(settings.train.seed)
    try:
        built = (
            task.sized() if isinstance(task, TextTask) else task.model()
        )  # not every model can be made without memory
        params = AveragedParameters.of(built)
    except DataError as error:
        raise Skip(
            "its tokenizer is not found by its name here: `shoal join --tokenizer` compares a copy "
            "of it."
        ) from error
    count = sum(parameter.numel() for parameter in params)
    shapes = params.shapes
    digest = model_digest(params)
    if digest != manifest.model:
        sources = [(m.peer, m.addresses) for m in visit.members().values() if m.model != digest][:2]
        assert visit.link is not None
        query = StateQuery(
            StateRequest(swarm=visit.link.swarm, model=digest), shapes, names=params.names
        )
        for source in sources:
            with contextlib.suppress(NetworkError):
                header = visit.running().call(
                    ask(visit.running(), source, query.request, FLOAT32.nbytes(shapes)), 15.0
                )
                query.check(source[0], header)  # names the difference
        raise FaultError(
            f"this node's model ({count:,} parameters) has other names, shapes or types than the "
            "swarm's: use its task, options and version."
        )
    need, (free, _) = count * COPIES, free_memory()
    said = f"{manifest.task}, {count:,} parameters, as in the swarm"
    if settings.train.optimizer == "muon":
        said += f"; {_split(visit, task, built, tell)}"
    if need > free:
        raise Note(
            f"{said}; a node with it takes some {need / GB:.1f} GB, and {free / GB:.1f} are free: "
            "end other programs."
        )
    return said


def _split(visit: Visit, task: Task, built: nn.Module, tell: Tell) -> Split:
    """Return what Muon and AdamW train; report the names too if the visit is to name them."""
    from shoal.optim.inner import split

    try:
        division = split(built, task.hidden_matrices(built))
    except ValueError as error:
        raise FaultError(f"the optimizer muon cannot train this model: {error}.") from error
    if visit.parameters:
        for optimizer, named in (("muon", division.muon), ("adamw", division.adamw)):
            tell(
                CheckOutcome(
                    optimizer,
                    "ok",
                    ", ".join(f"{name} ({size:,})" for name, size in named.items()) or "nothing",
                )
            )
    return division


def checks(visit: Visit) -> list[Check]:
    """Return all checks in order; without a link those of this machine and its daemon.

    The manifest comes right after the first contact: it says whether the other checks need an
    invitation.
    """
    unfit = ExitCode.UNFIT_MACHINE
    reach = ExitCode.UNREACHED
    differs = ExitCode.DIFFERS
    of_machine: list[tuple[Any, ...]] = [
        ("python", unfit, python),
        ("torch", unfit, torch, (), 60.0),
        ("device", unfit, device, ("torch",), 60.0),
        ("memory", unfit, memory),
        ("disk", unfit, disk),
        ("run", unfit, last_run),
        ("port", ExitCode.NO_DAEMON, port),
        ("daemon", ExitCode.NO_DAEMON, network_checks.daemon, ("torch",), 45.0),
    ]
    of_link: list[tuple[Any, ...]] = [
        ("bootstrap", reach, network_checks.bootstrap, ("daemon",), 60.0),
        ("swarm", differs, swarm, ("bootstrap",), 60.0),
        ("clock", unfit, network_checks.clock, ("bootstrap",), 50.0),
        ("dialled back", reach, network_checks.dialled, ("port", "bootstrap"), 100.0),
        ("nat", reach, network_checks.nat, ("bootstrap",), 10.0),
        ("bandwidth", reach, network_checks.bandwidth, ("bootstrap",), 95.0),
        ("version", differs, version, ("swarm",), 10.0),
        ("bucket", differs, bucket, ("swarm",), 60.0),
        ("model", differs, model, ("swarm",), 300.0),
    ]
    rows = of_machine if visit.link is None else [*of_machine, *of_link]
    return [Check(name, code, partial(run, visit), *more) for name, code, run, *more in rows]


def diagnose(
    link: str | None,
    *,
    port: int = 0,
    hooks: str | None = None,
    parameters: bool = False,
    identity: Path | None = None,
    tell: Tell = lambda finding: None,
) -> tuple[list[CheckOutcome], ExitCode]:
    """Run all checks; return the findings and the exit code of the first failure.

    ``tell`` gets each finding at once. LinkError.

    ``port``: on which the node is to listen, 0 for any. ``hooks``: this machine's copy of the
    swarm's task. ``parameters``: name those that Muon and AdamW train, where the swarm has Muon.
    ``identity``: the key file that the node is to use, by default the user's; it is needed where
    the invitation is for that peer.
    """
    visit = Visit(None if link is None else Link.parse(link), port, hooks, parameters)
    path = identity or default_identity_path()
    if visit.link is not None and invited(visit.link.invite) is not None and path.exists():
        visit.identity = Identity.load(path)
    try:
        return examine(checks(visit), tell)
    finally:
        visit.close()
