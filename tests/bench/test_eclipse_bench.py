"""bench/eclipse.py: without peer exchange captured peers are cut off, with it they are not; bad options are refused."""

import json

from bench.eclipse import main


def test_captured_peers_are_cut_off_only_without_peer_exchange(called):
    done = called(main, "--peers", "20", "--minutes", "2", "--hostile", ".2", "--seeds", "0", "--cases", "none", "few", "--json")
    none, few = json.loads(done.stdout)["runs"]
    assert none["cut_off"] == none["parts"] == 0.5  # 8 of the 16 honest ones are captured
    assert none["bytes_per_s"] == 0
    assert few["cut_off"] == few["parts"] == 0
    assert 0 < few["hostile_passive"] < 0.5
