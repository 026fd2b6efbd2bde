"""The commands ``shoal up`` and ``shoal join``, which run a node. Heavy imports happen inside."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.node.cli.options import (
    AVERAGING_FLAGS,
    METRICS_FLAGS,
    NODE_FLAGS,
    RL_FLAGS,
    RUN,
    SET_FLAG,
    SettingsCommand,
    json_option,
    overrides,
    set_option,
    verbose_option,
)
from shoal.node.cli.swarms import link_for
from shoal.node.console import dumps
from shoal.node.exit_code import ExitCode
from shoal.node.logs import log_to_stderr

if TYPE_CHECKING:
    from shoal.node.config.settings import Settings
    from shoal.node.parallel.job import Job
    from shoal.node.parallel.node_ranks import NodeRanks
    from shoal.node.runtime.run_options import ShutdownSignals
    from shoal.swarm.access.link import Link


RUN_FLAGS = {RUN: ("train.steps", "outer.every", "swarm.invite_only", "swarm.public")}


PLAIN_OPTIONS = (
    verbose_option,
    json_option,
    # The hidden ones are for `shoal demo`, which starts its nodes by them.
    click.option("--baseline", is_flag=True, hidden=True),
    click.option("--keep-rounds", is_flag=True, hidden=True),
    click.option("--with-parent", type=int, hidden=True),
)
"""Options of a node that are no settings."""


def plain_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `PLAIN_OPTIONS` to a command."""
    for option in PLAIN_OPTIONS:
        function = option(function)
    return function


@click.command(
    cls=SettingsCommand,
    settings=[RUN_FLAGS, NODE_FLAGS, AVERAGING_FLAGS, RL_FLAGS, METRICS_FLAGS, SET_FLAG],
    short_help="Create a swarm and start a node in it.",
)
@click.argument("file", required=False, type=click.Path(path_type=Path), metavar="[SWARM.TOML]")
@set_option
@plain_options
def up(file: Path | None, **flags: Any) -> int:
    """Create a swarm, start a node in it, and print the link by which others join.

    \b
    Examples:
      shoal up --data FOLDER                     a small language model on your text
      shoal up --task task.py:Mine --name anna   a model of your own, made by `shoal init`
      shoal up swarm.toml --method diloco        settings from a file, and one of them changed
      shoal up --resume --name anna              go on from the newest checkpoint in runs/anna
      shoal up --listen /ip4/0.0.0.0/tcp/4001 --announce /ip4/203.0.113.5/tcp/4001
                                                 reachable from outside, if port 4001 is forwarded
    """
    return _run_node(file, None, flags)


@click.command(
    cls=SettingsCommand,
    settings=[{RUN: ("yes", "steps", "assigned")}, NODE_FLAGS, RL_FLAGS, METRICS_FLAGS],
    short_help="Join a swarm by its link and train with it.",
)
@click.argument("link", metavar="LINK|NAME")
@click.option(
    "--yes", is_flag=True, help="With NAME: join the public swarm of that name without asking."
)
@click.option("--steps", type=int, help="Inner steps of this node.  [default: the swarm's]")
@click.option(
    "--set",
    "assigned",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a setting of this node's own tables.",
)
@plain_options
def join(link: str, yes: bool, steps: int | None, **flags: Any) -> int:
    """Join the swarm of LINK and train with it.

    Prints a link that others can join by, with more members than LINK has.

    NAME: a public swarm that the seeds list (`shoal swarms`), those of --bootstrap or SHOAL_SEEDS.
    A link carries no code: a swarm that trains a task of its creator's own can only be joined with
    a copy of its files.

    \b
    Examples:
      shoal join 'shoal://...' --data FOLDER
      shoal join 'shoal://...' --task task.py:Mine --name bert
      shoal join 'shoal://...' --upload 8 --ram 12     use part of this machine only
      shoal join common-text --bootstrap /ip4/203.0.113.9/tcp/4001/p2p/12D3KooW...
    """
    from shoal.node.parallel.job import LINK

    found = os.environ.get(LINK) or link_for(link, flags["node.bootstrap"], yes)
    return _run_node(None, found, {**flags, "train.steps": steps})


