"""``shoal pull``: write the swarm's weights to files, without being a member and without training.

The weights are chosen and checked as for a newcomer (`shoal.swarm.state.sync`). They are written
under the model's own names if the task can be built here, otherwise numbered; then the shapes are
those whose hash the swarm's creator signed. An unfinished download stays in ``.pull`` in the output
folder, and the next ``shoal pull`` goes on with it as long as any peer still holds that snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from shoal.node.checkpoint.export import WEIGHTS, export_model, export_numbered, fill
from shoal.node.commands.pull_average import Average
from shoal.node.commands.pull_average import average as mean_of
from shoal.node.commands.pull_average import lines as average_lines
from shoal.node.config.settings import Settings, load
from shoal.node.data.reader import TEXT
from shoal.node.data.source import PREFIX, DataError, is_path
from shoal.node.runtime.door import RL, enter
from shoal.node.task import Task
from shoal.node.tasks.gpt import GPT, VOCABULARY, Attention
from shoal.node.tasks.loader import HookError
from shoal.optim.codecs.base import FLOAT32, all_finite
from shoal.optim.outer.averaged import float_buffers
from shoal.optim.parameters import AveragedParameters
from shoal.swarm.access import Link
from shoal.swarm.errors import MessageError, NetworkError, ShoalError
from shoal.swarm.exchange.contribution import Outline, model_digest, outline_digest
from shoal.swarm.manifest import Manifest
from shoal.swarm.membership.admission import visited
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.stream import short
from shoal.swarm.state.catch_up import sources_in
from shoal.swarm.state.download import Peer
from shoal.swarm.state.progress import FetchProgress, while_it_moves
from shoal.swarm.state.query import ATTEMPTS, ModelDiffersError, StateQuery
from shoal.swarm.state.snapshot import DIGEST, chunk_size, chunks_in, snapshot_id
from shoal.swarm.state.sync import fetch_into, wait_for
from shoal.swarm.wire.envelope import CHUNK, MAX_EXTRA, pack, unpack, unpack_names
from shoal.swarm.wire.messages import Member, StateHeader, StateRequest

# A download on disk that can be interrupted and resumed: files ``header`` and ``chunks`` in a
# folder of its own.
#
# No record is kept of the chunks that are there. A resumed download hashes what is in the file, so
# a chunk that is half written or has changed is fetched again.

HEADER, CHUNKS = "header", "chunks"


class ResumableDownload:
    """A `ChunkSink` for the first ``wanted`` bytes of a snapshot, rounded up to whole chunks, in
    ``folder``.

    Its methods raise OSError when the disk fails.
    """

    def __init__(self, folder: Path, header: StateHeader, digests: bytes, wanted: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if begun_download(folder) != header:
            clear_download(folder)
            folder.mkdir()
            (folder / HEADER).write_bytes(pack(header))
        self.path = folder / CHUNKS
        self._size = min(chunks_in(wanted) * CHUNK, header.nbytes)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            os.ftruncate(self._file, self._size)
            self.have = {
                chunk for chunk in range(chunks_in(wanted)) if self._right(chunk, header, digests)
            }
        except BaseException:
            os.close(self._file)
            raise

    def _right(self, chunk: int, header: StateHeader, digests: bytes) -> bool:
        data = os.pread(self._file, chunk_size(header.nbytes, chunk), chunk * CHUNK)
        return blake3(data).digest() == digests[chunk * DIGEST : (chunk + 1) * DIGEST]

    def write(self, chunk: int, data: memoryview) -> None:
        written = 0
        while written < len(data):
            written += os.pwrite(self._file, data[written:], chunk * CHUNK + written)
        self.have.add(chunk)

    def payload(self) -> Tensor:
        """Return the file's bytes (uint8), mapped rather than read. Changes stay in memory."""
        return torch.from_file(str(self.path), shared=False, size=self._size, dtype=torch.uint8)

    def close(self) -> None:
        os.close(self._file)


def begun_download(folder: Path) -> StateHeader | None:
    """Return the header of the unfinished download in ``folder``; None if there is none, or it is
    unreadable.
    """
    try:
        with (folder / HEADER).open("rb") as file:
            return unpack(file.read(StateHeader.LIMIT + 1), StateHeader)
    except (OSError, MessageError):
        return None


