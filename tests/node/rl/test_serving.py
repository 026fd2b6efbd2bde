"""A policy whose completions a server draws: one of the tests' own, which speaks as vLLM documents
it, or as llama.cpp's does.
"""

import copy
import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.node.config.rl_settings import RLSettings
from shoal.node.config.settings import Settings
from shoal.node.rl import completion_server
from shoal.node.rl.environment import Env, Question, canonical
from shoal.node.rl.hf import HF
from shoal.node.rl.loading import load_policy, make_task
from shoal.node.rl.moved_places import PLACES
from shoal.node.rl.policy import PolicyError
from shoal.node.rl.strings import Strings
from shoal.node.rl.task import RLTask
from shoal.node.task import Shard
from shoal.node.training.trainer import Trainer
from shoal.node.verify.proven_group import policy_label
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings

pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("transformers", "peft")
]
PROMPTS = ["a", "reverse: abc", "the longest of all the prompts"]
STRINGS = Env("strings", canonical({}), Strings())


@pytest.fixture(scope="module")
def folder(folder, tmp_path_factory):
    """The model of the other tests, surer of its answers, so that an adapter changes them."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    place = tmp_path_factory.mktemp("surer")
    model.save_pretrained(place)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(place)
    return place


class Model:
    """Model of the server: draws by transformers and torch alone, not by the policy under test."""

    def __init__(self, folder):
        self.folder, self.made = folder, {}
        self.generator = torch.Generator().manual_seed(0)
        self.shift = 0.0  # added to each log-probability that it tells
        self.noise = 0.0  # standard deviation of what is added beside it

    def load(self, name, path):
        import peft
        import transformers

        base = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        self.made[name] = (peft.PeftModel.from_pretrained(base, path) if path else base).eval()

    @torch.no_grad()
    def draw(self, model, prompt, most, temperature):
        ids, logs = [], []
        while len(ids) < most and 0 not in ids:
            plain = model(torch.tensor([[*prompt, *ids]])).logits[0, -1].log_softmax(-1)
            tempered = (plain / temperature).softmax(-1) if temperature else plain
            ids.append(
                int(torch.multinomial(tempered, 1, generator=self.generator))
                if temperature
                else int(plain.argmax())
            )
            rounding = self.noise * float(torch.randn((), generator=self.generator))
            logs.append(float(plain[ids[-1]]) + self.shift + rounding)
        return ids, logs


class Server:
    """HTTP server.

    ``kind``: vllm or llama; ``asked``: all (path, body); ``reply``: in place of what it would
    answer. ``cache``: names of fields which, with a prompt's first token, decide whether it is
    answered by the weights that answered such a prompt first. ``names``: adapters in their order;
    ``echo``: prompts are in its answers too.
    """

    def __init__(self, model, kind):
        self.model, self.kind, self.asked, self.drawn, self.reply = model, kind, [], [], None
        self.loaded, self.ignores, self.over = {}, False, threading.Event()
        self.cache, self.cached = None, {}
        self.names, self.echo = [], False
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append((self.path, body))
                if server.reply is not None:
                    server.reply(self)
                else:
                    server.answer(self, body)

            def say(self, status, data):
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *given):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def answer(self, handler, body):
        if handler.path == "/v1/completions":
            rows = [
                self.model.draw(
                    self.weights(body, prompt), prompt, body["max_tokens"], body["temperature"]
                )
                for prompt in body["prompt"]
                for _ in range(body["n"])
            ]
            self.drawn.append(rows)
            if self.echo:
                prompts = [prompt for prompt in body["prompt"] for _ in range(body["n"])]
                rows = [
                    (prompt + ids, [-1.0] * len(prompt) + logs)
                    for prompt, (ids, logs) in zip(prompts, rows, strict=True)
                ]
            choices = [
                {"index": place, "text": "?", "logprobs": self.told(*row)}
                for place, row in enumerate(rows)
            ]
            handler.say(
                200, json.dumps({"object": "text_completion", "choices": choices[::-1]}).encode()
            )
        elif self.kind == "llama":
            handler.say(
                404, b'{"error":{"message":"File Not Found","type":"not_found_error","code":404}}'
            )
        elif handler.path == "/v1/load_lora_adapter":
            place = Path(body["lora_path"])
            self.names.append(body["lora_name"])
            self.loaded[body["lora_name"]] = load_file(place / "adapter_model.safetensors"), place
            self.model.load(body["lora_name"], place)
            handler.say(200, b"Success")
        elif handler.path == "/v1/unload_lora_adapter":
            handler.say(200, b"Success")

    def weights(self, body, prompt):
        """Return the model that answers ``prompt``."""
        model = self.model.made["" if self.ignores else body.get("model", "")]
        if self.cache is None:
            return model
        key = (*(body.get(name) for name in self.cache), prompt[0])
        return self.cached.setdefault(key, model)

    def told(self, ids, logs):
        if self.kind == "llama":
            return {
                "content": [
                    {"id": one, "token": "?", "bytes": [63], "logprob": log}
                    for one, log in zip(ids, logs, strict=True)
                ]
            }
        return {
            "tokens": [f"token_id:{one}" for one in ids],
            "token_logprobs": logs,
            "top_logprobs": [{}] * len(ids),
        }

    def paths(self):
        return [path.rpartition("/")[2] for path, _ in self.asked]


@contextmanager
def serving_of(folder, kind="vllm"):
    model = Model(folder)
    model.load("", None)
    server = Server(model, kind)
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.http.shutdown()
        server.http.server_close()
        thread.join(10)


@pytest.fixture
def server(folder):
    with serving_of(folder) as made:
        yield made


@pytest.fixture
def policy(folder, server):
    return load_policy(f"hf:{folder}@{server.url}", STRINGS, 0)


def changed(policy, by=0.5):
    """As if trained."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in policy.module.named_parameters():
            if "lora_B" in name:
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=by)


