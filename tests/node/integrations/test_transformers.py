"""Two trainers of transformers in one swarm, in threads of this process; with LoRA only the
adapters travel.

transformers and peft are imported in the tests: they take two seconds, and whoever collects these
needs neither.
"""

import threading
from importlib.util import find_spec

import pytest
import torch

import shoal
from shoal.node.checkpoint.store import save
from shoal.optim import NoLoCo, Simulation
from shoal.swarm.errors import ShoalError
from tests.node.integrations import two_peers
from tests.node.integrations.two_peers import EVERY, HERE, STEPS, ended, flat, joined_late
from tests.support.outer_training import GoesBack
from tests.support.session_loops import together

pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("transformers", "peft")
]
pytestmark.append(pytest.mark.usefixtures("accelerate_of_each_thread"))


def tiny(seed, lora=True):
    import transformers

    torch.manual_seed(0)  # the base model is everybody's
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    if not lora:
        return model
    import peft

    torch.manual_seed(seed)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )


def rows(seed):
    tokens = torch.randint(32, (64, 8), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(model, data, folder, kind=None, more=None, **options):
    import transformers

    settings = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.1,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 3,
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 1,
        "dataloader_pin_memory": False,
    }
    arguments = transformers.TrainingArguments(**settings | (more or {}))
    return (kind or transformers.Trainer)(model, arguments, train_dataset=data, **options)


def adapters(model):
    return [p.detach().clone() for p in model.parameters() if p.requires_grad]


def swarm_callback(session, **options):
    from shoal.node.integrations.transformers import SwarmCallback

    return SwarmCallback(session, **options)


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


def test_only_adapters_are_exchanged(tmp_path):
    """Only the adapters are exchanged and who joins begins with those of the first."""
    models = [tiny(1), tiny(2)]  # before there are threads, which share torch's random numbers
    begin = adapters(models[0])
    assert sum(p.numel() for p in begin) < sum(p.numel() for p in models[0].parameters()) / 10
    assert not all(torch.equal(a, b) for a, b in zip(begin, adapters(models[1]), strict=True))
    first = shoal.create(
        state=models[0], every=EVERY, lag=0, start_when=2, network=HERE, codec="float32"
    )
    link, callbacks = first.link, {}

    def train(name, session):
        with session as s:
            callbacks[name] = watched(s)
            number = "ab".index(name)
            trainer(
                models[number], rows(number), tmp_path / name, callbacks=[callbacks[name]]
            ).train()

    together(
        lambda: train("a", first),
        lambda: train("b", shoal.join(link, state=models[1], network=HERE)),
    )
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
        wrapped = trainer(
            twin,
            rows(1),
            tmp_path,
            optimizers=(opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda _: 1.0)),
        )
        wrapped.train()

    Simulation(["only"]).run(alone)
    assert callback.opt.round == STEPS // EVERY
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_a_trainer_stops_where_the_creator_ends_the_run(tmp_path):
    """Fault: after `shoal end` it trained on to its own last step, with nobody."""
    model = tiny(0, lora=False)

    def train(session):
        made = trainer(model, rows(1), tmp_path, callbacks=[swarm_callback(session)])
        made.train()
        return made.state.global_step

    assert ended(model, train, EVERY + 1) == EVERY + 1


def pair(train, **outer):
    """The results of two peers that train models which begin equal, and the models."""
    models = [tiny(0, lora=False), tiny(0, lora=False)]
    return two_peers.pair(train, models, **outer), models


def saved_weights(folder, model):
    from safetensors.torch import load_file

    kept = load_file(folder / "model.safetensors")
    return flat(kept.get(name, parameter) for name, parameter in model.named_parameters())