def clear_download(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


MAX_BYTES = 64 << 30
ASIDE = ".pull"
INNER = ("lr", "weight_decay", "schedule", "warmup", "clip")
"""Settings of training that the model card names."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

log = logging.getLogger(__name__)


class PullError(ShoalError):
    """The swarm has nothing to pull, or this machine has no place for it."""


@dataclass(frozen=True)
class BuiltModel:
    """Model of the swarm's task, its parameters in the order of the slow weights, and a tokenizer
    if the task has one.
    """

    model: nn.Module
    parameters: AveragedParameters
    task: Task
    tokenizer: Any = None


def pull(
    link: Link,
    out: Path,
    *,
    hooks: str | None = None,
    data: str | None = None,
    evaluate: bool = False,
    average: bool = False,
    max_bytes: int = MAX_BYTES,
    force: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Write the weights of the swarm of ``link``, and a model card, into the folder ``out``; return
    a report.

    Args:
        hooks: this machine's copy of the swarm's task, if it is not built in.
        data: the task's data on this machine. evaluate: compute the held-out loss on it, for the
            model card.
        average: take the mean of all members that can be reached
            (`shoal.node.commands.pull_average`), whose held-out losses are computed if the task is
            here, and told to ``say``.
        max_bytes: most bytes of weights (float32) to fetch; the free space of the disk bounds them
            too.
        force: replace existing weights.

    Raises:
        PullError, HookError, MemoryBudgetError, ModelDiffersError, NetworkError, MessageError,
        StartupError: each says in one
            sentence what to do.
    """
    if (out / WEIGHTS).exists() and not force:
        raise PullError(
            f"There are weights in {str(out)!r} already: choose another folder, or pass --force to "
            "replace them."
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        cap = min(max_bytes, shutil.disk_usage(out).free)
    except OSError as error:
        raise PullError(
            f"Cannot write to {str(out)!r} ({error.strerror}): choose another folder."
        ) from error
    began = time.monotonic()
    with visited(link) as (host, manifest, members, _):
        if manifest.outer.alone:
            raise PullError(
                "The peers of this swarm do not average (method none), so it has no weights to "
                "pull."
            )
        built, why = build_model(manifest, hooks, data)
        if built is None and evaluate:
            raise PullError(
                f"{why} Without the task there is no held-out loss: pull without --evaluate."
            )
        sources = sources_in(host, members, manifest.model, manifest.creator)
        if not sources:
            raise PullError(
                "No peer of this swarm has finished a round yet, so there is nothing to pull: try "
                "again later."
            )
        query = _WeightsQuery(
            StateRequest(swarm=link.swarm, model=manifest.model),
            [] if built is None else built.parameters.shapes,
            equal=manifest.outer.row.group == "everyone",
            attempts=ATTEMPTS + 1,  # one for an earlier download that cannot be finished
            names=() if built is None else built.parameters.names,
            known=built is not None,
            cap=cap,
        )
        before = host.traffic.received
        parts: list[dict[str, Any]] = []
        try:
            if average:
                made = _average(host, query, sources, members, out / ASIDE, built, say)
                header, tensors, parts = made.header, made.tensors, made.report()
            else:
                header, tensors = _fetch(host, query, sources, out / ASIDE, say)
        except OSError as error:
            raise PullError(
                f"Cannot write to {str(out)!r} ({error.strerror}): free some space, and pull again."
            ) from error
        received = host.traffic.received - before
    if not all_finite(tensors):
        clear_download(out / ASIDE)
        raise PullError("The weights of this swarm hold NaN or infinity: its training has failed.")
    about = _about(link, manifest, header, members, built, why)
    if average:
        about |= {"snapshot": None, "averaged": sum(not part["left_out"] for part in parts)}
        about["notes"] = [made.note(), *about["notes"]]
    about |= {
        "values": FLOAT32.nbytes(header.shapes) // 4,
        "held_out_loss": None,
        "held_out_on": None,
    }
    aside = out / ASIDE / "new"
    if built is not None:
        fill(built.parameters, tensors)
        if evaluate or average:
            about |= {
                "held_out_loss": float(built.task.evaluate(built.model)),
                "held_out_on": _held_out_on(manifest, data),
            }
        files = export_model(built.model, about, out, aside, built.tokenizer)
    else:
        files = export_numbered(tensors, about, out, aside)
    clear_download(out / ASIDE)
    return {
        **about,
        "out": str(out),
        "files": files,
        **({"average": parts} if average else {}),
        "tensors": len(header.shapes),
        "bytes_received": received,
        "seconds": round(time.monotonic() - began, 2),
    }


def build_model(
    manifest: Manifest, hooks: str | None, data: str | None = None
) -> tuple[BuiltModel | None, str]:
    """Return the swarm's model, of a task that reads ``data`` here; or None, and why its
    parameters' names are not known.

    Raises:
        HookError, DataError, ModelDiffersError: the task that the user named cannot be loaded, or
            is not the swarm's.
        MemoryBudgetError: there is no memory for the model.
    """
    if manifest.task == RL and hooks is None:
        return None, "In a swarm of the task rl each node has a model of its own."
    try:
        built = _model(
            *enter(load(None, {"task.hooks": hooks, "node.data": data}), manifest, trains=False)
        )
    except (HookError, DataError) as error:
        if hooks is not None:
            raise
        return None, str(error)
    if model_digest(built.parameters) != manifest.model:
        raise ModelDiffersError(
            "The model of the task here is not the swarm's: use the task and version of the swarm."
        )
    return built, ""


def _model(settings: Settings, task: Task) -> BuiltModel:
    torch.manual_seed(settings.train.seed)
    model = task.model()
    return BuiltModel(model, AveragedParameters.of(model), task, getattr(task, "tokenizer", None))


@dataclass(frozen=True, kw_only=True)
class _WeightsQuery(StateQuery):
    """Query for the slow weights alone, checked against the manifest where the shapes are not known
    here, and bounded in size.
    """

    known: bool
    cap: int

    def check(self, peer: str, header: StateHeader) -> None:
        theirs = Outline(unpack_names(header.names), header.shapes)
        if self.known:
            own = Outline(tuple(self.names), tuple(self.shapes))
            difference = own.differs(theirs)
            if difference is not None:
                raise ModelDiffersError(
                    f"The model here is not that of peer {short(peer)}: {difference}."
                )
        elif len(theirs.names) != len(theirs.shapes) or not any(
            outline_digest(theirs, [dtype] * len(theirs.shapes)) == self.request.model
            for dtype in DTYPES
        ):
            raise PullError(
                f"The names and shapes that peer {short(peer)} offers cannot be checked against "
                "the swarm's manifest: "
                "name your copy of the task with --task."
            )
        need = self.wanted(header)
        if header.dtype != "float32" or not need <= header.nbytes <= need * (1 + MAX_EXTRA):
            raise MessageError(
                f"peer {short(peer)} offers {header.nbytes} bytes where the model has {need}."
            )
        if need > self.cap:
            raise PullError(
                f"The weights have {need:,} bytes and at most {self.cap:,} may come: allow more "
                "with --max-bytes, or free "
                "some space."
            )

    def wanted(self, header: StateHeader) -> int:
        return FLOAT32.nbytes(header.shapes)


class _SinksOnDisk:
    """Sink factory that keeps an unfinished download in ``folder``. ``files`` closes what it
    opens.
    """

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self._folder, self._files = folder, files

    def unfinished(self) -> StateHeader | None:
        return begun_download(self._folder)

    async def open(self, header: StateHeader, digests: bytes) -> ResumableDownload:
        need = FLOAT32.nbytes(header.shapes)
        loop = asyncio.get_running_loop()
        kept = await loop.run_in_executor(
            None, ResumableDownload, self._folder, header, digests, need
        )
        self._files.callback(kept.close)
        log.info("%d of %d chunks were here before", len(kept.have), chunks_in(need))
        return kept

    async def finish(
        self, header: StateHeader, digests: bytes, sink: ResumableDownload
    ) -> tuple[StateHeader, ResumableDownload]:
        return header, sink


def _fetch(
    host: Host,
    query: StateQuery,
    sources: Sequence[Peer],
    folder: Path,
    say: Callable[[str], None],
) -> tuple[StateHeader, list[Tensor]]:
    """Fetch a snapshot by way of a file in ``folder``; return its header, and its slow weights
    mapped from the file.

    ``say`` is told how far it is.

    Raises:
        NetworkError, PullError, ModelDiffersError; OSError of the disk.
    """
    with ExitStack() as files:
        progress = FetchProgress()
        fetch = fetch_into(host, query, sources, _SinksOnDisk(folder, files), progress)
        fetched = wait_for(host.submit(while_it_moves(fetch, progress)), progress, say)
        if fetched is None:
            raise NetworkError(
                "all peers that were asked for weights refused, or are gone: try again."
            )
        header, kept = fetched
        return header, FLOAT32.decode(
            kept.payload()[: FLOAT32.nbytes(header.shapes)], header.shapes
        )


def _average(
    host: Host,
    query: _WeightsQuery,
    sources: Sequence[Peer],
    members: Mapping[str, Member],
    folder: Path,
    built: BuiltModel | None,
    say: Callable[[str], None],
) -> Average:
    """Return the mean of the newest snapshots of ``sources``, each kept below ``folder``.

    The bound on bytes is of all together.
    """
    left = query.cap

    def fetch(number: int, source: Peer) -> tuple[StateHeader, list[Tensor]]:
        nonlocal left
        own = replace(query, confirmed=False, cap=left)  # each member's weights are its own
        header, tensors = _fetch(host, own, [source], folder / str(number), say)
        left -= own.wanted(header)
        return header, tensors

    def held_out_loss(tensors: Sequence[Tensor]) -> float:
        assert built is not None
        fill(built.parameters, tensors)
        return float(built.task.evaluate(built.model))

    return mean_of(sources, members, fetch, held_out_loss if built is not None else None, say)


def _about(
    link: Link,
    manifest: Manifest,
    header: StateHeader,
    members: Mapping[str, Member],
    built: BuiltModel | None,
    why: str,
) -> dict[str, Any]:
    """Return what the weights are and how they came to be, by the swarm's settings and what its
    members report.
    """
    outer, train = manifest.outer.resolved(), manifest.train
    losses = [member.loss for member in members.values() if member.loss is not None]
    steps = [member.step for member in members.values()] or [0]
    notes = []
    if built is None:
        notes.append(
            f"{why} Without it the parameters are numbered, in the order in which the swarm's task "
            "has them."
        )
    elif float_buffers(built.model):
        notes.append(
            "Buffers that are not parameters (running statistics) are those of a fresh model: "
            "peers do not hand them out."
        )
    return {
        "swarm": link.swarm,
        "name": manifest.name,
        "round": header.round,
        "snapshot": snapshot_id(header).hex(),
        "task": manifest.task,
        "task_options": dict(manifest.task_options),
        "method": manifest.outer.method,
        "named": built is not None,
        "notes": notes,
        **({"model": _size(built.model)} if built is not None and type(built.model) is GPT else {}),
        "created": manifest.created,
        "outer": {
            **outer.knobs(),
            "codec": outer.codec,
            "round": outer.round,
            "robust": outer.robust,
            "finish": outer.finish,
        },
        "train": {
            name: value
            for name in ("optimizer", *INNER)
            if (value := getattr(train, name)) is not None
        },
        "rounds": header.round // int(manifest.outer.overlap().get("fragments", 1)),
        "peers": len(members),
        "steps": [min(steps), max(steps)],
        "train_loss": sum(losses) / len(losses) if losses else None,
    }


def _held_out_on(manifest: Manifest, data: str | None) -> str:
    """Return the name of the data of the held-out loss: never a path of this machine, for the card
    is there to be published.
    """
    name = data or str(manifest.task_options.get("data", ""))
    if name.startswith(PREFIX) and not is_path(name.removeprefix(PREFIX)):
        return name
    return (
        "files named with --data"
        if data
        else "the Python standard library"
        if manifest.task == TEXT
        else "the task's own data"
    )


def _size(gpt: GPT) -> dict[str, int]:
    """Return the options that build a `GPT` of this size."""
    context, width = gpt.positions.weight.shape
    heads = next(module.heads for module in gpt.modules() if isinstance(module, Attention))
    vocabulary = len(gpt.bytes.weight)
    other = {} if vocabulary == VOCABULARY else {"vocabulary": vocabulary}
    return {"layers": len(gpt.blocks), "width": width, "heads": heads, "context": context, **other}


def summary(report: Mapping[str, Any]) -> str:
    names = "under the model's own names" if report["named"] else "numbered"
    lines = [
        f"{report['out']}: {report['values']:,} values in {report['tensors']} tensors, {names}, of "
        f"round {report['round']}"
    ]
    if "average" in report:
        lines += average_lines(report["average"], report["held_out_loss"])
    if report["held_out_loss"] is not None:
        lines.append(f"held-out loss {report['held_out_loss']:.4f}, on {report['held_out_on']}")
    return "\n".join([*lines, *report["notes"]])
