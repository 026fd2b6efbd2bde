"""The manifest and the swarm id."""

import time

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from shoal.optim import methods_with
from shoal.optim.methods import methods_of
from shoal.swarm.errors import MessageError
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import MAX_BUCKET, MIN_BUCKET, Manifest, open_manifest, swarm_id
from shoal.swarm.p2p.hivemind_adapter import MAX_SUBKEYS
from shoal.swarm.settings import outer as outer_settings
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.wire.envelope import pack, seal

ME, OTHER = Identity.ephemeral(), Identity.ephemeral()

numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
option = st.booleans() | numbers | st.text(max_size=50)


def manifest(**changes):
    return Manifest(
        **{
            "name": "fish",
            "created": time.time(),
            "creator": ME.peer_id,
            "task": "text",
            "model": "0" * 64,
            **changes,
        }
    )


def sealed_unchecked(**changes):
    payload = msgpack.packb(["manifest", 1, {**manifest().model_dump(), **changes}])
    return msgpack.packb([ME.peer_id, payload, ME.sign("shoal/manifest/1", payload)])


@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,30}", fullmatch=True), option, max_size=32
    ),
    st.sampled_from(["text", "package.module:Class", "my-file.py:Class"]),
    st.builds(OuterSettings, lr=st.floats(0.01, 10), every=st.integers(1, 10**6)),
    st.builds(
        TrainSettings,
        steps=st.integers(1, 2**53),
        seed=st.integers(0, 2**63 - 1),
        optimizer=st.just("adamw"),
        lr=st.none() | st.floats(0.01, 10),
        schedule=st.sampled_from(["constant", "cosine", "wsd"]),
        warmup=st.integers(0, 2**53),
        clip=st.floats(0, 1e9),
    ),
)
def test_round_trip_keeps_values_and_their_types(options, task, outer, train):
    made = manifest(task=task, task_options=options, outer=outer, train=train)
    sealed = seal(made, ME)
    got = open_manifest(sealed, swarm_id(sealed))
    assert got == made
    assert [type(value) for value in got.task_options.values()] == [
        type(value) for value in options.values()
    ]


def test_swarm_id_is_the_hash_of_the_sealed_bytes():
    assert swarm_id(b"") == "4oymiquy7qobjgx36tejs35zeqt24qpemsnzgtfeswmrw6csxbkq"
    sealed = seal(manifest(), ME)
    assert len(swarm_id(sealed)) == 52
    assert swarm_id(seal(manifest(), OTHER)) != swarm_id(sealed)


def test_another_manifest_than_the_links_is_refused():
    sealed = seal(manifest(), ME)
    with pytest.raises(MessageError, match=r"wrong swarm id: .* not to aaaa"):
        open_manifest(sealed, "a" * 52)


def test_a_manifest_signed_by_another_than_its_creator_is_refused():
    with pytest.raises(MessageError, match="another peer than its creator"):
        open_manifest(seal(manifest(), OTHER))


def test_another_protocol_is_named():
    with pytest.raises(
        MessageError, match="speaks protocol 3, this node speaks 2: update shoal here"
    ):
        open_manifest(seal(manifest(protocol=3), ME))


@pytest.mark.parametrize(
    "change",
    [
        {"task": "../evil.py:Class"},
        {"task": "/tmp/evil.py:Class"},
        {"task": "a:b:c"},
        {"task": "a:b()"},
        {"task": ""},
        {"task_options": {"a b": 1}},
        {"task_options": {"a": [1]}},
        {"task_options": {"a": None}},
        {"task_options": {"a": float("nan")}},
        {"task_options": {"a": 2**63}},
        {"task_options": {"a": "x" * 1025}},
        {"task_options": {f"a{n}": 1 for n in range(33)}},
        {"outer": {"every": 0}},
        {"outer": {"lr": float("inf")}},
        {"outer": {"method": "diloko"}},
        {"outer": {"method": "local", "lr": 0.5}},
        {"outer": {"codec": "int9"}},
        {"outer": {"codec": "sign"}},
        {"outer": {"codec": "int8+ef:" + "9" * 60}},
        {"outer": {"fragments": 1025}},
        {"outer": {"fragments": 3, "every": 2}},
        {"outer": {"method": "diloco", "lag": 1}},
        {"outer": {"lag": 50}},
        {"outer": {"lag": -1}},
        {"outer": {"lag": "often"}},
        {"outer": {"lag": 1.0}},
        {"outer": {"lag": True}},
        {"outer": {"unknown": 1}},
        {"outer": {"wait_s": 0}},
        {"train": {"steps": -1}},
        {"train": {"steps": True}},
        {"start_when": 0},
        {"bucket": 3},
        {"bucket": 65},
        {"bucket": -1},
        {"bucket": 64, "epoch_s": 29.9},
        {"bucket": 64, "epoch_s": 1e6},
        {"bucket": 64, "verify": {"audit_rate": 0.1}},
        {"public": True, "invite_only": True},
        {"shards": 0},
        {"name": "a\nb"},
    ],
)
def test_out_of_bounds_values_are_refused(change):
    """Values out of bounds are refused here and from the wire."""
    with pytest.raises(ValidationError):
        manifest(**change)
    with pytest.raises(MessageError, match="malformed manifest"):
        open_manifest(sealed_unchecked(**change))