def _run_node(file: Path | None, link: str | None, flags: dict[str, Any]) -> int:
    """Run a node that creates a swarm or joins that of ``link``: as its only process, as one of its
    ranks, or as the launcher of them.
    """
    from shoal.node.parallel.job import job_of, ranks_wanted

    job = job_of()
    if job is not None:
        from shoal.node.parallel.rank_process import run_rank

        run_rank(job, lambda: _run_rank(job, file, link, flags))
    from shoal.node.config.settings import load
    from shoal.node.runtime.run_options import ShutdownSignals, end_with_parent, handle_all

    shutdown = ShutdownSignals()
    shutdown.install()
    if flags["with_parent"]:
        end_with_parent(flags["with_parent"])
    settings = load(file, overrides(flags), joins=link is not None)
    parsed = _parsed(link, settings)
    world = ranks_wanted(settings)
    if world > 1:
        from shoal.node.parallel.job import LINK
        from shoal.node.parallel.launcher import MAX_RESTARTS, Launcher

        os.environ[LINK] = link or ""
        launcher = Launcher(world, sys.argv[1:], MAX_RESTARTS)
        handle_all(launcher.forward)
        return launcher.run()
    return _train(settings, parsed, shutdown, flags, None)


def _run_rank(job: Job, file: Path | None, link: str | None, flags: dict[str, Any]) -> int:
    """Run one process of a node of several; all have been started with the same arguments."""
    from shoal.node.config.settings import load
    from shoal.node.parallel import rank_process
    from shoal.node.parallel.node_ranks import NodeRanks
    from shoal.node.runtime.node_run import follow
    from shoal.node.runtime.run_options import ShutdownSignals, again, end_with_parent

    parent = rank_process.launcher_pid()
    if parent is not None:
        end_with_parent(parent)
    shutdown = ShutdownSignals()
    if job.leads:
        shutdown.install()
        rank_process.begin_leading(job)
    else:
        rank_process.begin_following()
    settings = load(file, overrides(flags), joins=link is not None)
    parsed = _parsed(link, settings)
    log_to_stderr(flags["verbose"])
    if not job.leads and not flags["verbose"]:
        # Rank 0 has the same to say.
        logging.getLogger("shoal").setLevel(logging.ERROR)
    ranks = NodeRanks.meet(settings, job)
    if not job.leads:
        return follow(ranks, settings)
    if job.restarts:
        settings, parsed = again(settings, parsed)
    return _train(settings, parsed, shutdown, flags, ranks)


def _parsed(link: str | None, settings: Settings) -> Link | None:
    if link is None:
        return None
    from shoal.node.config.links import read_link

    return read_link(link, settings.node.run_folder)


def _train(
    settings: Settings,
    link: Link | None,
    shutdown: ShutdownSignals,
    flags: dict[str, Any],
    ranks: NodeRanks | None,
) -> int:
    """Run the node, as its only process or as rank 0."""
    log_to_stderr(flags["verbose"])
    from shoal.node.runtime.display import make_display
    from shoal.node.runtime.node_run import NodeRun

    as_json = flags["as_json"]
    run = NodeRun(
        settings,
        link,
        make_display(),
        shutdown,
        on_link=lambda made: click.echo(str(made), err=as_json),
        baseline=flags["baseline"],
        keep_rounds=flags["keep_rounds"],
        ranks=ranks,
    )
    result = run.run()
    if as_json:
        click.echo(dumps(result.model_dump(mode="json")))
    if result.not_saved is not None:
        from shoal.node.checkpoint.folder import CheckpointError

        raise CheckpointError(result.not_saved)
    if result.interrupted:
        return int(ExitCode.INTERRUPTED)
    return int(ExitCode.TRAINED_ALONE if result.trained_alone else ExitCode.OK)
