"""Options that benchmarks refuse: each names the one at fault, with exit code 2, before it measures anything."""

import pytest
import torch

from bench import eclipse, exchange, latency, light, overlap, quality, sapo, table, verification, verification_135m

REFUSED = {
    eclipse: ["--hostile 1", "--captured 2", "--peers 5", "--entries 0"],
    exchange: ["--mb 0", "--mb x", "--rtt 0", "--against smoke", "--repeats 0"],
    latency: ["--samples 1", "--runs x", "--peers 1"],
    light: ["--peers 1", "--processes 0", "--period 30", "--share 0"],
    overlap: ["--delay -1", "--methods smoke", "--mbit 0", "--nodes 1", "--fragments 11", "--lag 100", "--codec smoke"],
    quality: ["--methods magic", "--codecs zip", "--batch 30 --peers 4", "--steps 70", "--seeds 0"],
    sapo: ["--nodes 1", "--seeds 0", "--policy huge"],
    table: ["--methods magic", "--seeds 0", "--device cuda"],
    verification: ["--claims 0", "--calibrate 19", "--tokens 241", "--rate 0.6", "--dtypes fp64"],
    verification_135m: ["--honest 40", "--dtypes fp16"],
}
CASES = [(bench, options) for bench, refused in REFUSED.items() for options in refused]


@pytest.mark.parametrize(("bench", "options"), CASES, ids=[f"{bench.__name__} {options}" for bench, options in CASES])
def test_a_wrong_option_is_named(bench, options, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = refused(bench.main, *options.split())
    assert "error:" in said
    assert options.split()[0] in said or bench in (eclipse, light)
