"""Several nodes that verify each other in one process: real policies, claims and checks, but no
sockets, threads or clock.
"""

import hashlib
import itertools
import shutil
from unittest import mock

import torch

from shoal.node.config.rl_settings import RLSettings
from shoal.node.config.settings import Settings
from shoal.node.rl.loading import load_env
from shoal.node.rl.task import RLTask
from shoal.node.rl.tiny import Tiny, Warm
from shoal.node.task import Shard
from shoal.node.verify import service
from shoal.node.verify.calibrate import self_calibrate
from shoal.node.verify.completion_claims import CALIBRATION, CompletionClaims
from shoal.node.verify.material import Agreed
from shoal.node.verify.terms import make_terms
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.internal_errors import InternalErrors
from shoal.verification.calibration_file import save_calibration
from shoal.verification.consensus.rulings import Rules

SWARM, ROUND_S, TICKS = "swarm", 100.0, 40  # steps of each node in a round
START = 5.0 * ROUND_S


class Board:
    """What all see: the time, and who is there."""

    def __init__(self):
        self.now, self.there = START, {}


class Net:
    """`shoal.node.verify.swarm_network.SwarmNetwork` on a board.

    ``hands_out`` False: it has nothing that it is asked for.
    """

    def __init__(self, board, me, hands_out=True):
        self.board, self.me, self.swarm, self.hands_out = board, me, SWARM, hands_out
        self.bodies, self.counts, self.asked = {}, {}, []
        self.internal_errors = InternalErrors()

    def sign(self, record):
        return toy_signature(self.me, record)

    def verify(self, peer, record, signature):
        return signature == toy_signature(peer, record)

    def open(self, take, log, is_banned):
        self.take, self.log, self.is_banned = take, log, is_banned
        self.board.there[self.me] = self

    def publish(self, record, signature):
        for peer, other in self.board.there.items():
            if peer != self.me:
                other.take(self.me, record, signature)

    def put(self, body):
        sha256 = hashlib.sha256(body).digest()
        if self.hands_out:
            self.bodies.pop(sha256, None)
            self.bodies[sha256] = body  # as the newest
        return sha256

    def get(self, peer, sha256, most, timeout):
        self.asked.append(peer)
        if peer not in self.board.there:
            raise NetworkError(f"{peer} cannot be reached.")
        body = self.board.there[peer].bodies.get(sha256)
        if body is None:
            raise MessageError("The peer does not hold the body any more.", "unavailable")
        assert len(body) <= most
        assert timeout > 0
        self.put(body)
        return body

    def fetch_log(self, peer, since):
        return self.board.there[peer].log(since)

    def others(self):
        return sorted(
            peer for peer in self.board.there if peer != self.me and not self.is_banned(peer)
        )

    def name(self, peer):
        return f"{peer}'s node"

    def close(self):
        del self.board.there[self.me]


def toy_signature(peer, record):
    return hashlib.sha256(peer.encode() + record).digest()


class Node:
    """A node that trains a small policy and verifies; ``verification`` and its network.

    ``rules``: others than a swarm's.
    """

    def __init__(self, board, me, folder, calibration, *, seed=0, hands_out=True, **rules):
        self.me, self.said, self.events = me, [], []
        self.task = task_of(seed)
        self.task.connect(None, me)
        settings = settings_of(folder / me)
        if calibration is not None:
            settings.node.run_folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(calibration, settings.node.run_folder / CALIBRATION)
        self.network, salts = Net(board, me, hands_out), itertools.count()
        clock = lambda: board.now  # noqa: E731
        kind = CompletionClaims(
            settings, make_terms(settings, self.task), self.task, self.network, clock
        )
        self.claimer = kind.claimer
        # No claim is planted unless a test asks for it: what honest peers claim is then valid,
        # whatever the lottery.
        with mock.patch.object(
            service,
            "rules_of",
            lambda verify: Rules(audit=verify.audit_rate, **{"planted": 0.0, **rules}),
        ):
            self.verification = service.Verification(
                settings, kind, self.network, clock=clock, timer=clock,
                salt=lambda: hashlib.sha256(f"{me}:{next(salts)}".encode()).digest(),
            )  # fmt: skip
        self._rounds = self.task.batches(Shard(0, 1, 0))
        self._optimizer = self.task.inner_optimizer(self.task.policy.module.parameters())
        self.verification.prepare()

    def train(self):
        loss = self.task.loss(self.task.policy.module, next(self._rounds))
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def step(self):
        self.verification.step()
        self.verification.tell(
            self.said.append, lambda event, **fields: self.events.append({"event": event, **fields})
        )

    @property
    def banned(self):
        return {
            peer for peer in self.verification.table.standings if self.verification.is_banned(peer)
        }


def task_of(seed=0):
    env = load_env("strings", {"families": "last"})
    policy = Tiny(env.made, seed=seed, layers=1, width=16, warm=Warm(steps=10, batch=16))
    return RLTask(
        env,
        lambda: policy,
        RLSettings(held_out=5, local=1, external=0, group=8, max_tokens=8),
        seed=seed,
    )


def calibrate(out, claims, name="tiny"):
    """Write the calibration of the policy that all nodes here train to the file ``out``, which is
    returned.
    """
    task = task_of()
    save_calibration(
        self_calibrate(task.policy, task.env, Agreed(1.0, 8, 8), policy_name=name, claims=claims),
        out,
    )
    return out


def settings_of(folder, **verify):
    agreed, given = {"audit_rate": 1.0, "round_s": ROUND_S, **verify}, {"folder": str(folder)}
    return Settings.model_validate(
        {
            "task": {"hooks": "rl"},
            "rl": {"group": 8, "max_tokens": 8},
            "verify": agreed,
            "node": given,
        }
    )


def run(board, nodes, rounds):
    """So many rounds: each node steps, and trains once at the begin of each and once later; changes
    of weights are real.
    """
    with torch.random.fork_rng([]):
        for tick in range(int(rounds * TICKS)):
            for node in nodes:
                node.step()
                if tick % (TICKS // 2) == 1:
                    node.train()
            board.now += ROUND_S / TICKS
