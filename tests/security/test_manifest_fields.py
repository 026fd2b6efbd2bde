"""Every field of a manifest, at its bounds and beyond: it is taken, or refused in one sentence;
nothing moves, nothing is loaded.

The manifests are signed as they are, past all checks of who makes one, and go through what
every command uses.
"""

import importlib.util
import math
import sys

import annotated_types
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.node.config.settings import load
from shoal.node.runtime.join import choose_shard, for_new_swarm, new_manifest
from shoal.node.runtime.task_setup import continued, enter, make_task
from shoal.node.tasks.gpt import sized
from shoal.node.training.resources import held
from shoal.node.training.trainer import Trainer
from shoal.optim.parameters import AveragedParameters
from shoal.swarm.errors import MessageError, ShoalError
from shoal.swarm.exchange.contribution import model_digest
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Manifest, is_public, open_manifest, title_of
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.settings.verification import Terms, VerifySettings

CREATOR = Identity.ephemeral()
TINY = {"layers": 1, "width": 8, "heads": 2, "context": 8, "batch": 1}
DIGEST = model_digest(
    AveragedParameters.of(
        sized(**{key: TINY[key] for key in ("layers", "width", "heads", "context")})
    )
)
TERMS = {"policy": "tiny", "base": "0" * 64, "group": 2, "temperature": 1.0, "max_tokens": 8}
TABLES = {
    (): Manifest,
    ("outer",): OuterSettings,
    ("train",): TrainSettings,
    ("verify",): VerifySettings,
    ("terms",): Terms,
}
OPTIONS = (
    *TINY,
    "max_bytes",
    "shuffle",
    "lr",
    "warmup",
    "data",
    "field",
    "tokenizer",
    "tokenizer_digest",
    "order",
    "env",
    "x",
    "",
)
NUMBERS = (
    None,
    True,
    -1,
    0,
    1,
    2,
    0.5,
    math.nan,
    math.inf,
    -math.inf,
    2**31,
    2**53,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    5e-324,
    1.7e308,
)
CANARY = "canary_of_a_manifest"
TEXTS = (
    "",
    "x",
    "x" * 64,
    "x" * 65,
    "x" * 1025,
    "\x1b[2J",
    "../x",
    "/etc/passwd",
    "hf: /etc",
    f"{CANARY}:Task",
    f"{CANARY}.py:Task",
    f"./{CANARY}.py:Env",
    "os:system",
    "text",
    "rl",
    "own-loop",
    "seconds:auto",
    "tokens:0",
    "int8+ef",
    "auto:99",
    "topk2:nan",
    b"",
    b"x",
)
LARGE = (
    [0] * 10**6,
    dict.fromkeys(range(10**6), 0),
    "x" * 10**6,
    [[[[[[[[[[]]]]]]]]]],
    {"a": {"b": {}}},
)


PLAIN = open_manifest(
    new_manifest(load(None, {"task.options": TINY, "train.optimizer": "task"}), CREATOR, DIGEST)
).model_dump()


def base(**changes):
    return {**PLAIN, **changes}


def sealed(fields):
    """Sign ``fields`` as they are."""
    payload = msgpack.packb([Manifest.KIND, Manifest.VERSION, fields])
    return msgpack.packb(
        [
            CREATOR.peer_id,
            payload,
            CREATOR.sign(f"shoal/{Manifest.KIND}/{Manifest.VERSION}", payload),
        ]
    )


def bounds(model, name):
    """Return the values at the bounds of a field, and one beyond each."""
    found = []
    for rule in model.model_fields[name].metadata:
        for kind in (
            annotated_types.Ge,
            annotated_types.Le,
            annotated_types.Gt,
            annotated_types.Lt,
        ):
            if isinstance(rule, kind):
                at = getattr(rule, kind.__name__.lower())
                found += [
                    at - 1,
                    at,
                    at + 1,
                    float(at),
                    math.nextafter(at, math.inf),
                    math.nextafter(at, -math.inf),
                ]
        if isinstance(rule, annotated_types.MaxLen):
            found += ["x" * rule.max_length, "x" * (rule.max_length + 1)]
    return found