@pytest.mark.parametrize("kind", ["vllm", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_completions_are_the_servers_and_their_log_probabilities_the_nodes(
    folder, kind, temperature
):
    with serving_of(folder, kind) as server:
        policy = load_policy(f"hf:{folder}@{server.url}/v1/", STRINGS, 0)
        groups = policy.generate(PROMPTS, 3, temperature=temperature, max_tokens=6, seed=0)
    flat = [one for group in groups for one in group]
    assert [len(group) for group in groups] == [3, 3, 3]
    assert [list(one.tokens) for one in flat] == [ids for ids, _ in server.drawn[0]]
    assert len({one.tokens for one in flat}) > 5
    ((path, body),) = server.asked
    assert path == "/v1/completions"
    assert body["prompt"] == [policy._prompt(prompt) for prompt in PROMPTS]
    wanted = {
        "n": 3,
        "max_tokens": 6,
        "temperature": temperature,
        "top_p": 1,
        "top_k": -1,
        "min_p": 0,
        "logprobs": 1,
    }
    assert {name: body[name] for name in wanted} == wanted
    assert "model" not in body
    logs, mask = policy.log_probs(
        [prompt for prompt in PROMPTS for _ in range(3)], [one.tokens for one in flat], temperature
    )
    for row, kept, one in zip(logs, mask, flat, strict=True):
        torch.testing.assert_close(row[kept], torch.tensor(one.log_probs), atol=1e-6, rtol=0)
        assert one.text == policy._completion(list(one.tokens), list(one.log_probs)).text
        assert one.finish == ("stop" if one.tokens[-1] == 0 else "length")


def test_greedy_answers_are_those_of_the_policy_itself(policy):
    own = HF.generate(policy, PROMPTS, 1, temperature=0.0, max_tokens=6, seed=0)
    served = policy.generate(PROMPTS, 1, temperature=0.0, max_tokens=6, seed=0)
    assert [[one.tokens for one in group] for group in served] == [
        [one.tokens for one in group] for group in own
    ]


def test_server_draws_with_the_trained_adapter(policy, server):
    """The adapter that the server draws with is the trained one."""
    changed(policy)
    policy.generate(["a"], 2, temperature=1.0, max_tokens=4, seed=0)
    policy.generate(["a"], 2, temperature=1.0, max_tokens=4, seed=0)
    assert server.paths() == ["load_lora_adapter", "completions", "completions"]
    ((first, (tensors, place)),) = server.loaded.items()
    assert [body["model"] for path, body in server.asked if path == "/v1/completions"] == [
        first,
        first,
    ]
    trained = {
        name: weight.detach()
        for name, weight in policy.module.named_parameters()
        if weight.requires_grad
    }
    assert len(tensors) == len(trained) > 0
    for name, weight in trained.items():
        assert torch.equal(tensors[name.replace(".default", "")], weight)
    assert json.loads((place / "adapter_config.json").read_text())["peft_type"] == "LORA"

    changed(policy, by=-0.2)
    (group,) = policy.generate(["a"], 2, temperature=1.0, max_tokens=4, seed=0)
    for one, (_, logs) in zip(group, server.drawn[-1], strict=True):
        torch.testing.assert_close(
            torch.tensor(one.log_probs), torch.tensor(logs), atol=1e-4, rtol=0
        )
    probed_and_drawn = ["completions"] * 2
    assert server.paths()[3:] == ["load_lora_adapter", "unload_lora_adapter", *probed_and_drawn]
    second = server.asked[-1][1]["model"]
    assert (second == first, server.asked[-3][1]) == (False, {"lora_name": first})
    assert not place.exists()
    assert server.loaded[second][1].exists()


def test_a_server_with_other_weights_is_refused(policy, server):
    server.ignores = True  # takes the adapter, and draws without it
    changed(policy)
    with pytest.raises(
        PolicyError,
        match=rf"^The server at {server.url} has other weights .* 0.15 is allowed: .*\.$",
    ):
        policy.generate(PROMPTS, 3, temperature=1.0, max_tokens=6, seed=0)


OLDER = (
    r"^The server at {} took the newest adapter and answers as with {} \(\d+% of the way\): start "
    r"it again, as vLLM with --enable-lora and, if this comes back, --no-enable-prefix-caching\.$"
)
SMALL = 0.02  # an update by which no answer is as far off as another model's


def draw(policy, prompts=PROMPTS):
    return policy.generate(prompts, 6, temperature=1.0, max_tokens=6, seed=0)


def never(server):
    """It accepts an adapter and ignores it: verl #7495, ms-swift #9855."""
    server.ignores = True


def one_late(server):
    """It answers by the adapter before the newest."""
    server.weights = lambda body, prompt: server.model.made[server.names[-2]]


def cached(server):
    """A prompt that came before is answered from what older weights made of it: NeMo-RL #4018."""
    server.cache = ()


def echoes(server):
    server.echo = True


def without_logs(server):
    server.told = lambda ids, logs: {"tokens": [f"token_id:{one}" for one in ids]}


def answered(server):
    """Return how many completions were answered: those of a probe, and others."""
    asked = [body for path, body in server.asked if path == "/v1/completions"]
    sizes = [(body["max_tokens"], len(body["prompt"]) * body["n"]) for body in asked]
    probed = sum(size for most, size in sizes if most == 1)
    return probed, sum(size for _, size in sizes) - probed


OLDER_OF = {never: "no adapter", one_late: "the adapter before it", cached: "the adapter before it"}


@pytest.mark.parametrize("lie", OLDER_OF)
def test_probe_finds_older_weights_before_anything_is_drawn(policy, server, lie):
    """After an update that is a tenth of SMALL, too."""
    if lie is cached:
        lie(server)  # it holds the prompts by the time of the update
    changed(policy, by=SMALL / 10)
    draw(policy)
    lie(server)
    drawn = answered(server)[1]
    changed(policy, by=SMALL / 10)
    with pytest.raises(PolicyError, match=OLDER.format(server.url, OLDER_OF[lie])):
        draw(policy)
    assert answered(server) == (PLACES, drawn)
    assert policy.module.training


def test_first_adapter_is_proved_against_none(policy, server):
    draw(policy)
    never(server)
    changed(policy, by=SMALL)
    with pytest.raises(PolicyError, match=OLDER.format(server.url, "no adapter")):
        draw(policy)
    assert answered(server) == (PLACES, len(PROMPTS) * 6)


def test_what_is_drawn_shows_older_weights_without_a_probe(policy, server):
    """The node has just begun, and nothing was drawn that could be asked for again."""
    never(server)
    changed(policy, by=SMALL)
    with pytest.raises(PolicyError, match=OLDER.format(server.url, "no adapter")):
        draw(policy)
    assert answered(server) == (0, len(PROMPTS) * 6)


def test_cache_of_several_versions_ago_is_noticed(policy, server):
    server.cache = ("cache_salt",)
    changed(policy, by=SMALL)
    draw(policy)
    oldest = server.model.made[server.names[-1]]
    for _ in range(2):
        changed(policy, by=SMALL)
        draw(policy)
    server.weights = lambda body, prompt: oldest
    changed(policy, by=SMALL)
    with pytest.raises(PolicyError, match="took the newest adapter and answers as with"):
        draw(policy)


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (echoes, r"\(\d+ tokens for at most 6\)"),
        (without_logs, "tokens that are not the model's, or none"),
    ],
)
def test_first_answer_without_own_log_probabilities_is_refused(policy, server, lie, said):
    lie(server)
    with pytest.raises(PolicyError, match=f"{NONSENSE} .*{said}"):
        draw(policy)
    assert answered(server) == (0, len(PROMPTS) * 6)


