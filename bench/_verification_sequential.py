"""How many claims it takes until the odds against a cheat are an alarm, and how often they are one
against an honest peer.

The distances of claims are measured once and kept in bench/results/sequential.json.gz; peers are
resampled from them. An honest peer's calibration and its claims are drawn from one pool without
replacement, so they are exchangeable and each of the 1,000 claims is another one. "honest, without
AVX" are claims written with other instructions (ATEN_CPU_CAPABILITY), which shows what another
honest machine does; they, and a cheat's, are drawn with replacement. Odds are computed as
`shoal.verification.sequential` does, for many peers at once.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from bench._verification_claims import ACTIVATIONS, CHEATING, FRESH, SAMPLING, examined
from bench._verification_tiny import Tiny
from bench._verification_world import CHEATS, DTYPES, Writer, honest
from shoal.verification.martingale import JUMP, KAPPAS
from shoal.verification.sequential import ACROSS, ALARM, LENGTH, TOLERANCE

Rows = NDArray[np.float64]
ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "bench" / "results" / "sequential.json.gz"
HONEST, OTHER = "honest", "honest, without AVX"
POOL, CALIBRATE, LIFE, TOKENS = 1536, 512, 1000, 128
CLAIMS = {HONEST: POOL, OTHER: 256, "int8 weights": 256, "weights + 0.1 % noise": 192}
WITHOUT_AVX = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
GRAINS = np.array(
    [feature.grain for proof in (ACTIVATIONS, SAMPLING) for feature in proof.features]
)
PARTS = (slice(0, len(ACTIVATIONS.features)), slice(len(ACTIVATIONS.features), len(GRAINS)))


# -- measuring -------------------------------------------------------------------------------------


def measured(
    path: Path = KEPT, seconds: float = float("inf"), claims: dict[str, int] | None = None
) -> dict[str, Rows]:
    """Means of all features (claims, F), by "prover verifier who".

    What is not in the file yet is measured, 64 claims at a time,
    and kept, for so many ``seconds``; then raises TimeoutError.
    """
    kept: dict[str, list[list[float]]] = (
        json.loads(gzip.decompress(path.read_bytes())) if path.exists() else {}
    )
    begin = time.perf_counter()
    for who, many in (claims or CLAIMS).items():
        for prover in DTYPES:
            while (done := len(kept.get(f"{prover} {prover} {who}", []))) < many:
                if time.perf_counter() - begin > seconds:
                    raise TimeoutError(
                        f"{who} of {prover}: {done} of {many} claims; run it again to go on"
                    )
                numbers = range(_first(who) + done, _first(who) + min(done + Tiny.rows, many))
                for verifier, rows in _measure(prover, who, numbers).items():
                    kept.setdefault(f"{prover} {verifier} {who}", []).extend(rows)
                path.write_bytes(
                    gzip.compress(json.dumps(kept, separators=(",", ":")).encode(), mtime=0)
                )
                print(
                    f"{who} of {prover}: {done + len(numbers)} of {many} claims",
                    file=sys.stderr,
                    flush=True,
                )
    return {key: np.array(rows) for key, rows in kept.items()}


def _first(who: str) -> int:
    return FRESH if who in (HONEST, OTHER) else CHEATING


def _measure(prover: str, who: str, numbers: range) -> dict[str, list[list[float]]]:
    world = Tiny()
    write: Writer
    if who == OTHER:
        write = _elsewhere(prover)
    elif who == HONEST:
        write = honest(world, world.model(DTYPES[prover]), TOKENS)
    else:
        write = CHEATS[who](world, world.model(DTYPES[prover]), TOKENS)
    tokens, states = write(numbers, 1.0)
    found = examined(
        world,
        lambda claims, heat: (tokens, states),
        [world.model(one) for one in DTYPES.values()],
        numbers,
        1.0,
    )
    return {
        verifier: [
            [float(f"{mean:.4g}") for mean in (*told.means(), *drawn.means())]
            for told, drawn in of_one
        ]
        for verifier, of_one in zip(DTYPES, found, strict=True)
    }


def _elsewhere(prover: str) -> Writer:
    def write(claims: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "written"
            command = [
                sys.executable,
                "-m",
                __name__,
                prover,
                str(claims[0]),
                str(len(claims)),
                str(out),
            ]
            subprocess.run(
                command, check=True, timeout=600, cwd=ROOT, env={**os.environ, **WITHOUT_AVX}
            )
            found = load_file(out)
        return found["tokens"], found["states"]

    return write


# -- resampling ------------------------------------------------------------------------------------


def tolerances(known: Rows, across: bool) -> Rows:
    found: Rows = np.maximum(GRAINS, (ACROSS if across else TOLERANCE) * known.mean(axis=0))
    return found


def p_values(known: Rows, claims: Rows, tolerance: Rows) -> Rows:
    """Conformal p-values (n, F) of one series of claims (n, F) after calibrated ones (m, F)."""
    least = claims - tolerance
    ranked = np.sort(known, axis=0)
    found = np.empty_like(claims)
    earlier = np.tri(len(claims), k=-1, dtype=bool)
    for at in range(claims.shape[1]):
        beyond = len(known) - np.searchsorted(ranked[:, at], least[:, at])
        beyond = beyond + ((claims[None, :, at] >= least[:, None, at]) & earlier).sum(axis=1)
        found[:, at] = (1 + beyond) / (1 + len(known) + np.arange(len(claims)))
    return found


def capitals(p: Rows) -> Rows:
    """Logarithms of the capital after each of the p-values (n, B) of B martingales."""
    kappas = np.array(KAPPAS)[:, None]
    shares = np.full((len(KAPPAS), p.shape[1]), -np.log(len(KAPPAS)))
    found = np.empty_like(p)
    total = np.zeros(p.shape[1])
    for at, row in enumerate(np.log(p)):
        shares = np.logaddexp(np.log1p(-JUMP) + shares, np.log(JUMP / len(KAPPAS)) + total)
        shares += np.log(kappas) + (kappas - 1) * row
        total = found[at] = np.logaddexp.reduce(shares, axis=0)
    return found


def log_odds(lives: list[tuple[Rows, Rows]], across: bool) -> Rows:
    """Logarithms of the odds after each claim, (n, peers), from each peer's calibrated claims (m,
    F) and own ones (n, F).
    """
    many = len(lives[0][1])
    parts = []
    for begin in range(0, many, LENGTH):
        p = np.stack(
            [
                p_values(known, own[begin : begin + LENGTH], tolerances(known, across))
                for known, own in lives
            ],
            axis=1,
        )
        found = capitals(p.reshape(len(p), -1)).reshape(p.shape)
        number = len(PARTS) * (begin // LENGTH) + 1  # each fingerprint has a series of its own
        shared = [
            np.log((part.stop - part.start) * (number + at) * (number + at + 1))
            for at, part in enumerate(PARTS)
        ]
        parts.append(
            np.max(
                [
                    found[:, :, part].max(axis=2) - less
                    for part, less in zip(PARTS, shared, strict=True)
                ],
                axis=0,
            )
        )
    return np.concatenate(parts)


def first_alarms(odds: Rows) -> list[float]:
    """For each peer, the number of claims until the alarm; infinite if there is none."""
    alarmed = odds >= ALARM
    return [float(row.argmax()) + 1 if row.any() else float("inf") for row in alarmed.T]


def result(kept: dict[str, Rows], honest_peers: int, cheats: int, seed: int = 0) -> dict[str, Any]:
    """Simulate so many honest peers, and cheats of each kind, for each pair of dtypes together with
    each verifier.
    """
    source = np.random.default_rng(seed)
    rows, highest, elsewhere = {}, [], []
    for pair in [(prover, verifier) for prover in DTYPES for verifier in DTYPES]:
        pools = {who: kept[f"{' '.join(pair)} {who}"] for who in CLAIMS}
        across = pair[0] != pair[1]

        def peer(who: str, many: int, pools: dict[str, Rows] = pools) -> tuple[Rows, Rows]:
            order = source.permutation(len(pools[HONEST]))
            if who == HONEST:
                return pools[who][order[:CALIBRATE]], pools[who][
                    order[CALIBRATE : CALIBRATE + many]
                ]
            return pools[HONEST][order[:CALIBRATE]], pools[who][
                source.integers(len(pools[who]), size=many)
            ]

        tops = log_odds([peer(HONEST, LIFE) for _ in range(honest_peers)], across).max(axis=0)
        others = log_odds([peer(OTHER, LIFE) for _ in range(cheats)], across).max(axis=0)
        highest += list(tops)
        elsewhere += list(others)
        found = {
            who: first_alarms(log_odds([peer(who, LIFE) for _ in range(cheats)], across))
            for who in list(CLAIMS)[2:]
        }
        rows[" -> ".join(pair)] = {
            "honest": float((tops >= ALARM).mean()),
            OTHER: float((others >= ALARM).mean()),
            **{who: _median(times) for who, times in found.items()},
        }
    same, mixed = (
        [row for pair, row in rows.items() if (len(set(pair.split(" -> "))) == 1) == is_same]
        for is_same in (True, False)
    )
    worst: dict[str, float | None] = {}
    for who in list(CLAIMS)[2:]:
        worst |= {
            who: _worst(row[who] for row in same),
            f"{who}, across dtypes": _worst(row[who] for row in mixed),
        }
    return {
        "honest_ban_rate": float(np.mean(np.array(highest) >= ALARM)),
        "honest_peers": len(highest),
        "claims_of_a_peer": LIFE,
        "honest_odds": {
            f"{odds:g}": int((np.array(highest) >= np.log(odds)).sum())
            for odds in (1, 10, 100, 1000)
        },
        "other_machine_ban_rate": float(np.mean(np.array(elsewhere) >= ALARM)),
        "claims_to_ban": worst,
        "pairs": rows,
    }


def _median(times: list[float]) -> float | None:
    """None if most were not found."""
    middle = sorted(times)[len(times) // 2]
    return middle if np.isfinite(middle) else None


def _worst(medians: Any) -> float | None:
    found = list(medians)
    return None if None in found else max(found)


def markdown(shown: dict[str, Any]) -> str:
    """The table of pairs."""
    columns = ["honest", OTHER, *list(CLAIMS)[2:]]
    lines = [
        "| prover -> verifier | " + " | ".join(columns) + " |",
        "| --- " * (len(columns) + 1) + "|",
    ]
    for pair, row in shown["pairs"].items():
        cells = [f"{100 * row[name]:g} %" for name in columns[:2]]
        cells += ["not found" if row[name] is None else f"{row[name]:g}" for name in columns[2:]]
        lines.append(f"| {pair} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":  # in a process of its own, whose environment chose the instructions
    torch.set_num_threads(1)
    prover, first, many, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    tokens, states = honest(Tiny(), Tiny().model(DTYPES[prover]), TOKENS)(
        range(first, first + many), 1.0
    )
    save_file({"tokens": tokens.contiguous(), "states": states.contiguous()}, out)
