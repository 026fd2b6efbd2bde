"""The bytes of each row of docs/table.csv, by its formula, against those that exchanges count as
they leave a host.
"""

import csv
from collections import defaultdict
from pathlib import Path

import pytest

from bench._table import links
from bench._table.methods import RECIPES, TORCHFT
from shoal.optim import codec_named
from shoal.optim.codecs.two_way import two_way
from shoal.optim.exchange.butterfly import FEWEST
from shoal.swarm.exchange.cost import payload_sent
from tests.support.fake_network import GroupPeer
from tests.support.pair_peers import Peer

TABLE = Path(__file__).resolve().parents[3] / "docs" / "table.csv"
OF_OTHERS = ("ddp", "snoo", *TORCHFT)
"""Methods of the table that send nothing by an exchange of ours."""
PARAMS, SPARSE_PARAMS = 1 << 20, 4 << 20
WAIT_S = 60.0
FRAMES = 0.005
"""Of a payload: what frames it on a stream, at most."""
MESSAGES_BYTES = 2000
"""What a node sends of other messages in an exchange, at most, for each member: with these payloads
at most 4 %.
"""


def rows_by_exchange():
    """Return the methods of the table by what their exchanges do: whom they average with, and the
    codec.
    """
    found = defaultdict(set)
    with TABLE.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["method"] not in OF_OTHERS:
                found[RECIPES[row["method"]].group, row["codec"]].add(row["method"])
    return found


def counted(network, group, codec, params, peers):
    """Return the bytes that left each host which took part in one exchange."""
    make = Peer if group == "pair" else GroupPeer
    made = [make(network, wait=WAIT_S) for _ in range(peers)]
    handles = [
        peer.start(0, float(number), codec_named(codec), (params,))
        for number, peer in enumerate(made)
    ]
    means = [handle.result() for handle in handles]
    return [
        peer.host.traffic.sent for peer, mean in zip(made, means, strict=True) if mean is not None
    ]


def check(network, group, codec, methods, peers):
    params = SPARSE_PARAMS if codec.startswith("topk2") else PARAMS
    sent = counted(network, group, codec, params, peers)
    assert len(sent) == peers
    payload = codec_named(codec).nbytes([(params,)]) / params
    both_ways = two_way(codec_named(codec))
    back = 0.0 if both_ways is None else both_ways.back.nbytes([(params,)]) / params
    if both_ways is not None and peers >= FEWEST:
        sent = [sum(sent) / peers] * peers  # who averages a larger share sends more
    for method in methods:
        work = links.work(method, codec, peers, 50, payload, back)
        expected = [payload_sent(work) / links.PARAMETERS * params] * peers
        if group == "pair" and peers % 2:  # an average: the middle of a chain sends two payloads
            one = expected[0] * peers / (peers + 1)
            expected = [one] * (peers - 1) + [2 * one]
        for least, each in zip(expected, sorted(sent), strict=True):
            assert least <= each <= least * (1 + FRAMES) + peers * MESSAGES_BYTES


@pytest.mark.parametrize(
    ("group", "codec", "method", "peers"),
    [
        ("pair", "mod4", "noloco-overlap", 3),
        ("everyone", "sign+ef", "diloco", 3),
        ("everyone", "float32", "diloco", 3),
        ("everyone", "float32", "diloco", 4),
        ("everyone", "sign+ef,back=sign+ef", "diloco", 3),
        ("everyone", "sign+ef,back=e3m0+ef", "diloco", 4),
    ],
)
def test_exchanges_send_what_the_formula_says(network, group, codec, method, peers):
    """A pair one payload (the middle of three two), a group all others' or, in float32 from four
    on, what a ring sends, or a share of payload and averages.
    """
    check(network, group, codec, {method}, peers)


@pytest.mark.slow(reason="exchanges a payload of each codec among two, three and four hosts")
@pytest.mark.parametrize("peers", [2, 3, 4])
@pytest.mark.parametrize(("group", "codec"), sorted(rows_by_exchange()))
def test_each_row_of_the_table_sends_its_formula(network, group, codec, peers):
    check(network, group, codec, rows_by_exchange()[group, codec], peers)