def test_update_that_moves_nothing_is_not_probed(policy, server):
    changed(policy, by=SMALL)
    draw(policy)
    changed(policy, by=1e-7)
    draw(policy)
    assert answered(server)[0] == 0


def test_salted_cache_never_serves_older_weights(policy, server):
    """A prefix cache that heeds the salt never answers by older weights."""
    server.cache = ("cache_salt",)
    for _ in range(3):
        changed(policy, by=SMALL)
        draw(policy)
        assert len(server.cached) == len({key[0] for key in server.cached}) * len(PROMPTS)
    assert len({id(model) for model in server.cached.values()}) == 3


def test_rounding_server_is_not_called_older(policy, server):
    """A server that rounds is not taken for an older one."""
    server.model.noise = 0.1
    for _ in range(12):
        changed(policy, by=SMALL)
        draw(policy)


def test_the_bound_is_on_the_mean_difference(policy, server):
    for shift in (0.149, -0.149):
        server.model.shift = shift
        policy.generate(PROMPTS, 2, temperature=0.7, max_tokens=5, seed=0)
    for shift in (0.151, -0.151):
        server.model.shift = shift
        with pytest.raises(PolicyError, match=r"are 0\.151 off for a token"):
            policy.generate(PROMPTS, 2, temperature=0.7, max_tokens=5, seed=0)


