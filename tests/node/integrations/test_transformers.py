"""Two trainers of transformers in one swarm, in threads of this process; with LoRA only the adapters travel.

transformers and peft are imported in the tests: they take two seconds, and whoever collects these needs neither.
"""

import threading
from importlib.util import find_spec

import pytest
import torch

import shoal
from shoal.optim import NoLoCo, Simulation
from shoal.swarm.errors import ShoalError

pytestmark = [pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed") for name in ("transformers", "peft")]
HERE = shoal.NetworkOptions(listen=("/ip4/127.0.0.1/tcp/0",), relay="off")
EVERY, STEPS = 3, 9


def tiny(seed, lora=True):
    import transformers

    torch.manual_seed(0)  # the base model is everybody's
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    if not lora:
        return model
    import peft

    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def rows(seed):
    tokens = torch.randint(32, (64, 8), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(model, data, folder, optimizers=(None, None), callbacks=(), **options):
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=0.01, save_strategy="no", report_to="none", logging_steps=3, disable_tqdm=True, use_cpu=True, seed=1,
        lr_scheduler_type="constant", dataloader_pin_memory=False, weight_decay=0.1,
    )  # fmt: skip
    for name, value in options.items():
        setattr(arguments, name, value)
    return transformers.Trainer(model, arguments, train_dataset=data, optimizers=optimizers, callbacks=[*callbacks])


def adapters(model):
    return [p.detach().clone() for p in model.parameters() if p.requires_grad]


def swarm_callback(session):
    from shoal.node.integrations.transformers import SwarmCallback

    return SwarmCallback(session)


def watched(session):
    """Return a callback that notes what it begins with, and who was in each mean."""
    callback = swarm_callback(session)
    begin = callback.on_train_begin

    def on_train_begin(*given, **named):
        callback.met = []
        callback.options["on_round"] = lambda info: callback.met.append(len(info.members))
        begin(*given, **named)
        callback.start = [tensor.clone() for tensor in callback.opt.slow]

    callback.on_train_begin = on_train_begin
    return callback


def test_only_the_adapters_are_exchanged_and_who_joins_begins_with_those_of_the_first(tmp_path):
    models = [tiny(1), tiny(2)]  # before there are threads, which share torch's random numbers
    begin = adapters(models[0])
    assert sum(p.numel() for p in begin) < sum(p.numel() for p in models[0].parameters()) / 10
    assert not all(torch.equal(a, b) for a, b in zip(begin, adapters(models[1]), strict=True))
    first = shoal.create(state=models[0], every=EVERY, lag=0, start_when=2, network=HERE)
    link, callbacks = first.link, {}

    def train(name, session):
        with session as s:
            callbacks[name] = watched(s)
            number = "ab".index(name)
            trainer(models[number], rows(number), tmp_path / name, callbacks=[callbacks[name]]).train()

    thread = threading.Thread(target=lambda: train("b", shoal.join(link, state=models[1], network=HERE)))
    thread.start()
    train("a", first)
    thread.join(60)
    assert [callbacks[name].met for name in "ab"] == [[2] * (STEPS // EVERY)] * 2
    for callback in callbacks.values():
        assert callback.opt.tokens == 4 * STEPS
        assert all(torch.equal(a, b) for a, b in zip(callback.start, begin, strict=True))
    moved = [torch.cat([t.flatten() for t in callbacks[name].opt.slow]) for name in "ab"]
    assert not torch.equal(moved[0], torch.cat([t.flatten() for t in begin]))
    assert torch.equal(moved[0], moved[1])  # two that began equal and meet in every round


def test_the_outer_step_comes_after_the_trainers_own(tmp_path):
    """Alone in its swarm a trainer ends with the bits of a loop that wraps the same optimizer."""
    model = tiny(0, lora=False)
    with shoal.create(state=model, every=EVERY, lag=0, network=HERE, wait_s=0.5) as s:
        callback = swarm_callback(s)
        made = trainer(model, rows(1), tmp_path, callbacks=[callback])
        made.train()
    twin = tiny(0, lora=False)
    plain = trainer(twin, rows(1), tmp_path)
    plain.create_optimizer()
    inner = plain.optimizer

    def alone(exchange):
        opt = NoLoCo(inner, exchange, every=EVERY, lag=0)
        wrapped = trainer(twin, rows(1), tmp_path, optimizers=(opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda _: 1.0)))
        wrapped.train()

    Simulation(["only"]).run(alone)
    assert callback.opt.round == STEPS // EVERY
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_several_processes_in_one_trainer_are_refused():
    class Arguments:
        world_size = 2

    with pytest.raises(ShoalError, match="The trainer has 2 processes: start one process for each peer"):
        swarm_callback(None).on_train_begin(Arguments(), None, None)


def test_who_joins_takes_over_the_checkpoint_that_the_first_resumed(tmp_path):
    """Mutant: the weights at `create` count, which the trainer replaces only then."""
    models = [tiny(1, lora=False), tiny(1, lora=False)]
    donor = tiny(1, lora=False)
    trainer(donor, rows(5), tmp_path / "donor", save_strategy="steps", save_steps=STEPS).train()
    first = shoal.create(state=models[0], every=EVERY, lag=0, start_when=2, network=HERE)
    sessions, callbacks, errors = [first, shoal.join(first.link, state=models[1], network=HERE)], [None, None], []

    def train(number, **how):
        try:
            with sessions[number] as s:
                callbacks[number] = watched(s)
                folder = tmp_path / str(number)
                trainer(models[number], rows(number), folder, max_steps=STEPS + EVERY, callbacks=[callbacks[number]]).train(**how)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=lambda: train(1))
    thread.start()
    train(0, resume_from_checkpoint=str(tmp_path / "donor" / f"checkpoint-{STEPS}"))
    thread.join(100)
    assert errors == []
    for callback in callbacks:
        assert all(torch.equal(a, b) for a, b in zip(callback.start, donor.parameters(), strict=True))
    assert callbacks[0].opt.steps == EVERY  # it goes on where the checkpoint was