class Watch:
    """Notes what is opened, imported or started that a manifest may have named."""

    def __init__(self):
        self.on, self.seen = False, []
        sys.addaudithook(self._event)

    def _event(self, event, arguments):
        if self.on and event in (
            "open",
            "import",
            "exec",
            "subprocess.Popen",
            "os.system",
            "socket.connect",
            "socket.getaddrinfo",
        ):
            said = str(arguments[0])
            if (
                event not in ("open", "import", "exec")
                or CANARY in said
                or said in ("/etc/passwd", "/etc", "../x")
            ):
                self.seen.append((event, said))


WATCH = Watch()


@pytest.fixture(autouse=True)
def canary(tmp_path, monkeypatch):
    (tmp_path / f"{CANARY}.py").write_text("raise SystemExit('ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    constants = importlib.util.find_spec("huggingface_hub") and importlib.import_module(
        "huggingface_hub.constants"
    )
    if constants:  # it looks at HF_HUB_OFFLINE once, when it is imported
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def judged(fields):
    """Put a manifest through the check; return what came of it, a sentence or the settings."""
    packed, before, modules = sealed(fields), held(), set(sys.modules)
    WATCH.seen.clear()
    WATCH.on = True
    try:
        for look in (title_of, is_public):  # what a board, `watch` and `shoal swarms` take of it
            try:
                look(packed)
            except MessageError as error:
                assert_sentence(error)
        try:
            manifest = open_manifest(packed)
        except MessageError as error:
            return assert_sentence(error)
        for way in (entered, gone_on):
            try:
                way(manifest)
            except ShoalError as error:
                assert_sentence(error)
        return manifest
    finally:
        WATCH.on = False
        assert WATCH.seen == []
        assert CANARY not in sys.modules
        assert not [
            name for name in sys.modules.keys() - modules if name.startswith("_shoal_hooks_")
        ]
        assert held() - before < 300 * 2**20


def entered(manifest):
    agreed, task = enter(load(None, {"node.ram": 2.0}), manifest)
    choose_shard(agreed, manifest, {}, CREATOR.peer_id)
    if agreed.task.hooks == "text":
        Trainer(task, agreed.outer, agreed.train)


def gone_on(manifest):
    make_task(for_new_swarm(continued(load(), manifest)))


def assert_sentence(error):
    said = str(error)
    assert "\n" not in said
    assert said.endswith((".", ".)")), said
    assert len(said) < 2000
    return said


def changed(path, name, value):
    fields = base()
    if path[:1] == ("terms",):
        whole = {"steps": 5, "dims": 16, "data": "0" * 64} if path[1:] else TERMS
        fields["terms"] = {**whole, name: value}
    elif path:
        fields[path[0]] = {**fields[path[0]], name: value}
    else:
        fields[name] = value
    return fields


@pytest.mark.slow(
    reason="some 4,000 manifests are signed and judged, and trainers made of those that are taken"
)
@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for path, model in TABLES.items() for name in model.model_fields],
)
def test_every_field_at_its_bounds_and_beyond(path, name):
    values = [*NUMBERS, *TEXTS, *bounds(TABLES[path], name)]
    for value in values:
        judged(changed(path, name, value))


def test_a_million_entries_are_refused_as_they_come():
    for name in ("task_options", "outer"):
        assert all(isinstance(judged(changed((), name, value)), str) for value in LARGE)


@pytest.mark.slow(reason="some 1,400 manifests are signed and judged")
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_the_task(name):
    for task in ("text", "rl"):
        for value in (*NUMBERS, *TEXTS):
            judged(base(task=task, task_options={**(TINY if task == "text" else {}), name: value}))
    judged(base(task_options={str(number): number for number in range(33)}))


values = st.one_of(
    st.sampled_from([*NUMBERS, *TEXTS]),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=40),
)


@settings(max_examples=60)
@given(
    st.dictionaries(st.sampled_from([*Manifest.model_fields]), values, max_size=3),
    st.dictionaries(st.sampled_from([*OuterSettings.model_fields]), values, max_size=3),
    st.dictionaries(st.sampled_from([*TrainSettings.model_fields]), values, max_size=3),
    st.dictionaries(st.sampled_from(OPTIONS), values, max_size=4),
)
def test_any_mixture_of_fields(own, outer, train, options):
    fields = base()
    judged({
        **fields, "outer": {**fields["outer"], **outer}, "train": {**fields["train"], **train},
        "task_options": {**fields["task_options"], **options}, **own,
    })  # fmt: skip
