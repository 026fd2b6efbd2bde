"""The memory budget and what a node cannot compute: queues, precisions, and blocks that compute
their activations again.
"""

import copy
import gc
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shoal.node.config.settings import load
from shoal.node.free_memory import free_memory
from shoal.node.task import Shard, Task
from shoal.node.tasks.gpt import GPT, Block
from shoal.node.tasks.guarded import Guarded
from shoal.node.training import resources as memory
from shoal.node.training.device_plan import DevicePlan
from shoal.node.training.precision import DTYPES, check_precision
from shoal.node.training.recompute import recompute
from shoal.node.training.resources import (
    BODIES_BYTES,
    GB,
    POOL_BYTES,
    MemoryBudgetError,
    check,
    held,
    most_held,
    shares,
)
from shoal.node.training.trainer import Trainer
from shoal.node.training.training_error import TrainingError
from shoal.node.user_code import UserCodeError
from shoal.optim import Alone
from shoal.optim import device as of_device
from shoal.optim.layers import repeated_blocks
from shoal.swarm.errors import OuterError
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from tests.support.trainer_loops import CPU, STEPS, Small, float16, near, run, trainer


class Wide(Task):
    """A million parameters."""

    def model(self):
        return torch.nn.Linear(1000, 1000, bias=False)

    def batches(self, shard):
        yield torch.zeros(1, 1000)

    def loss(self, model, batch):
        return model(batch).sum()

    def evaluate(self, model):
        return 0.0


class Busy(Wide):
    """Of which a step has 80 MB as its batch and 80 MB as what the model returns."""

    def hidden_matrices(self, model):
        return ["weight"]

    def batches(self, shard):
        while True:
            yield torch.zeros(20_000, 1000)


PARAMETERS = list(Wide().model().parameters())


def test_too_large_model_is_refused_with_the_sum(monkeypatch):
    """A model that does not fit is refused with the sum."""
    monkeypatch.setattr(memory, "held", lambda: 100_000_000)
    outer = 4_000_000 * 2
    training = 4_000_000 * (1 + 2 + 1) + outer
    gigabytes = 0.2
    need = 100_000_000 + training + sum(shares(gigabytes))
    assert need < gigabytes * GB
    check(gigabytes, PARAMETERS)
    monkeypatch.setattr(memory, "held", lambda: 100_000_000 + int(gigabytes * GB) - need + 1)
    with pytest.raises(
        MemoryBudgetError,
        match=r"need about 0\.20 GB .* inner optimizer 0\.01, .* --ram allows 0\.2: allow",
    ):
        check(gigabytes, PARAMETERS)
    check(gigabytes, PARAMETERS, slow_here=False)
    check(gigabytes, PARAMETERS, method="none")


def test_the_estimate_is_what_the_optimizers_really_take():
    made = Trainer(Wide(), OuterSettings(), TrainSettings(), device=torch.device("cpu"))
    outer = [*made.opt.slow, *(t for tensors in made.opt.rule_state.values() for t in tensors)]
    assert sum(tensor.nbytes for tensor in outer) == 4_000_000 * 2


def test_unbounded_memory_warns_before_optimizers(monkeypatch):
    """Without a bound the user is warned before the optimizers are made."""
    monkeypatch.setattr(memory, "held", lambda: 100_000_000)
    need = 4_000_000 * (1 + 2 + 2 + 1) + sum(shares(0.0))
    logged, made = [], []

    def trainer(free):
        monkeypatch.setattr(memory, "free_memory", lambda: (free, 1e12))

        class Watched(Wide):
            def inner_optimizer(self, params):
                made.append(len(logged))
                return super().inner_optimizer(params)

        Trainer(
            Watched(),
            OuterSettings(),
            TrainSettings(),
            on_model=lambda params: check(0.0, params, logged.append),
        )

    trainer(need)
    assert logged == []
    trainer(need - 1)
    (said,) = logged
    assert said.startswith(
        f"This node will need about {(need + 100_000_000) / GB:.2f} GB of memory (it holds 0.10, "
    )
    assert "so the system may end it without a word: end other programs" in said
    assert made == [0, 1]


