"""What a prover may try against the check of completions: changed weights, and text of its own
under an honest proof.
"""

import copy

import torch

from shoal.node.verify.group import ACTIVATIONS, read, write
from shoal.node.verify.material import Agreed, decode_material, output_hash, seed_of
from shoal.node.verify.snapshot import digest
from shoal.swarm.topics.rollout import pack_tokens
from shoal.swarm.wire.envelope import pack
from tests.support.claims import PEER, ROUND, RUN, SLOT


def restated(world, proven, rows=None, finish=None, **fields):
    """A claim about other material than was proved, with hashes that fit it."""
    told = decode_material(proven.material)
    rows = told.rows() if rows is None else rows
    tokens = tuple(pack_tokens(row) for row in rows)
    material = pack(
        told.model_copy(update={"tokens": tokens, "finish": tuple(finish or told.finish), **fields})
    )
    claim = world.claim(proven)
    said = {
        "output": output_hash(rows),
        "tokens": sum(map(len, rows)),
        "fingerprint": digest(material),
    }
    return claim.model_copy(update=said), material


# -- weights ---------------------------------------------------------------------------------------


def rounded(bits):
    """Symmetric quantisation, one scale for each row."""
    top = 2 ** (bits - 1) - 1
    return lambda weight: (
        torch.round(weight / (scale := weight.abs().amax(1, keepdim=True) / top)) * scale
    )


def fp8(weight):
    scale = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def adapter(size):
    """An adapter of rank 1, merged: a change of this norm relative to the weight's."""

    def change(weight):
        generator = torch.Generator().manual_seed(3)
        product = torch.outer(
            torch.randn(weight.shape[0], generator=generator),
            torch.randn(weight.shape[1], generator=generator),
        )
        return weight + size * weight.norm() / product.norm() * product

    return change


def tuned(world, steps, lr):
    """A copy after some steps of SGD on the right answers."""
    other = copy.deepcopy(world.policy)
    questions = [world.env.made.question(5, index) for index in range(8)]
    for _ in range(steps):
        logs, mask = other.log_probs(
            [q.prompt for q in questions], [other.encode(q.answer, True) for q in questions], 1.0
        )
        grads = torch.autograd.grad(
            -(logs * mask).sum() / mask.sum(), list(other.module.parameters())
        )
        with torch.no_grad():
            for parameter, grad in zip(other.module.parameters(), grads, strict=True):
                parameter -= lr * grad
    return other


# -- text ------------------------------------------------------------------------------------------


def asked(world, index):
    return world.env.made.question(world.question(index).seed, index)


def seed_for(world, index):
    """The seed that a claim of this question has to use."""
    return seed_of(RUN, ROUND, PEER, SLOT, world.question(index).hash)


def drawn(world, index, policy=None, temperature=None, seed=None):
    """The text of a group as ``policy`` writes it, at a temperature or from a seed that may be
    another than is claimed.
    """
    agreed = (
        world.agreed
        if temperature is None
        else Agreed(temperature, world.agreed.max_tokens, world.agreed.group)
    )
    chosen = seed_for(world, index) if seed is None else seed
    return [
        one.tokens
        for one in write(
            policy or world.policy, asked(world, index).prompt, agreed, chosen
        ).completions
    ]


def margins_of(world, index, rows):
    """The states and margins of ``rows`` with the claimed weights and seed."""
    return read(
        world.policy, asked(world, index).prompt, rows, world.agreed, seed_for(world, index)
    )


def prefilled(world, index, rows):
    """A claim of ``rows`` whose proof is that of the right weights, which have read them; and its
    largest margin, in nats.
    """
    states, found = margins_of(world, index, rows)
    finish = ["stop" if world.policy.ends(row[-1]) else "length" for row in rows]
    claim, material = restated(
        world, world.proven(index), rows, finish, proof=ACTIVATIONS.make(states)
    )
    return claim, material, float(found.max())


def steered(world, index):
    """The honest text with the right answer where it costs least margin, and that sum in nats; None
    if it holds it anyway.
    """
    rows = drawn(world, index)
    right = tuple(world.policy.encode(asked(world, index).answer, True))
    if right in rows:
        return None
    tried = [[*rows[:place], right, *rows[place + 1 :]] for place in range(len(rows))]
    costs = [float(margins_of(world, index, trial)[1].sum()) for trial in tried]
    return min(zip(costs, tried, strict=True))
