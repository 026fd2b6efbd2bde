"""``shoal pull``: the swarm's weights as files, without being a member of it and without training.

The weights are chosen and checked as a newcomer does (swarm/statements.py). They are written under the model's own names if the
task can be made here, else numbered; then the shapes are those whose hash the swarm's creator signed. What has come of a download
stays in ``.pull`` in the output folder, and the next ``shoal pull`` goes on with it as long as any peer still holds that snapshot.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.node.checkpoint import resumable_download as partial
from shoal.node.checkpoint.export import WEIGHTS, export_model, export_numbered, fill
from shoal.node.checkpoint.resumable_download import ResumableDownload
from shoal.node.config.settings import Settings, load
from shoal.node.data.errors import DataError
from shoal.node.runtime.join import RL, swarm_settings
from shoal.node.tasks.gpt import GPT, VOCABULARY, Attention
from shoal.node.tasks.loader import HookError, load_task
from shoal.optim import method_named
from shoal.optim.codecs.base import FLOAT32, Shape
from shoal.optim.outer.buffers import float_buffers
from shoal.swarm.access.link import Link
from shoal.swarm.errors import MessageError, NetworkError, ShoalError
from shoal.swarm.exchange.contribution import finite, model_digest, shapes_differ
from shoal.swarm.manifest.manifest import Manifest
from shoal.swarm.membership.visitor import visited
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.stream import short
from shoal.swarm.state.download import Peer, download, fetch_digests
from shoal.swarm.state.selection import NobodyVouchesError
from shoal.swarm.state.snapshot import chunks_in, snapshot_id
from shoal.swarm.state.sync import ATTEMPTS, FETCH_S, ModelDiffersError, StateQuery, settle
from shoal.swarm.wire.fields import MAX_EXTRA
from shoal.swarm.wire.member import Member
from shoal.swarm.wire.state import StateHeader, StateRequest

MAX_BYTES = 64 << 30
ASKED = 8  # members that are asked for what they hold
ASIDE = ".pull"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

log = logging.getLogger(__name__)


class PullError(ShoalError):
    """There is nothing to pull, or no place for it."""


@dataclass(frozen=True)
class Made:
    """The model of the swarm's task, its parameters in the order of the slow weights, and a tokenizer if the task has one."""

    model: nn.Module
    parameters: list[Tensor]
    tokenizer: Any = None