def test_a_containers_limit_counts(tmp_path):
    (tmp_path / "meminfo").write_text(
        "MemTotal:       8000 kB\nMemFree: 1 kB\nMemAvailable:   4000 kB\nHugePages_Total: 0\n"
    )
    assert free_memory(tmp_path, tmp_path / "none") == (4_096_000, 8_192_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path, tmp_path) == (4_096_000, 8_192_000)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 200000\n")
    assert free_memory(tmp_path, tmp_path) == (500_000, 1_000_000)
    assert free_memory(tmp_path / "none", tmp_path)[0] == 500_000


def test_a_checkpoint_is_copied_only_where_that_leaves_memory(monkeypatch):
    monkeypatch.setattr(memory, "held", lambda: 0)  # between two exchanges
    monkeypatch.setattr(memory, "most_held", lambda: GB)
    monkeypatch.setattr(memory, "free_memory", lambda: (GB, 9 * GB))
    bounded, free = memory.room_for_copy(1.5), memory.room_for_copy(0.0)
    assert (bounded(GB // 2), bounded(GB // 2 + 1)) == (True, False)
    assert (free(GB // 4), free(GB // 4 + 1)) == (
        True,
        False,
    )  # four nodes that ask at once: none is killed


def test_what_was_held_is_compared_with_the_bound(monkeypatch):
    monkeypatch.setattr(memory, "most_held", lambda: 2 * GB)
    assert (memory.beyond(0.0), memory.beyond(2.0)) == ("", "")
    assert memory.beyond(1.5).startswith(
        "this node has held 2.00 GB of memory, where --ram allows 1.5: "
    )


def test_queues_follow_from_the_budget():
    assert shares(0.0) == (POOL_BYTES, BODIES_BYTES)
    assert shares(0.64) == (20_000_000, 10_000_000)
    assert shares(1000.0) == (POOL_BYTES, BODIES_BYTES)


def test_what_a_process_holds_is_found():
    assert 10_000_000 < held() < 1 << 40
    assert 10_000_000 < most_held() < 1 << 40


def test_unfit_state_folder_is_one_sentence(tmp_path):
    """A folder that cannot hold the outer state is one sentence."""
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OuterError,
        match=r"cannot be kept in files in '.*file' \(.*\): free some space, or choose another "
        r"folder",
    ):
        Trainer(Wide(), OuterSettings(), TrainSettings(), offload=tmp_path / "file")
    made = Trainer(Wide(), OuterSettings(), TrainSettings(), offload=tmp_path / "there")
    assert [tensor.shape for tensor in made.opt.slow] == [(1000, 1000)]


@pytest.fixture
def card(monkeypatch):
    """Plays a device of 100 MB, of which tensors of this process have the model's 4 MB and 1 MB
    more.
    """
    has = SimpleNamespace(free=95_000_000, allocated=5_000_000)
    monkeypatch.setattr(of_device, "free_and_total", lambda device: (has.free, 100_000_000))
    monkeypatch.setattr(of_device, "allocated", lambda device: has.allocated)
    monkeypatch.setattr(of_device, "peak", lambda device: has.peak)
    monkeypatch.setattr(of_device, "forget_peak", lambda device: None)
    return has


GPU = torch.device("cuda", 0)


def planned(model=None, inner=torch.optim.AdamW, **options):
    model = model or Wide().model()
    return DevicePlan(
        model,
        GPU,
        inner(model.parameters()),
        **{"method": "noloco", "slow_there": False, "tries": False, **options},
    )


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, {"model": 4, "inner optimizer": 8, "gradients": 4}),
        (
            {"slow_there": True},
            {"model": 4, "inner optimizer": 8, "slow weights": 8, "gradients": 4, "exchange": 4},
        ),
        (
            {"tries": True},
            {"model": 4, "inner optimizer": 8, "trial of partners' weights": 4, "gradients": 4},
        ),
        (
            {"ranks": 4, "slow_there": True},
            {"model": 4, "inner optimizer": 8, "slow weights": 2, "gradients": 4, "exchange": 1},
        ),
        (
            {"ranks": 4, "gathered": 6_000_000, "slow_there": True},
            {
                "model": 4,
                "inner optimizer": 8,
                "slow weights": 2,
                "gradients": 4,
                "others' parts": 6,
            },
        ),
        ({"inner": torch.optim.SGD}, {"model": 4, "gradients": 4}),
        (
            {"inner": lambda params: torch.optim.SGD(params, momentum=0.9)},
            {"model": 4, "inner optimizer": 4, "gradients": 4},
        ),
        (
            {"inner": lambda params: torch.optim.AdamW(params, amsgrad=True)},
            {"model": 4, "inner optimizer": 12, "gradients": 4},
        ),
    ],
)
def test_device_memory_is_planned_by_purpose(card, options, parts):
    """What training takes of a device is planned by what it is for."""
    found = {name: nbytes / 10**6 for name, nbytes in planned(**options)._parts().items() if nbytes}
    assert found == parts


