"""Decoders of claims and of what they are checked by: proofs, material, calibrations, weights."""

import functools
import math

import torch
from safetensors.torch import save

from shoal.node.rl.environment import EnvError
from shoal.node.verify import claim_file, inspect_claim
from shoal.node.verify.errors import VerifyError
from shoal.node.verify.material import Agreed, Coordinates, material_of
from shoal.node.verify.material import decode_material as decode_material
from shoal.node.verify.snapshot import load_snapshot
from shoal.node.verify.stated_odds import decode_odds
from shoal.swarm.errors import MessageError
from shoal.swarm.topics.attestation import sign_record
from shoal.swarm.wire.envelope import (
    pack,
)
from shoal.verification.calibration import Calibration, CalibrationError, Honest, Pair
from shoal.verification.calibration_file import load_calibration, save_calibration
from shoal.verification.consensus.records import Claim, Signed
from shoal.verification.fingerprints.activations import ActivationProof
from shoal.verification.fingerprints.fingerprint import Evidence, Feature
from tests.security.decoder import HERE, ME, one
from tests.security.hostile import (
    JSON,
    MSGPACK,
    SAFETENSORS,
)
from tests.support.message_kinds import good


def proofs():
    torch.manual_seed(2)
    states, made = torch.randn(40, 64), ActivationProof()
    yield one(
        f"proof {made.name}",
        "verification/fingerprints/activations.py:ActivationProof._pairs",
        lambda data: made.compare(data, states),
        lambda: made.make(states),
        sound=lambda found: isinstance(found, Evidence),
    )


@functools.cache
def calibration():
    features = (Feature("error", 0.1),)
    evidence = [Evidence(features, ((0.1,), (0.2,)), (1.0, 0.5))] * 20
    save_calibration(
        Calibration({Pair("f", "m", "float32", "float32"): Honest.of(evidence)}),
        HERE / "calibration",
    )
    return (HERE / "calibration").read_bytes()


@functools.cache
def policy():
    torch.manual_seed(4)
    return torch.nn.Linear(3, 2)


def policy_snapshot():
    return save({name: value.detach().clone() for name, value in policy().named_parameters()})


def material(data=b"{}"):
    return material_of(
        Coordinates("strings", "1", data, 5, 6), [[1, 2]], ["stop"],
        proof=b"p", policy="tiny", dtype="float32", kernel="k", snapshot=1,
    )  # fmt: skip


MATERIAL = pack(material())


@functools.cache
def stored():
    claim = good(Claim).model_copy(update={"peer": ME.peer_id})
    signed = Signed(claim, sign_record(ME, claim.encoded))
    return claim_file.save_claim(
        HERE / "claims", signed, MATERIAL, Agreed(1.0, 8, 2), None
    ).read_bytes()


def inspected(data):
    """What ``shoal verify claim`` makes of a file before it computes anything."""
    (HERE / "one.claim").write_bytes(data)
    found = claim_file.load_claim(HERE / "one.claim")
    try:
        read = decode_material(found.material)
    except MessageError:
        return found
    return inspect_claim._environment(read, None)


def environment(data):
    return inspect_claim._environment(material(data[:4096]), None)


def finite(value):
    return not isinstance(value, float) or math.isfinite(value)


def calibrated(data):
    (HERE / "read").write_bytes(data)
    return load_calibration(HERE / "read")


def pairs_of(data):
    return SAFETENSORS.open(data)[0]["__metadata__"]["pairs"].encode()


def pairs(data):
    """Read a calibration whose description is the stranger's."""
    header, content = SAFETENSORS.open(calibration())
    header["__metadata__"]["pairs"] = data.decode("utf-8", "replace")
    return calibrated(SAFETENSORS.make([header, content]))


def claim_decoders():
    return [
        one(
            "odds in a vote",
            "node/verify/stated_odds.py:decode_odds",
            decode_odds,
            lambda: b'{"odds": 3.5}',
            JSON,
            sound=finite,
        ),
        *proofs(),
        one(
            "material of a claim",
            "node/verify/material.py:decode_material node/verify/material.py:Material.rows",
            lambda data: decode_material(data).rows(),
            lambda: MATERIAL,
            MSGPACK,
            MessageError,
        ),
        one(
            "stored claim",
            "node/verify/claim_file.py:_read_file",
            inspected,
            stored,
            MSGPACK,
            VerifyError,
            EnvError,
        ),
        one(
            "environment of a claim",
            "node/verify/inspect_claim.py:_environment",
            environment,
            lambda: b'{"letters": 4}',
            JSON,
            VerifyError,
            EnvError,
        ),
        one(
            "weights of a policy",
            "",
            lambda data: load_snapshot(policy(), data),
            policy_snapshot,
            SAFETENSORS,
            VerifyError,
        ),
        one(
            "calibration",
            "verification/calibration_file.py:load_calibration",
            lambda data: calibrated(data),
            calibration,
            SAFETENSORS,
            CalibrationError,
            sentence=False,
        ),
        one(
            "calibrated pairs",
            "verification/calibration_file.py:load_calibration",
            pairs,
            lambda: pairs_of(calibration()),
            JSON,
            CalibrationError,
            sentence=False,
        ),
    ]