SAVING = {"save_strategy": "steps", "save_steps": EVERY}
BEST = SAVING | {
    "eval_strategy": "steps",
    "eval_steps": EVERY,
    "load_best_model_at_end": True,
    "metric_for_best_model": "score",
    "greater_is_better": True,
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("scores", "patience", "swarm_last", "last"),
    [([3, 2, 1], 5, True, 9), ([3, 2, 1], 1, False, 6)],
    ids=["all steps", "early, order reversed"],
)
def test_session_finishes_before_the_last_save(tmp_path, scores, patience, swarm_last, last):
    """Were it finished at the trainer's end, the mean would be written over the best weights, and
    have them in it.
    """
    import transformers

    def train(name, model, session):
        callback, left = swarm_callback(session), iter(scores)
        order = [transformers.EarlyStoppingCallback(patience), callback]
        made = trainer(
            model,
            rows("ab".index(name)),
            tmp_path / name,
            more=BEST,
            eval_dataset=rows(3)[:4],
            compute_metrics=lambda _: {"score": next(left)},
            callbacks=order if swarm_last else order[::-1],
        )
        made.train()
        assert made.state.global_step == last
        assert made.state.best_model_checkpoint.endswith(f"checkpoint-{EVERY}")
        return flat(callback.opt.slow)

    slow, models = pair(train, finish="average")
    for name, model in zip("ab", models, strict=True):
        best = saved_weights(tmp_path / name / f"checkpoint-{EVERY}", model)
        assert (flat(model.parameters()) - best).abs().max() == 0
        assert torch.equal(
            saved_weights(tmp_path / name / f"checkpoint-{last}", model), slow[0]
        )  # the mean

    def undisturbed(name, model, session):
        callback = swarm_callback(session)
        trainer(
            model,
            rows("ab".index(name)),
            tmp_path / "plain" / name,
            more={"max_steps": last},
            callbacks=[callback],
        ).train()
        return flat(callback.opt.slow)

    plain, _ = pair(undisturbed, finish="average")
    assert torch.equal(slow[0], slow[1])
    assert torch.equal(slow[0], plain[0])


@pytest.mark.ci
@pytest.mark.parametrize("lag", [0, 2])
def test_a_resumed_trainer_goes_on_bit_by_bit(tmp_path, lag):
    """Were the outer state not in the checkpoint, slow weights, momentum and what is in flight
    would begin anew.
    """

    def train(more, resume, name, model, session):
        callback = swarm_callback(session)
        trainer(
            model, rows("ab".index(name)), tmp_path / name, more=more, callbacks=[callback]
        ).train(resume_from_checkpoint=resume)
        return flat([*callback.opt.slow, *callback.opt.rule_state["momentum"]]), callback.opt.round

    straight, models = pair(lambda *peer: train(SAVING, None, *peer), lag=lag)
    expected = [flat(model.parameters()) for model in models]
    resumed, models = pair(
        lambda name, *peer: train(
            {}, str(tmp_path / name / f"checkpoint-{2 * EVERY}"), name, *peer
        ),
        lag=lag,
    )
    for (found, round), (wanted, rounds), model, weights in zip(
        resumed, straight, models, expected, strict=True
    ):
        assert round == rounds
        assert torch.equal(found, wanted)
        assert torch.equal(flat(model.parameters()), weights)


def test_foreign_outer_state_is_left_alone(tmp_path, caplog):
    """An outer state of other weights is left alone and a damaged one is said."""
    from shoal.node.integrations import transformers as ours

    class State:
        global_step = 6

    class Arguments:
        output_dir, resume_from_checkpoint = str(tmp_path), None

    file = tmp_path / "checkpoint-6" / ours.FILE
    model = tiny(0, lora=False)
    assert ours._restored(Arguments(), State(), model) is None
    save(file, 6, {"weights": "00", "outer": {}})
    assert ours._restored(Arguments(), State(), model) is None
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        f"the trainer resumes, but no outer state of these weights is in {file}"
    ] * 2
    next(file.glob("step-*/*.json")).write_text("no checkpoint")
    with pytest.raises(ShoalError, match="The checkpoint is damaged"):
        ours._restored(Arguments(), State(), model)


@pytest.mark.parametrize("evaluate", ["fast", "slow"])
def test_evaluated_weights_are_chosen(tmp_path, evaluate):
    """Each of several evaluation sets, of whose beginning the trainer says nothing, gets the slow
    weights.
    """
    import transformers

    seen, slow = [], []

    class Watching(transformers.Trainer):
        def prediction_step(self, model, inputs, *rest, **named):
            result = super().prediction_step(model, inputs, *rest, **named)
            slow.append(flat(callback.opt.slow).clone())
            seen.append(torch.equal(flat(model.parameters()), slow[-1]))
            return result

    model = tiny(0, lora=False)
    more = {
        "eval_strategy": "steps",
        "eval_steps": 4,
        "max_steps": 8,
        "save_strategy": "steps",
        "save_steps": 4,
        "eval_on_start": True,
    }
    with shoal.create(state=model, every=EVERY, lag=0, network=HERE, wait_s=0.5) as s:
        callback = swarm_callback(s, evaluate=evaluate)
        sets = {"one": rows(3)[:4], "two": rows(4)[:4]}
        trainer(
            model,
            rows(1),
            tmp_path / evaluate,
            kind=Watching,
            more=more,
            eval_dataset=sets,
            callbacks=[callback],
        ).train()
    assert callback._hook is None
    at_end, before = (
        saved_weights(tmp_path / evaluate / f"checkpoint-{step}", model) for step in (8, 4)
    )
    assert torch.equal(at_end, flat(callback.opt.slow))  # the run's result
    assert not torch.equal(before, slow[2])  # of step 4
    assert seen == [True] * 2 + [evaluate == "slow"] * 2 + [True] * 2