def test_narrow_weights_are_cast_where_they_are(card):
    parts = planned(Wide().model().bfloat16())._parts()
    assert (parts["gradients"], parts["staging"]) == (2_000_000, 4_000_000)


def test_a_device_without_room_is_refused_with_what_would_fit(card):
    card.free = 24_000_000  # and the 4 MB that the model has
    planned(slow_there=True)
    card.free -= 1
    words = (
        r"about 0\.03 GB of cuda:0 without activations \(model 0\.00, .*\) and 0\.03 are free "
        r"there: leave --offload device out"
    )
    with pytest.raises(
        MemoryBudgetError, match=words + ".* train a model of fewer than 999,999 parameters"
    ):
        planned(slow_there=True)
    planned()
    planned(slow_there=True, ranks=2)


@pytest.mark.parametrize(
    ("held", "libraries", "said"),
    [
        (1.2, 128 << 20, None),
        (1.21, 128 << 20, "less is left for activations"),
        (1 / 1.2, 0, None),
        (1 / 1.21, 0, "a larger model or batch than the plan"),
    ],
)
def test_memory_is_compared_with_the_plan(card, held, libraries, said):
    """After the first step what is held is compared with the plan."""
    plan = planned()
    taken = round(12_000_000 * held) + libraries
    card.allocated, card.peak = 1_000_000 + taken, 41_000_000 + libraries
    found = plan.compared()
    begins = (
        f"after its first step this node holds {taken / 1e9:.2f} GB of cuda:0, where 0.01 "
        "were planned; with activations, "
    )
    later = 48_000_000 + libraries  # with Adam's 8 MB
    assert found.startswith(
        begins + f"gradients and exchange the next ones will take up to {later / 1e9:.2f}"
    )
    assert (": " in found, said is None or said in found) == (said is not None, True)


def test_second_steps_shortage_is_foretold(card):
    """Memory that the second step will not have is told after the first."""
    plan = planned()
    card.allocated, card.peak = 13_000_000, 1_000_000 + 99_000_000 - 8_000_000
    assert "accumulate" not in plan.compared()
    card.peak += 1
    assert (
        "take up to 0.10, more than the 0.10 that are there, so raise train.accumulate, or set "
        "train.recompute" in plan.compared()
    )


@pytest.mark.gpu(standin=True)
@pytest.mark.parametrize("slow_there", [False, True])
@pytest.mark.parametrize(
    ("method", "optimizer"), [("noloco", "adamw"), ("diloco", "adamw"), ("eager", "muon")]
)
def test_plan_equals_memory_after_a_step(slow_there, method, optimizer):
    """The plan is what a node really holds after its first step."""
    gc.collect()  # trainers of other tests
    train = TrainSettings(steps=1, optimizer=optimizer)
    trainer = Trainer(
        Busy(), OuterSettings(method=method), train, device=GPU, slow_on_device=slow_there
    )
    trainer.connect(Alone(), "run", Shard(0, 1, 0))
    trainer.step()
    held = of_device.allocated(GPU) - trainer.plan._before
    assert 0.95 * held <= sum(trainer.plan.lasting.values()) <= 1.05 * held
    said = trainer.plan.compared()
    assert ": " not in said
    trainer.step()
    assert float(said.split("up to ")[1]) == pytest.approx(
        (of_device.peak(GPU) - trainer.plan._before) / 10**9, rel=0.1
    )