def test_the_largest_manifest_fits_a_reply():
    options = {f"{'a' * 62}{n:02}": "x" * 1024 for n in range(32)}
    assert len(seal(manifest(task_options=options), ME)) < 48 * 1024
    with pytest.raises(MessageError, match="make it smaller"):
        pack(manifest(task_options=dict.fromkeys(options, "\U0001f41f" * 1024)))


PAIRS = pytest.mark.parametrize(
    "method", [name for name in methods_with("lag") if name in methods_of("pair")]
)


@PAIRS
@pytest.mark.parametrize(
    ("given", "fragments", "lag"),
    [
        ({}, 4, "auto"),
        ({"every": 3}, 3, "auto"),  # each fragment has a step of its own
        ({"lag": 0}, 1, 0),
        ({"fragments": 1}, 1, "auto"),
        ({"lag": 7}, 4, 7),
        ({"fragments": 2}, 2, "auto"),
        ({"fragments": 2, "lag": 0}, 2, 0),
    ],
)
def test_a_new_manifest_has_fragments_and_lag_written_out(
    method, given, fragments, lag, monkeypatch
):
    settings = OuterSettings(method=method, **given)
    written = settings.resolved()
    assert (written.fragments, written.lag) == (fragments, lag)
    assert (
        settings.knobs().items() <= written.knobs().items()
    )  # this node trains as the manifest says
    sealed = seal(manifest(outer=written), ME)
    monkeypatch.setattr(outer_settings, "DEFAULT_LAG", 0)  # a later version, with another default
    assert open_manifest(sealed).outer == written


@pytest.mark.parametrize(("settings", "words"), [
    ({"lr": 0.1}, "the task's own optimizer has its own lr"),
    ({"weight_decay": 0.0}, "the task's own optimizer has its own weight_decay"),
    ({"warmup": 3}, "the task's own schedule has its own warmup"),
    ({"schedule": "wsd"}, "the schedule wsd leads to an end: set steps"),
])  # fmt: skip
def test_settings_of_training_that_do_not_go_together(settings, words):
    with pytest.raises(ValueError, match=words):
        TrainSettings(**settings)


def test_defaults_and_descriptions():
    outer = OuterSettings()
    assert (outer.method, outer.every, outer.lr, outer.momentum, outer.codec) == (
        "noloco",
        *[None] * 4,
    )
    assert (outer.wait_s, outer.buffers, outer.finish) == (10, "ignore", "average")
    train = TrainSettings()
    assert (train.steps, train.seed, train.eval_every) == (0, 0, 0)
    model: type[BaseModel]
    for model in (Manifest, OuterSettings, TrainSettings):
        for name, field in model.model_fields.items():
            assert field.description, name
    assert OuterSettings(lr=1).lr == 1.0  # TOML writes whole numbers without a point


def test_buckets_are_in_the_manifest():
    sealed = seal(manifest(bucket=64, epoch_s=90.0), ME)
    assert (open_manifest(sealed).bucket, open_manifest(sealed).epoch_s) == (64, 90.0)
    assert open_manifest(seal(manifest(), ME)).bucket == 0


def test_uneven_cut_is_in_the_manifest():
    """The fragment of each parameter is in the manifest of a swarm not cut by layer."""
    two = {"outer": OuterSettings(fragments=2, lag=0)}
    sealed = seal(manifest(fragment_of=(1, 0, 1), **two), ME)
    assert open_manifest(sealed).fragment_of == (1, 0, 1)
    many = tuple(at % 2 for at in range(8192))
    assert open_manifest(seal(manifest(fragment_of=many, **two), ME)).fragment_of == many
    with pytest.raises(MessageError, match=r"fragment_of.* numbers of two bytes"):
        open_manifest(sealed_unchecked(fragment_of=b"\1\0\0"))
    for wrong in ((0, 0), (0, 2), (0, 1, 2), (-1, 0, 1)):
        with pytest.raises(ValueError, match=r"fragment_of|fragments are others"):
            manifest(fragment_of=wrong, **two)


def test_bucket_fits_a_nodes_storage():
    """No bucket is larger than what a node stores of a key."""
    assert MAX_BUCKET == MAX_SUBKEYS


@pytest.mark.parametrize("bucket", [1, MIN_BUCKET - 1, MAX_BUCKET + 1, 2**40])
def test_impossible_bucket_is_refused(bucket):
    """It came in a manifest of somebody else's: a node stores no more records of one key, and pairs
    need a few to choose from.
    """
    with pytest.raises(MessageError, match=r"^[^\n]*bucket[^\n]* holds 4 to 64 members[^\n]*\.$"):
        open_manifest(sealed_unchecked(bucket=bucket))