def pull(link: Link, out: Path, *, hooks: str | None = None, max_bytes: int = MAX_BYTES, force: bool = False) -> dict[str, Any]:
    """Write the weights of the swarm of ``link`` into the folder ``out``; returns what was done.

    Args:
        hooks: this machine's copy of the swarm's task, where it is not built in.
        max_bytes: of weights, float32, that are taken at most; nor more than there is space for.
        force: replace weights that are there.

    Raises:
        PullError, HookError, ModelDiffersError, NetworkError, MessageError, StartupError: in one sentence.
    """
    if (out / WEIGHTS).exists() and not force:
        raise PullError(f"There are weights in {str(out)!r} already: choose another folder, or say --force to replace them.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        cap = min(max_bytes, shutil.disk_usage(out).free)
    except OSError as error:
        raise PullError(f"Cannot write to {str(out)!r} ({error.strerror}): choose another folder.") from error
    began = time.monotonic()
    with visited(link) as (host, manifest, members):
        if manifest.outer.method == "none":
            raise PullError("The peers of this swarm do not average (method none), so it has no weights to pull.")
        made, why = make(manifest, hooks)
        givers = _givers(manifest, members)
        if not givers:
            raise PullError("No peer of this swarm has finished a round yet, so there is nothing to pull: try again later.")
        check = _Check(manifest, None if made is None else [tuple(p.shape) for p in made.parameters], cap)
        request = StateRequest(swarm=link.swarm, model=manifest.model)
        wish = StateQuery(request, check.shapes or (), equal=method_named(manifest.outer.method).group == "everyone")
        before = host.traffic.received
        try:
            taken = host.call(_take(host, wish, givers, check, out / ASIDE), FETCH_S)
        except OSError as error:
            raise PullError(f"Cannot write to {str(out)!r} ({error.strerror}): free some space, and pull again.") from error
        received = host.traffic.received - before
    header, kept = taken
    tensors = FLOAT32.decode(kept.payload()[: FLOAT32.nbytes(header.shapes)], header.shapes)
    kept.close()
    if not finite(tensors):
        partial.clear(out / ASIDE)
        raise PullError("The weights of this swarm hold NaN or infinity: its training has failed.")
    about = _about(link, manifest, header, made, why)
    aside = out / ASIDE / "new"
    if made is not None:
        fill(made.parameters, tensors)
        files = export_model(made.model, about, out, aside, made.tokenizer)
    else:
        files = export_numbered(tensors, about, out, aside)
    partial.clear(out / ASIDE)
    return {
        **about,
        "out": str(out),
        "files": files,
        "tensors": len(header.shapes),
        "values": FLOAT32.nbytes(header.shapes) // 4,
        "bytes_received": received,
        "seconds": round(time.monotonic() - began, 2),
    }


def make(manifest: Manifest, hooks: str | None) -> tuple[Made | None, str]:
    """The swarm's model; or None, and why its parameters' names are not known.

    Raises:
        HookError, DataError, ModelDiffersError: the task that the user named cannot be made, or is not the swarm's.
    """
    if manifest.task == RL and hooks is None:
        return None, "the model of an rl task is each node's own affair"
    try:
        settings = swarm_settings(load(None, {"task.hooks": hooks}), manifest)
        made = _model(settings)
    except (HookError, DataError) as error:
        if hooks is not None:
            raise
        return None, str(error)
    if model_digest(made.parameters) != manifest.model and model_digest(_trained(made.model)) != manifest.model:
        raise ModelDiffersError("The model of the task here is not the swarm's: use the task and version of the swarm.")
    return made, ""


def _model(settings: Settings) -> Made:
    task = load_task(settings.task.hooks, settings.task.options)
    torch.manual_seed(settings.train.seed)
    model = task.model()
    inner = task.inner_optimizer(_trained(model))
    ordered = [parameter for group in inner.param_groups for parameter in group["params"]]
    return Made(model, ordered, getattr(task, "tokenizer", None))


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _givers(manifest: Manifest, members: Mapping[str, Member]) -> list[Peer]:
    there = [m for m in members.values() if m.model == manifest.model and m.state in ("waiting", "training") and m.round > 0]
    return [(member.peer, member.addresses) for member in sorted(there, key=lambda member: -member.round)[:ASKED]]


@dataclass(frozen=True)
class _Check:
    """Whether what a peer states is the swarm's model, and not too large."""

    manifest: Manifest
    shapes: Sequence[Shape] | None
    cap: int

    def __call__(self, peer: str, header: StateHeader) -> None:
        if self.shapes is not None:
            difference = shapes_differ(tuple(self.shapes), header.shapes)
            if difference is not None:
                raise ModelDiffersError(f"The model here is not that of peer {short(peer)}: {difference}.")
        elif not any(_digest(dtype, header.shapes) == self.manifest.model for dtype in DTYPES):
            raise PullError(
                f"The shapes that peer {short(peer)} states cannot be checked against the swarm's manifest: "
                "name your copy of the task with --hooks."
            )
        need = FLOAT32.nbytes(header.shapes)
        if header.dtype != "float32" or not need <= header.nbytes <= need * (1 + MAX_EXTRA):
            raise MessageError(f"peer {short(peer)} states {header.nbytes} bytes where the model has {need}.")
        if need > self.cap:
            raise PullError(
                f"The weights have {need:,} bytes and at most {self.cap:,} may come: say more with --max-bytes, or free some space."
            )


def _digest(dtype: torch.dtype, shapes: Sequence[Shape]) -> str:
    """As ``model_digest``, of parameters that are all of one type."""
    return hashlib.sha256(";".join(f"{dtype}{list(shape)}" for shape in shapes).encode()).hexdigest()


async def _take(
    host: Host, wish: StateQuery, givers: Sequence[Peer], check: Callable[[str, StateHeader], None], folder: Path
) -> tuple[StateHeader, ResumableDownload]:
    """The header of what was taken, and where it lies. NetworkError, PullError, ModelDiffersError; OSError of the disk."""
    loop, swarm = asyncio.get_running_loop(), wish.request.swarm
    problem = NetworkError("none of the peers that were asked hands out weights: try again.")
    header, stating = partial.begun(folder), list(givers)
    left_out: set[str] = set()
    for attempt in range(ATTEMPTS + 1):
        asked = [to for to in givers if to[0] not in left_out]
        if not asked:
            break
        digests = None if header is None else await _still_held(host, swarm, header, stating, check)
        if header is None or digests is None:
            try:
                chosen = await settle(host, wish, asked, check, attempt)
            except NobodyVouchesError as error:
                problem, header = error, None
                continue
            header, stating = chosen[0].header, [one.reached for one in chosen]
            digests = await _still_held(host, swarm, header, stating, check)
            if digests is None:
                header = None
                continue
        need = FLOAT32.nbytes(header.shapes)
        kept = await loop.run_in_executor(None, ResumableDownload, folder, header, digests, need)
        log.info("%d of %d chunks were here before", len(kept.have), chunks_in(need))
        holders = [*stating, *(to for to in asked if to not in stating)]
        try:
            left_out |= await download(host, swarm, header, digests, holders, kept, range(chunks_in(need)))
            return header, kept
        except NetworkError as error:
            kept.close()
            problem, stating = error, asked
        except BaseException:
            kept.close()
            raise
    raise problem


async def _still_held(
    host: Host, swarm: str, header: StateHeader, holders: Sequence[Peer], check: Callable[[str, StateHeader], None]
) -> bytes | None:
    """The digests of a snapshot that was chosen before, if it is of this swarm and any of ``holders`` has it."""
    try:
        check(host.peer_id, header)
        return await fetch_digests(host, swarm, header, holders)
    except ShoalError as error:
        log.info("nothing to go on with: %s", error)
        return None


def _about(link: Link, manifest: Manifest, header: StateHeader, made: Made | None, why: str) -> dict[str, Any]:
    notes = []
    if made is None:
        notes.append(f"The parameters are numbered in the order in which the swarm's task has them, for {why.rstrip('.')}.")
    elif float_buffers(made.model):
        notes.append("Buffers that are not parameters (running statistics) are those of a fresh model: peers do not hand them out.")
    about: dict[str, Any] = {
        "swarm": link.swarm,
        "name": manifest.name,
        "round": header.round,
        "snapshot": snapshot_id(header).hex(),
        "task": manifest.task,
        "task_options": dict(manifest.task_options),
        "method": manifest.outer.method,
        "named": made is not None,
        "notes": notes,
    }
    if made is not None and type(made.model) is GPT:
        about["model"] = _size(made.model)
    return about


def _size(gpt: GPT) -> dict[str, int]:
    """What ``GPT`` is made with."""
    context, width = gpt.positions.weight.shape
    heads = next(module.heads for module in gpt.modules() if isinstance(module, Attention))
    vocabulary = len(gpt.bytes.weight)
    other = {} if vocabulary == VOCABULARY else {"vocabulary": vocabulary}
    return {"layers": len(gpt.blocks), "width": width, "heads": heads, "context": context, **other}


def summary(report: Mapping[str, Any]) -> str:
    """The report for people."""
    names = "under the model's own names" if report["named"] else "numbered"
    lines = [f"{report['out']}: {report['values']:,} values in {report['tensors']} tensors, {names}, of round {report['round']}"]
    return "\n".join([*lines, *report["notes"]])