def test_precisions_that_there_are():
    for name in ("float32", *DTYPES):
        assert load(None, {"train.precision": name}).train.precision == name


def test_a_device_that_cannot(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(torch.nn.functional, "linear", refuse)
    check_precision("float32", CPU)
    for name, other in [("float16", "bfloat16 or float32"), ("bfloat16", "float32")]:
        with pytest.raises(
            TrainingError,
            match=f"The device 'cpu' cannot compute in {name}: set train.precision to {other}.",
        ):
            check_precision(name, CPU)


def test_a_gpu_without_bfloat16(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    with pytest.raises(
        TrainingError,
        match=r"The device 'cuda:0' cannot compute in bfloat16: set train.precision to float16 or",
    ):
        check_precision("bfloat16", torch.device("cuda", 0))


def test_weights_of_float16_are_refused_with_float16():
    class Half(Small):
        def model(self):
            return super().model().half()

    float16(CPU)
    with pytest.raises(
        TrainingError,
        match=r"The model has weights of float16, whose gradients cannot be scaled back",
    ):
        trainer(Half(), precision="float16")


class Starved(Small):
    def loss(self, model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (
            {},
            r"on 'cpu' for a step: cut the batch into parts \(--set train.accumulate=2\), .* "
            r"format \(--precision bfloat16\), ",
        ),
        ({"accumulate": 4}, r"\(--set train.accumulate=8\)"),
        (
            {"accumulate": 8, "precision": "bfloat16"},
            r"for a step: (keep fewer .*, )?keep .*--offload DIR\), make the model",
        ),
    ],
)
def test_out_of_memory_says_what_would_fit(own, words):
    """Memory that runs out is one sentence with what would fit."""
    with pytest.raises(TrainingError, match=words) as caught:
        run(Starved(), **own)
    assert "\n" not in str(caught.value)


def test_out_of_memory_in_the_loss_names_the_place():
    """Memory that runs out in the user's loss names the place and what would fit."""
    with pytest.raises(
        UserCodeError,
        match=r"Your task 'Starved' failed in loss\(\): OutOfMemoryError: .*: cut .*\(--set "
        r"train.accumulate=2\)",
    ) as caught:
        run(Guarded(Starved(), "Starved"))
    assert caught.value.trace


def test_out_of_memory_in_the_optimizer_blames_no_batch(monkeypatch):
    """Memory that runs out in the optimizer is no matter of the batch."""
    made = trainer()

    def starve(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(made.opt.inner, "step", starve)
    with pytest.raises(
        TrainingError,
        match=r"not enough memory on 'cpu' for a step: keep .* \(--offload DIR\), make",
    ):
        made.run()


def test_out_of_memory_does_not_suggest_files_in_use(tmp_path):
    """Memory that runs out does not ask for files that there are."""
    with pytest.raises(TrainingError, match="make the model or its batches smaller") as caught:
        trainer(Starved(), offload=tmp_path).run()
    assert "--offload" not in str(caught.value)


# -- compiling -------------------------------------------------------------------------------------


def test_compiling_changes_no_name_and_evaluates_the_model_itself(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: torch.nn.Sequential(model))
    plain_one, compiled = trainer(method="streaming"), trainer(method="streaming", compile=True)
    assert list(compiled.state()["model"]) == list(plain_one.state()["model"])
    assert compiled.state()["parameters"] == plain_one.state()["parameters"]
    assert compiled.opt.fragments == plain_one.opt.fragments
    seen = []
    compiled.task.evaluate = lambda model: seen.append(model) or 1.0
    compiled.evaluate()
    assert seen == [compiled.model]
    assert compiled.inner_step.model is not compiled.model


@pytest.mark.slow(reason="compiles a model")
def test_a_compiled_model_takes_the_same_steps():
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("needs a C++ compiler")
    assert near(run(compile=True), run(), 1e-5)
    assert near(
        run(compile=True, precision="bfloat16", accumulate=2),
        run(precision="bfloat16", accumulate=2),
        1e-2,
    )


def test_a_model_that_cannot_be_compiled_is_one_sentence(monkeypatch):
    from torch._inductor.exc import InvalidCxxCompiler

    class Uncompilable(torch.nn.Module):
        def forward(self, x):
            raise InvalidCxxCompiler

    monkeypatch.setattr(torch, "compile", lambda model: Uncompilable())
    with pytest.raises(
        TrainingError,
        match=r"Cannot compile the model \(InvalidCxx.*: No working C\+\+.*leave --compile",
    ) as found:
        run(compile=True)
    assert "\n" not in str(found.value)

    def refuse(model):
        raise RuntimeError("torch.compile is not supported on Python 3.99+")

    monkeypatch.setattr(torch, "compile", refuse)
    with pytest.raises(
        TrainingError,
        match=r"Cannot compile the model \(RuntimeError: torch.compile is not supported on Python",
    ):
        trainer(compile=True)


class Layer(nn.Module):
    """A layer with dropout, that counts its calls."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.drop, self.calls = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
            nn.Dropout(0.3),
            0,
        )

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        return x + scale * self.drop(self.down(torch.relu(self.up(x))))


class Deep(nn.Module):
    """Layers between two that are not repeated."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(Layer(8) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.last(x)


class Layered(Small):
    def model(self):
        return Deep()


@pytest.mark.parametrize("own", [{}, {"accumulate": 2, "precision": "bfloat16"}])
def test_recomputed_steps_are_bit_equal(own):
    """The steps are the same bit by bit with dropout too."""
    plain, again = (
        trainer(Layered(), method="noloco", **own),
        trainer(Layered(), method="noloco", recompute=True, **own),
    )
    for made in (plain, again):
        torch.manual_seed(3)
        made.run()
    one, other = plain.state()["model"], again.state()["model"]
    assert list(one) == list(other), "names stay"
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert again._names() == plain._names()
    parts = own.get("accumulate", 1)
    assert [layer.calls for layer in plain.model.layers] == [parts * STEPS] * 3
    assert [layer.calls for layer in again.model.layers] == [2 * parts * STEPS] * 3
    again.evaluate()
    assert [layer.calls for layer in again.model.layers] == [2 * parts * STEPS + 1] * 3, (
        "nothing is kept, nothing computed again"
    )


def test_a_copy_computes_with_its_own_weights():
    model = Deep()
    recompute(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.layers.parameters():
            parameter.zero_()
    x = torch.ones(2, 4)
    assert torch.equal(twin(x), twin.last(twin.first(x)))
    twin(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_blocks_of_models():
    gpt = GPT(3, 8, 2, 8)
    assert repeated_blocks(gpt) == list(gpt.blocks)
    assert all(isinstance(block, Block) for block in repeated_blocks(gpt))
    nested = nn.Sequential(
        nn.Linear(4, 8), nn.Sequential(*[nn.ModuleDict({"a": Deep()}) for _ in range(2)])
    )
    assert len(repeated_blocks(nested)) == 6, "of what is called"
    mixed = nn.ModuleDict({"one": Layer(8), "two": Layer(8), "other": Deep()})
    assert repeated_blocks(mixed) == [mixed["one"], mixed["two"], *mixed["other"].layers]


def test_a_model_without_blocks_is_refused():
    class Flat(Layered):
        def model(self):
            return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

    with pytest.raises(
        TrainingError,
        match=r"The model has no repeated blocks to compute again .*: leave train\.recompute out",
    ):
        trainer(Flat(), recompute=True)


def test_models_of_transformers_with_an_adapter():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    settings = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    gradients = []
    tokens = torch.arange(12).reshape(2, 6)
    for again in (False, True):
        torch.manual_seed(0)
        base = transformers.LlamaForCausalLM(settings).eval()  # as from_pretrained returns it
        model = peft.get_peft_model(
            base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )
        if again:
            assert repeated_blocks(model) == list(base.model.layers)
            recompute(model)
        calls = []
        base.model.layers[0].mlp.register_forward_pre_hook(
            lambda *args, calls=calls: calls.append(1)
        )
        with torch.no_grad():  # B of an adapter begins at zero, and A has no gradient then
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert len(calls) == 1 + again
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        with torch.no_grad():  # a cache that a call asks for is one, and is filled once
            first = model(input_ids=tokens, use_cache=True)
            assert first.past_key_values.get_seq_length() == 6
    one, other = gradients
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