def test_smaller_batches_keep_the_optimizer(tmp_path):
    """Its error of memory was hidden behind "A session has one optimizer"."""
    import transformers

    class Short(transformers.Trainer):
        def training_step(self, model, inputs, *rest):
            if len(inputs["input_ids"]) == 4 and self.state.global_step == 1:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *rest)

    model = tiny(0, lora=False)
    more = {"auto_find_batch_size": True, "per_device_train_batch_size": 4}
    with shoal.create(state=model, every=EVERY, lag=0, network=HERE, wait_s=0.5) as s:
        callback = swarm_callback(s)
        trainer(model, rows(1), tmp_path, kind=Short, more=more, callbacks=[callback]).train()
    assert callback.opt.steps == 1 + STEPS
    assert callback.opt.tokens == 2 * 4 + 2 * 3 * STEPS


def test_several_processes_in_one_trainer_are_refused():
    class Arguments:
        world_size = 2

    with pytest.raises(
        ShoalError, match="The trainer has 2 processes: start one process for each peer"
    ):
        swarm_callback(None).on_train_begin(Arguments(), None, None)


def test_who_joins_takes_over_the_checkpoint_that_the_first_resumed(tmp_path):
    """Mutant: the weights at `create` count, which the trainer replaces only then."""
    models = [tiny(1, lora=False), tiny(1, lora=False)]
    donor = tiny(1, lora=False)
    trainer(
        donor, rows(5), tmp_path / "donor", more={"save_strategy": "steps", "save_steps": STEPS}
    ).train()
    # Without a last average, in which the first would stay while the other waits for it in a round.
    first = shoal.create(
        state=models[0],
        every=EVERY,
        lag=0,
        start_when=2,
        network=HERE,
        codec="float32",
        finish="none",
    )
    sessions, callbacks, errors = (
        [first, shoal.join(first.link, state=models[1], network=HERE)],
        [None, None],
        [],
    )

    def train(number, **how):
        try:
            with sessions[number] as s:
                callbacks[number] = watched(s)
                folder = tmp_path / str(number)
                made = trainer(
                    models[number],
                    rows(number),
                    folder,
                    more={"max_steps": STEPS + EVERY},
                    callbacks=[callbacks[number]],
                )
                made.train(**how)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=lambda: train(1))
    thread.start()
    train(0, resume_from_checkpoint=str(tmp_path / "donor" / f"checkpoint-{STEPS}"))
    thread.join(100)
    assert errors == []
    for callback in callbacks:
        assert all(
            torch.equal(a, b) for a, b in zip(callback.start, donor.parameters(), strict=True)
        )
    assert callbacks[0].opt.steps == EVERY  # it goes on where the checkpoint was


def test_a_trainers_optimizer_that_remembers_earlier_weights_is_refused(tmp_path):
    model = tiny(0)
    inner = GoesBack([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with shoal.create(state=model, every=EVERY, network=HERE) as session:
        fitted = trainer(
            model, rows(0), tmp_path, callbacks=[swarm_callback(session)], optimizers=(inner, None)
        )
        with pytest.raises(
            ShoalError, match=r"^This inner optimizer .*: GoesBack remembers earlier"
        ):
            fitted.train()


@pytest.mark.parametrize("steps", [3, 10**7], ids=["over", "under way"])
def test_late_trainer_follows_the_swarms_schedule(tmp_path, steps):
    """A half wave of this cosine is over at the end, so it rises again beyond it."""
    import transformers

    models, places, rates = [tiny(1), tiny(2)], [], []

    class Noted(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            places.append(kwargs["lr_scheduler"].last_epoch)
            rates.append(kwargs["optimizer"].param_groups[0]["lr"])
            control.should_training_stop = len(places) == 3

    def train(session):
        more = {"max_steps": steps, "lr_scheduler_type": "cosine"}
        callbacks = [Noted(), swarm_callback(session)]
        trainer(models[1], rows(1), tmp_path, more=more, callbacks=callbacks).train()

    joined_late(*models, train, steps=4 * EVERY)
    if steps == 3:
        assert rates == [0.0] * 3
    else:
        first = places[0]
        assert first >= 4 * EVERY
        assert places == [first, first + 1, first + 2]
