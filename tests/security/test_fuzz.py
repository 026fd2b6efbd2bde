"""Whatever bytes come in place of right ones: a value within its bounds, or the one exception that
the decoder is known to raise.

A place in the source that opens bytes and is missing in `decoders` fails the last test.
"""

import ast
import itertools
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.security.decoders import decoders
from tests.security.file_decoders import checkpoint
from tests.security.hostile import DIGESTED, WHOLE, changes, hostile, millions

ROOT = Path(__file__).resolve().parents[2]
DECODERS = decoders()
each = pytest.mark.parametrize("decoder", DECODERS, ids=[decoder.name for decoder in DECODERS])


def judged(decoder, data):
    """Give ``data`` to a decoder; return its value, or None if it was refused as it should be."""
    try:
        value = decoder.read(data)
    except decoder.refuses as error:
        said = str(error)
        if decoder.sentence:
            assert said.isprintable()
            assert said.endswith((".", ")")), said
            assert len(said) < 1200
        return None
    assert decoder.sound(value), data[:200]
    return value


def measured(decoder, data):
    """Do the same, and return the bytes that Python held at most, and the number of calls."""
    calls = itertools.count()
    tracemalloc.start()
    known = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: next(calls))
    try:
        judged(decoder, data)
    finally:
        sys.setprofile(known)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak, next(calls)


@each
def test_good_bytes_are_taken(decoder):
    for data in decoder.samples():
        assert decoder.sound(decoder.read(data))


@each
@settings(max_examples=25)
@given(data=st.data())
def test_bytes_at_random_cut_flipped_and_changed(decoder, data):
    judged(decoder, data.draw(hostile(decoder.form, decoder.samples())))


@each
def test_another_value_in_one_place(decoder):
    for data in decoder.samples() if decoder.form is not None and decoder.tree else ():
        for changed in changes(decoder.form, data, decoder.cases):
            judged(decoder, changed)


LARGE = [decoder for decoder in DECODERS if decoder.tree]


@pytest.mark.slow(reason="every call of some 1,500 decodings of a megabyte is counted")
@pytest.mark.parametrize("decoder", LARGE, ids=[decoder.name for decoder in LARGE])
def test_what_is_large_or_deep_costs_little(decoder):
    """A small multiple of its bytes in memory, and in calls, of which as many are made on any
    machine.
    """
    judged(decoder, WHOLE[0])  # what is made once is made
    large = (
        (millions(decoder.form, data) for data in decoder.samples()[:1])
        if decoder.form is not None
        else ()
    )
    for data in (*WHOLE, *itertools.chain.from_iterable(large)):
        peak, calls = measured(decoder, data)
        assert peak < decoder.times * len(data) + 8 * 2**20
        assert calls < 4 * len(data) + 50_000


def test_checkpoint_tensor_has_a_text_name():
    """A tensor of a checkpoint has a text for a name."""
    tree = DIGESTED.open(checkpoint()[1])
    model = dict(dict(tree["state"]["dict"])["trainer"]["dict"])["model"]["dict"]
    model[0][0] = 7
    assert judged(
        next(one for one in DECODERS if one.name == "checkpoint to merge"), DIGESTED.make(tree)
    )


# -- all of them -----------------------------------------------------------------------------------