def garbage(handler):
    handler.wfile.write(b"\x16\x03 what is this?\r\n\r\n")


def answers(data, status=200):
    return lambda handler: handler.say(
        status, data if isinstance(data, bytes) else json.dumps(data).encode()
    )


def row(tokens, logs):
    return {"choices": [{"index": 0, "logprobs": {"tokens": tokens, "token_logprobs": logs}}]}


NONSENSE = "answered other than completions with their tokens' ids"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (garbage, "failed at /v1/completions .*what is this"),
        (
            answers({"error": {"message": "no\nmore"}}, 400),
            r"failed at /v1/completions \(400: no\): look",
        ),
        (answers(b"[" * 60_000, 500), r"failed at /v1/completions \(500: \[+\): look"),
        (
            answers({"detail": "no field of it"}, 422),
            r"failed at /v1/completions \(422: .*\): use vLLM or llama\.cpp's own server "
            r"\(llama-server\), for it does not "
            r"understand what is asked: other servers take no tokens as a prompt, or return no "
            r"tokens' ids\.$",
        ),
        (answers(b"<html>"), NONSENSE),
        (answers(b'{"choices":' + b"[" * 50_000), NONSENSE),
        (answers({"choices": []}), r"\(0 completions for 1\)"),
        (answers(row([], [])), r"\(tokens that are not the model's, or none\)"),
        (answers(row(["token_id:96"], [-1.0])), r"\(tokens that are not the model's, or none\)"),
        (
            answers(row(["token_id:1", "token_id:2"], [-1.0])),
            r"\(tokens that are not the model's, or none\)",
        ),
        (answers(row(["b"], [-1.0])), NONSENSE),
        (answers(row(["token_id:1"], [float("nan")])), NONSENSE),
        (answers(row(["token_id:1"], [None])), NONSENSE),
        (answers(b" " * 200_000), "with more than 73,728 bytes"),
    ],
)
def test_what_else_it_answers_is_one_sentence(policy, server, reply, said):
    server.reply = reply
    with pytest.raises(PolicyError, match=f"^The server at {server.url} .*{said}") as raised:
        policy.generate(["a"], 1, temperature=1.0, max_tokens=4, seed=0)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("drips", [False, True])
def test_a_server_that_is_too_slow_is_left(policy, server, drips, monkeypatch):
    def late(handler):
        handler.send_response(200)
        handler.end_headers()
        while not server.over.wait(0.02):
            if drips:
                handler.wfile.write(b" ")

    monkeypatch.setattr(completion_server, "ANSWER_S", 0.4)
    server.reply = late
    with pytest.raises(
        PolicyError, match="did not answer /v1/completions within 0 s: ask for less at once"
    ):
        policy.generate(["a"], 1, temperature=1.0, max_tokens=4, seed=0)


