"""Checks of the network: daemon, bootstrap peers, clock, dialling back, NAT and bandwidth.

Runner of checks in order, each with a deadline; a check that needs a failed one is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import statistics
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

from shoal.node.console import ExitCode, plural
from shoal.node.user_code import explained
from shoal.optim.methods import METHODS, methods_of
from shoal.swarm.access.link import Link
from shoal.swarm.errors import MessageError, NetworkError, ShoalError
from shoal.swarm.identity import Identity
from shoal.swarm.membership.clock_check import MAX_ASKED, clock_problem, clock_skew
from shoal.swarm.p2p.addresses import host_of
from shoal.swarm.p2p.reachability import (
    DIAL_PROTOCOL,
    DialBackView,
    Outcome,
    ask,
    dialled_port,
    listen_for_dial_back,
)
from shoal.swarm.p2p.seed_request import addresses_of, ask_seed
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.throughput import SPEED_PROTOCOL, measure
from shoal.swarm.wire.messages import SEED_PROTOCOL, Member

if TYPE_CHECKING:
    from shoal.swarm.manifest import Manifest
    from shoal.swarm.membership.directory import Directory
    from shoal.swarm.p2p.host import Host
Verdict = Literal["ok", "note", "failed", "skipped"]


class FaultError(ShoalError):
    """Raised by a check for what prevents training here, or joining the swarm."""


class Note(ShoalError):
    """Raised by a check for something worth knowing that does not prevent training."""


class Skip(ShoalError):
    """Raised by a check that cannot run here."""


@dataclass(frozen=True)
class CheckOutcome:
    """Outcome of a check.

    ``said``: one sentence; after a failure what happened and what to do. ``seconds`` it took.

    ``trace``: the traceback of the user's own code, if that failed; "" if it returned something
    wrong.
    """

    check: str
    outcome: Verdict
    said: str
    seconds: float = 0.0
    trace: str | None = None


Tell = Callable[[CheckOutcome], None]


@dataclass(frozen=True)
class Check:
    """Check.

    ``run`` returns in a few words what is well, or raises ShoalError. It may report findings of its
    own before.

    ``needs``: names of earlier checks. ``code``: exit code of `shoal doctor` if this is the first
    that fails. ``seconds``: time limit, after which its thread is abandoned.
    """

    name: str
    code: ExitCode
    run: Callable[[Tell], str]
    needs: tuple[str, ...] = ()
    seconds: float = 20.0


def examine(
    checks: Sequence[Check], tell: Tell = lambda finding: None
) -> tuple[list[CheckOutcome], ExitCode]:
    """Run all ``checks``; return all findings and the code of the first failure.

    ``tell`` gets each finding at once.
    """
    findings: list[CheckOutcome] = []
    cause: dict[
        str, str
    ] = {}  # check that failed or was skipped -> the failed check that caused it
    code = ExitCode.OK

    def note(finding: CheckOutcome) -> None:
        findings.append(finding)
        tell(finding)

    for check in checks:
        blocked = next((cause[name] for name in check.needs if name in cause), None)
        if blocked is not None:
            cause[check.name] = blocked
            note(CheckOutcome(check.name, "skipped", f"needs {blocked!r}, see there"))
            continue
        finding = _run(check, note)
        if finding.outcome in ("failed", "skipped"):
            cause[check.name] = check.name
        if finding.outcome == "failed" and code == ExitCode.OK:
            code = check.code if finding.trace is None else ExitCode.BAD_INPUT
        note(finding)
    return findings, code


def _run(check: Check, note: Tell) -> CheckOutcome:
    began = time.monotonic()
    ended: list[CheckOutcome] = []
    late = threading.Event()

    def tell(finding: CheckOutcome) -> None:
        if not late.is_set():
            note(finding)

    def work() -> None:
        outcome: Verdict = "ok"
        trace: str | None = None
        try:
            said = check.run(tell)
        except ShoalError as error:
            outcome = (
                "note"
                if isinstance(error, Note)
                else "skipped"
                if isinstance(error, Skip)
                else "failed"
            )
            said = str(error)
            trace = getattr(error, "trace", None)
        except Exception as error:  # one check must not stop the others
            outcome = "failed"
            if (own := explained(error)) is not None:
                said = str(own)
                trace = getattr(own, "trace", "")
            else:
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
                what = f"{type(error).__name__}: {error}".split("\n")[0][:300]
                said = f"this check itself failed ({what}, in {where}): please report it."
        ended.append(
            CheckOutcome(check.name, outcome, said, round(time.monotonic() - began, 3), trace)
        )

    thread = threading.Thread(target=work, name=f"doctor-{check.name}", daemon=True)
    thread.start()
    thread.join(check.seconds)
    if ended:
        return ended[0]
    late.set()
    said = (
        f"this took longer than {check.seconds:g} s and was given up: the machine may be "
        "overloaded, try again."
    )
    return CheckOutcome(check.name, "failed", said, round(time.monotonic() - began, 3))


T = TypeVar("T")


@dataclass
class Visit:
    """Visit of a node that is no member to the swarm of ``link``, if there is one."""

    link: Link | None
    port: int = 0
    hooks: str | None = None
    parameters: bool = False
    """Name the parameters that each of several inner optimizers trains."""
    identity: Identity = field(default_factory=Identity.ephemeral)
    host: Host | None = None
    began: float = 0.0
    """When it was started, by the monotonic clock."""
    directory: Directory | None = None
    reached: list[str] = field(default_factory=list)
    """Full multiaddrs of members that answered."""
    seeds: list[str] = field(default_factory=list)
    """Full multiaddrs of bootstrap nodes that answered."""
    manifest: Manifest | None = None
    seen: list[DialBackView] = field(default_factory=list)
    outcome: str | None = None
    """Outcome of dialling back, if it was tried."""
    opened: str | None = None
    """The address at which the router was found to let peers in, at a port that it opened for the
    daemon.
    """

    def ask(
        self, address: str, protocol: str, work: Callable[[Stream], Awaitable[T]], seconds: float
    ) -> T:
        """Do ``work`` on a stream to the peer of a full multiaddr.

        Raises NetworkError or MessageError.
        """
        host = self.running()

        async def asked() -> T:
            with contextlib.closing(
                await host.open(address.rpartition("/p2p/")[2], protocol, timeout=10.0)
            ) as stream:
                return await work(stream)

        return host.call(asked(), seconds)

    def running(self) -> Host:
        if self.host is None:
            raise NetworkError("the network daemon does not run.")
        return self.host

    def agreed(self) -> Manifest:
        if self.manifest is None:
            raise MessageError("the swarm's manifest is not there.")
        return self.manifest

    def members(self) -> dict[str, Member]:
        return {} if self.directory is None else self.directory.members()

    def now(self) -> float:
        """Return Unix seconds by the clocks of the peers that said theirs; by this machine's if
        none did.
        """
        return time.time() + clock_skew(self.seen)

    def close(self) -> None:
        with contextlib.suppress(NetworkError):
            if self.directory is not None:
                self.directory.close()
        if self.host is not None:
            self.host.close()


CONNECT_S = 8.0  # seconds for one bootstrap peer
# seconds from its start in which a daemon has a router open a port, and the host asks it for its
# addresses
OPENED_S = 12.0
OLD = "does not offer"  # part of `Host.open`'s error for a protocol that a peer does not know


def daemon(visit: Visit, tell: Tell) -> str:
    """Check that the daemon starts and answers."""
    from shoal.swarm.membership.admission import start_unconnected

    # The addresses of the link are tried later, one by one.
    visit.began = time.monotonic()
    visit.host = start_unconnected(visit.identity, visit.link, ("/ip4/0.0.0.0/tcp/0",))
    return "the network daemon starts and answers"


async def _connected(host: Host, addresses: Sequence[str]) -> dict[str, str]:
    """Connect to all ``addresses`` at once; return of each in a few words why it could not be
    reached, or nothing.
    """

    async def one(address: str) -> str:
        try:
            await host.connect(address, CONNECT_S)
        except NetworkError as error:
            return str(error).removeprefix(f"{address} ").removesuffix(".")
        return ""

    return dict(zip(addresses, await asyncio.gather(*map(one, addresses)), strict=True))


def bootstrap(visit: Visit, tell: Tell) -> str:
    """Try each address of the link; a member that answers is enough, or a seed that names one."""
    assert visit.link is not None
    host = visit.running()
    addresses = visit.link.bootstrap
    problems = host.call(_connected(host, addresses), CONNECT_S + 2.0)
    # Each peer once: when one of its addresses works the others do not matter.
    answering = {
        address.rpartition("/p2p/")[2]: address
        for address, problem in problems.items()
        if not problem
    }
    for address, problem in problems.items():
        if (
            problem and address.rpartition("/p2p/")[2] in answering
        ):  # an address of its local network, for instance
            problem = "no answer from here, but the peer answers at another of its addresses"
        tell(CheckOutcome(f"peer {address}", "note" if problem else "ok", problem or "answers"))
    for address in answering.values():
        _sort(visit, address)
    if not answering:
        raise FaultError(
            "no bootstrap peer can be reached: see the lines above, or get a new link from "
            "somebody in the swarm."
        )
    if not visit.reached:
        raise FaultError(
            "only bootstrap nodes answer, and they name no member that does: the swarm's last node "
            "may have left, ask for one."
        )
    dead = len({a.rpartition("/p2p/")[2] for a in addresses} - answering.keys())
    said = (
        f"{plural(len(visit.reached), 'member')} and {plural(len(visit.seeds), 'bootstrap node')} "
        "answer"
    )
    if dead:
        raise Note(
            f"{said}, {dead} of the link's peers do not: that is enough, but see the lines above, "
            "or get a newer link."
        )
    return said


def _sort(visit: Visit, address: str) -> None:
    """Sort a reached peer: connect to the members that a seed names, and note any other as a
    member.
    """
    assert visit.link is not None
    link = visit.link
    host = visit.running()
    try:
        named = addresses_of(
            visit.ask(address, SEED_PROTOCOL, lambda stream: ask_seed(stream, link.swarm), 15.0)
        )
    except (NetworkError, MessageError) as error:
        if OLD in str(
            error
        ):  # no seed: a member, unless it says otherwise when asked for the manifest
            _add(visit, address)
        return
    visit.seeds.append(address)
    for each, problem in host.call(_connected(host, named[:8]), CONNECT_S + 2.0).items():
        if not problem:
            _add(visit, each)


def _add(visit: Visit, address: str) -> None:
    """Note a reached member once: the link and a seed may both name it."""
    if address.rpartition("/p2p/")[2] not in {
        known.rpartition("/p2p/")[2] for known in visit.reached
    }:
        visit.reached.append(address)


def clock(visit: Visit, tell: Tell) -> str:
    """Compare this machine's clock with the median of peers' clocks, each known within half a round
    trip.
    """
    for address in [*visit.seeds[:1], *visit.reached, *visit.seeds[1:]][:MAX_ASKED]:
        try:
            visit.seen.append(visit.ask(address, DIAL_PROTOCOL, ask, 15.0))
        except (NetworkError, MessageError) as error:
            tell(CheckOutcome(f"clock of {short(address)}", "note", str(error)))
    if not visit.seen:
        raise Skip("no peer told its time: they may run an older shoal.")
    if problem := clock_problem(visit.seen):
        raise FaultError(problem)
    error_s = max(seen.error for seen in visit.seen)
    skew = statistics.median(seen.skew for seen in visit.seen)
    return (
        f"{abs(skew):.2f} s off the clock of {plural(len(visit.seen), 'peer')}, give or take "
        f"{error_s:.2f}"
    )


_NOT_REACHED = {
    "unreached": "{peer} could not connect back to port {port}",
    "refused": "the connection of {peer} to {address} port {port} was refused",
    "silent": "the connection of {peer} to {address} port {port} was not answered",
    "other": "something else answers at {address} port {port}",
}


def dialled(visit: Visit, tell: Tell) -> str:
    """Let a peer dial back to the port, on which only this check listens."""
    host = visit.running()
    problem = "no peer can be asked"
    for seen in visit.seen:
        if not seen.address:
            problem = "every connection goes through a relay"
            continue

        async def rung(peer: str = seen.peer) -> tuple[int, Outcome | None]:
            async with listen_for_dial_back(visit.port) as (number, token):
                return number, await _rung(host, peer, number, token)

        try:
            number, outcome = host.call(rung(), 30.0)
        except OSError as error:
            raise FaultError(
                f"port {visit.port} cannot be listened on ({error.strerror}): choose another one."
            ) from error
        except (NetworkError, MessageError) as error:
            problem = str(error).removesuffix(".")
            continue
        if outcome in ("busy", "unseen", None):
            problem = f"{short(seen.peer)} dials nobody now, ask again in a minute"
            continue
        visit.outcome = outcome
        if outcome == "reached":
            return f"{short(seen.peer)} connected back to {seen.address} port {number}"
        if (opened := _by_router(visit, seen)) is not None:
            visit.opened = seen.address
            return (
                f"{short(seen.peer)} connected back to {seen.address} port {opened}, which the "
                "router opened (UPnP or NAT-PMP)"
            )
        said = _NOT_REACHED[str(outcome)].format(
            peer=short(seen.peer), address=seen.address, port=number
        )
        raise Note(
            f"{said}: open it in the firewall and forward it in the router, or rely on a bootstrap "
            "node with --relay; a node that only dials out still trains."
        )
    raise Skip(f"not tried: {problem}.")


async def _rung(host: Host, peer: str, number: int, token: bytes = b"") -> Outcome | None:
    with contextlib.closing(await host.open(peer, DIAL_PROTOCOL, timeout=10.0)) as stream:
        return (await ask(stream, number, token)).outcome


def _by_router(visit: Visit, seen: DialBackView) -> int | None:
    """Return the port that the router opened for the daemon, if the peer that sees this machine
    there connects to it.
    """
    host = visit.running()
    port = None
    while not _own(seen.address):
        port = dialled_port(
            [address for address in host.addresses() if host_of(address) == seen.address]
        )
        if port is not None or time.monotonic() > visit.began + OPENED_S:
            break
        time.sleep(0.2)
    if port is None:
        return None
    try:
        return (
            port if host.call(_rung(host, seen.peer, port), 30.0) == "other" else None
        )  # the daemon answers, and knows no token
    except (NetworkError, MessageError):
        return None


def _own(host: str) -> bool:
    """Return whether this machine has the IP address ``host``."""
    with socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM
    ) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def nat(visit: Visit, tell: Tell) -> str:
    """Classify the NAT from the addresses that peers see and whether they could dial back."""
    seen = sorted({seen.address for seen in visit.seen if seen.address})
    if not seen:
        raise Skip("no peer sees an address of this machine.")
    hidden = [address for address in seen if not _own(address)]
    reached = visit.outcome == "reached"
    if len(hidden) > 1 and all(ipaddress.ip_address(address).version == 4 for address in hidden):
        raise Note(
            f"behind a NAT that shows {' and '.join(hidden)} to different peers: use a bootstrap "
            "node with --relay."
        )
    if visit.opened is not None:
        return (
            f"behind a NAT, seen as {visit.opened}, whose router opens a port by itself: "
            "nothing to forward or to announce"
        )
    if hidden:
        if reached:
            return (
                f"behind a NAT, seen as {hidden[0]}, with the port forwarded: add --announce "
                f"/ip4/{hidden[0]}/tcp/PORT"
            )
        raise Note(
            f"private, behind a NAT and seen as {hidden[0]}: forward a port, or have a bootstrap "
            "node with --relay in the link."
        )
    public = any(ipaddress.ip_address(address).is_global for address in seen)
    kind = "public" if public else "in the same network as its peers"
    if visit.outcome is not None and not reached:
        raise Note(
            f"{kind}, seen as {seen[0]} without a NAT, but a firewall keeps others out: open the "
            "port."
        )
    return f"{kind}, seen as {seen[0]} without a NAT"


def bandwidth(visit: Visit, tell: Tell) -> str:
    """Measure the bandwidth: a few MB both ways at once with one member."""
    problem = ""
    for address in visit.reached[:MAX_ASKED]:
        try:
            speed = visit.ask(address, SPEED_PROTOCOL, measure, 30.0)
        except (NetworkError, MessageError) as error:
            problem = str(error)
            continue
        down = speed.down * 8e-6
        up = speed.up * 8e-6
        said = f"{down:,.1f} Mbit/s from {short(address)}" + (
            f" and {up:,.1f} to it, at once" if speed.whole else ""
        )
        if not speed.whole or min(down, up) < 1.0:
            thin = " or ".join(name for name in methods_of("everyone") if METHODS[name].advised)
            slow = f"the link is slow, so take --method {thin}, or --codec int8"
            raise Note(f"{said}{'' if speed.whole else f' and less than {up:,.1f} to it'}: {slow}.")
        return said
    raise Skip(f"not measured: {problem.removesuffix('.')}.")