OPENERS = {
    "unpackb",
    "Unpacker",
    "unpack_from",
    "loads",
    "load_file",
    "safe_open",
    "frombuffer",
    "from_bytes",
    "b64decode",
    "b58decode",
    "fromhex",
    "decompress",
    "decompressobj",
    "unquote",
    "ParseFromString",
    "validate_json",
    "model_validate_json",
    "readexactly",
}
"""What makes something of bytes or text.

``unpack`` and ``unseal`` of messages go through two of these.
"""
DIGESTS = {
    "node/data/sharding.py:stable_hash",
    "node/data/sharding.py:is_held_out",
    "node/rl/gym.py:Gym.question",
    "node/rl/own_questions.py:OwnQuestions.number",
    "node/batches.py:LoadedBatches._begin_epoch",
    "node/verify/material.py:seed_of",
    "optim/experimental/sparta.py:chosen",
    "swarm/membership/records.py:_first_bits",
    "verification/consensus/planting.py:must_plant",
    "verification/consensus/sortition.py:is_audited",
    "swarm/identity.py:",
    "swarm/identity.py:b58encode",
}
"""Numbers of digests, keys and constants, all of one length."""
OWN = {
    "optim/codecs/mod4.py:Mod4Codec.load_state_dict",
    "optim/codecs/block_exponents.py:exponents_from_text",
    "node/checkpoint/packing.py:_pack_array",
    "node/checkpoint/store.py:prove",
    "node/doctor/machine_checks.py:_event",
    "node/config/edit_file.py:edit",
    "node/config/edit_file.py:_parsed",
    "node/config/settings.py:_read",
    "node/config/settings.py:assignment",
    "node/data/hub_dataset.py:HubDataset._records",
    "node/rl/rollout_sharing.py:RolloutSharing.__init__",
    "node/data/record_files.py:RecordFiles._text",
    "node/data/tokenizer.py:Bytes.encode",
    "node/demo/run_nodes.py:run_nodes",
    "node/demo/consensus_distance.py:consensus_distances",
    "node/demo/liveness.py:EventReader.read",
    "node/parallel/rank_process.py:read_ends",
    "node/parallel/node_ranks.py:NodeRanks.follow",
    "node/commands/status.py:_refusal_events",
    "node/runtime/run_options.py:_own_link",
    "node/templates/finetune/task.py:Finetune.tokens_of",
    "node/templates/pretrain/task.py:Pretrain.text",
    "node/rl/asked_rounds.py:AskedRounds._read",
    "node/verify/evidence_file.py:EvidenceFile.series",
    "node/verify/evidence_file.py:EvidenceFile.claims",
    "optim/codecs/memory.py:buffer",
    "optim/exchange/store_consensus.py:StoreConsensus._offered",
    "optim/outer/torch_form.py:TorchForm._read",
    "optim/ranks/orders.py:Channel.send",
    "optim/ranks/orders.py:Channel.receive",
    "swarm/p2p/peerstore.py:Peerstore._load",
    "swarm/topics/tally.py:_read",
    "swarm/topics/tally.py:Tally._load",
    "swarm/training/following_session.py:FollowingSession.__init__",
    "swarm/state/spool.py:Spool.mapped",
}
"""Files and processes of the user's own: settings, data, a node's folder, the ranks of one job."""
ELSEWHERE = {
    "swarm/p2p/host.py:Host._echo": "32 bytes of libp2p's ping: any are an echo",
    "swarm/p2p/hivemind_adapter.py:_Calls.call_protobuf_handler": "tests/swarm/p2p/test_dial_backoff.py: a node id of 21 bytes",  # noqa: E501
    "swarm/p2p/reachability.py:_dial": "a token, compared whole",
    "swarm/p2p/stream.py:Stream._head": "test_fuzz_streams",
    "swarm/p2p/stream.py:Stream._receive": "test_fuzz_streams",
    "swarm/p2p/daemon.py:read_message": "frames of the daemon on this machine; what strangers say "
    "in them is opened elsewhere",
    "swarm/exchange/group/reduction.py:AllReduce._received": "all-reduce: sizes follow from the "
    "shapes",
    "swarm/state/selection.py:_sample": "tests/swarm/state: a piece whose size and digest are "
    "known",
    "swarm/topics/rollout.py:_parts": "message rollout, and test_message_fields",
    "swarm/topics/rollout.py:_tensor": "message rollout, and test_message_fields",
    "optim/weight_patch.py:bits_in": "a body whose size and SHA-256 are known",
    "swarm/wire/envelope.py:_shapes": "message offer, and test_message_fields",
    "swarm/identity.py:public_key_of": "link, and every peer id of a message",
}


def openers():
    """Return the functions of the product that call an opener, as ``path:name``."""
    found = set()

    def visit(node, path, names):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                visit(child, path, [*names, child.name])
                continue
            if (
                isinstance(child, ast.Call)
                and getattr(child.func, "attr", getattr(child.func, "id", "")) in OPENERS
            ):
                found.add(f"{path}:{'.'.join(names)}")
            visit(child, path, names)

    for top in ("node", "optim", "swarm", "verification"):
        for file in (ROOT / top).rglob("*.py"):
            visit(
                ast.parse(file.read_text(encoding="utf-8")), file.relative_to(ROOT).as_posix(), []
            )
    return found


def test_no_decoder_is_missing():
    covered = {place for decoder in DECODERS for place in decoder.covers}
    found = openers()
    assert found - covered - DIGESTS - OWN - ELSEWHERE.keys() == set(), (
        "give it a line in one of *_decoders.py"
    )
    assert (DIGESTS | OWN | ELSEWHERE.keys()) - found == set(), "it opens no bytes any more"
    sources = {
        path: (ROOT / path.partition(":")[0]).read_text(encoding="utf-8") for path in covered
    }
    assert [
        path
        for path, text in sources.items()
        if f"def {path.rpartition('.')[2].rpartition(':')[2]}(" not in text
    ] == []