def test_no_server_is_one_sentence(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        policy = load_policy(f"hf:{folder}@{url}", STRINGS, 0)
        with pytest.raises(
            PolicyError,
            match=rf"^No server answers at {url} \(.*refused\): start it, or leave @{url} out\.$",
        ):
            policy.generate(["a"], 1, temperature=1.0, max_tokens=4, seed=0)


def settings(folder, server, **rl):
    return Settings.model_validate(
        {"task": {"hooks": "rl"}, "rl": {"policy": f"hf:{folder}@{server.url}", **rl}}
    )


def test_a_node_that_learns_refuses_a_server_whose_weights_stay(folder):
    with serving_of(folder, "llama") as server:
        with pytest.raises(
            PolicyError,
            match=r"failed at /v1/load_lora_adapter \(404: File Not Found\): start vLLM "
            r".*only=share",
        ):
            _ = make_task(settings(folder, server)).policy
        sharing = make_task(settings(folder, server, only="share")).policy
        assert len(sharing.generate(["a"], 2, temperature=1.0, max_tokens=4, seed=0)[0]) == 2
        changed(sharing)  # as by averaging
        with pytest.raises(PolicyError, match="load_lora_adapter"):
            sharing.generate(["a"], 2, temperature=1.0, max_tokens=4, seed=0)


class Letters:
    """Pays for early letters, so that rewards of a group differ."""

    version = "1"

    def question(self, seed, index):
        return Question(f"{seed % 100}-{index}")

    def reward(self, question, completion):
        return sum(letter < "P" for letter in completion) / max(len(completion), 1)


def test_each_update_reaches_the_server_before_the_next_completions(folder, server):
    task = make_task(settings(folder, server))
    env = Env("letters", canonical({}), Letters())
    policy = task.policy
    rl = RLSettings(local=1, external=0, group=4, held_out=2, max_tokens=5, lr=0.01)
    trainer = Trainer(
        RLTask(env, lambda: policy, rl, seed=0),
        OuterSettings(method="none"),
        TrainSettings(steps=3),
    )
    trainer.connect(trainer.opt.exchange, "run", Shard(0, 1, 0))
    for _ in range(3):
        trainer.step()
    assert server.paths() == [
        "load_lora_adapter",
        "completions",
        *["load_lora_adapter", "unload_lora_adapter", "completions", "completions"] * 2,
    ]
    names = [body["model"] for _, body in server.asked if body.get("n") == 4]
    assert len(set(names)) == 3
    first, _, last = (server.loaded[name][0] for name in names)
    assert any(not torch.equal(first[name], last[name]) for name in first)


def test_node_draws_claims_itself(policy, server):
    """Claims are drawn by the node and a copy asks nobody."""

    def choose(logits):
        return logits.argmax(-1)

    drawn = policy.generate(["a"] * 2, 1, temperature=1.0, max_tokens=4, seed=0, choose=choose)
    assert drawn[0] == drawn[1]
    twin = copy.deepcopy(policy)
    assert type(twin) is HF
    assert (
        twin.generate(["a"], 1, temperature=0.0, max_tokens=4, seed=0)[0][0].tokens
        == drawn[0][0].tokens
    )
    assert server.asked == []


@pytest.mark.parametrize(
    "url",
    ["http://", "http://host:port", "http://user@host", "http://host/?a=b", "https://host:8/#x"],
)
def test_what_is_no_address_of_a_server_is_refused(folder, url):
    with pytest.raises(
        PolicyError, match=r"no address of a server: write it such as http://127\.0\.0\.1:8000\.$"
    ):
        load_policy(f"hf:{folder}@{url}", STRINGS, 0)


def test_server_is_no_part_of_the_policy_name(tmp_path, monkeypatch):
    """The server is no part of a policy's folder or name."""
    monkeypatch.chdir(tmp_path)
    Path("smol").mkdir()
    given = ["hf:smol@http://127.0.0.1:8000", "hf:owner/name@https://host/v1"]
    assert [RLSettings(policy=spec).policy for spec in given] == [
        f"hf:{tmp_path}/smol@http://127.0.0.1:8000",
        given[1],
    ]
    assert [policy_label(spec) for spec in given] == ["hf:smol", "hf:name"]
